"""GET /docs: /openapi.json as a page that needs no network: Swagger UI, as the package `offapi` carries it."""

from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lamina.server.errors import ApiError
from lamina.server.routing import route
from lamina.server.state import ServerState

_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Lamina API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger_style.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger_bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  presets: [SwaggerUIBundle.presets.apis],
});
"""
_ASSETS = {"swagger_style.css": "text/css", "swagger_bundle.js": "text/javascript"}
#: the page may load from here only; Swagger UI writes styles into the page and draws its icons from data
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"


def routes(state: ServerState) -> Sequence[BaseRoute]:
    """The page and its parts."""
    kept: dict[str, bytes] = {}

    async def show(request: Request) -> Response:
        if find_spec("offapi") is None:
            raise _missing()
        headers = {"Content-Security-Policy": _POLICY}
        return Response(_PAGE, media_type="text/html", headers=headers)

    async def start(request: Request) -> Response:
        return Response(_START, media_type="text/javascript")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise ApiError(404, f"/docs/{name[:100]} does not exist here")
        if name not in kept:
            kept[name] = _read(name)
        return Response(kept[name], media_type=_ASSETS[name], headers={"Cache-Control": "max-age=86400"})

    return [route("/docs", show), route("/docs/start.js", start), route("/docs/{name}", asset)]


def _read(name: str) -> bytes:
    try:
        return resources.files("offapi").joinpath(name).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise _missing() from None


def _missing() -> ApiError:
    text = "this page needs the package offapi: pip install 'lamina[ui]'; /openapi.json is what it would show"
    return ApiError(404, text, code="not_installed")
