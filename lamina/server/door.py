"""What every request passes before its endpoint: its id, who may ask, web pages of others, and errors on the way out."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.base.errors import LaminaError
from lamina.base.log import event, get_logger
from lamina.server.auth import find_key, is_allowed_host, is_for_browsers, is_own_origin, needs_key
from lamina.server.errors import ApiError, id_headers, is_request_id, to_api_error, to_response
from lamina.server.state import ServerState

_LOG = get_logger(__name__)
_CORS_METHODS = b"GET, POST, DELETE, OPTIONS"

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """An ASGI application around the endpoints.

    scope["lamina_id"] is the request's id (echoed as X-Request-Id), scope["lamina_key"] the API key it came with or None.
    """

    def __init__(self, app: Starlette, state: ServerState) -> None:
        self._holder = app
        self._app: ASGIApp = app.router  # without the framework's own error pages
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, or answers it here."""
        scope["app"], scope["lamina_state"] = self._holder, self._state
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        exchange = _Exchange(send)
        try:
            self._let_in(scope, exchange)
            if scope["type"] == "websocket":
                await self._app(scope, receive, exchange.send_socket)
                return
            if scope["method"] == "OPTIONS" and exchange.origin:
                await to_preflight(scope, exchange)
            elif scope["method"] == "OPTIONS" and (allowed := self._methods_of(scope)):
                await exchange.send_empty([(b"allow", allowed.encode())])
            else:
                await self._app(scope, receive, exchange.send)
        except Exception as error:
            await self._answer_error(error, scope, receive, exchange)
        finally:
            if scope["type"] == "http":
                self._state.count_response(scope["method"], _route_of(scope), exchange.status or 499, time.perf_counter() - start)

    def _let_in(self, scope: Scope, exchange: "_Exchange") -> None:
        """Raises ApiError for a request that must not go on."""
        scope["lamina_id"], scope["lamina_key"] = exchange.id, None
        origin = host = b""
        if sum(name == b"host" for name, _ in scope["headers"]) > 1:
            raise ApiError(400, "Host is given twice: one is allowed", "Host", "invalid_value")
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                if not is_request_id(value):
                    text = "X-Request-Id is not valid: 1 to 128 of A-Z a-z 0-9 _ . -"
                    raise ApiError(400, text, "X-Request-Id", "invalid_value")
                exchange.id = scope["lamina_id"] = value.decode("ascii")
            elif name == b"origin":
                origin = value
            elif name == b"host":
                host = value
        settings, path = self._state.settings, scope["path"]
        if not is_allowed_host(settings, host.decode("latin-1")):
            text = "this name is not one of the server's: use 127.0.0.1 or localhost, or start it with --allow-host NAME"
            raise ApiError(403, text, "Host", "host_not_allowed")
        if origin:
            if not is_own_origin(settings, origin.decode("latin-1"), host.decode("latin-1")):
                raise ApiError(403, "web pages of this origin may not call: --allow-origin", "Origin", "origin_not_allowed")
            exchange.origin = origin
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS" and bool(origin)
        if settings.api_keys and needs_key(path) and not is_preflight:
            scope["lamina_key"] = find_key(settings, scope["headers"], path)
            if scope["lamina_key"] is None:
                exchange.asks_browser = is_for_browsers(path)
                raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    async def _answer_error(self, error: Exception, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        allowed = ""
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                allowed = self._methods_of(scope)
            error = ApiError(error.status_code, _reason(error.status_code, scope, allowed))
        answer = to_api_error(error)
        if answer.status >= 500 and not isinstance(error, LaminaError):
            _LOG.error("failed request=%s", exchange.id, exc_info=error)
        if scope["type"] == "websocket":
            await receive()
            await exchange.refuse_socket(answer)
            return
        if exchange.status:  # an answer has begun: the connection is cut, so that nobody takes it for a whole one
            event(_LOG, "answer_broken_off", logging.WARNING, request=exchange.id, error=type(error).__name__)
            raise ConnectionAbortedError("an answer broke off")
        response = to_response(answer, scope["path"])
        if allowed:
            response.headers["Allow"] = allowed
        if exchange.asks_browser:
            response.headers["WWW-Authenticate"] = 'Basic realm="lamina", charset="UTF-8"'
        await response(scope, receive, exchange.send)

    def _methods_of(self, scope: Scope) -> str:
        """The methods of a path, all of its routes together; "" where it does not exist."""
        routes = [route for route in self._holder.router.routes if isinstance(route, Route)]
        found = [route.methods or () for route in routes if route.matches(scope)[0] != Match.NONE]
        return ", ".join(sorted({method for methods in found for method in methods}))


class _Exchange:
    """The answer to one request on its way out."""

    def __init__(self, send: Send) -> None:
        self.send_raw = send
        self.id = os.urandom(8).hex()
        self.status = 0
        self.origin = b""
        self.asks_browser = False

    async def send(self, message: MutableMapping[str, object]) -> None:
        """Adds the id, and what a page of another origin needs, to the head."""
        if message["type"] == "http.response.start":
            headers = message["headers"] = list(message.get("headers", ()))  # type: ignore[call-overload]
            headers += id_headers(self.id)
            if self.origin:
                headers += [(b"access-control-allow-origin", self.origin), (b"vary", b"Origin")]
                headers.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
            self.status = int(str(message["status"]))
        await self.send_raw(message)

    async def send_empty(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Status 204."""
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    async def send_socket(self, message: MutableMapping[str, object]) -> None:
        """What a web socket is told. One that nobody serves is refused as any other request is."""
        if message["type"] == "websocket.close" and not self.status:
            await self.refuse_socket(ApiError(404, "there is no web socket here"))
            return
        if message["type"] == "websocket.accept":
            self.status = 101
            headers = message.get("headers", ())
            message["headers"] = [*headers, *id_headers(self.id)]  # type: ignore[misc]
        elif message["type"] == "websocket.http.response.start":
            message["headers"] = [*message.get("headers", ()), *id_headers(self.id)]  # type: ignore[misc]
        await self.send_raw(message)

    async def refuse_socket(self, answer: ApiError) -> None:
        """Answers the request that would open a web socket; closes one that is open."""
        if self.status:
            await self.send_raw({"type": "websocket.close", "code": 1008})
            return
        response = to_response(answer)
        self.status = answer.status
        headers = [*response.raw_headers, *id_headers(self.id)]
        await self.send_raw({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
        await self.send_raw({"type": "websocket.http.response.body", "body": response.body})


async def to_preflight(scope: Scope, exchange: _Exchange) -> None:
    """The answer to a browser that asks whether a page may call."""
    headers = [(b"access-control-allow-methods", _CORS_METHODS), (b"access-control-max-age", b"600")]
    headers.append((b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, anthropic-version"))
    await exchange.send_empty(headers)


def _route_of(scope: Scope) -> str:
    """The path as it was registered; "" where nothing is."""
    route = scope.get("lamina_route", "")
    return route if isinstance(route, str) else ""


def _reason(status: int, scope: Scope, allowed: str) -> str:
    path = quote(scope["path"][:200])
    if status == 404:
        return f"{path} does not exist here"
    if status == 405:
        return f"{scope['method']} is not allowed for {path}: {allowed or 'nothing'} is"
    return f"{path}: refused with status {status}"
