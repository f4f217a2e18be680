"""The life of the server's process: listen, start the engine, serve, drain, end."""

import asyncio
import contextlib
import errno
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.base.peers import PeerConfig
from lamina.chat.formats import ChatFormat
from lamina.engine.client import EngineClient
from lamina.engine.default_sampling import find_defaults
from lamina.engine.text import load_codec
from lamina.engine.wire import Progress, Ready
from lamina.server import ui
from lamina.server.app import make_app
from lamina.server.protocol import protocol_for
from lamina.server.settings import ServerSettings
from lamina.server.state import ServerState
from lamina.server.tracing import KeepTraceHeaders, open_tracing

_LOG = get_logger(__name__)
_MAX_CONNECTIONS = 8192
_CLOSE_S = 5


class WebServer(uvicorn.Server):
    """The web server, whose signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: see `serve`."""
        yield


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens where the settings say. Raises ConfigError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError("port", settings.port, f"one that is free on {settings.host}; 0 takes any") from None
        raise ConfigError("host", settings.host, f"an address of this machine, with port {settings.port} ({error})") from None
    listener.setblocking(False)
    return listener


async def serve(
    state: ServerState, listener: socket.socket, on_progress: Callable[[Progress], None], on_ready: Callable[[Ready], None]
) -> None:
    """Serves until SIGTERM or SIGINT, then drains. It listens at once; requests get 503 until the engine is ready.

    Raises what the engine says if it cannot start.
    """
    settings = state.settings
    tracing = open_tracing(state.model_name) if settings.has_traces else None
    app = make_app(state)
    if tracing is not None:
        state.observers.append(tracing)
        app = KeepTraceHeaders(app)
    config = uvicorn.Config(
        app, http=protocol_for(settings), lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, limit_concurrency=_MAX_CONNECTIONS, timeout_graceful_shutdown=_CLOSE_S, backlog=1024,
        timeout_keep_alive=75,
    )  # fmt: skip
    web = WebServer(config)
    loop, asked_to_end = asyncio.get_running_loop(), asyncio.Event()
    num_signals = 0

    def end(name: str) -> None:
        nonlocal num_signals
        num_signals += 1
        state.is_draining = True
        event(_LOG, "stopping", signal=name, in_flight=state.in_flight, drain_s=settings.drain_s)
        asked_to_end.set()
        if num_signals > 1:
            web.should_exit = web.force_exit = True

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, end, one.name)
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    ending = asyncio.create_task(asked_to_end.wait())
    try:
        starting = asyncio.create_task(state.client.start(on_progress))
        await asyncio.wait((starting, ending, serving), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            on_ready(starting.result())
            gc.collect()
            gc.freeze()  # what is here now stays; the collector need not look at it again
            await asyncio.wait((ending, serving), return_when=asyncio.FIRST_COMPLETED)
            await _drain(state, web)
        else:
            starting.cancel()
    finally:
        state.is_draining = True
        await state.client.stop()
        web.should_exit = True
        await asyncio.wait((serving,), timeout=_CLOSE_S + 2)
        await ui.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        ending.cancel()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)


async def _drain(state: ServerState, web: uvicorn.Server) -> None:
    """Waits until nothing is in work, drain_s at most, less after a second signal."""
    loop = asyncio.get_running_loop()
    until = loop.time() + state.settings.drain_s
    while state.in_flight and loop.time() < until and not web.force_exit:
        await asyncio.sleep(0.02)
    if state.in_flight:
        event(_LOG, "drain_ended", in_flight=state.in_flight)


def make_state(
    settings: ServerSettings, config: EngineConfig, directory: Path, chat: ChatFormat | None, peers: PeerConfig | None = None
) -> ServerState:
    """The server's state before the engine runs. Raises ConfigError if the tokenizer or generation_config.json cannot be read."""
    defaults = find_defaults(directory, settings.generation_config)
    return ServerState(settings, EngineClient(config, peers=peers), load_codec(directory), chat, defaults)
