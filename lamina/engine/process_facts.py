"""What the engine's process tells about itself: the facts at its start, and counters that never go down."""

import math
import os
import time
from dataclasses import dataclass, field

import msgspec

from lamina.engine.engine import Engine
from lamina.engine.moves import MoveCounts
from lamina.engine.process_cache import memories_of
from lamina.engine.wire import GrammarStats, MemoryRow, Ready, RequestRow, Stats
from lamina.memory.layout import Layout
from lamina.memory.ledger import Ledger
from lamina.memory.plan import CHECKPOINTS, Held, predict
from lamina.models.files import CONFIG, model_name, read_file
from lamina.runtime.chosen import chosen_ops
from lamina.schedule.drafting import DraftCounts
from lamina.schedule.request import Request
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Step

PLAN_LENGTHS = (1024, 8192, 32768)
_MOST_ROWS = 200
_NO_GRAMMARS = GrammarStats()
_NO_MOVES = MoveCounts({}, {})


class _ModelConfig(msgspec.Struct):
    model_type: str = ""


def make_ready(engine: Engine, load_s: float, role: str = "both", peer_address: str = "") -> Ready:
    """The facts of a loaded engine."""
    config, layout, worker = engine.config, engine.layout, engine.worker.config
    lengths = tuple(dict.fromkeys(min(length, engine.max_model_len) for length in PLAN_LENGTHS))
    return Ready(
        pid=os.getpid(), model=model_name(engine.directory), model_type=_model_type(engine), vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len, eos_token_ids=tuple(sorted(engine.worker.eos_token_ids)), device=config.device,
        block_tokens=layout.block_tokens, page_bytes=layout.page_bytes, num_pages=engine.num_pages, slot_pages=layout.slot_pages,
        max_requests=config.max_requests, max_step_tokens=config.step_tokens,
        replay_tokens=-1 if math.isinf(layout.replay) else int(layout.replay), hit_granularity=hit_granularity(layout),
        plan_lengths=lengths, memories=_memory_rows(layout, lengths, engine.max_model_len),
        ops=chosen_ops(engine.directory, config), load_s=load_s, formats=(worker.cache_format, worker.index_format),
        drafter=worker.draft, draft_tokens=layout.draft_tokens,
        role=role, peer_address=peer_address, model_id=engine.ledger.index.model_id, layout_id=layout.layout_id,
    )  # fmt: skip


def hit_granularity(layout: Layout) -> str:
    """Where a prefix can be gone on from, in words."""
    size = layout.block_tokens
    if not layout.has_state:
        return f"every {size} tokens"
    where = "any token at which a prompt or an answer ended, and where prompts parted"
    if math.isinf(layout.replay):
        return f"{where}; nothing between them"
    return f"{where}; between them every {size} tokens, by computing up to {int(layout.replay):,} tokens before again"


def _model_type(engine: Engine) -> str:
    return msgspec.json.decode(read_file(engine.directory, CONFIG) or b"{}", type=_ModelConfig).model_type


def _memory_rows(layout: Layout, lengths: tuple[int, ...], longest: int) -> tuple[MemoryRow, ...]:
    """Each memory with its kind, layers and bytes, then what is not a memory's: the hidden vector, padding.

    The last token of the longest request that fits is drawn and never stored.
    """
    tables = [predict(layout, [Held(length - (length == longest > 1))]) for length in lengths]
    rows = []
    for row in tables[0].rows:
        members = [memory for memory in layout.memories if memory.name == row.name]
        if row.name != CHECKPOINTS:
            kind = members[0].kind if members else row.name
            rows.append(MemoryRow(row.name, kind, len(members), tuple(table.nbytes(row.name) for table in tables)))
    return tuple(rows)


@dataclass(slots=True)
class _Sums:
    """Counters of one ledger and scheduler, or of all before."""

    preemptions: int = 0
    evictions: int = 0
    late_results: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.preemptions + other.preemptions, self.evictions + other.evictions, self.late_results + other.late_results,
            self.drafts + other.drafts,
        )  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Counts what the engine does. A step that breaks off gives the engine new books; the old ones' counters are added up."""

    engine: Engine
    begin: float = field(default_factory=time.monotonic)
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    drawn_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    lookups: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    has_prompt: bool = False  # of the step that is being made
    _before: _Sums = field(default_factory=_Sums)
    _books: tuple[Ledger, Scheduler] | None = None

    def computed(self, step: Step) -> None:
        """A step has been computed."""
        if step.decodes is not None:
            self.computed_tokens += len(step.decodes.members)
        else:
            self.computed_tokens += step.num_tokens
            self.has_prompt = self.has_prompt or not all(part.is_decode or part.num_guesses for part in step.slices)
        self.drawn_tokens += len(step.samples)
        self.steps += 1

    def took(self, seconds: float) -> None:
        """What the engine's step took."""
        if self.has_prompt:
            self.prefill_s += seconds
        else:
            self.decode_s += seconds
        self.has_prompt = False

    def admitted(self, request: Request) -> None:
        """A request runs for the first time."""
        if request.child or request.first_hit is None:
            return
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += request.cached_tokens
        self.lookups += 1
        reason = request.first_hit.reason
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def ended(self, reason: str) -> None:
        """An output has ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def stats(
        self, num_waiting: int, rows: tuple[RequestRow, ...], grammars: GrammarStats = _NO_GRAMMARS,
        moves: MoveCounts = _NO_MOVES,
    ) -> Stats:  # fmt: skip
        """All of it now. num_waiting  requests that the engine has not been given yet."""
        engine, sums, arena = self.engine, self._sums(), self.engine.ledger.arena
        drafts = sums.drafts  # what was drawn after a wrong one was thrown away
        return Stats(
            time_s=time.monotonic() - self.begin, running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting) + num_waiting, free_pages=arena.free, held_pages=arena.held,
            cached_pages=arena.evictable + arena.pinned,
            prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, computed_tokens=self.computed_tokens,
            drawn_tokens=self.drawn_tokens - drafts.rejected, steps=self.steps,
            prefill_s=self.prefill_s, decode_s=self.decode_s,
            preemptions=sums.preemptions, evictions=sums.evictions, late_results=sums.late_results, lookups=self.lookups,
            misses=dict(self.misses), finished=dict(self.finished), memories=memories_of(engine.ledger),
            requests=rows[:_MOST_ROWS], grammars=grammars, drafts=drafts.drafts, draft_tokens=drafts.tokens,
            accepted_drafts=drafts.accepted, accepted_by_place=tuple(drafts.by_place),
            arriving=moves.arriving, moves=moves.states, moved_bytes=moves.nbytes,
        )  # fmt: skip

    def _sums(self) -> _Sums:
        books = (self.engine.ledger, self.engine.scheduler)
        if self._books is not None and self._books[0] is not books[0]:
            self._before = self._before + _sums_of(*self._books)
        self._books = books
        return self._before + _sums_of(*books)


def _sums_of(ledger: Ledger, scheduler: Scheduler) -> _Sums:
    return _Sums(ledger.stats.preempted, ledger.evictions, scheduler.late_results, scheduler.guesses.counts)
