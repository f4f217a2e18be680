"""What a model can look up, by the engine itself: `python -m tools.train_tiny.evaluate --data DIR --model DIR`.

Each text is read once; its questions reuse it as a prefix, as a server's would. Greedy. A line for each kind, length, number of
facts and cache format: exact answers of all, and by fifths of the text. `--perplexity` reads held-out text instead. Lines that
--out has already, of the same weights and device, are not asked again; what has no time left is not begun.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lamina import LLM, SamplingParams
from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS
from lamina.engine.locate import locate
from tools.train_tiny.exam import KINDS, Question, is_kind, is_right, questions
from tools.train_tiny.names import SPLITS

FIFTHS = 5
TOGETHER = 16  # questions asked at once
STEP_TOKENS = 8192  # of a text that are read in one step on a GPU
BYTES_A_TOKEN = {"fp8": 640, "bf16": 1280, "fp32": 2560}  # that a text is remembered in, at most, all layers
SPARE_BYTES = 1 << 30
REPORT_SECONDS = 10.0


class OutOfTimeError(Exception):
    """No time is left for what was begun."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked: `least` questions, `facts` told in each text of `length` tokens."""

    kind: str
    split: str
    length: int
    facts: int
    cache_format: str
    index_format: str
    device: str
    weights: str  # the beginning of their SHA-256


@dataclass(slots=True)
class Result:
    """Exact answers of one setting. `fifths`: [right, asked] by where in the text the answer was told.

    seconds  of all; read_seconds of them until the first answer about each text.   held_bytes  of one question with its text.
    """

    asked: int = 0
    right: int = 0
    share: float = 0.0
    fifths: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(FIFTHS)])
    texts: int = 0
    cached_tokens: int = 0
    held_bytes: int = 0
    read_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, question: Question, is_good: bool) -> None:
        """Counts one answer."""
        place = self.fifths[min(int(question.depth * FIFTHS), FIFTHS - 1)]
        place[0] += is_good
        place[1] += 1
        self.asked, self.right = self.asked + 1, self.right + is_good
        self.share = round(self.right / self.asked, 4)


class Progress:
    """A line on stderr that is written over; where that is no terminal, a line every few seconds."""

    def __init__(self, title: str, until: float) -> None:
        self.title, self.until = title, until
        self.is_live = sys.stderr.isatty()
        self.said = time.monotonic()

    def __call__(self, text: str) -> None:
        """Says how far it is. Raises OutOfTimeError."""
        now = time.monotonic()
        if now > self.until:
            raise OutOfTimeError
        if now - self.said > (0.2 if self.is_live else REPORT_SECONDS):
            self.said = now
            print(f"\r\033[K{self.title}: {text}" if self.is_live else f"{self.title}: {text}", end="" if self.is_live else "\n",
                  file=sys.stderr, flush=True)  # fmt: skip

    def close(self) -> None:
        """Leaves the line empty."""
        if self.is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def ask(
    llm: LLM, data: Path, setting: Setting, least: int, most_texts: int, until: float = math.inf, wrong: int = 0
) -> Result:  # fmt: skip
    """Asks at least `least` questions, all about each text, or so many of more; prints the first `wrong` wrong answers to stderr.

    Raises OutOfTimeError at the time `until`, ValueError if facts have no room.
    """
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    title = f"{setting.kind}, {setting.split}, {setting.length:,} tokens, {setting.facts} facts, {setting.cache_format}"
    progress = Progress(title, until)
    result, began = Result(), time.monotonic()
    seed = 0
    while result.asked < least and seed < most_texts:
        found = questions(data, 7000 + seed, setting.length, setting.facts, setting.kind, setting.split)
        seed += 1
        left = least - result.asked
        if len(found) > least:  # a text with more facts than are asked for: evenly spread
            found = [found[int((place + 0.5) * len(found) / left)] for place in range(left)]
        result.texts += 1
        for first, together in _batches(found):
            answers = _answers(llm, together, progress, f"{result.asked} of {least} asked, {result.right} right")
            if first:
                result.read_seconds = round(result.read_seconds + answers[0][1], 2)
            for question, (text, _, cached, held) in zip(together, answers, strict=True):
                good = is_right(text, question.answer)
                result.add(question, good)
                result.cached_tokens += cached
                result.held_bytes = max(result.held_bytes, held)
                if not good and wrong > 0:
                    wrong -= 1
                    end = tokenizer.decode(list(question.ids))
                    print(f"    {setting.kind} {setting.length} at {question.depth:.2f}: {end[-90:]!r} {question.answer!r} "
                          f"wrote {text!r}", file=sys.stderr)  # fmt: skip
    progress.close()
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _batches(found: list[Question]) -> Iterator[tuple[bool, list[Question]]]:
    """Questions that are asked at once, the first of each text alone; whether it is that one."""
    one_text = all(question.prefix is found[0].prefix for question in found)
    if one_text:
        yield True, found[:1]
        found = found[1:]
    for start in range(0, len(found), TOGETHER):
        yield False, found[start : start + TOGETHER]


