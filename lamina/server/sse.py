"""Answers that stream: server-sent events.

A slow reader blocks nobody but itself: while it does not read, its own answer is not taken from the engine's queue, which is
bounded, and beyond its bound the request ends. A reader that does not read at all is cut off by `protocol.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from lamina.base.errors import LaminaError
from lamina.base.log import get_logger
from lamina.server.body import state_of, to_json
from lamina.server.errors import body_of, to_api_error
from lamina.server.generation import Generation, wait_until_gone

_LOG = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def data(value: object) -> bytes:
    """One event of OpenAI's protocols."""
    return b"data: " + to_json(value) + b"\n\n"


def error_data(error: Exception) -> bytes:
    """What a stream of OpenAI's protocols ends with where it breaks off."""
    return data(body_of(to_api_error(error)))


class EventStream:
    """An ASGI answer of the bytes that `parts` gives. When the client goes, or something breaks, `generations` are cancelled.

    on_error  the bytes that a stream ends with if it fails.
    """

    def __init__(
        self, request: Request, parts: AsyncIterator[bytes], generations: Sequence[Generation],
        on_error: Callable[[Exception], bytes] = error_data,
    ) -> None:  # fmt: skip
        self._request = request
        self._parts = parts
        self._generations = generations
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        async with cancelled_when_gone(self._request, self._generations):
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            try:
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except Exception as error:
                if not isinstance(error, LaminaError):
                    _LOG.error("stream failed request=%s", scope["lamina_id"], exc_info=error)
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class cancelled_when_gone:
    """While this runs, generations are cancelled when the client goes; at the end in any case."""

    def __init__(self, request: Request, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._gone = asyncio.create_task(_watch(request, generations))

    async def __aenter__(self) -> None:
        """Nothing more."""

    async def __aexit__(self, *_: object) -> None:
        """The end, however it came."""
        self._gone.cancel()
        for generation in self._generations:
            generation.cancel()


async def _watch(request: Request, generations: Sequence[Generation]) -> None:
    """Waits for the client to go."""
    await wait_until_gone(request)
    if not all(one.is_finished for one in generations):
        state_of(request).counters.disconnects += 1
        for generation in generations:
            generation.cancel()
