"""HTTP/1.1 with limits that the web server itself does not have: the head's size, and how long a client may take.

A client that does not finish a head, or does not read what was sent, is cut off after `client_s` seconds; one that is slow and
reads is not. The body's size and time are looked after where it is read (`body.py`).
"""

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, TypedDict

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as WebState

from lamina.server.errors import ApiError, id_headers, is_request_id, to_response
from lamina.server.settings import ServerSettings

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope

_SEND_BYTES = 256 * 1024
_MAX_PIPELINE = 16


class _TooLarge(Exception):
    """A head beyond the limit."""


async def _refuse_connection(scope: "Scope", receive: "ASGIReceiveCallable", send: "ASGISendCallable") -> None:
    """Too many connections are open."""
    error = ApiError(503, "too many connections are open", code="queue_full", retry_after_s=1.0)
    response = to_response(error)
    headers = [*response.raw_headers, *id_headers(secrets.token_hex(8))]
    await send({"type": "http.response.start", "status": 503, "headers": headers, "trailers": False})
    await send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})


class LifespanState(TypedDict, total=False):
    """What the web server hands to each protocol; nothing of it is used."""


class _HeadWithBody(asyncio.Transport):
    """A connection as answers write to it: the head goes out together with the first part of the body, if that comes at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._is_head = False
        self._head = b""

    def begin(self) -> None:
        """What is written next is a head."""
        self._is_head = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends what was kept and this; a head is kept until the next write, or the loop's next turn."""
        if self._is_head:
            self._is_head, self._head = False, bytes(data)
            self._loop.call_soon(self.flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Sends what was kept."""
        head, self._head = self._head, b""
        if head:
            self._transport.write(head)

    def close(self) -> None:
        """Closes once all is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        self._head = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed or will be."""
        return self._transport.is_closing()


def protocol_for(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol's class, with the settings' limits."""

    class LimitedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(
            self, config: Config, server_state: WebState, app_state: LifespanState, _loop: asyncio.AbstractEventLoop | None = None
        ) -> None:
            super().__init__(config, server_state, dict(app_state), _loop)
            self._head_bytes = 0
            self._late_bytes = 0
            self._is_in_head = True
            self._is_too_large = False
            self._timer: asyncio.TimerHandle | None = None
            self._answering: RequestResponseCycle | None = None
            self._out: _HeadWithBody | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """A client has come; its head must follow soon."""
            super().connection_made(transport)
            self._out = _HeadWithBody(transport, self.loop)
            listener = transport.get_extra_info("socket")
            if listener is not None:  # else a client that does not read is noticed only after megabytes
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """The client has gone."""
            self._stop_timer()
            super().connection_lost(exc)
            answering = self._answering
            if answering is not None and not answering.response_complete:  # others may have come behind it
                answering.disconnected = True
                answering.message_event.set()

        def data_received(self, data: bytes) -> None:
            """Counts what belongs to a head that is not complete."""
            was_in_head = self._is_in_head
            super().data_received(data)
            is_waiting = self._is_in_head or self.cycle is None or self.cycle.response_complete
            if is_waiting and self._timer is None and not self.transport.is_closing():
                self._start_timer()  # a head that is not whole, or bytes that begin none
            if was_in_head and self._is_in_head and not self.transport.is_closing():
                self._head_bytes += len(data)
                if self._head_bytes > settings.max_header_bytes:
                    self._is_too_large = True
                    self.send_400_response("Invalid HTTP request received.")

        def on_message_begin(self) -> None:
            """A head begins."""
            super().on_message_begin()
            self._is_in_head, self._head_bytes, self._late_bytes = True, 0, 0

        def on_url(self, url: bytes) -> None:
            """Part of the request's target."""
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """One header."""
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """The head is there."""
            self._is_in_head, self._head_bytes = False, 0
            self._stop_timer()
            super().on_headers_complete()
            if 0 < len(self.pipeline) <= _MAX_PIPELINE:  # a client that does not wait may still go, and that is to be seen
                self.flow.resume_reading()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
            """A request is next. `app` is the web server's own where there are too many connections."""
            self._answering = cycle
            if self._out is not None:
                self._out.begin()
                cycle.transport = self._out
            super()._start_asgi_task(cycle, app if app is self.app else _refuse_connection)

        def on_message_complete(self) -> None:
            """The body is there: who reads it need not look at the clock."""
            super().on_message_complete()
            if self.cycle is not None:
                self.cycle.scope["state"]["is_whole"] = True

        def on_body(self, body: bytes) -> None:
            """Part of a body. What still comes after the answer is thrown away, but not for ever."""
            if self.cycle.response_complete:
                self._late_bytes += len(body)
                if self._late_bytes > settings.max_body_bytes:
                    self.transport.abort()
            super().on_body(body)

        def pause_writing(self) -> None:
            """The client does not read as fast as it gets."""
            super().pause_writing()
            self._stop_timer()
            self._start_timer()

        def resume_writing(self) -> None:
            """The client has read."""
            self._stop_timer()
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            """The answer to a head that cannot be read or is too large; the connection ends."""
            if self.transport.is_closing():
                return
            if self._answering is not None and self._answering.response_started and not self._answering.response_complete:
                self.transport.abort()  # what would be written now would be part of that answer
                return
            status, text = (b"431 Request Header Fields Too Large", "the head is too large") if self._is_too_large else (
                b"400 Bad Request", "this is not HTTP/1.1"
            )  # fmt: skip
            body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % text.encode()
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            ids = b"".join(b"%s: %s\r\n" % pair for pair in id_headers(self._find_id()))
            self.transport.write(head % (status, len(body)) + ids + b"\r\n" + body)
            self.transport.close()

        def _find_id(self) -> str:
            """The request's own id where one has been read, else a new one."""
            found = [value for name, value in self.headers or () if name == b"x-request-id" and is_request_id(value)]
            return found[-1].decode("ascii") if found and self._is_in_head else secrets.token_hex(8)

        def _count(self, num_bytes: int) -> None:
            self._head_bytes += num_bytes
            if self._head_bytes > settings.max_header_bytes:
                self._is_too_large = True
                raise _TooLarge

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(settings.client_s, self._cut_off)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _cut_off(self) -> None:
            self._timer = None
            self.transport.abort()

    return LimitedProtocol
