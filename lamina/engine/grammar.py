"""Grammars for outputs: compiled beside the engine's loop by xgrammar (the extra `structured`), one state for each output.

tokenizer.json -> bytes of every token -> a compiler; a grammar's text -> checks -> compiled, kept -> a state -> a mask a token

Added tokens are no text to a grammar, so that no control token is drawn inside a string. A grammar that spells one out (the
marks around a tool call) sees that one as text: it is compiled against a vocabulary of its own.
"""

import importlib.util
import logging
import os
import statistics
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BusyError, ConfigError
from lamina.base.log import event, get_logger
from lamina.base.sizes import MiB
from lamina.engine.grammar_checks import FIELDS, check_grammar, read_choices, short
from lamina.engine.grammar_quiet import quiet
from lamina.engine.grammar_vocabulary import View, Vocabulary, read_vocabulary
from lamina.engine.wire import GRAMMAR_S, Grammar, GrammarStats

if TYPE_CHECKING:
    import xgrammar  # type: ignore[import-not-found,import-untyped,unused-ignore]

_LOG = get_logger(__name__)
_CACHE_BYTES = 256 * MiB
_MAX_GRAMMAR_BYTES = 64 * MiB
_MAX_VOCABULARIES = 8
_LIMIT_S = 10.0
_PROBE_TOKENS = 6
_MAX_MASK_S = 0.05  # of a probe's median; ordinary masks take 10 us to 1 ms
_MAX_SLOW_S = 2.0  # that the masks of one output may take beyond that, all together
_WORD_BITS = 32
_MAX_SPACES = 20  # in a row, between the parts of JSON: an output that only goes on with spaces comes to an end
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'

Bits = NDArray[np.int32]


