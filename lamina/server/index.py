"""GET /: what this server is and what can be asked of it; a browser goes to the page at /ui."""

from importlib.util import find_spec

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from lamina.base.version import __version__
from lamina.server.body import json_response
from lamina.server.routing import route
from lamina.server.state import ServerState


class Index(Struct):
    """Paths that begin an endpoint, with their methods."""

    name: str
    version: str
    endpoints: dict[str, list[str]]


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoint of this file."""
    has_page = state.settings.has_ui and find_spec("nicegui") is not None

    async def show(request: Request) -> ASGIApp:
        """The list, or the way to the page."""
        if has_page and "text/html" in request.headers.get("accept", "").lower():
            return RedirectResponse("ui/", 307, {"Vary": "Accept"})
        found: dict[str, set[str]] = {}
        for one in request.app.router.routes:
            if isinstance(one, Route) and one.methods:
                found.setdefault(one.path, set()).update(one.methods - {"HEAD"})
        endpoints = {path: sorted(methods) for path, methods in sorted(found.items())}
        response = json_response(Index("lamina", __version__, endpoints))
        response.headers["Vary"] = "Accept"
        return response

    return [route("/", show)]
