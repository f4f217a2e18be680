"""The command line. Answers go to stdout; progress, logs and errors go to stderr; an error is one line."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

from lamina.base.errors import LaminaError
from lamina.base.keywords import option_hint
from lamina.base.version import __version__
from lamina.cli.formatter import HelpFormatter

_EXIT_ERROR, _EXIT_USAGE, _EXIT_INTERRUPTED = 1, 2, 130
_DESCRIPTION = """\
Lamina: an inference engine whose memory is exact, explained and reused.
"""
_EPILOG = """\
Start here:
  lamina demo                              the whole thing on lamina-tiny, the model in the package
  lamina chat                              talk to it
  lamina serve                             OpenAI's API over it (lamina serve DIR: over yours)
  lamina generate --prompt "Once upon a time" --memory
  lamina plan lamina-tiny --memory 8GiB    where every byte goes, before anything is loaded

`lamina COMMAND --help` explains a command.
Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""


#: what each command does, in a line; its module is loaded only if it is the one
COMMANDS = {
    "serve": "serve a model to OpenAI's and Anthropic's clients over HTTP",
    "route": "put one address in front of several servers",
    "chat": "talk to a server or a model in the terminal",
    "bench": "measure how fast a server answers",
    "generate": "generate text from one or more prompts",
    "plan": "say where every byte of memory goes, from a config.json alone",
    "doctor": "say whether a checkpoint runs on this machine, and with what limits",
    "ops": "list every operation, its implementations, and which one runs here",
    "warmup": "compile a model's kernels for this GPU before anybody waits for them",
    "tiny": "write a tiny checkpoint with random weights",
    "demo": "ask the model in the package about a long text, and show its memory",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and the reason."""
        self.exit(_EXIT_USAGE, f"error: {' '.join(message.split())} (see `{self.prog} --help`)\n")


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser with all commands; each sets `run`, a function from the parsed arguments to an exit code.

    only  the command whose options are wanted; None: those of all.
    """
    parser = _Parser(
        prog="lamina", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter, allow_abbrev=False, add_help=False
    )
    about = parser.add_argument_group("options")
    about.add_argument("-h", "--help", action="help", help="show this and exit")
    about.add_argument("--version", action="version", version=f"lamina {__version__}", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        if only not in (None, name):
            commands.add_parser(name, help=text, add_help=False)
            continue
        module = import_module(f"{__name__}.{name}")
        command = commands.add_parser(
            name, help=text, description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=HelpFormatter,
            allow_abbrev=False, add_help=False,
        )  # fmt: skip
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(next((word for word in given if word in COMMANDS), ""))
    args, unknown = parser.parse_known_args(given)
    if unknown:
        prog = "lamina" if args.command is None else f"lamina {args.command}"
        hints = [f"{word.partition('=')[0]}: {hint}" for word in unknown if word.startswith("--") and (hint := option_hint(word))]
        _Parser(prog=prog).error("; ".join((f"unrecognized arguments: {' '.join(unknown)}", *hints)))
    if args.command is None:
        parser.error(f"a command is needed: {', '.join(COMMANDS)}")
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
    logger, handler = logging.getLogger("lamina"), logging.StreamHandler(sys.stderr)
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
