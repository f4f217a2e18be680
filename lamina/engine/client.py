"""The server's side of the engine's process: it starts it, gives it requests, hands out what comes, and starts it again.

One event loop, no threads of its own but one that waits for the process's end. No torch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Literal

import msgspec

from lamina.base.config import EngineConfig
from lamina.base.errors import CapacityError, ConfigError, LaminaError, WeightError
from lamina.base.log import event, get_logger
from lamina.base.peers import PeerConfig
from lamina.engine.client_counters import summed, without_gauges
from lamina.engine.client_process import EngineProcess, default_command, how_it_ended
from lamina.engine.client_stream import EngineGone, EngineRefused, RequestStream
from lamina.engine.wire import (
    CacheChange,
    CacheQuery,
    CacheState,
    Cancel,
    Command,
    Fatal,
    Finish,
    Outputs,
    Progress,
    Ready,
    Refusal,
    Report,
    Shutdown,
    Start,
    Stats,
    Submit,
)  # fmt: skip

__all__ = ["EngineClient", "EngineGone", "EngineRefused", "RequestStream"]

_LOG = get_logger(__name__)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_STEADY_S = 30.0  # an engine that has served so long starts again without a longer pause
_LOOK_S = 1.0
_BUSY_FACTOR = 20  # a silent engine that uses the processor has so many times longer
_CALL = "\0"  # begins the ids of calls, which no request's has

State = Literal["starting", "ready", "restarting", "stopped"]


class EngineClient:
    """Runs one engine's process, and serves one event loop: that in which `start` is called.

    command      how the process is started, its address is appended; None: this package's own.
    queue_limit  outputs of one request that may wait for their reader.   restarts  whether a dead engine is started again.
    silence_s    an engine with requests that says nothing for so long, and does nothing, is ended and counts as dead.
    peers        how it works with other engines; None: alone.
    ready, stats  what it said last; the counters of `stats` go on over restarts.   num_late  outputs that nobody waited for.
    """

    def __init__(
        self, config: EngineConfig, command: Sequence[str] | None = None, *, queue_limit: int = 4096, restarts: bool = True,
        silence_s: float = 30.0, peers: PeerConfig | None = None,
    ) -> None:  # fmt: skip
        if queue_limit < 1:
            raise ConfigError("queue_limit", queue_limit, "an integer of at least 1")
        if not silence_s > 0:
            raise ConfigError("silence_s", silence_s, "a number above 0")
        self.config = config
        self.peers = peers if peers is not None else PeerConfig()
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.state: State = "starting"
        self.num_restarts = 0
        self.num_late = 0
        self._command = default_command() if command is None else list(command)
        self._queue_limit = queue_limit
        self._restarts = restarts
        self._silence_s = silence_s
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._process: EngineProcess | None = None
        self._launched: asyncio.Future[Ready] | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[str, asyncio.Future[CacheState]] = {}
        self._num_calls = 0
        self._idle: asyncio.Event | None = None
        self._listeners: dict[int, Callable[[Stats], None]] = {}
        self._next_listener = 0
        self._before: Stats | None = None  # the counters of engines that have gone
        self._last_own: Stats | None = None  # what the present engine said last
        self._fatal: Fatal | None = None
        self._why_killed = ""
        self._pause_s = _FIRST_PAUSE_S
        self._ready_at = 0.0
        self._heard_at = 0.0
        self._looked_at = 0.0
        self._cpu = (0.0, 0.0)  # (when, processor seconds) when it was last seen to do something
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> Ready:
        """Starts the process; returns once it serves. on_progress  called while it loads, at restarts too.

        Raises what the engine says if it cannot start (ConfigError, CapacityError, WeightError), or EngineGone.
        """
        if self._process is not None or self.state != "starting":
            raise EngineGone("the engine was started before")
        self._on_progress = on_progress
        self._idle = asyncio.Event()
        self._idle.set()
        try:
            ready = await self._launch()
        except BaseException:
            self._stop_now("it could not be started")
            raise
        self._run(self._watch())
        return ready

    async def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, waits up to drain_s until none is left, and ends the process."""
        was_serving, self.state = self.state == "ready", "stopped"
        if self._launched is not None and not self._launched.done():
            self._launched.set_exception(EngineGone("the engine was stopped"))
        if was_serving and self._streams and drain_s > 0 and self._idle is not None:
            try:
                await asyncio.wait_for(self._idle.wait(), drain_s)
            except TimeoutError:
                event(_LOG, "drain_ended", logging.WARNING, requests=len(self._streams), seconds=drain_s)
        try:
            if was_serving and self._process is not None:
                await self._process.stop(Shutdown())
        finally:
            self._stop_now("it was stopped")

    def _stop_now(self, why: str) -> None:
        """The end, without waiting for anything."""
        self.state = "stopped"
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._fail_all(f"the engine is gone: {why}")

    async def _launch(self) -> Ready:
        """Starts a process and waits for its Ready. Raises what it says, or EngineGone."""
        self._fatal, self._why_killed = None, ""
        self._launched = asyncio.get_running_loop().create_future()
        self._process = EngineProcess(self._command, self._on_message, self._on_exit)
        settings: dict[str, int | float | str | bool | None] = asdict(self.config)
        level = logging.getLogger("lamina").getEffectiveLevel()
        self._process.send(Start(settings, level, asdict(self.peers)))
        ready = await self._launched
        self._ready_at = self._heard_at = self._looked_at = time.monotonic()
        return ready

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_exit(self, code: int) -> None:
        """The process has gone, and all that it sent has been read."""
        fatal, self._process = self._fatal, None
        why = f"its process ended with {how_it_ended(code)}"
        if fatal is not None:
            why = f"{fatal.message} ({why})"
        elif self._why_killed:
            why = self._why_killed
        if self._launched is not None and not self._launched.done():
            error = _as_error(fatal) if fatal is not None else EngineGone(f"the engine did not start: {why}")
            self._launched.set_exception(error)
            return
        self._keep_counters()
        if self.state == "stopped":
            self._fail_all(f"the engine is gone: {why}")
            return
        will = self._restarts
        self.state = "restarting" if will else "stopped"
        event(_LOG, "engine_died", logging.ERROR, why=why, requests=len(self._streams), restarts=will)
        self._fail_all(f"the engine died: {why}" + ("; it is being started again" if will else ""))
        if time.monotonic() - self._ready_at > _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        if will:
            self._run(self._start_again())

    async def _start_again(self) -> None:
        """Tries until it serves."""
        while self.state == "restarting":
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self.num_restarts += 1
            try:
                await self._launch()
            except (LaminaError, OSError) as error:
                process, self._process = self._process, None
                if process is not None:
                    process.close()
                event(_LOG, "engine_not_restarted", logging.ERROR, why=str(error), next_try_s=self._pause_s)

    def _fail_all(self, message: str) -> None:
        """Every stream and call ends with EngineGone."""
        streams, self._streams = self._streams, {}
        calls, self._calls = self._calls, {}
        for stream in streams.values():
            stream.fail(EngineGone(message, self.retry_after_s))
        for call in calls.values():
            if not call.done():
                call.set_exception(EngineGone(message, self.retry_after_s))
        if self._idle is not None:
            self._idle.set()

    @property
    def retry_after_s(self) -> float:
        """When an engine that is gone may be back, at a guess."""
        load_s = self.ready.load_s if self.ready is not None else 0.0
        return max(1.0, self._pause_s + load_s)

    # -- requests

    @property
    def in_flight(self) -> int:
        """Requests that the engine has not finished."""
        return len(self._streams)

    def submit(self, submit: Submit) -> RequestStream:
        """Gives a request to the engine; never waits. Raises EngineGone, and ConfigError for an id that is in use."""
        process = self._serving()
        if submit.id in self._streams or submit.id.startswith(_CALL):
            raise ConfigError("id", submit.id, "an id that no request has")
        stream = RequestStream(submit.id, max(1, submit.sampling.n), self._queue_limit, self.cancel)
        process.send(submit)
        self._streams[submit.id] = stream
        if self._idle is not None:
            self._idle.clear()
        return stream

    def cancel(self, id: str) -> None:
        """What has not finished of a request ends with "abort"; nothing happens to one that is not known."""
        if id in self._streams:
            self._send(Cancel(id))

    def finish(self, id: str, child: int) -> None:
        """One output has its answer: it ends with "stop"; nothing happens to one that is not known."""
        if id in self._streams:
            self._send(Finish(id, child))

    async def cache(self, limit: int = 256, realm: str = "") -> CacheState:
        """What the memory holds; of prefixes those whose cache_salt begins with `realm`. Raises EngineRefused, EngineGone."""
        return await self._call(lambda id: CacheQuery(id, limit, realm))

    async def change_cache(self, action: str, key: str = "", realm: str = "") -> CacheState:
        """Pins, unpins or drops a prefix, or drops all where key is ""; the state then. Raises EngineRefused, EngineGone."""
        return await self._call(lambda id: CacheChange(id, action, key, realm))

    async def _call(self, command_of: Callable[[str], Command]) -> CacheState:
        process = self._serving()
        self._num_calls += 1
        id = f"{_CALL}{self._num_calls}"
        call: asyncio.Future[CacheState] = asyncio.get_running_loop().create_future()
        self._calls[id] = call
        process.send(command_of(id))
        try:
            return await call
        finally:
            self._calls.pop(id, None)

    def _serving(self) -> EngineProcess:
        """The process, if it serves. Raises EngineGone."""
        if self.state == "ready" and self._process is not None:
            return self._process
        texts = {"restarting": "died and is being started again", "stopped": "is stopped"}
        raise EngineGone(f"the engine {texts.get(self.state, 'is starting')}", self.retry_after_s)

    def _send(self, command: Command) -> None:
        if self._process is not None:
            self._process.send(command)

    # -- what comes

    def add_listener(self, callback: Callable[[Stats], None]) -> Callable[[], None]:
        """Calls it with each new `stats`; returns the way to take it off."""
        number, self._next_listener = self._next_listener, self._next_listener + 1
        self._listeners[number] = callback
        return lambda: self._forget_listener(number)

    def _forget_listener(self, number: int) -> None:
        self._listeners.pop(number, None)

    def _on_message(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        try:
            report = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            event(_LOG, "report_dropped", logging.ERROR, bytes=len(data), why=str(error))
            return
        match report:
            case Outputs():
                self._on_outputs(report)
            case Stats():
                self._on_stats(report)
            case Refusal():
                self._on_refusal(report)
            case CacheState():
                call = self._calls.get(report.id)
                if call is not None and not call.done():
                    call.set_result(report)
            case Progress():
                self._on_loading(report)
            case Ready():
                self._on_ready(report)
            case Fatal():
                self._fatal = report

    def _on_outputs(self, report: Outputs) -> None:
        streams = self._streams
        for output in report.items:
            stream = streams.get(output.id)
            if stream is None:
                self.num_late += 1
            elif stream.put(output):
                self._forget(output.id)

    def _forget(self, id: str) -> None:
        self._streams.pop(id, None)
        if not self._streams and self._idle is not None:
            self._idle.set()

    def _on_refusal(self, report: Refusal) -> None:
        error = EngineRefused(report.kind, report.message, report.field)
        call, stream = self._calls.get(report.id), self._streams.get(report.id)
        if call is not None:
            if not call.done():
                call.set_exception(error)
        elif stream is not None:
            stream.fail(error)
            self._forget(report.id)
        else:
            self.num_late += 1

    def _on_loading(self, report: Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(report)

    def _on_ready(self, report: Ready) -> None:
        self.ready = report
        if self._launched is not None and not self._launched.done():
            self.state = "ready"
            self._launched.set_result(report)

    def _on_stats(self, report: Stats) -> None:
        self._last_own = report
        self._tell(summed(self._before, report))

    def _keep_counters(self) -> None:
        """What the engine that has gone counted stays."""
        if self._last_own is not None:
            self._before = without_gauges(summed(self._before, self._last_own))
            self._last_own = None
            self._tell(self._before)

    def _tell(self, stats: Stats) -> None:
        self.stats = stats
        for callback in list(self._listeners.values()):
            try:
                callback(stats)
            except Exception:
                _LOG.exception("a listener failed")

    # -- life signs

    async def _watch(self) -> None:
        """Ends an engine that has requests and gives no sign of life."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._silence_s / 4))
            now = time.monotonic()
            was_away, self._looked_at = now - self._looked_at > self._silence_s / 2, now
            if was_away or self.state != "ready" or self._process is None or not (self._streams or self._calls):
                self._heard_at = now  # nothing was asked, or this loop itself has not read what was said
                continue
            silent = now - self._heard_at
            if silent < self._silence_s / 2:
                self._cpu = (now, self._process.cpu_seconds() or 0.0)
                continue
            used = self._process.cpu_seconds()
            if used is not None and used > self._cpu[1] + 0.05 * (now - self._cpu[0]):
                self._cpu = (now, used)
            is_busy = now - self._cpu[0] < self._silence_s / 2
            if silent > self._silence_s * (_BUSY_FACTOR if is_busy else 1):
                self._why_killed = f"it gave no sign of life for {silent:.0f} s and was ended"
                self._process.kill()


def _as_error(fatal: Fatal) -> LaminaError:
    """What the engine said, as it would be raised here."""
    match fatal.kind:
        case "config":
            return ConfigError(fatal.field, fatal.value, fatal.allowed)
        case "capacity":
            return CapacityError(fatal.message)
        case "weights":
            return WeightError(fatal.message)
    return EngineGone(f"the engine did not start: {fatal.message}")