def _answers(llm: LLM, asked: list[Question], progress: Progress, so_far: str) -> list[tuple[str, float, int, int]]:
    """Of each question: what was written, seconds for all of them, tokens reused, bytes held."""
    engine, began = llm.engine, time.monotonic()
    text, prefix = None, asked[0].prefix
    groups = []
    try:
        for question in asked:
            if text is None or question.prefix is not prefix:
                text, prefix = question.prefix.tolist(), question.prefix  # a million numbers are made once
            params = SamplingParams(max_tokens=len(question.answer_ids) + 3, temperature=0)
            groups.append(engine.add([*text, *question.ids], params))
        while engine.has_work:
            engine.step()
            lease = groups[0].requests[0].lease
            progress(f"{so_far}, at token {lease.position:,}" if lease is not None else so_far)
    except BaseException:
        for group in groups:
            engine.cancel(group)
        raise
    seconds = time.monotonic() - began
    outputs = [group.output for group in groups]
    return [(o.outputs[0].text, seconds, o.usage.cached_tokens, sum(o.usage.held_bytes.values())) for o in outputs]


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


def kinds_of(text: str) -> list[str]:
    """Kinds of questions with commas between; else ArgumentTypeError."""
    if unknown := [part for part in text.split(",") if not is_kind(part)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: of {', '.join(KINDS)}")
    return text.split(",")


def formats_of(text: str) -> list[tuple[str, str]]:
    """Pairs of a cache format and an index format; else ArgumentTypeError."""
    pairs = [tuple(pair.split(":")) for pair in text.split(",")]
    if any(len(pair) != 2 or pair[0] not in CACHE_FORMATS or pair[1] not in INDEX_FORMATS for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: cache format:index format, such as fp8:fp4, with commas between")
    return [(pair[0], pair[1]) for pair in pairs]


def fingerprint(model: str) -> str:
    """12 hex digits that say which weights these are."""
    digest = hashlib.sha256()
    for file in sorted(locate(model).glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def load(model: str, device: str, formats: tuple[str, str], longest: int, cache_bytes: str | None) -> LLM:
    """The engine with room for a few texts of `longest` tokens; on a GPU what is asked compiles kernels, nothing more."""
    options: dict[str, object] = {"cache_bytes": cache_bytes or SPARE_BYTES + 3 * longest * BYTES_A_TOKEN[formats[0]]}
    if device != "cpu":
        options |= {"max_step_tokens": STEP_TOKENS, "warmup": False}
    return LLM(model, device=device, cache_format=formats[0], index_format=formats[1], max_requests=TOGETHER, **options)  # type: ignore[arg-type]


def evaluate() -> int:
    """Prints one JSON line for each setting, and appends it to --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--kinds", default=["recall"], type=kinds_of, help=f"of {', '.join(KINDS)}; factors with + between")
    parser.add_argument("--splits", default=["train"], type=among(SPLITS), help="train, held-out: whose words and templates")
    parser.add_argument("--lengths", default=[2048], type=numbers)
    parser.add_argument("--facts", default=[16], type=numbers, help="in each text")
    parser.add_argument("--least", type=int, default=100, help="questions for each setting (default 100)")
    parser.add_argument("--most-texts", type=int, default=1000, help="texts for each setting, even if that is fewer questions")
    parser.add_argument("--formats", default=[("fp8", "fp4")], type=formats_of, help="cache:index format, with commas between")
    parser.add_argument("--cache-bytes", default=None, help="default: 1 GiB and room for three texts of the greatest length")
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall-clock limit; a setting that it ends leaves no line")
    parser.add_argument("--wrong", type=int, default=2, help="wrong answers to show for each setting")
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    if arguments.least < 1:
        raise ValueError(f"--least {arguments.least}: 1 or more")
    for name in ("val.u16", "documents.json", "tokenizer.json"):
        if not (arguments.data / name).is_file():
            raise ValueError(f"--data {arguments.data}: no {name}; corpus.py writes it")
    weights, done = fingerprint(arguments.model), _done(arguments.out)
    for formats in arguments.formats:
        if arguments.perplexity:
            wanted = [Setting("perplexity", "held-out", 2048, 0, *formats, arguments.device, weights)]
        else:
            wanted = [
                Setting(kind, split, length, facts, *formats, arguments.device, weights)
                for length in arguments.lengths
                for kind in arguments.kinds
                for split in arguments.splits
                for facts in arguments.facts
            ]
        wanted = [setting for setting in wanted if setting not in done]
        if not wanted:
            continue
        longest = max(setting.length for setting in wanted)
        llm = load(arguments.model, arguments.device, formats, longest, arguments.cache_bytes)
        for setting in wanted:
            try:
                if arguments.perplexity:
                    found = perplexity(llm, arguments.data)
                else:
                    most = arguments.most_texts
                    found = asdict(ask(llm, arguments.data, setting, arguments.least, most, until, arguments.wrong))
                _say(arguments.out, asdict(setting) | found)
            except OutOfTimeError:
                print(f"no time left for {setting.kind} of {setting.length:,} tokens and what follows", file=sys.stderr)
                return 0
            except ValueError as error:
                if "no room" not in str(error):
                    raise
                print(f"left out: {error}", file=sys.stderr)
        del llm
    return 0


def _done(out: Path | None) -> list[Setting]:
    """Settings that --out has lines of."""
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    names = Setting.__slots__
    found = [json.loads(line) for line in lines]
    return [Setting(*(line[name] for name in names)) for line in found if all(name in line for name in names)]


def _say(out: Path | None, line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
