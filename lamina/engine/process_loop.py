"""The loop of the engine's process, and how its engine is made."""

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from lamina.base.config import EngineConfig
from lamina.base.log import event, get_logger
from lamina.base.peers import PeerConfig
from lamina.engine.engine import Engine
from lamina.engine.kv_events import KvEvents
from lamina.engine.moves import Moves
from lamina.engine.process_cache import cache_state
from lamina.engine.process_desk import Desk, refusal
from lamina.engine.process_facts import Tally, make_ready
from lamina.engine.process_guard import Guard
from lamina.engine.process_link import Link
from lamina.engine.wire import CacheChange, CacheQuery, Cancel, Command, Fatal, Finish, Outputs, Ready, Shutdown, Start, Submit

_LOG = get_logger(__name__)
_STATS_S = 0.25
_STATS_SOON_S = 0.02  # where work begins or ends
_NEWS_S = 0.001  # what steps that take less have drawn is sent together: a message costs more than such a step
_QUICK_S = 0.0002  # steps that together take less are made one after the other
_SLOW_S = 1.0  # for so long after a step that took more nothing waits for the next one
_MOST_COMMANDS = 256  # of one round, so that steps go on whatever comes
_MOST_ROWS = 128
_MOST_FAILURES = 3
_ALONE = PeerConfig()

OnProgress: TypeAlias = Callable[[int, int], None]


class MakeEngine(Protocol):
    """How an engine is made: settings, and whom to tell how far loading and compiling are."""

    def __call__(self, config: EngineConfig, on_tensor: OnProgress, on_warmup: OnProgress) -> Engine:
        """The engine, without texts."""
        ...


def load_engine(config: EngineConfig, on_tensor: OnProgress, on_warmup: OnProgress) -> Engine:
    """The engine of a checkpoint, without texts."""
    return Engine(config, on_tensor, on_warmup, has_text=False)


class Loop:
    """Goes round until it is told to stop. ready  what it has to say first. Raises ConfigError for peers that cannot be used."""

    def __init__(self, engine: Engine, link: Link, guard: Guard, load_s: float, peers: PeerConfig = _ALONE) -> None:
        self._engine = engine
        self._moves = None if peers.is_alone else Moves(engine, peers, link.wake)
        address = "" if self._moves is None else self._moves.address
        self.ready: Ready = make_ready(engine, load_s, peers.role, address)
        self._link = link
        self._guard = guard
        self._events = KvEvents(engine.layout, peers.kv_events, peers.kv_events_replay) if peers.kv_events else None
        self._tally = Tally(engine)
        self._desk = Desk(engine, self._tally, link.wake, self._moves)
        self._is_shut = False
        self._had_work = False
        self._failures = 0
        self._has_worked = False  # since the last counters
        self._told_news = self._told_stats = 0.0
        self._slow_until = 0.0

    def run(self) -> int:
        """The exit code: 0 after Shutdown or SIGTERM, 1 if steps fail again and again."""
        self._desk.prepare()
        while not self._guard.is_stopping:
            for command in self._link.commands(_MOST_COMMANDS):
                self._obey(command)
            if self._is_shut:
                break
            for refused in self._desk.add_compiled():
                self._link.send(refused)
            for refused in self._desk.pump():
                self._link.send(refused)
            self._desk.expire(time.monotonic())
            is_stuck = self._engine.has_work and not self._steps()
            if self._events is not None:
                self._events.flush(self._engine.ledger)
            self._tell()
            if self._failures >= _MOST_FAILURES:
                self._tell_news(time.monotonic())
                self._link.send(Fatal(f"{self._failures} steps failed one after the other"))
                return 1
            if is_stuck or not self._engine.has_work:
                self._rest()
        self._desk.cancel_all()
        self._tell_news(time.monotonic())
        self._tell_stats(time.monotonic())
        return 0

    def _steps(self) -> bool:
        """One step, and more as long as they take no time: to look for commands and news costs a part of such a step.

        False: all must wait for memory.
        """
        ends = time.monotonic() + _QUICK_S
        moves = self._step()
        while moves and self._engine.has_work and not self._failures and time.monotonic() < ends:
            moves = self._step()
        return moves

    def _step(self) -> bool:
        """One step. If it breaks off, what ran has ended with "error" and the rest goes on. False: all must wait for memory."""
        self._has_worked = True
        begin = time.monotonic()
        try:
            if not self._desk.step():
                if self._desk.is_moving:
                    return False
                raise RuntimeError("requests wait although nothing runs")
        except Exception:
            self._failures += 1
            _LOG.exception("step failed")
        else:
            self._failures = 0
        end = time.monotonic()
        if end - begin > 2 * _NEWS_S:
            self._slow_until = end + _SLOW_S
        return True

    def _tell(self) -> None:
        """Sends the news and the counters, each when it is time."""
        now = time.monotonic()
        if now - self._told_news >= _NEWS_S or now < self._slow_until or not self._engine.has_work:
            self._tell_news(now)
        if now >= self._stats_due:
            self._tell_stats(now)

    def _tell_stats(self, now: float) -> None:
        """Sends the counters."""
        self._had_work, self._told_stats, self._has_worked = self._desk.has_requests, now, False
        desk = self._desk
        rows, grammars = desk.rows(_MOST_ROWS), desk.grammar_stats()
        self._link.send(self._tally.stats(desk.num_compiling(), rows, grammars, desk.move_counts()))

    def _tell_news(self, now: float) -> None:
        """Sends what is new of each output."""
        outputs = self._desk.take()
        if outputs:
            self._told_news = now
            self._link.send(Outputs(tuple(outputs)))

    @property
    def _stats_due(self) -> float:
        """When counters are to be sent: sooner where work has begun or ended since, were it of one step."""
        has_work = self._desk.has_requests
        is_soon = has_work != self._had_work or (self._has_worked and not has_work)
        return self._told_stats + (_STATS_SOON_S if is_soon else _STATS_S)

    def _rest(self) -> None:
        """Waits for a command, a grammar, a deadline, or the time of the next counters."""
        until = min(self._stats_due, self._desk.next_deadline)
        self._link.wait(max(0.0, until - time.monotonic()))

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                refused = self._desk.submit(command)
                if refused is not None:
                    self._link.send(refused)
            case Cancel():
                self._desk.cancel(command.id)
            case Finish():
                self._desk.finish(command.id, command.child)
            case CacheQuery() | CacheChange():
                self._answer(command)
            case Shutdown():
                self._is_shut = True
            case Start():
                event(_LOG, "command_dropped", logging.WARNING, why="a second Start")

    def _answer(self, command: CacheQuery | CacheChange) -> None:
        try:
            self._link.send(cache_state(self._engine.ledger, command))
        except Exception as error:
            self._link.send(refusal(command.id, error))
