"""What the memory holds, told to the server; prefixes pinned and dropped on its wish."""

from collections.abc import Callable
from typing import TypeAlias

from lamina.base.errors import ConfigError
from lamina.engine.wire import CacheChange, CacheQuery, CacheState, MemoryState, PrefixRow
from lamina.memory.kept import drop, drop_all, memory_states, num_prefixes, page_states, pin, prefixes, unpin
from lamina.memory.ledger import Ledger

_Change: TypeAlias = Callable[[Ledger, str, str], object]

_CHANGES: dict[str, _Change] = {"pin": pin, "unpin": unpin, "drop": drop}
_MOST_PREFIXES = 10_000


def cache_state(ledger: Ledger, command: CacheQuery | CacheChange) -> CacheState:
    """The answer to a query, or to a change once it is done.

    Raises ConfigError for a change that is none or a key that is not there, CapacityError where too much would be pinned.
    """
    limit = CacheQuery("").limit
    if isinstance(command, CacheChange):
        _change(ledger, command)
    else:
        limit = max(0, min(command.limit, _MOST_PREFIXES))
    arena = ledger.arena
    rows = tuple(
        PrefixRow(
            row.key, row.tokens, row.age_s, row.hits, row.owner, row.is_pinned, row.is_running, row.pages, row.checkpoints,
            tuple((one.tokens, one.hits) for one in row.shared),
        )
        for row in prefixes(ledger, limit, command.realm)
    )  # fmt: skip
    return CacheState(
        id=command.id, free_pages=arena.free, held_pages=arena.held, cached_pages=arena.evictable, pinned_pages=arena.pinned,
        page_bytes=ledger.layout.page_bytes, memories=memories_of(ledger), prefixes=rows,
        num_prefixes=num_prefixes(ledger, command.realm),
        page_states=tuple(page_states(ledger)),
    )  # fmt: skip


def memories_of(ledger: Ledger) -> tuple[MemoryState, ...]:
    """Bytes of each memory now."""
    return tuple(MemoryState(row.name, row.held_bytes, row.cached_bytes) for row in memory_states(ledger))


def _change(ledger: Ledger, command: CacheChange) -> None:
    change = _CHANGES.get(command.action)
    if change is None:
        raise ConfigError("action", command.action, f"one of {', '.join(_CHANGES)}")
    if command.action == "drop" and not command.key:
        drop_all(ledger, command.realm)
    else:
        change(ledger, command.key, command.realm)
