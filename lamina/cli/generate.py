"""`lamina generate`: prompts in, text out."""

import argparse
import sys

from lamina.base.config import EMBEDDED
from lamina.base.errors import ConfigError
from lamina.cli.formatter import make_printable
from lamina.cli.generation import Served, load, serve
from lamina.cli.options import (
    add_common,
    add_engine,
    add_prompts,
    add_sampling,
    engine_config,
    read_prompts,
    sampling_params,
    say_embedded,
)
from lamina.cli.report import closing_line, logprob_lines, reuse_lines, table, to_json

DESCRIPTION = """\
Generates from all prompts together. Text streams to stdout as it comes: the first unfinished
output live, the others one after the other behind it, under a heading each if there are several.
"""
EPILOG = """\
Examples:
  lamina generate --prompt "Once upon a time" --max-tokens 64 --temperature 0
  lamina generate --model DIR --prompt-file long.txt --prompt "Hello" --seed 1 --memory
  lamina generate --model DIR --prompt "Hello" --json | python3 -m json.tool
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument_group("model").add_argument(
        "--model",
        default=EMBEDDED,
        metavar="DIR",
        help="a checkpoint: config.json, *.safetensors, tokenizer.json; a GGUF file; or a hub id org/name (default: %(default)s, "
        "the small model in the package)",
    )
    add_prompts(parser)
    add_sampling(parser)
    add_engine(parser)
    group = parser.add_argument_group("output (stdout)")
    group.add_argument(
        "--memory", action="store_true", help="then a table: for each memory the bytes predicted, held and written"
    )
    group.add_argument("--json", action="store_true", help="one JSON object with everything, and nothing else")
    group.add_argument("--no-stream", action="store_true", help="print each output when all are done")
    add_common(parser)
    parser.set_defaults(prompts=None)


def run(args: argparse.Namespace) -> int:
    """Serves the prompts and prints what was asked for."""
    if not args.prompts:
        raise ConfigError("prompt", None, "at least one of --prompt, --prompt-file and --prompt-ids")
    params, config = sampling_params(args), engine_config(args)
    prompts = read_prompts(args.prompts)
    make_printable(sys.stdout)
    say_embedded(args.model, args.quiet)
    engine, load_s = load(config, args.quiet)
    served = serve(
        engine, load_s, prompts, params, out=None if args.json else sys.stdout, streams=not args.no_stream, quiet=args.quiet,
        counts_memory=args.memory or args.json,
    )  # fmt: skip
    if args.json:
        print(to_json(served, args.model))
    else:
        _print_logprobs(served)
        if args.memory:
            print()
            table(served, sys.stdout)
    if not args.quiet:
        lines = [] if args.json else reuse_lines(served)
        print(*lines, closing_line(served), sep="\n", file=sys.stderr)
    return 0


def _print_logprobs(served: Served) -> None:
    several = sum(len(output.outputs) for output in served.outputs) > 1
    for number, output in enumerate(served.outputs, start=1):
        for one in output.outputs:
            if one.logprobs is not None:
                which = f" of prompt {number}, output {one.index + 1}" if several else ""
                print(f"\nlog-probability, rank, id and text of each token{which}:", *logprob_lines(one), sep="\n")
