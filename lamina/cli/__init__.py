"""The command line. Answers go to stdout; progress, logs and errors go to stderr; an error is one line."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import lamina
from lamina.base.errors import LaminaError
from lamina.cli import demo, generate, tiny
from lamina.cli.options import HelpFormatter

_EXIT_ERROR, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_DESCRIPTION = """\
Lamina: an inference engine whose memory is exact, explained and reused.
"""
_EPILOG = """\
Start here:
  lamina demo                                   the whole thing on a tiny model made on the spot
  lamina tiny tiny-model                        write that tiny model
  lamina generate --model tiny-model --prompt "Hello" --memory

`lamina COMMAND --help` explains a command.
Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and the reason."""
        self.exit(_EXIT_USAGE, f"error: {' '.join(message.split())} (see `{self.prog} --help`)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands; each sets `run`, a function from the parsed arguments to an exit code."""
    parser = _Parser(
        prog="lamina", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False
    )
    about = parser.add_argument_group("options")
    about.add_argument("-h", "--help", action="help", help="show this and exit")
    about.add_argument("--version", action="version", version=f"lamina {lamina.__version__}", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in (("generate", generate), ("tiny", tiny), ("demo", demo)):
        command = commands.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=HelpFormatter,
            allow_abbrev=False, add_help=False,
        )  # fmt: skip
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error("a command is needed: generate, tiny or demo")
    try:
        with _log_lines((logging.WARNING, logging.INFO, logging.DEBUG)[min(args.verbose, 2)]):
            code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as `head` does; nothing is wrong and nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_ERROR
    except KeyboardInterrupt:
        return _fail("interrupted", _EXIT_INTERRUPTED)
    except LaminaError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error))
    except MemoryError:
        return _fail("out of memory: lower --cache-bytes or --max-step-tokens")
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error} (this is a bug in Lamina; -v shows where)")
    return code


@contextmanager
def _log_lines(level: int) -> Iterator[None]:
    """Lamina's own log lines go to stderr, from this level up."""
    logger, handler = logging.getLogger(lamina.__name__), logging.StreamHandler(sys.stderr)
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _fail(message: str, code: int = _EXIT_ERROR) -> int:
    """One line on stderr, whatever the message has in it."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
