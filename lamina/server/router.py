"""One endpoint in front of several instances: each request goes to the one that knows most of its prompt and has not much to do.

An answer that has not begun goes to another instance if its own is lost: requests are all that is needed to ask again. Of a
stream that has begun the rest cannot be had elsewhere; it ends with an error that says so, never with something else.
"""

import asyncio
import contextlib
import logging
import re
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from lamina.base.log import event, get_logger
from lamina.server.auth import find_key, is_allowed_host, needs_key
from lamina.server.body import to_json
from lamina.server.errors import ApiError, to_api_error, to_response
from lamina.server.protocol import protocol_for
from lamina.server.route_client import Exchange, RouteError, host_header
from lamina.server.route_instances import Backend, Instances
from lamina.server.route_prefix import prefix_chain
from lamina.server.run import WebServer
from lamina.server.settings import ServerSettings
from lamina.server.sse import error_data
from lamina.server.state import PEER_HEADER

_LOG = get_logger(__name__)
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length",
     b"proxy-authorization", b"proxy-connection", b"expect", PEER_HEADER.encode())
)  # fmt: skip
#: what belongs to one instance and not to all of them
_OF_ONE = ("/v1/cache", "/v1/instance", "/ui")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp[A-Za-z0-9_-]{1,120})"')
_PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"([^"]{1,128})"')
_PATH_ID = re.compile(r"^/v1/responses/([^/]+)")
_MOST_IDS = 100_000
_CLOSE_S = 5


