"""/ui: the server's web page, a NiceGUI application mounted below our own.

NiceGUI is optional (the extra `lamina[ui]`) and brings its browser's parts in its wheel: the page asks nobody else for anything,
and its headers forbid it. It is imported when somebody first opens the page, in a thread, so that who serves an API only pays
nothing for it. Without it /ui says in one line how to get it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.server.state import ServerState
from lamina.server.ui_history import History

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/ui"
_MISSING = "The web page needs NiceGUI, which is not installed: pip install 'lamina[ui]'\n"
#: the page's own server is all it may talk to; its library compiles templates in the browser, hence unsafe-eval
_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    b"img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
_HEADERS = [(b"content-security-policy", _POLICY), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class Page:
    """An ASGI application that becomes NiceGUI's when it is first asked for something."""

    def __init__(self, state: ServerState, history: History) -> None:
        self._state = state
        self._history = history
        self._app: ASGIApp | None = None
        self._lock = asyncio.Lock()
        self._open = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the page, loading it first."""
        scope["lamina_route"] = PATH
        if self._app is None:
            if scope["type"] == "websocket":  # of a page that an earlier server has sent: it is told to load again
                await PlainTextResponse("gone", 404)(scope, receive, send)
                return
            async with self._lock:
                if self._app is None:
                    self._app = await self._load()

        has_gone = False

        async def receive_noted() -> Message:
            nonlocal has_gone
            message = await receive()
            has_gone = has_gone or message["type"] == "http.disconnect"
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        try:
            await self._app(scope, receive_noted, send_guarded)
        except RuntimeError:
            if not has_gone:  # the library's middleware complains where a browser did not wait for an answer
                raise

    async def _load(self) -> ASGIApp:
        made = await asyncio.to_thread(_make, self._state, self._history)
        await self._open.enter_async_context(made.router.lifespan_context(made))
        return made

    async def close(self) -> None:
        """Ends the page's background work."""
        await self._open.aclose()


def _make(state: ServerState, history: History) -> "FastAPI":
    from lamina.server.ui_page import make_page_app  # NiceGUI: half a second

    return make_page_app(state, history)


_pages: list[Page] = []


def routes(state: ServerState) -> Sequence[BaseRoute]:
    """The page, or the line that says what it needs."""
    if not state.settings.has_ui:
        return []
    if find_spec("nicegui") is None:
        missing = PlainTextResponse(_MISSING, 501)
        return [Route(PATH, missing), Route(PATH + "/{rest:path}", missing)]
    history = History()
    state.observers.append(history)
    state.client.add_listener(history.on_stats)
    page = Page(state, history)
    _pages.append(page)
    return [Route(PATH, RedirectResponse(PATH + "/", 307)), Mount(PATH, app=page)]


async def close() -> None:
    """Ends what the page does in the background, if anybody opened it."""
    while _pages:
        await _pages.pop().close()
