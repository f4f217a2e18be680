"""`lamina chat`: talk to a server, or to a model, in the terminal."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from lamina.base.config import EMBEDDED
from lamina.base.errors import ConfigError, LaminaError
from lamina.base.sizes import format_bytes
from lamina.cli.chat_server import OwnServer
from lamina.cli.chat_talk import EFFORTS, Answer, Message, Settings, Talk
from lamina.cli.formatter import make_printable
from lamina.cli.http_client import Client, ServerError, is_address, parse_address, read_key
from lamina.cli.options import add_common, add_engine, say_embedded
from lamina.cli.stream import PICTURES
from lamina.models.files import is_embedded, model_path

DESCRIPTION = """\
A chat in the terminal. With a URL it talks to that server, Lamina's or another of OpenAI's
protocol; with a directory, or nothing (lamina-tiny, the small model in the package), it starts a
server of its own on a free port of this machine, with a key of its own, and stops it at the end. lamina-tiny
answers at temperature 0.3 and without thoughts unless told otherwise; it is good at facts told in
plain words: "The code of the blue door is 4821.", later "What is the code of the blue door?"

Answers stream to stdout, thoughts dim. Ctrl-C stops an answer; at the prompt it quits, as Ctrl-D does.
Where stdin is not a terminal each line is a message or a command, and stdout gets the answers alone,
without thoughts; with --one-message all of stdin is one message. The first error then ends it with
exit code 1.
"""
EPILOG = """\
Examples:
  lamina chat
  lamina chat http://127.0.0.1:8000 --api-key-file key.txt --think high
  echo "What is a prefix?" | lamina chat DIR --max-tokens 64
  lamina chat http://127.0.0.1:8000 --one-message < question.txt
"""
HELP = """\
/stats             tokens, cached tokens, memory, speed of the last answer and of all
/new               forget the conversation
/think WHAT        on, off, low, high, max; auto leaves it to the server
/system TEXT       the system message; without TEXT there is none
/save FILE         write the conversation as JSON
/help, /quit       this; the end
A line that ends with \\ goes on in the next one. A message that begins with / is written //.
"""
_DIM, _PLAIN = "\033[2m", "\033[0m"
_MAX_HISTORY = 1_000
#: of the model in the package, which is too small for 1.0
_EMBEDDED_TEMPERATURE = 0.3
#: options of `add_engine` that are handed on to the server
_ENGINE = (
    "device", "cache_bytes", "gpu_memory_utilization", "cache_format", "index_format", "dtype", "max_step_tokens",
    "max_model_len", "checkpoint_interval", "deterministic", "kernels", "activation_format", "draft", "draft_tokens",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    parser.add_argument(
        "where", metavar="URL|DIR", nargs="?", default=EMBEDDED,
        help="a server or a checkpoint (default: %(default)s, the small model in the package)",
    )  # fmt: skip
    group = parser.add_argument_group("the server")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key to give; also LAMINA_API_KEY (default: none)")
    group.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first)")
    group = parser.add_argument_group("answers")
    group.add_argument("--system", default="", metavar="TEXT", help="the system message")
    group.add_argument(
        "--think", choices=("auto", "on", "off", *EFFORTS), default="auto", metavar="WHAT",
        help="on, off, low, high, max, auto: as the server likes (default auto)",
    )  # fmt: skip
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer, thoughts included")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token (default: the server's)")
    group.add_argument("--top-p", type=float, metavar="P", help="fewest tokens that reach this probability")
    group.add_argument("--seed", type=int, metavar="N", help="makes answers repeatable")
    group = parser.add_argument_group("input")
    group.add_argument("--one-message", action="store_true", help="all of stdin is one message")
    add_engine(parser)
    add_common(parser)
    parser.set_defaults(engine_defaults={name: parser.get_default(name) for name in _ENGINE})


def run(args: argparse.Namespace) -> int:
    """Talks until it is told to end; 1 if stdin is no terminal and something failed."""
    make_printable(sys.stdout)
    with contextlib.ExitStack() as stack:
        if is_address(args.where):
            address, key = parse_address(args.where), read_key(args.api_key_file)
        else:
            server = stack.enter_context(OwnServer(args.where, _engine_options(args)))
            say_embedded(args.where, args.quiet)
            if not args.quiet:
                print("starting a server (the model loads) ...", file=sys.stderr, flush=True)
            address, key = parse_address(server.wait()), server.key
        client = stack.enter_context(contextlib.closing(Client(address, key)))
        temperature, think = args.temperature, args.think
        if not is_address(args.where) and is_embedded(model_path(args.where)):
            temperature = _EMBEDDED_TEMPERATURE if temperature is None else temperature
            think = "off" if think == "auto" else think
        settings = Settings(_model(client, args.model), args.max_tokens, temperature, args.top_p, args.seed)
        set_thinking(settings, think)
        talk = Talk(client, settings, args.system)
        terminal = Terminal(talk, args.quiet)
        if not args.quiet:
            hint = "   (/help shows the commands)" if terminal.is_interactive else ""
            print(f"{settings.model} at {address}{hint}", file=sys.stderr, flush=True)
        if args.one_message:
            return 0 if terminal.answer(sys.stdin.read()) else 1
        return terminal.run()


def _engine_options(args: argparse.Namespace) -> list[str]:
    """The engine's options that were given, as `lamina serve` takes them."""
    found = ["--no-warmup"] if args.no_warmup else []
    given = vars(args)
    for name in _ENGINE:
        if given[name] != args.engine_defaults[name]:
            found += [f"--{name.replace('_', '-')}", str(given[name])]
    return found


