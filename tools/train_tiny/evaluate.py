"""What a model can look up, by the engine itself: `python -m tools.train_tiny.evaluate --data DIR --model DIR`.

Each text is read once; its questions reuse it as a prefix, as a server's would. Greedy. A line for each kind, length, number of
facts and cache format: exact answers of all, and by fifths of the text. `--perplexity` reads held-out text instead.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lamina import LLM, SamplingParams
from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from tools.train_tiny.exam import KINDS, is_right, questions
from tools.train_tiny.names import SPLITS

FIFTHS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """Exact answers of one setting. `fifths`: (right, asked) by where in the text the answer was told."""

    kind: str
    split: str
    length: int
    facts: int
    cache_format: str
    index_format: str
    asked: int
    right: int
    share: float
    fifths: list[tuple[int, int]]
    cached_tokens: int
    seconds: float


def ask(
    llm: LLM, data: Path, kind: str, split: str, length: int, facts: int, least: int, formats: tuple[str, str], wrong: int = 0
) -> Result:
    """Asks at least `least` questions, `facts` about each text; prints the first `wrong` wrong answers to stderr."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    asked = right = cached = seed = 0
    fifths = [[0, 0] for _ in range(FIFTHS)]
    began = time.monotonic()
    while asked < least:
        found = questions(data, 7000 + seed, length, facts, kind, split)
        seed += 1
        params = SamplingParams(max_tokens=max(len(q.answer_ids) for q in found) + 3, temperature=0)
        outputs = llm.generate([found[0].prompt], params)
        if len(found) > 1:
            outputs += llm.generate([q.prompt for q in found[1:]], params)
        for question, output in zip(found, outputs, strict=True):
            good = is_right(output.outputs[0].text, question.answer)
            place = fifths[min(int(question.depth * FIFTHS), FIFTHS - 1)]
            place[0] += good
            place[1] += 1
            asked, right, cached = asked + 1, right + good, cached + output.usage.cached_tokens
            if not good and wrong > 0:
                wrong -= 1
                end = tokenizer.decode(list(question.ids))
                print(
                    f"    {kind} {length} at {question.depth:.2f}: {end[-90:]!r} {question.answer!r} "
                    f"wrote {output.outputs[0].text!r}",
                    file=sys.stderr,
                )
    return Result(
        kind, split, length, facts, *formats, asked, right, round(right / asked, 4), [tuple(f) for f in fifths], cached,
        round(time.monotonic() - began, 1),
    )  # fmt: skip


def perplexity(llm: LLM, data: Path, length: int = 2048, most: int = 24) -> dict[str, float]:
    """Nats per token and per character of the held-out text, in rows of `length` tokens spread over it."""
    ids = np.fromfile(data / "val.u16", np.uint16).astype(int)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    nats = tokens = characters = 0.0
    for start in np.linspace(0, len(ids) - 1 - length, most).astype(int):
        row = ids[start : start + length].tolist()
        (output,) = llm.generate([row], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        nats += sum(-entry[row[i]].logprob for i, entry in enumerate(output.prompt_logprobs) if entry)
        tokens += length - 1
        characters += len(tokenizer.decode(row[1:]))
    return {
        "nats_per_token": round(nats / tokens, 4),
        "nats_per_character": round(nats / characters, 4),
        "perplexity": round(math.exp(nats / tokens), 3),
        "tokens": int(tokens),
    }


def main() -> int:
    """Runs `evaluate`; an error is one line."""
    try:
        return evaluate()
    except (ValueError, OSError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 with commas between; else ArgumentTypeError."""
    found = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(found) != text.count(",") + 1 or min(found, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers above 0 with commas between")
    return found


def among(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """A list of some of `allowed` with commas between; else ArgumentTypeError."""

    def parse(text: str) -> list[str]:
        if unknown := [part for part in text.split(",") if part not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: of {', '.join(allowed)}")
        return text.split(",")

    return parse


def formats_of(text: str) -> list[tuple[str, str]]:
    """Pairs of a cache format and an index format; else ArgumentTypeError."""
    pairs = [tuple(pair.split(":")) for pair in text.split(",")]
    if any(len(pair) != 2 or pair[0] not in CACHE_FORMATS or pair[1] not in INDEX_FORMATS for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: cache format:index format, such as fp8:fp4, with commas between")
    return [(pair[0], pair[1]) for pair in pairs]


def evaluate() -> int:
    """Prints one JSON line for each setting, and appends it to --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kinds", default=["recall"], type=among(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--splits", default=["train"], type=among(SPLITS), help="train, held-out: whose words and templates")
    parser.add_argument("--lengths", default=[2048], type=numbers)
    parser.add_argument("--facts", default=[16], type=numbers, help="questions about each text")
    parser.add_argument("--least", type=int, default=100, help="questions for each setting (default 100)")
    parser.add_argument("--formats", default=[("fp8", "fp4")], type=formats_of, help="cache:index format, with commas between")
    parser.add_argument("--cache-bytes", default=None)
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers to show for each setting")
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    arguments = parser.parse_args()
    if arguments.least < 1:
        raise ValueError(f"--least {arguments.least}: 1 or more")
    for name in ("val.u16", "documents.json", "tokenizer.json"):
        if not (arguments.data / name).is_file():
            raise ValueError(f"--data {arguments.data}: no {name}; corpus.py writes it")
    for cache_format, index_format in arguments.formats:
        options = {"cache_bytes": arguments.cache_bytes} if arguments.cache_bytes else {}
        llm = LLM(arguments.model, device=arguments.device, cache_format=cache_format, index_format=index_format, **options)
        if arguments.perplexity:
            _say(arguments.out, {"cache_format": cache_format, "index_format": index_format} | perplexity(llm, arguments.data))
            continue
        for kind in arguments.kinds:
            for split in arguments.splits:
                for length in arguments.lengths:
                    for facts in arguments.facts:
                        result = ask(
                            llm,
                            arguments.data,
                            kind,
                            split,
                            length,
                            facts,
                            arguments.least,
                            (cache_format, index_format),
                            arguments.wrong,
                        )
                        _say(arguments.out, asdict(result))
        del llm
    return 0


def _say(out: Path | None, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
