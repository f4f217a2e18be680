"""`lamina serve`: the server that OpenAI's and Anthropic's clients speak to."""

import argparse
import asyncio
import importlib.util
import secrets
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lamina.base.config import EMBEDDED, EngineConfig
from lamina.base.errors import ConfigError
from lamina.base.sizes import parse_bytes
from lamina.base.version import __version__
from lamina.cli.options import add_common, add_engine, engine_config
from lamina.cli.peer_options import add_peers, peer_config
from lamina.cli.serve_table import LoadingBar, start_table
from lamina.engine.locate import locate
from lamina.engine.wire import Ready
from lamina.models.files import about_embedded, is_embedded, model_name
from lamina.server.auth import is_loopback, read_keys
from lamina.server.settings import ServerSettings

DESCRIPTION = """\
Serves a model over HTTP: OpenAI's chat completions, completions and responses, Anthropic's
messages, /tokenize, /health, /metrics, /v1/cache, and a page at /ui. Without MODEL_DIR it
serves lamina-tiny, the small model in the package, to try everything with.
"""
EPILOG = """\
Examples:
  lamina serve
  lamina serve DIR --cache-bytes 8GiB --served-model-name my-model --api-key-file keys.txt --host 0.0.0.0
  lamina serve --role prefill --port 8100 --peer-listen 127.0.0.1:8110
  lamina serve --role decode --port 8200 --peers 127.0.0.1:8110

SIGTERM or Ctrl-C: new requests get 503, running ones may end within --drain-seconds; again: at once.
"""
_NEEDED = ("starlette", "uvicorn", "zmq", "jinja2", "httptools")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    default = ServerSettings()
    parser.add_argument(
        "model", metavar="MODEL_DIR", nargs="?", default=EMBEDDED,
        help="a checkpoint, or a hub id org/name (default: %(default)s, the small model in the package)",
    )  # fmt: skip
    group = parser.add_argument_group("where and for whom")
    group.add_argument(
        "--host", default=default.host, metavar="ADDRESS", help="listen here (default %(default)s: this machine only)"
    )
    group.add_argument("--port", type=int, default=default.port, metavar="N", help="0: any that is free (default %(default)s)")
    text = "keys, one a line, 8 characters or more; also LAMINA_API_KEY (default: none)"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=text)
    group.add_argument("--allow-no-key", action="store_true", help="serve other machines without asking for a key")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model, can be repeated (default: its own or its directory's)",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="web pages that may call (CORS), * for all, can be repeated (default: none)",
    )
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="a Host name to accept besides localhost where no key is asked for, can be repeated",
    )  # fmt: skip
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--max-queue",
        type=int,
        default=default.max_queue,
        metavar="N",
        help="prompts in work at once; more get 429 (default %(default)s)",
    )
    group.add_argument(
        "--max-requests", type=int, default=256, metavar="N", help="outputs computed at once (default %(default)s)"
    )
    group.add_argument(
        "--max-body-bytes", default="16MiB", metavar="SIZE", help="largest body of a request (default %(default)s)"
    )
    group.add_argument(
        "--client-seconds", type=float, default=default.client_s, metavar="S",
        help="time for a client to send a head or a body, or to read what waits for it (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--keep-alive-seconds", type=float, default=default.keep_alive_s, metavar="S",
        help="a stream that is silent for so long sends a comment, 0: never (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=default.drain_s,
        metavar="S",
        help="time to end after SIGTERM (default %(default)s)",
    )
    group.add_argument(
        "--stall-seconds", type=float, default=default.stall_s, metavar="S",
        help="/health fails when work waits and no token moves for so long (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--generation-config", default=default.generation_config, metavar="SOURCE",
        help="how to sample where a request does not say: auto (as the checkpoint's generation_config.json says), vllm (at "
        "temperature 1), or a directory with such a file (default %(default)s)",
    )  # fmt: skip
    group.add_argument("--salt-by-api-key", action="store_true", help="each API key has a cache of its own")
    group.add_argument("--no-ui", action="store_true", help="no web page at /ui")
    text = "a span for each request; OTEL_* variables say where to (needs lamina[otel])"
    group.add_argument("--otel", action="store_true", help=text)
    group.add_argument("--log-prompts", action="store_true", help="prompts and answers go to the log (with -v)")
    group = parser.add_argument_group("chats")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template (default: the model's own format)")
    group.add_argument("--chat-format", choices=("dsml", "jinja"), help="how chats are written (default: by the model)")
    group.add_argument(
        "--raw-special-tokens", action="store_true", help="control tokens spelled in users' texts become control tokens"
    )
    add_peers(parser)
    add_engine(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("serve", f"without {', '.join(missing)}", "pip install 'lamina[serve]'")
    from lamina.models.chats import find_chat_format
    from lamina.server.run import listen, make_state, serve

    settings = _settings(args)
    console = Console(stderr=True, highlight=False)
    directory = locate(args.model)
    args.model = str(directory)
    config, peers = _engine_config(args), peer_config(args)
    names = tuple(dict.fromkeys(args.served_model_name or [])) or (model_name(directory),)
    settings = replace(settings, names=names)
    about = about_embedded() if is_embedded(directory) else ""
    chat = find_chat_format(directory, args.chat_template, args.chat_format)
    listener = listen(settings)
    with listener:
        port = listener.getsockname()[1]
        settings = replace(settings, port=port)
        bar = LoadingBar(console, args.quiet)
        state = make_state(settings, config, directory, chat, peers)

        def on_ready(ready: Ready) -> None:
            bar.stop()
            if not args.quiet:
                start_table(console, ready, settings, config, None if chat is None else chat.name, about, str(state.defaults))
            if ready.peer_address:
                print(f"prompts for others: {ready.peer_address}", file=sys.stderr, flush=True)
            print(f"ready: {address_of(settings)}", file=sys.stderr, flush=True)

        if not args.quiet:
            what = about or directory
            print(f"lamina {__version__}: listening on {address_of(settings)}, loading {what}", file=sys.stderr, flush=True)
        try:
            asyncio.run(serve(state, listener, bar.show, on_ready))
        finally:
            bar.stop()
    if not args.quiet:
        print("ended", file=sys.stderr, flush=True)
    return 0


def _settings(args: argparse.Namespace) -> ServerSettings:
    """The server's settings. Raises ConfigError."""
    keys = read_keys(args.api_key_file)
    if not keys and not is_loopback(args.host) and not args.allow_no_key:
        allowed = "a loopback address, or give --api-key-file (or LAMINA_API_KEY), or --allow-no-key"
        raise ConfigError("host", args.host, allowed)
    if args.salt_by_api_key and not keys:
        raise ConfigError("salt_by_api_key", True, "an --api-key-file to tell keys apart")
    for name, value, low, high in (
        ("port", args.port, 0, 65_535), ("max_queue", args.max_queue, 1, 1_000_000),
        ("drain_seconds", args.drain_seconds, 0, 86_400), ("stall_seconds", args.stall_seconds, 0.1, 86_400),
        ("client_seconds", args.client_seconds, 0.1, 86_400), ("keep_alive_seconds", args.keep_alive_seconds, 0, 86_400),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(name, value, f"{low} to {high}")
    for name in args.served_model_name or ():
        if not name or len(name) > 256 or not name.isprintable():
            raise ConfigError("served_model_name", name, "1 to 256 printable characters")
    return ServerSettings(
        host=args.host, port=args.port, api_keys=keys, max_queue=args.max_queue,
        max_body_bytes=parse_bytes(args.max_body_bytes, "max_body_bytes"),
        client_s=args.client_seconds, keep_alive_s=args.keep_alive_seconds,
        drain_s=args.drain_seconds, stall_s=args.stall_seconds, generation_config=args.generation_config,
        raw_special_tokens=args.raw_special_tokens, salt_by_api_key=args.salt_by_api_key,
        salt_secret=secrets.token_bytes(32), log_prompts=args.log_prompts, allow_origins=tuple(args.allow_origin),
        allow_hosts=tuple(name.lower() for name in args.allow_host), has_ui=not args.no_ui, has_traces=args.otel,
    )  # fmt: skip


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return replace(engine_config(args), max_requests=args.max_requests)


def address_of(settings: ServerSettings) -> str:
    """The server's URL."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"