def _model(client: Client, wanted: str | None) -> str:
    """The name to ask for. Raises ConfigError for one that is not served."""
    names = [model.id for model in client.models()]
    if not names:
        raise LaminaError(f"{client.address} serves no model")
    if wanted is not None and wanted not in names:
        raise ConfigError("model", wanted, f"one of {', '.join(names)}")
    return wanted or names[0]


def set_thinking(settings: Settings, word: str) -> None:
    """on, off, auto, or an effort. Raises ConfigError."""
    if word not in ("auto", "on", "off", *EFFORTS):
        raise ConfigError("think", word, f"on, off, {', '.join(EFFORTS)} or auto")
    settings.thinking = None if word == "auto" else word != "off"
    settings.effort = word if word in EFFORTS else None


class Terminal:
    """Reads lines, writes answers."""

    def __init__(self, talk: Talk, quiet: bool) -> None:
        self._talk = talk
        self._quiet = quiet
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._shows_thoughts = sys.stdout.isatty()
        self._has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._commands: dict[str, Callable[[str], None]] = {
            "stats": lambda _: print_stats(talk), "new": self._new, "think": self._think, "system": self._system,
            "save": self._save, "help": lambda _: print(HELP, end="", file=sys.stderr),
        }  # fmt: skip

    def run(self) -> int:
        """Until the end of the input, /quit or Ctrl-C at the prompt; 1 if something failed and nobody is there to see it."""
        with _line_history(self.is_interactive):
            while (line := self._read()) is not None:
                text = line.strip()
                if not text:
                    continue
                if text in ("/quit", "/exit"):
                    break
                is_command = text.startswith("/") and not text.startswith("//")
                is_good = self._do(text) if is_command else self.answer(line[1:] if line.startswith("//") else line)
                if not (is_good or self.is_interactive):
                    return 1
        return 0

    def answer(self, text: str) -> bool:
        """Asks, and writes what comes. False: there was an error, which was written."""
        is_dim, ends_line = False, True
        out = sys.stdout
        try:
            with contextlib.closing(self._talk.ask(text)) as pieces:
                for kind, piece in pieces:
                    if kind == "thought" and not self._shows_thoughts:
                        continue
                    if (kind == "thought") != is_dim:
                        is_dim = kind == "thought"
                        out.write("" if ends_line else "\n")
                        if self._has_colours:
                            out.write(_DIM if is_dim else _PLAIN)
                        piece = piece.lstrip("\n")
                    out.write(piece.translate(PICTURES) if out.isatty() else piece)
                    ends_line = piece.endswith("\n") if piece else ends_line
                    out.flush()
        except KeyboardInterrupt:
            self._end_line(is_dim, ends_line)
            if not self.is_interactive:
                raise
            print("(stopped)", file=sys.stderr)
            return True
        except ServerError as error:
            self._end_line(is_dim, ends_line)
            print(f"error: {error}", file=sys.stderr, flush=True)
            return False
        self._end_line(is_dim, ends_line)
        last = self._talk.last
        if last is not None and last.finish == "length" and not self._quiet:
            print("(cut off: the most tokens were reached)", file=sys.stderr, flush=True)
        return True

    def _end_line(self, is_dim: bool, ends_line: bool) -> None:
        if is_dim and self._has_colours:
            sys.stdout.write(_PLAIN)
        sys.stdout.write("" if ends_line else "\n")
        sys.stdout.flush()

    def _read(self) -> str | None:
        """The next message, None at the end."""
        lines: list[str] = []
        while True:
            try:
                if self.is_interactive:
                    line = input(". " if lines else "> ")
                else:
                    line = sys.stdin.readline()
                    if not line:
                        return "\n".join(lines) or None
                    line = line.rstrip("\n")
            except (EOFError, KeyboardInterrupt) as end:
                if isinstance(end, KeyboardInterrupt) and not self.is_interactive:
                    raise
                print(file=sys.stderr)
                return None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _do(self, text: str) -> bool:
        """A command. False: it could not be done, which was written."""
        name, _, rest = text[1:].partition(" ")
        try:
            if name not in self._commands:
                raise ConfigError("command", f"/{name}", f"/{', /'.join(self._commands)} or /quit")
            self._commands[name](rest.strip())
        except (LaminaError, OSError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _new(self, rest: str) -> None:
        self._talk.forget()
        self._say("(a new conversation)")

    def _think(self, word: str) -> None:
        set_thinking(self._talk.settings, word)
        self._say(f"(thinking: {word})")

    def _system(self, text: str) -> None:
        self._talk.system = text
        self._say("(the system message is set)" if text else "(there is no system message)")

    def _save(self, rest: str) -> None:
        names = shlex.split(rest)
        if len(names) != 1:
            raise ConfigError("file", rest, "one name: /save FILE")
        path = Path(names[0]).expanduser()
        messages: list[Message] = self._talk.all_messages()
        whole = msgspec.json.encode({"model": self._talk.settings.model, "messages": messages})
        path.write_bytes(msgspec.json.format(whole) + b"\n")
        self._say(f"(saved {len(messages)} messages in {path})")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def print_stats(talk: Talk) -> None:
    """A table on stderr: the last answer, and all of them."""
    if talk.last is None:
        raise LaminaError("there is no answer yet")
    last, totals = talk.last, talk.totals
    table = Table(title=None)
    for name in ("", "last answer", f"all {totals.answers}"):
        table.add_column(name, justify="left" if not name else "right")
    usage = last.usage
    counts = ["-"] * 4  # a stopped answer's are not known
    if usage is not None:
        counts = [
            f"{usage.prompt_tokens:,}", _share(usage.cached_tokens, usage.prompt_tokens), f"{usage.completion_tokens:,}",
            f"{usage.reasoning_tokens:,}",
        ]  # fmt: skip
    rows = [
        ("prompt tokens", counts[0], f"{totals.prompt_tokens:,}"),
        ("of them cached", counts[1], _share(totals.cached_tokens, totals.prompt_tokens)),
        ("answer tokens", counts[2], f"{totals.completion_tokens:,}"),
        ("of them thoughts", counts[3], f"{totals.reasoning_tokens:,}"),
        ("first text after", "-" if last.first_s is None else f"{last.first_s * 1e3:,.0f} ms", ""),
        ("tokens/s after it", "-" if last.tokens_s is None else f"{last.tokens_s:,.1f}", ""),
        ("time", f"{last.total_s:,.2f} s", f"{totals.seconds:,.2f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    console = Console(stderr=True, highlight=False)
    console.print(table)
    console.print(memory_lines(last), end="", markup=False, soft_wrap=True)


def memory_lines(answer: Answer) -> str:
    """Bytes of each memory, and why the lookup of the prefix stopped; nothing where the server does not say."""
    memory = None if answer.usage is None else answer.usage.memory
    if memory is None:
        return ""
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.held_bytes.items() if size)
    total = format_bytes(sum(memory.held_bytes.values()))
    return f"memory {total}: {held}\n" + (f"prefix {memory.prefix_stop}\n" if memory.prefix_stop else "")


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.0%})" if whole else f"{part:,}"


@contextlib.contextmanager
def _line_history(is_interactive: bool) -> Iterator[None]:
    """Lines that were typed can be had again with the arrow keys, now and next time, where Python has readline."""
    if not is_interactive:
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "lamina" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MAX_HISTORY)
    readline.set_auto_history(True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
