"""Grammars are compiled beside the loop; the compiler is made when the first one comes, what it imports soon after the start."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from lamina.engine.engine import Engine
from lamina.engine.grammar import CompiledGrammar, GrammarCompiler, import_library, is_installed
from lamina.engine.wire import Grammar, GrammarStats

_SETTLE_S = 0.5  # what comes first, and what ends at once, is not slowed down


class Grammars:
    """Compiles for one engine. wake  called when one is done, mostly from another thread."""

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._wake = wake
        self._compiler: GrammarCompiler | None = None
        self._pending: list[Future[CompiledGrammar]] = []

    def prepare(self) -> None:
        """Imports the library in a moment, in a thread of its own: it takes seconds. Nothing where it is not installed."""
        if is_installed():
            timer = threading.Timer(_SETTLE_S, import_library)
            timer.daemon = True
            timer.start()

    @property
    def num_pending(self) -> int:
        """Those that were not taken yet."""
        return len(self._pending)

    def stats(self) -> GrammarStats:
        """What they cost so far."""
        return GrammarStats() if self._compiler is None else self._compiler.stats()

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begins to compile. Raises ConfigError for what can be seen to be wrong at once, BusyError where nobody is free."""
        if self._compiler is None:
            engine = self._engine
            self._compiler = GrammarCompiler(engine.directory, engine.vocab_size, engine.worker.eos_token_ids)
        future = self._compiler.submit(grammar)
        self._pending.append(future)
        future.add_done_callback(lambda _: self._wake())
        return future

    def take_done(self) -> list[Future[CompiledGrammar]]:
        """Those that are done, in the order in which they were asked for."""
        if not self._pending:
            return []
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        return done

    def forget(self, future: Future[CompiledGrammar] | None) -> None:
        """Nobody wants it any more; one that has begun runs to its end."""
        if future is not None and future in self._pending:
            self._pending.remove(future)
            future.cancel()
