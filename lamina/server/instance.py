"""/v1/instance: what a router has to know of one instance among several."""

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.server.body import json_response, state_of
from lamina.server.routing import route
from lamina.server.state import ServerState


class Instance(Struct):
    """One instance. role  both, prefill, decode.   peer_address  where others ask it for prompts, "" where they do not.

    model_id, layout_id  what two instances must have in common to hand prompts over.
    """

    role: str
    peer_address: str
    models: tuple[str, ...]
    model_id: str
    layout_id: str
    block_tokens: int
    running: int
    waiting: int
    is_draining: bool


async def show_instance(request: Request) -> ASGIApp:
    """GET /v1/instance."""
    state = state_of(request)
    ready, stats = state.ready, state.client.stats
    running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
    return json_response(
        Instance(
            ready.role, ready.peer_address, state.settings.names, ready.model_id, ready.layout_id, ready.block_tokens, running,
            waiting, state.is_draining,
        )
    )  # fmt: skip


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    return [route("/v1/instance", show_instance)]
