"""`lamina route`: one endpoint in front of several instances."""

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.base.sizes import parse_bytes
from lamina.cli.options import add_common
from lamina.server.auth import is_loopback, read_keys
from lamina.server.settings import ServerSettings

DESCRIPTION = """\
Puts one address in front of several `lamina serve`: each request goes to the instance that knows
most of its prompt and has not much to do, and says who should compute the rest of it. Instances
that are lost are noticed, and what they had not begun to answer is asked elsewhere.
"""
EPILOG = """\
Examples:
  lamina serve --role prefill --port 8100 --peer-listen 127.0.0.1:8110
  lamina serve --role decode --port 8200 --peers http://127.0.0.1:8000/peers
  lamina serve --role decode --port 8300 --peers http://127.0.0.1:8000/peers
  lamina route http://127.0.0.1:8100 http://127.0.0.1:8200 http://127.0.0.1:8300 --port 8000
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command understands."""
    default = ServerSettings()
    parser.add_argument("urls", metavar="URL", nargs="+", help="an instance's address, http://HOST:PORT")
    group = parser.add_argument_group("where and for whom")
    group.add_argument(
        "--host", default=default.host, metavar="ADDRESS", help="listen here (default %(default)s: this machine only)"
    )
    group.add_argument("--port", type=int, default=default.port, metavar="N", help="0: any that is free (default %(default)s)")
    text = "keys, one a line; one must come with each request, and instances must know the first; also LAMINA_API_KEY"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=text)
    group.add_argument("--allow-no-key", action="store_true", help="serve other machines without asking for a key")
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="a Host name to accept besides localhost where no key is asked for, can be repeated",
    )  # fmt: skip
    group.add_argument(
        "--max-body-bytes", default="16MiB", metavar="SIZE", help="largest body of a request (default %(default)s)"
    )
    group.add_argument(
        "--drain-seconds", type=float, default=default.drain_s, metavar="S",
        help="time to end after SIGTERM (default %(default)s)",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to end."""
    missing = [name for name in ("starlette", "uvicorn", "h11", "httptools") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("route", f"without {', '.join(missing)}", "pip install 'lamina[serve]'")
    from lamina.server.route_instances import Instances
    from lamina.server.router import Router, serve_routes
    from lamina.server.run import listen

    keys = read_keys(args.api_key_file)
    if not keys and not is_loopback(args.host) and not args.allow_no_key:
        allowed = "a loopback address, or give --api-key-file (or LAMINA_API_KEY), or --allow-no-key"
        raise ConfigError("host", args.host, allowed)
    for name, value, high in (("port", args.port, 65_535), ("drain_seconds", args.drain_seconds, 86_400)):
        if not 0 <= value <= high:
            raise ConfigError(name, value, f"0 to {high}")
    settings = ServerSettings(
        host=args.host, port=args.port, api_keys=keys, max_body_bytes=parse_bytes(args.max_body_bytes, "max_body_bytes"),
        drain_s=args.drain_seconds, allow_hosts=tuple(name.lower() for name in args.allow_host),
    )  # fmt: skip
    instances = Instances(args.urls, keys[0] if keys else None)
    listener = listen(settings)
    with listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listener.getsockname()[1]}"

        def on_ready() -> None:
            serving = sum(one.is_serving for one in instances.all)
            if not args.quiet:
                print(f"{serving} of {len(instances.all)} instances serve", file=sys.stderr)
            print(f"ready: {address}", file=sys.stderr, flush=True)

        asyncio.run(serve_routes(Router(settings, instances), listener, on_ready))
    if not args.quiet:
        print("ended", file=sys.stderr, flush=True)
    return 0
