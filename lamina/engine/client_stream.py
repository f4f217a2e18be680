"""The answer of one request as it comes, for one reader."""

import asyncio
from collections import deque
from collections.abc import Callable

from lamina.base.errors import LaminaError
from lamina.engine.wire import Output


class EngineGone(LaminaError):
    """The engine's process has died, is being started again, or was stopped. retry_after_s  when to come again, at a guess."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineRefused(LaminaError):
    """The engine does not serve this. kind  config (`field` names what is wrong), capacity or internal."""

    def __init__(self, kind: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field
        self.message = message


class RequestStream:
    """Outputs of a request, until each of its children has finished. Raises EngineRefused or EngineGone where they end early.

    A reader that does not read loses its request once more than `limit` outputs wait for it.
    """

    __slots__ = ("_cancel", "_error", "_left", "_limit", "_queue", "_waiter", "id")

    def __init__(self, id: str, num_children: int, limit: int, cancel: Callable[[str], None]) -> None:
        self.id = id
        self._left = num_children
        self._limit = limit
        self._cancel = cancel
        self._queue: deque[Output] = deque()
        self._error: LaminaError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Output:
        if not self._queue:
            await self._wait()
        if self._queue:
            return self._queue.popleft()
        raise StopAsyncIteration

    async def get_batch(self) -> list[Output]:
        """All that is there, waiting for at least one; [] at the end."""
        if not self._queue:
            await self._wait()
        found = list(self._queue)
        self._queue.clear()
        return found

    async def has_news(self, seconds: float) -> bool:
        """Whether something is there, or the end, waiting for it at most so long."""
        if not self._queue and self._error is None and self._left:
            loop = asyncio.get_running_loop()
            assert self._waiter is None, "a stream has one reader"
            self._waiter = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                timer.cancel()
        return bool(self._queue) or self._error is not None or not self._left

    async def _wait(self) -> None:
        """Until something is there, or the end. Raises what ended it early."""
        while not self._queue:
            if self._error is not None:
                raise self._error
            if not self._left:
                return
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def put(self, output: Output) -> bool:
        """Takes an output from the engine; whether it was the last."""
        if output.finish is not None:
            self._left -= 1
        if self._error is None:
            if len(self._queue) >= self._limit:
                self._queue.clear()
                text = f"the answer was not read: {self._limit} outputs were waiting"
                self._error = EngineRefused("capacity", text)
                if self._left:
                    self._cancel(self.id)
            else:
                self._queue.append(output)
            self._wake()
        return not self._left

    def fail(self, error: LaminaError) -> None:
        """Ends it early; what is there can still be read."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
