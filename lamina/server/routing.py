"""How an endpoint is registered."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.body import state_of
from lamina.server.state import PEER_HEADER, asked_peer

_MOST_PEER_CHARS = 300

Handler = Callable[[Request], Awaitable[ASGIApp]]


class _Endpoint:
    """A handler as an ASGI application that tells the door its route."""

    def __init__(self, path: str, handler: Handler) -> None:
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["lamina_route"] = self._path
        request = Request(scope, receive, send)
        asked_peer.set(request.headers.get(PEER_HEADER, "")[:_MOST_PEER_CHARS])
        try:
            response = await self._handler(request)
        finally:
            state_of(request).take_body_bytes(scope, 0, 0)
        await response(scope, receive, send)


def route(path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> Route:
    """A route. The handler gives an ASGI answer, or raises ApiError, ConfigError, EngineRefused or EngineGone."""
    return Route(path, _Endpoint(path, handler), methods=list(methods))
