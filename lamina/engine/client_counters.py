"""Counters that go on over restarts: what engines before counted is added to what the present one says."""

from itertools import zip_longest

import msgspec

from lamina.engine.wire import GrammarStats, MemoryState, Stats

#: fields that only grow; the others are gauges of now
COUNTERS = (
    "time_s", "prompt_tokens", "cached_tokens", "computed_tokens", "drawn_tokens", "steps", "prefill_s", "decode_s",
    "preemptions", "evictions", "late_results", "lookups", "drafts", "draft_tokens", "accepted_drafts",
)  # fmt: skip


def summed(before: Stats | None, now: Stats) -> Stats:
    """`now` with the counters of `before` added."""
    if before is None:
        return now
    sums = {name: getattr(before, name) + getattr(now, name) for name in COUNTERS}
    return msgspec.structs.replace(
        now, misses=_added(before.misses, now.misses), finished=_added(before.finished, now.finished),
        grammars=_grammars(before.grammars, now.grammars), accepted_by_place=_places(before, now),
        moves=_added(before.moves, now.moves), moved_bytes=_added(before.moved_bytes, now.moved_bytes), **sums,
    )  # fmt: skip


def without_gauges(stats: Stats) -> Stats:
    """What is left of an engine that has gone: nothing runs and nothing is held."""
    memories = tuple(MemoryState(row.name, 0, 0) for row in stats.memories)
    return msgspec.structs.replace(
        stats, running=0, waiting=0, arriving=0, free_pages=0, held_pages=0, cached_pages=0, memories=memories, requests=(),
        grammars=msgspec.structs.replace(stats.grammars, kept=0, kept_bytes=0),
    )  # fmt: skip


def _places(before: Stats, now: Stats) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(before.accepted_by_place, now.accepted_by_place, fillvalue=0)))


def _grammars(left: GrammarStats, right: GrammarStats) -> GrammarStats:
    return GrammarStats(
        tuple(a + b for a, b in zip(left.compiled, right.compiled, strict=True)), left.total_s + right.total_s,
        left.hits + right.hits, right.kept, right.kept_bytes, left.evicted + right.evicted, _added(left.refused, right.refused),
    )  # fmt: skip


def _added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in (*left, *(name for name in right if name not in left))}
