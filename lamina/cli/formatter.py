"""How the program's own texts look."""

import argparse
from contextlib import suppress
from typing import TextIO


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, options in a column wide enough for their names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def make_printable(out: TextIO) -> None:
    """Lets a stream write what its encoding lacks as question marks instead of failing."""
    with suppress(AttributeError):  # a stream that a caller put in the place of stdout
        out.reconfigure(errors="replace")  # type: ignore[attr-defined]
