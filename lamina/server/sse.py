"""Answers that stream: server-sent events.

A slow reader blocks nobody but itself: while it does not read, its own answer is not taken from the engine's queue, which is
bounded, and beyond its bound the request ends. A reader that does not read at all is cut off by `protocol.py`.

A stream that has nothing to say for a while, as its request waits or its prompt is long, says so: what stands between the client
and the server may close a connection that is silent.
"""

import asyncio
import time
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
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every reader of such streams passes over
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
    """An ASGI answer of the bytes that `parts` gives, whole events each. When the client goes, or something breaks, `generations`
    are cancelled.

    on_error  the bytes that a stream ends with if it fails.   keep_alive  those that it sends when it has nothing to say.
    """

    def __init__(
        self, request: Request, parts: AsyncIterator[bytes], generations: Sequence[Generation],
        on_error: Callable[[Exception], bytes] = error_data, keep_alive: bytes = KEEP_ALIVE,
    ) -> None:  # fmt: skip
        self._request = request
        self._parts = parts
        self._generations = generations
        self._on_error = on_error
        self._keep_alive = keep_alive
        self._sent_s = time.monotonic()
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        async with cancelled_when_gone(self._request, self._generations):
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            ticking = asyncio.create_task(self._tick(send))
            goes_on = True
            try:
                async for part in self._parts:
                    self._is_sending = True
                    goes_on = not part.endswith(DONE)  # the end of the stream goes out together with its last event
                    await send({"type": "http.response.body", "body": part, "more_body": goes_on})
                    self._is_sending = False
                    self._sent_s = time.monotonic()
            except Exception as error:
                ticking.cancel()
                if not isinstance(error, LaminaError):
                    _LOG.error("stream failed request=%s", scope["lamina_id"], exc_info=error)
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
            finally:
                ticking.cancel()
            if goes_on:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tick(self, send: Send) -> None:
        """A sign of life each time that nothing was sent for keep_alive_s."""
        pause_s = state_of(self._request).settings.keep_alive_s
        while pause_s:
            await asyncio.sleep(max(0.0, self._sent_s + pause_s - time.monotonic()))
            if time.monotonic() - self._sent_s < pause_s:
                continue
            if not self._is_sending:  # else it is the client that does not read
                await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})
            self._sent_s = time.monotonic()


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
