"""Requests of the router to its instances: HTTP/1.1, one connection each, the body as it comes."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias
from urllib.parse import urlsplit

import h11

from lamina.base.errors import ConfigError, LaminaError

_CONNECT_S = 2.0
_READ_BYTES = 64 * 1024
_MOST_BODY_BYTES = 256 << 20
_URL = "an instance's address such as http://127.0.0.1:8000"

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class RouteError(LaminaError):
    """An instance that cannot be reached, or has gone."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instance is."""

    host: str
    port: int
    is_tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_tls}://{host}:{self.port}"


def parse_origin(text: str) -> Origin:
    """http://host:port, also short as host:port or with /v1 at its end. Raises ConfigError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError:
        raise ConfigError("url", text, _URL) from None
    is_plain = parts.path.rstrip("/") in ("", "/v1") and not (parts.query or parts.fragment or parts.username)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ConfigError("url", text, _URL)
    is_tls = parts.scheme == "https"
    return Origin(parts.hostname, port or (443 if is_tls else 80), is_tls)


class Exchange:
    """One request and its answer. As a context manager it closes the connection, which cancels what has not been answered.

    status, headers  of the answer, once `begin` has returned.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        self.headers: Headers = ()

    async def __aenter__(self) -> "Exchange":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is None:
            return
        if self._http.their_state is h11.DONE:
            self._writer.close()
        else:
            self._writer.transport.abort()

    async def begin(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> None:
        """Sends the request and waits for the answer's head. Raises RouteError."""
        origin = self._origin
        try:
            context = ssl.create_default_context() if origin.is_tls else None
            opening = asyncio.open_connection(origin.host, origin.port, ssl=context, limit=_READ_BYTES)
            self._reader, self._writer = await asyncio.wait_for(opening, _CONNECT_S)
            request = h11.Request(method=method, target=target, headers=[*headers, (b"connection", b"close")])
            self._writer.write(self._http.send(request) or b"")
            if body:
                self._writer.write(self._http.send(h11.Data(body)) or b"")
            self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
            await self._writer.drain()
            while not isinstance(found := await self._next(), h11.Response):
                if not isinstance(found, h11.InformationalResponse):
                    raise RouteError(f"{origin} has gone")
            self.status, self.headers = found.status_code, [(bytes(name), bytes(value)) for name, value in found.headers]
        except TimeoutError:
            raise RouteError(f"{origin} cannot be reached in {_CONNECT_S:g} s") from None
        except (OSError, h11.ProtocolError, asyncio.IncompleteReadError) as error:
            raise RouteError(f"{origin} cannot be reached or has gone: {error}") from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The answer's body as it comes. Raises RouteError if it breaks off."""
        try:
            while not isinstance(found := await self._next(), h11.EndOfMessage):
                if not isinstance(found, h11.Data):
                    raise RouteError(f"{self._origin} has gone")
                yield bytes(found.data)
        except (OSError, h11.ProtocolError) as error:
            raise RouteError(f"{self._origin} has gone: {error}") from None

    async def _next(self) -> object:
        assert self._reader is not None
        while (found := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return found

    async def read(self) -> bytes:
        """The whole body. Raises RouteError."""
        parts, size = [], 0
        async for part in self:
            parts.append(part)
            size += len(part)
            if size > _MOST_BODY_BYTES:
                raise RouteError(f"{self._origin} answers with more than {_MOST_BODY_BYTES} bytes")
        return b"".join(parts)


async def fetch(origin: Origin, path: str, headers: Headers = ()) -> tuple[int, bytes]:
    """GET: (status, body). Raises RouteError."""
    async with contextlib.AsyncExitStack() as stack:
        exchange = await stack.enter_async_context(Exchange(origin))
        await exchange.begin(b"GET", path.encode(), [(b"host", _host(origin)), *headers], b"")
        return exchange.status, await exchange.read()


def _host(origin: Origin) -> bytes:
    return str(origin).partition("://")[2].encode()


def host_header(origin: Origin) -> tuple[bytes, bytes]:
    """The header that names an instance."""
    return b"host", _host(origin)