class MatcherState:
    """Where one output is, see schedule.grammar.GrammarState."""

    __slots__ = ("_after", "_ends", "_is_broken", "_last_word", "_mask", "_matcher", "_slow_s", "_stops", "_words")

    def __init__(
        self, matcher: "xgrammar.GrammarMatcher", vocab_size: int, after: int | None, ends: tuple[int, ...],
        stops: frozenset[int],
    ) -> None:  # fmt: skip
        self._matcher = matcher
        self._words = -(-vocab_size // _WORD_BITS)
        self._last_word = np.array((1 << ((vocab_size - 1) % _WORD_BITS + 1)) - 1, np.uint32).view(np.int32)[()]
        self._after = after  # None once the grammar has begun
        self._ends, self._stops = ends, stops
        self._mask: bytes | None = None  # of the next token, once somebody has asked
        self._is_broken = False
        self._slow_s = 0.0

    @property
    def banned(self) -> tuple[int, ...]:
        """Ends of text, while the grammar has not begun: an output that thinks does not end before it has answered."""
        return () if self._after is None else self._ends

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end can come."""
        return self._is_broken or self._matcher.is_terminated()

    def mask(self) -> bytes | None:
        """Tokens that may come next; None before the grammar has begun."""
        if self._after is not None:
            return None
        if self._mask is None:
            self._mask = self._fill()
        return self._mask

    def accept(self, token: int) -> bool:
        """Goes on by a token that was drawn."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return True
        self._mask = None
        if self._is_broken:
            return False
        if token in self._stops and self._matcher.is_completed():
            return True
        self._is_broken = not self._matcher.accept_token(token)
        return not self._is_broken

    def _fill(self) -> bytes:
        bits: Bits = np.full((1, self._words), -1, np.int32)
        if self.is_done:
            bits.fill(0)
        else:
            begin = time.perf_counter()
            self._matcher.fill_next_token_bitmask(bits, 0)
            self._slow_s += max(0.0, time.perf_counter() - begin - _MAX_MASK_S)
            if self._slow_s > _MAX_SLOW_S:  # it holds all others up
                event(_LOG, "grammar_given_up", logging.WARNING, slow_s=round(self._slow_s, 2))
                self._is_broken = True
                bits.fill(0)
        bits[0, -1] &= self._last_word  # the library leaves what no token stands for as it was
        may_end = not self._is_broken and (self._matcher.is_completed() or self._matcher.is_terminated())
        row = bits[0].view(np.uint32)
        for token in self._ends:  # the matcher's own idea of an end is not the request's
            if token not in self._stops:
                row[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
        if may_end:
            for token in self._stops:
                row[token >> 5] |= np.uint32(1 << (token & 31))
        return bytes(row.astype("<u4", copy=False))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that outputs can start. after  as in wire.Grammar.   nbytes  about what it takes in memory."""

    compiled: "xgrammar.CompiledGrammar"
    make_matcher: "Callable[[xgrammar.CompiledGrammar], xgrammar.GrammarMatcher]"
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    after: int | None
    nbytes: int

    def start(self, stop_ids: Collection[int]) -> MatcherState:
        """The state of one output, which any of `stop_ids` ends once the grammar is complete."""
        matcher = self.make_matcher(self.compiled)
        return MatcherState(matcher, self.vocab_size, self.after, self.eos_token_ids, frozenset(stop_ids))


@dataclass(frozen=True, slots=True)
class _Kept:
    compiled: "xgrammar.CompiledGrammar"
    nbytes: int


class GrammarCompiler:
    """Compiles grammars for one checkpoint, in threads of its own, and keeps the last ones.

    directory  of the checkpoint, with a tokenizer.json.   vocab_size  the model's, which may be padded.
    limit_s    longest time to compile one; cache_bytes  of those that are kept.
    A thread that compiles one beyond the limit cannot be ended, only waited for: while all are busy so, others are refused.
    Raises ConfigError where xgrammar is not installed or the checkpoint has no tokenizer that it can use.
    """

    def __init__(
        self, directory: Path, vocab_size: int, eos_token_ids: Collection[int], *, limit_s: float = _LIMIT_S,
        cache_bytes: int = _CACHE_BYTES, num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.limit_s, self.cache_bytes = limit_s, cache_bytes
        self._directory = directory
        self._vocabulary: Vocabulary | None = None
        self._num_threads = num_threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, "grammar")
        self._lock = threading.Lock()  # of what is kept and counted
        self._making = threading.Lock()  # of the vocabulary and the compilers
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._compilers: OrderedDict[View, xgrammar.GrammarCompiler] = OrderedDict()
        self._num_late = 0  # threads with one that was given up
        self._compiled = [0] * (len(GRAMMAR_S) + 1)
        self._total_s, self._num_hits, self._num_evicted = 0.0, 0, 0
        self._refused: dict[str, int] = {}
        if not is_installed():
            raise ConfigError("response_format", "a grammar", "none here: install lamina[structured]")

    def stats(self) -> GrammarStats:
        """What has been compiled, kept and refused so far."""
        with self._lock:
            return GrammarStats(
                tuple(self._compiled), self._total_s, self._num_hits, len(self._kept), self._kept_bytes, self._num_evicted,
                dict(self._refused),
            )  # fmt: skip

    def refused(self, reason: str) -> None:
        """Counts one that was not compiled."""
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def is_late(self, change: int) -> None:
        """A thread goes on with a grammar that was given up (1), or is free again (-1)."""
        with self._lock:
            self._num_late += change

    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Begins to compile; the future raises ConfigError naming the field, or BusyError. What is known at once is raised so."""
        try:
            check_grammar(grammar)
        except ConfigError:
            self.refused("invalid")
            raise
        if grammar.after is not None and not 0 <= grammar.after < self.vocab_size:
            raise ConfigError("after", grammar.after, f"a token id from 0 to {self.vocab_size - 1}")
        found: Future[CompiledGrammar] = Future()
        kept = self._look_up(grammar)
        if kept is not None:
            with self._lock:
                self._num_hits += 1
            found.set_result(self._bind(kept, grammar))
            return found
        if self._num_late >= self._num_threads:
            self.refused("busy")
            raise BusyError(_busy(grammar, self.limit_s))
        _Job(self, grammar, found).start(self._pool)
        return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """As `submit`, waiting for the end."""
        return self.submit(grammar).result()

    def close(self) -> None:
        """Begins nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def build(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles in the caller's thread, whatever time it takes."""
        kept = self._look_up(grammar)
        if kept is None:
            kept = self._build(grammar)
        return self._bind(kept, grammar)

    def _bind(self, kept: _Kept, grammar: Grammar) -> CompiledGrammar:
        make = import_library().GrammarMatcher
        return CompiledGrammar(kept.compiled, make, self.vocab_size, self.eos_token_ids, grammar.after, kept.nbytes)

    def _look_up(self, grammar: Grammar) -> _Kept | None:
        with self._lock:
            kept = self._kept.get((grammar.kind, grammar.value))
            if kept is not None:
                self._kept.move_to_end((grammar.kind, grammar.value))
            return kept

    def _build(self, grammar: Grammar) -> _Kept:
        begin = time.monotonic()
        compiler = self._compiler_for(grammar)
        try:
            with quiet():
                compiled = _compile(compiler, grammar)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(*_complaint(grammar, _reason(error))) from None
        self._took(time.monotonic() - begin)
        nbytes = int(compiled.memory_size_bytes)
        if nbytes > _MAX_GRAMMAR_BYTES:
            raise ConfigError(*_complaint(grammar, f"it takes {nbytes} B compiled, at most {_MAX_GRAMMAR_BYTES} are allowed"))
        event(
            _LOG, "grammar_compiled", logging.DEBUG, kind=grammar.kind, bytes=nbytes,
            ms=round(1e3 * (time.monotonic() - begin), 1),
        )  # fmt: skip
        kept = _Kept(compiled, nbytes)
        mask_s = self._probe(self._bind(kept, grammar))
        if mask_s > _MAX_MASK_S:
            raise ConfigError(
                *_complaint(grammar, f"a mask takes {1e3 * mask_s:.0f} ms, at most {1e3 * _MAX_MASK_S:.0f} are allowed")
            )
        self._keep(grammar, kept)
        return kept

    def _took(self, seconds: float) -> None:
        with self._lock:
            self._compiled[bisect_left(GRAMMAR_S, seconds)] += 1
            self._total_s += seconds

    def _probe(self, compiled: CompiledGrammar) -> float:
        """Seconds that a mask takes, over the first tokens of some text."""
        state = replace(compiled, after=None).start(self.eos_token_ids)
        times = []
        for _ in range(_PROBE_TOKENS):
            begin = time.perf_counter()
            mask = state.mask()
            times.append(time.perf_counter() - begin)
            assert mask is not None
            ids = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]
            wanted = [int(token) for token in ids[len(ids) // 2 :][:3] if token not in self.eos_token_ids]
            if not wanted or not state.accept(wanted[0]):
                break
        return statistics.median(times)

    def _keep(self, grammar: Grammar, kept: _Kept) -> None:
        key = (grammar.kind, grammar.value)
        with self._lock:
            old = self._kept.pop(key, None)
            self._kept_bytes += kept.nbytes + len(grammar.value) - (old.nbytes + len(grammar.value) if old else 0)
            self._kept[key] = kept
            while self._kept_bytes > self.cache_bytes and len(self._kept) > 1:
                (_, value), oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.nbytes + len(value)
                self._num_evicted += 1

    def _compiler_for(self, grammar: Grammar) -> "xgrammar.GrammarCompiler":
        """The compiler that sees the vocabulary as the grammar needs it.

        A large vocabulary takes a while: it has a lock of its own, so that the engine's loop, which counts and looks up, goes on.
        """
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._directory, self.vocab_size)
            view = self._vocabulary.view_of(grammar)
            found = self._compilers.get(view)
            if found is None:
                library = import_library()
                info = library.TokenizerInfo(
                    self._vocabulary.texts(view), library.VocabType.RAW, vocab_size=self.vocab_size,
                    stop_token_ids=list(self.eos_token_ids) or None,
                )  # fmt: skip
                found = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._compilers[view] = found
                if len(self._compilers) > _MAX_VOCABULARIES:
                    self._compilers.popitem(last=False)
            self._compilers.move_to_end(view)
            return found


class _Job:
    """One grammar that is being compiled. It is given up after the limit; what its thread still does is thrown away."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, found: "Future[CompiledGrammar]") -> None:
        self._compiler, self._grammar, self._found = compiler, grammar, found
        self._limit_s = compiler.limit_s
        self._lock = threading.Lock()
        self._is_running = self._is_late = False
        self._timer = threading.Timer(self._limit_s, self._give_up)
        self._timer.daemon = True

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Queues it; the time that it waits for a thread counts too."""
        self._timer.start()
        pool.submit(self._run)

    def _run(self) -> None:
        try:
            import_library()
            with self._lock:
                if self._found.done():
                    return
                self._is_running = True
            compiled = self._compiler.build(self._grammar)
        except Exception as error:
            self._end(None, error)
        else:
            self._end(compiled, None)

    def _end(self, compiled: CompiledGrammar | None, error: Exception | None) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_running = False
            if self._is_late:
                self._compiler.is_late(-1)
        if self._settle(compiled, error) and error is not None:
            self._compiler.refused("invalid")

    def _give_up(self) -> None:
        """The limit has passed: its client is to blame if it was being compiled all the time, nobody is if it had to wait."""
        with self._lock:
            is_running = self._is_running
            if is_running:
                self._is_late = True
                self._compiler.is_late(1)
        error: Exception = BusyError(_busy(self._grammar, self._limit_s))
        if is_running:
            error = ConfigError(*_complaint(self._grammar, f"it takes longer than {self._limit_s:g} s to compile"))
        if self._settle(None, error):
            self._compiler.refused("late" if is_running else "busy")

    def _settle(self, compiled: CompiledGrammar | None, error: Exception | None) -> bool:
        """Whether it was the first to come, which counts; a future that was cancelled wants nothing."""
        try:
            if compiled is not None:
                self._found.set_result(compiled)
            else:
                self._found.set_exception(error)
        except InvalidStateError:
            event(_LOG, "grammar_late", logging.DEBUG, kind=self._grammar.kind)
            return False
        return True


def is_installed() -> bool:
    """Whether there is a library to compile grammars with. It is not imported."""
    return importlib.util.find_spec("xgrammar") is not None


def import_library() -> ModuleType:
    """The library. The first time it takes seconds. Raises ConfigError where it cannot be imported."""
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigError("response_format", "a grammar", f"none here ({error}): install lamina[structured]") from None
    return xgrammar


def _busy(grammar: Grammar, limit_s: float) -> str:
    return (
        f"{FIELDS[grammar.kind]}: no thread was free to compile it within {limit_s:g} s (the library is being loaded, or others' "
        "grammars take too long): come again"
    )


def _compile(compiler: "xgrammar.GrammarCompiler", grammar: Grammar) -> "xgrammar.CompiledGrammar":
    kind, value = grammar.kind, grammar.value
    if kind == "json_schema":
        return compiler.compile_json_schema(value, max_whitespace_cnt=_MAX_SPACES)
    if kind == "json_object":
        return compiler.compile_json_schema(_ANY_OBJECT, max_whitespace_cnt=_MAX_SPACES)
    if kind == "regex":
        return compiler.compile_regex(value)
    if kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(quoted, read_choices(value))))
    if kind == "ebnf":
        return compiler.compile_grammar(value)
    assert kind == "structural_tag", kind  # the checks know no other
    return compiler.compile_structural_tag(msgspec.json.encode(_with_few_spaces(msgspec.json.decode(value))).decode())


def _with_few_spaces(tag: object) -> object:
    """A tag with a bound of the spaces in each JSON that it has none for. Schemas are left alone."""
    if isinstance(tag, list):
        return [_with_few_spaces(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    found = {key: item if key == "json_schema" else _with_few_spaces(item) for key, item in tag.items()}
    if found.get("type") == "json_schema" and found.get("max_whitespace_cnt") is None:
        found["max_whitespace_cnt"] = _MAX_SPACES
    return found


def quoted(text: str) -> str:
    """A text as a grammar writes it."""
    return '"' + "".join(char if char.isalnum() else f"\\U{ord(char):08X}" for char in text) + '"'


def _complaint(grammar: Grammar, reason: str) -> tuple[str, str, str]:
    """(field, value, allowed) of a ConfigError."""
    return FIELDS[grammar.kind], short(grammar.value), f"a {grammar.kind} that compiles: {reason}"


def _reason(error: Exception) -> str:
    """The library's complaint in one line, without where in its source it stands."""
    text = " ".join(str(error).split())
    if text.startswith("[") and "] " in text:
        text = text.split("] ", 1)[1]
        head, colon, rest = text.partition(": ")
        text = rest if colon and ".cc:" in head else text
    return text[:300] or type(error).__name__
