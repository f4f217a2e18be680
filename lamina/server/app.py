"""The application: every endpoint's routes in one list. A new endpoint is its file and one line here."""

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.server import (
    cache,
    chat,
    completions,
    docs,
    health,
    index,
    instance,
    messages,
    metrics,
    models_list,
    openapi,
    responses,
    tokens,
    ui,
)
from lamina.server.door import Door
from lamina.server.state import ServerState

#: functions from the server's state to routes, which are looked at in this order
ROUTES: list[Callable[[ServerState], Sequence[BaseRoute]]] = [
    chat.routes,
    completions.routes,
    models_list.routes,
    responses.routes,
    messages.routes,
    tokens.routes,
    health.routes,
    index.routes,
    instance.routes,
    openapi.routes,
    docs.routes,
    cache.routes,
    metrics.routes,
    ui.routes,
]


def make_app(state: ServerState) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = Starlette(routes=[route for routes in ROUTES for route in routes(state)])
    app.router.redirect_slashes = False  # a path with a slash too many is not ours
    return Door(app, state)
