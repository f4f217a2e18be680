"""`lamina tiny`: a small checkpoint made on the spot."""

import argparse
import sys
from pathlib import Path

from lamina.base.sizes import format_bytes
from lamina.cli.options import add_common
from lamina.models.tiny import FORMATS, SHAPES, write_tiny

DESCRIPTION = """\
Writes a complete tiny checkpoint: the tensor names, number formats and layer schedule of the
shipped models, random weights (so its text is gibberish), and a tokenizer trained on Python's
own help. The same seed gives the same weights on every machine.
"""
EPILOG = """\
Example:
  lamina tiny tiny-model --shape pro --seed 7
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a new or an empty directory")
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default="flash",
        help="flash, pro: their two schedules of layers; bench: wider, for benchmarks (default flash)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights, 0 or more (default 0)")
    group.add_argument(
        "--format",
        choices=FORMATS,
        default="official",
        help="official: FP8 and packed FP4; transformers: the same numbers in BF16 and FP32 (default official)",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint and says where it is."""
    directory: Path = args.directory
    write_tiny(directory, args.shape, args.seed, args.format)
    if not args.quiet:
        size = format_bytes(sum(path.stat().st_size for path in directory.iterdir()))
        print(f"wrote {directory} ({args.shape}, seed {args.seed}, {args.format} format, {size})", file=sys.stderr)
    return 0