class Router:
    """The ASGI application."""

    def __init__(self, settings: ServerSettings, instances: Instances) -> None:
        self.settings = settings
        self.instances = instances
        self.in_flight = 0
        self.is_draining = False
        self.counts = {"requests": 0, "retries": 0, "lost_streams": 0}
        self._owners: OrderedDict[bytes, Backend] = OrderedDict()  # of kept responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})
            return
        self.in_flight += 1
        started = [False]

        async def note(message: Message) -> None:
            started[0] = True
            await send(message)

        try:
            await self._answer(scope, receive, note)
        except Exception as error:
            if started[0]:
                raise
            if not isinstance(error, ApiError):
                _LOG.exception("a request failed")
            await to_response(to_api_error(error), scope["path"])(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["headers"]
        host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
        if not is_allowed_host(self.settings, host):
            raise ApiError(403, f"Host {host[:80]!r} is not one of this router's", code="host_not_allowed")
        if self.settings.api_keys and needs_key(path) and find_key(self.settings, headers, path) is None:
            raise ApiError(401, "no valid API key came with the request", code="invalid_api_key")
        if await self._own(path, scope, receive, send):
            return
        if any(path == one or path.startswith(one + "/") for one in _OF_ONE):
            raise ApiError(404, f"{path} is an instance's own: ask it there", code="not_found")
        if self.is_draining:
            raise ApiError(503, "the router is shutting down", code="shutting_down", retry_after_s=5.0)
        body = await _read(receive, self.settings.max_body_bytes)
        self.counts["requests"] += 1
        await self._forward(scope, receive, send, body)

    async def _own(self, path: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answers what is the router's; False for everything else."""
        serving = [one for one in self.instances.all if one.is_serving]
        match path:
            case "/health" | "/ready" | "/ping":
                status = "draining" if self.is_draining else "ready" if serving else "no instance serves"
                content = to_json({"status": status, "instances": len(serving), "of": len(self.instances.all)})
                await _send(send, 200 if status == "ready" else 503, content, b"application/json")
            case "/peers":  # for --peers of instances that ask others
                found = [one.about.peer_address for one in serving if one.about is not None and one.about.peer_address]
                await _send(send, 200, "".join(f"{one}\n" for one in found).encode(), b"text/plain")
            case "/metrics":
                lines = [f"lamina_router_{name}_total {count}\n" for name, count in self.counts.items()]
                for one in self.instances.all:
                    lines.append(f'lamina_router_in_work{{instance="{one.origin}"}} {one.in_work}\n')
                    lines.append(f'lamina_router_serving{{instance="{one.origin}"}} {int(one.is_serving)}\n')
                await _send(send, 200, "".join(lines).encode(), b"text/plain; version=0.0.4")
            case _:
                return False
        return True

    async def _forward(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Asks one instance after the other until one answers; ends when the client goes."""
        chain = await asyncio.to_thread(prefix_chain, body) if len(body) > 65_536 else prefix_chain(body)
        owner = self._owner(scope["path"], body)
        tried: list[Backend] = []
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            while True:
                one = owner if owner is not None and not tried else self.instances.choose(chain, tried)
                if one is None:
                    text = "no instance serves" if not tried else f"{len(tried)} instances were lost while they had this request"
                    raise ApiError(503, text, code="engine_unavailable", retry_after_s=2.0)
                tried.append(one)
                asking = asyncio.create_task(self._ask(one, chain, scope, send, body, owner is not None))
                lost = asyncio.create_task(one.lost.wait())
                try:
                    await asyncio.wait((asking, lost, gone), return_when=asyncio.FIRST_COMPLETED)
                    if gone.done() and not asking.done():
                        return
                    if not asking.done():
                        asking.cancel()
                    if await _result(asking):
                        return
                finally:
                    asking.cancel()
                    lost.cancel()
                self.counts["retries"] += 1
        finally:
            gone.cancel()

    async def _ask(
        self, one: Backend, chain: Sequence[bytes], scope: Scope, send: Send, body: bytes, is_owner: bool
    ) -> bool:  # fmt: skip
        """Whether the request has had its answer from this instance; False: another one should be asked."""
        prefill = self.instances.choose_prefill(chain, one) if chain else None
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        headers += [host_header(one.origin), (b"content-length", str(len(body)).encode())]
        if prefill is not None and prefill.about is not None:
            headers.append((PEER_HEADER.encode(), prefill.about.peer_address.encode()))
            prefill.prefills += 1
        one.in_work += 1
        answer = _Answer(send, self._note_id(one, scope["path"]))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        try:
            async with Exchange(one.origin) as exchange:
                await exchange.begin(scope["method"].encode(), target, headers, body)
                if exchange.status in (502, 503) and not is_owner and self.instances.choose(chain, (one,)) is not None:
                    return False
                await answer.take(exchange)
            return True
        except (RouteError, asyncio.CancelledError) as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if not is_cancelled:
                one.misses += 1
                event(_LOG, "instance_failed", logging.WARNING, url=str(one.origin), why=str(error), begun=answer.has_begun)
            if not answer.has_begun:
                if is_owner and not is_cancelled:
                    raise ApiError(502, f"the instance that keeps this is lost: {error}", code="instance_lost") from None
                return False
            self.counts["lost_streams"] += not is_cancelled or one.about is None
            await answer.break_off()
            return True
        finally:
            one.in_work -= 1
            if prefill is not None:
                prefill.prefills -= 1

    def _owner(self, path: str, body: bytes) -> Backend | None:
        """The instance that keeps what a request speaks of."""
        if not path.startswith("/v1/responses"):
            return None
        found = _PATH_ID.match(path)
        previous = _PREVIOUS.search(body)
        key = found[1].encode() if found is not None else previous[1] if previous is not None else b""
        one = self._owners.get(key)
        return one if one is not None and one.is_serving else None

    def _note_id(self, one: Backend, path: str) -> Callable[[bytes], None]:
        """What looks at the beginning of an answer for the id under which it is kept."""

        def note(start: bytes) -> None:
            found = _RESPONSE_ID.search(start) if path == "/v1/responses" else None
            if found is not None:
                self._owners[found[1]] = one
                if len(self._owners) > _MOST_IDS:
                    self._owners.popitem(last=False)

        return note


class _Answer:
    """What goes to the client: streams as they come, everything else once all of it is there."""

    def __init__(self, send: Send, note: Callable[[bytes], None]) -> None:
        self._send = send
        self._note = note
        self.has_begun = False

    async def take(self, exchange: Exchange) -> None:
        """Passes an answer on. Raises RouteError where it breaks off."""
        headers = [(name, value) for name, value in exchange.headers if name.lower() not in _HOP_BY_HOP]
        is_stream = any(name.lower() == b"content-type" and b"text/event-stream" in value for name, value in headers)
        if not is_stream:
            body = await exchange.read()
            self._note(body[:4096])
            self.has_begun = True
            headers.append((b"content-length", str(len(body)).encode()))
            await self._send({"type": "http.response.start", "status": exchange.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return
        async for part in exchange:
            if not self.has_begun:
                self._note(part[:4096])
                self.has_begun = True
                await self._send({"type": "http.response.start", "status": exchange.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self) -> None:
        """Ends a stream that has lost its instance."""
        error = ApiError(502, "the instance that gave this answer is lost: ask again", code="instance_lost")
        await self._send({"type": "http.response.body", "body": b"\n\n" + error_data(error)})


async def _result(asking: "asyncio.Task[bool]") -> bool:
    """What a request gave; False for one that was cancelled, as its instance is lost."""
    try:
        return await asking
    except asyncio.CancelledError:
        return False


async def _read(receive: Receive, most_bytes: int) -> bytes:
    """The whole body. Raises ApiError."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has gone before its body was there", code="client_gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            raise ApiError(413, f"the body is larger than --max-body-bytes={most_bytes}", code="body_too_large")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve_routes(router: Router, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves until SIGTERM or SIGINT, then lets what runs end within drain_s."""
    config = uvicorn.Config(
        router, http=protocol_for(router.settings), lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=_CLOSE_S, backlog=1024, timeout_keep_alive=75,
    )  # fmt: skip
    web = WebServer(config)
    loop, ending = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        if ending.is_set():
            web.should_exit = web.force_exit = True
        router.is_draining = True
        ending.set()

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, end)
    await asyncio.gather(*(router.instances.look(one) for one in router.instances.all))
    following = asyncio.create_task(router.instances.follow())
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    waiting = asyncio.create_task(ending.wait())
    on_ready()
    try:
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        until = loop.time() + router.settings.drain_s
        while router.in_flight and loop.time() < until and not web.force_exit:
            await asyncio.sleep(0.02)
    finally:
        web.should_exit = True
        await asyncio.wait((serving,), timeout=_CLOSE_S + 2)
        for task in (following, waiting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
