"""/health: whether tokens move while work waits. /ready: whether new requests are served now. /version."""

import time

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.base.version import __version__
from lamina.engine.wire import Stats
from lamina.server.body import json_response, state_of
from lamina.server.routing import route
from lamina.server.state import ServerState


class Health(Struct):
    """status  ok, or the reason why not."""

    status: str
    engine: str
    restarts: int
    running: int
    waiting: int
    stalled_s: float


class Liveness:
    """Notes when tokens last moved. The engine reports four times a second; no report counts as a standstill."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._computed = -1
        self._moved = time.monotonic()
        state.client.add_listener(self._take)

    def _take(self, stats: Stats) -> None:
        has_work = stats.running + stats.waiting > stats.arriving  # those are somebody else's work, and have a deadline
        if stats.computed_tokens != self._computed or not has_work:
            self._computed, self._moved = stats.computed_tokens, time.monotonic()

    def check(self) -> Health:
        """Why the server is not well, or "ok"."""
        client, stats = self._state.client, self._state.client.stats
        running, waiting = (0, 0) if stats is None else (stats.running, stats.waiting)
        stalled = time.monotonic() - self._moved if client.state == "ready" and self._state.in_flight else 0.0
        status = "ok"
        if client.state != "ready":
            status = f"the engine is {client.state}"
        elif stalled > self._state.settings.stall_s:
            count = max(self._state.in_flight, running + waiting)
            status = f"no token has moved for {stalled:.0f} s although {count} requests are in work"
        return Health(status, client.state, client.num_restarts, running, waiting, round(stalled, 1))


async def show_version(request: Request) -> ASGIApp:
    """GET /version."""
    return json_response({"version": __version__})


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    liveness = Liveness(state)

    async def show_health(request: Request) -> ASGIApp:
        """GET /health: 200 while the engine lives and tokens move, or nothing waits; else 503."""
        health = liveness.check()
        return json_response(health, 200 if health.status == "ok" else 503)

    async def show_ready(request: Request) -> ASGIApp:
        """GET /ready: 200 while new requests are served; 503 before, while the engine restarts, and on the way down."""
        state = state_of(request)
        status = "draining" if state.is_draining else state.client.state
        return json_response({"status": status}, 200 if status == "ready" else 503)

    return [
        route("/health", show_health), route("/ping", show_health), route("/ready", show_ready), route("/version", show_version),
    ]  # fmt: skip
