"""Many streamed answers at once: a client for load, lean enough not to be what is measured.

One event loop, one connection for each request in flight, kept for the next. HTTP is parsed in C (httptools), chunks are decoded
into records (msgspec).
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import httptools
import msgspec

from lamina.base.errors import LaminaError
from lamina.cli.http_client import CHUNKS, Address, Chunk, Usage, error_text

_DONE = b"[DONE]"


@dataclass(slots=True)
class Result:
    """What became of one request, in seconds.

    error    "" for a whole answer, else its kind: "HTTP 429", "connection", "timeout", "broken off".   message  of the error.
    start_s  when it was sent, on the clock of time.perf_counter.   first_s  until its first text.   total_s  until its end.
    gaps     between chunks with text.
    """

    start_s: float = 0.0
    first_s: float | None = None
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    usage: Usage | None = None
    text: str = ""
    error: str = ""
    message: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the answer is whole."""
        return not self.error


class LoadClient:
    """Sends requests to one server. keeps_text  whether answers are wanted, not only counted."""

    def __init__(self, address: Address, key: str | None = None, keeps_text: bool = False, timeout_s: float = 3600.0) -> None:
        self._address = address
        self._keeps_text = keeps_text
        self._timeout_s = timeout_s
        self._free: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.is_tls else None
        key_line = f"Authorization: Bearer {key}\r\n" if key is not None else ""
        self._head = f"Host: {address.netloc}\r\nUser-Agent: lamina\r\n{key_line}Content-Type: application/json\r\n"

    async def post(self, path: str, value: object) -> Result:
        """Sends a request and reads its answer, streamed or whole. Never raises for what the server or the network does."""
        body = msgspec.json.encode(value)
        head = f"POST {self._address.base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        result = Result(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connect()
                result.start_s = time.perf_counter()
                try:
                    await connection.ask(head + body, result, self._keeps_text)
                finally:
                    if connection.can_be_kept:
                        self._free.append(connection)
                    else:
                        connection.close()
        except TimeoutError:
            result.error, result.message = "timeout", f"no whole answer within {self._timeout_s:g} s"
        except OSError as error:
            result.error, result.message = "connection", str(error)
        result.total_s = time.perf_counter() - result.start_s
        return result

    def close(self) -> None:
        """Closes what is kept."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def _connect(self) -> "_Connection":
        while self._free:
            connection = self._free.pop()
            if connection.can_be_kept:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._address.host, self._address.port, ssl=self._tls)
        return connection


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._end: asyncio.Future[None] | None = None
        self._result = Result()
        self._keeps_text = False
        self._is_stream = False
        self._parts: list[bytes] = []
        self._rest = b""
        self._now = self._last = 0.0
        self._has_ended = False
        self._is_alive = True

    @property
    def can_be_kept(self) -> bool:
        """Whether another request may follow."""
        return self._is_alive and self._end is None and self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, result: Result, keeps_text: bool) -> None:
        """Sends a request; its answer goes into `result`."""
        assert self._transport is not None
        self._result, self._keeps_text = result, keeps_text
        self._parts, self._rest, self._is_stream, self._has_ended = [], b"", False, False
        self._end = asyncio.get_running_loop().create_future()
        self._last = result.start_s
        self._transport.write(request)
        try:
            await self._end
            self._end = None
        finally:
            if self._end is not None:
                self._is_alive = False

    def close(self) -> None:
        """Ends the connection."""
        self._is_alive = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken off", f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has gone."""
        self._is_alive = False
        self._fail("connection" if self._result.first_s is None else "broken off", str(exc or "the server closed the connection"))

    def _fail(self, kind: str, message: str) -> None:
        if self._end is not None and not self._end.done():
            self._result.error, self._result.message = kind, message
            self._end.set_result(None)

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """A piece of the answer's body."""
        if not self._is_stream:
            self._parts.append(body)
            return
        events = (self._rest + body if self._rest else body).split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            if event.startswith(b"data: "):
                self._take(event[6:])

    def on_message_complete(self) -> None:
        """The answer is whole."""
        status = self._parser.get_status_code()
        self._is_alive = self._is_alive and self._parser.should_keep_alive()
        result = self._result
        if status != 200:
            result.error, result.message = f"HTTP {status}", error_text(b"".join(self._parts))
        elif self._is_stream:
            if not self._has_ended and not result.error:
                result.error, result.message = "broken off", "the stream ended before its end"
        else:
            self._take(b"".join(self._parts))
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _take(self, data: bytes) -> None:
        """One chunk, or a whole answer."""
        result = self._result
        if data == _DONE:
            self._has_ended = True
            return
        try:
            chunk = CHUNKS.decode(data)
        except msgspec.DecodeError as error:
            result.error, result.message = "broken off", f"a chunk is not what was expected: {error}"
            return
        if chunk.usage is not None:
            result.usage = chunk.usage
        if chunk.error is not None:
            result.error, result.message = "broken off", chunk.error.message
        text = text_of(chunk)
        if text is None:
            return
        if result.first_s is None:
            result.first_s = self._now - result.start_s
        else:
            result.gaps.append(self._now - self._last)
        self._last = self._now
        if self._keeps_text:
            result.text += text


def text_of(chunk: Chunk) -> str | None:
    """The answer's text in a chunk, "" where there are only thoughts or calls, None where there is nothing new."""
    found: str | None = None
    for choice in chunk.choices:
        delta = choice.delta
        if choice.text:
            found = (found or "") + choice.text
        elif delta is not None and delta.content:
            found = (found or "") + delta.content
        elif delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls):
            found = found or ""
    return found


def check_errors(results: list[Result]) -> None:
    """Raises LaminaError with the first error if no answer at all is whole."""
    if results and not any(result.is_good for result in results):
        first = results[0]
        raise LaminaError(f"no request was answered; the first: {first.error}: {first.message}")
