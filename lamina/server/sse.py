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
from starlette.types import Message, Receive, Scope, Send

from lamina.base.errors import LaminaError
from lamina.base.log import get_logger
from lamina.server.body import state_of, to_json
from lamina.server.errors import body_of, to_api_error
from lamina.server.generation import Generation, Piece

_LOG = get_logger(__name__)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every reader of such streams passes over
_FIRST_S = 1.0  # how long a stream may wait for its first tokens before its head is sent
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
        self, request: Request, generations: Sequence[Generation], on_error: Callable[[Exception], bytes] = error_data,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:  # fmt: skip
        self._request = request
        self._generations = generations
        self._watch = cancelled_when_gone(request, generations)
        self._parts: AsyncIterator[bytes] | None = None
        self._on_error = on_error
        self._keep_alive = keep_alive
        self._sent_s = time.monotonic()
        self._is_sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._sign: asyncio.Task[None] | None = None

    async def of(self, parts_from: Callable[[list[Piece] | None], AsyncIterator[bytes]]) -> "EventStream":
        """This, with its bytes. parts_from  gets the first pieces where there is one generation and they have come in a moment.

        Raises what refuses the prompt at once, so that this is an answer with a status of its own.
        """
        try:
            first = await self._generations[0].begin(_FIRST_S) if len(self._generations) == 1 else None
        except BaseException:
            self._watch.end()
            raise
        self._parts = parts_from(first)
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        assert self._parts is not None
        async with self._watch:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            self._wait_for_silence(send)
            goes_on = True
            try:
                async for part in self._parts:
                    self._is_sending = True
                    goes_on = not part.endswith(DONE)  # the end of the stream goes out together with its last event
                    await send({"type": "http.response.body", "body": part, "more_body": goes_on})
                    self._is_sending = False
                    self._sent_s = time.monotonic()
            except Exception as error:
                self._stop_waiting()
                if not isinstance(error, LaminaError):
                    _LOG.error("stream failed request=%s", scope["lamina_id"], exc_info=error)
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
            finally:
                self._stop_waiting()
            if goes_on:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _wait_for_silence(self, send: Send) -> None:
        """Sends a sign of life each time that nothing was sent for keep_alive_s. (A timer costs less than a task.)"""
        pause_s = state_of(self._request).settings.keep_alive_s
        if not pause_s:
            return
        now = time.monotonic()
        if now - self._sent_s >= pause_s:
            self._sent_s = now
            is_waiting = self._is_sending or (self._sign is not None and not self._sign.done())
            if not is_waiting:  # else it is the client that does not read
                message = {"type": "http.response.body", "body": self._keep_alive, "more_body": True}
                self._sign = asyncio.ensure_future(_sent(send, message))
        left_s = self._sent_s + pause_s - now
        self._timer = asyncio.get_running_loop().call_later(left_s, self._wait_for_silence, send)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sign is not None:
            self._sign.cancel()


async def _sent(send: Send, message: Message) -> None:
    await send(message)


class cancelled_when_gone:
    """From now on generations are cancelled when the client goes; at the end in any case."""

    def __init__(self, request: Request, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._gone = asyncio.create_task(_watch(request, generations))

    def end(self) -> None:
        """The end, however it came."""
        self._gone.cancel()
        for generation in self._generations:
            generation.cancel()

    async def __aenter__(self) -> None:
        """Nothing more."""

    async def __aexit__(self, *_: object) -> None:
        """The end."""
        self.end()


async def _watch(request: Request, generations: Sequence[Generation]) -> None:
    """Waits for the client to go."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not all(one.is_finished for one in generations):
        state_of(request).counters.disconnects += 1
        for generation in generations:
            generation.cancel()
