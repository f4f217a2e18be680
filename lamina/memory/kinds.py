"""What a layer remembers: four kinds and an alias, as data.

Everything the rest of the engine needs (bytes, what is live at a position, what a checkpoint holds, how far a replay
goes) is derived here, once. No other module asks which kind a memory is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lamina.base.dtypes import nbytes
from lamina.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of an entry or a state: `shape` elements of `dtype` a row."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return nbytes(self.dtype, math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How one entry is stored: its fields, each kept in an array of its own."""

    name: str
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one entry, without alignment."""
        return sum(field.nbytes for field in self.fields)


@dataclass(frozen=True, slots=True)
class Part:
    """An array of `rows` rows of one field that a memory keeps in a block page or in a slot."""

    field: Field
    rows: int


#: Rows [start, start + count) of a slot part.
RowRange: TypeAlias = tuple[int, int]


class _Derived:
    """What a kind answers when it says nothing else: no arrays, no live bytes, nothing to replay."""

    __slots__ = ()

    def block_parts(self, block_tokens: int) -> tuple[Part, ...]:
        """Arrays in each block page; block_tokens is a multiple of every stride."""
        return ()

    def slot_parts(self, draft_tokens: int) -> tuple[Part, ...]:
        """Arrays in the slot of a running request."""
        return ()

    def slot_live(self, position: int, draft_tokens: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot part the rows that matter once `position` tokens have been seen, oldest first."""
        return ()

    @property
    def slot_edges(self) -> tuple[object, ...]:
        """What decides `slot_live`: memories with equal edges have equal live rows."""
        return ()

    def tail_parts(self, block_tokens: int) -> tuple[Part, ...]:
        """Arrays in each block of `block_tokens` tokens, for what can be kept in pages of its own with a left edge."""
        return ()

    def tail_live(self, position: int) -> tuple[RowRange, ...]:
        """Positions (first, count) whose rows matter once `position` tokens have been seen, for what `tail_parts` holds."""
        return ()

    @property
    def tail_edges(self) -> tuple[int, ...]:
        """What decides `tail_live`: memories with equal edges can share their blocks."""
        return ()

    def log_rows(self, position: int) -> int:
        """Final log entries once `position` tokens have been seen."""
        return 0

    def live_bytes(self, position: int) -> int:
        """Bytes that matter once `position` tokens have been seen, log and slot."""
        return 0

    @property
    def log_stride(self) -> int:
        """Native tokens per log entry; 1 where there is no log."""
        return 1

    @property
    def most_tail_rows(self) -> tuple[int, int]:
        """Rows that one more token can at most need at once, for what `tail_parts` holds: two runs of positions."""
        return (0, 0)

    @property
    def replay_tokens(self) -> float:
        """Tokens to replay if the slot part is lost; 0 where nothing can be lost."""
        return 0

    @property
    def takes_drafts(self) -> bool:
        """Whether tokens drafted ahead can be taken back."""
        return True


@dataclass(frozen=True, slots=True)
class Log(_Derived):
    """Entry j for ever; it is final once token (j+1)*stride - 1 has been seen.

    entry   how an entry is stored.   stride  native tokens an entry stands for.
    lag     rows at position p stop at p - 1 - lag (a draft block: 1).
    """

    name: str
    layer: int
    entry: EntryFormat
    stride: int
    lag: int = 0

    def block_parts(self, block_tokens: int) -> tuple[Part, ...]:
        """Arrays in each block page; block_tokens is a multiple of the stride."""
        return tuple(Part(field, block_tokens // self.stride) for field in self.entry.fields)

    def log_rows(self, position: int) -> int:
        """Final entries once `position` tokens have been seen."""
        return max(0, position - self.lag) // self.stride

    def live_bytes(self, position: int) -> int:
        """Bytes that matter once `position` tokens have been seen."""
        return self.log_rows(position) * self.entry.nbytes

    @property
    def log_stride(self) -> int:
        """Native tokens per log entry."""
        return self.stride

    @property
    def kind(self) -> str:
        """The kind's name, for tables."""
        return "log"

    @property
    def lifetime(self) -> str:
        """How long an entry lives, in words."""
        return "kept to the end of the request"


@dataclass(frozen=True, slots=True)
class Window(_Derived):
    """The last `size` entries, the current one included; since the last multiple of `reset`; plus the first `keep_first`.

    Position q is in ring row keep_first + (q mod (size + draft tokens)); the first `keep_first` positions have rows of their own.
    """

    name: str
    layer: int
    entry: EntryFormat
    size: int
    reset: int | None = None
    keep_first: int = 0
    lag: int = 0

    def slot_parts(self, draft_tokens: int) -> tuple[Part, ...]:
        """A ring of size + draft rows for each field."""
        return tuple(Part(field, self.keep_first + self.size + draft_tokens) for field in self.entry.fields)

    @property
    def slot_edges(self) -> tuple[object, ...]:
        """What decides `slot_live`."""
        return ("window", len(self.entry.fields), *self.tail_edges)

    def tail_parts(self, block_tokens: int) -> tuple[Part, ...]:
        """Arrays in each block of `block_tokens` tokens where the window is kept in pages of its own: a row a token."""
        return tuple(Part(field, block_tokens) for field in self.entry.fields)

    def tail_live(self, position: int) -> tuple[RowRange, ...]:
        """Positions (first, count) whose rows matter: the first `keep_first`, then the window, without overlap."""
        seen, count = max(0, position - self.lag), self.live_rows(position)
        return tuple(span for span in ((0, min(self.keep_first, seen)), (seen - count, count)) if span[1] > 0)

    @property
    def tail_edges(self) -> tuple[int, ...]:
        """What decides `tail_live`."""
        return (self.size, self.reset or 0, self.keep_first, self.lag)

    @property
    def most_tail_rows(self) -> tuple[int, int]:
        """Rows that one more token can at most need at once: of the first ones, and of the window with that token."""
        return self.keep_first, self.size if self.reset is None else min(self.size, self.reset)

    def live_rows(self, position: int) -> int:
        """Entries that a later token can still read, the first `keep_first` not counted."""
        seen = max(0, position - self.lag)
        since = seen if self.reset is None else seen % self.reset
        return min(since, self.size - 1, seen - min(self.keep_first, seen))

    def slot_live(self, position: int, draft_tokens: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot part the live rows, oldest first."""
        seen, count, ring = max(0, position - self.lag), self.live_rows(position), self.size + draft_tokens
        first = (seen - count) % ring
        head = min(count, ring - first)
        spans = [(0, min(self.keep_first, seen)), (self.keep_first + first, head), (self.keep_first, count - head)]
        return (tuple(span for span in spans if span[1] > 0),) * len(self.entry.fields)

    def live_bytes(self, position: int) -> int:
        """Bytes that matter once `position` tokens have been seen."""
        return (self.live_rows(position) + min(self.keep_first, max(0, position - self.lag))) * self.entry.nbytes

    @property
    def replay_tokens(self) -> float:
        """Tokens that must be replayed if the window is lost; kept first rows cannot be replayed."""
        return math.inf if self.keep_first else self.size - 1 + self.lag

    @property
    def kind(self) -> str:
        """The kind's name, for tables."""
        return "window"

    @property
    def lifetime(self) -> str:
        """How long an entry lives, in words."""
        return f"the last {self.size} tokens" + (f", cleared every {self.reset}" if self.reset is not None else "")


@dataclass(frozen=True, slots=True)
class Fold(_Derived):
    """The running result of the group of `period` tokens that is still open.

    state   the fields of the running result.   carry   names of those that are live when position mod period = 0.
    The state after q tokens is in row q mod (1 + draft tokens), so that drafts are taken back by going on from an older row.
    """

    name: str
    layer: int
    state: tuple[Field, ...]
    period: int
    carry: tuple[str, ...] = ()
    lag: int = 0

    def slot_parts(self, draft_tokens: int) -> tuple[Part, ...]:
        """A ring of 1 + draft rows for each field of the state."""
        return tuple(Part(field, 1 + draft_tokens) for field in self.state)

    def slot_live(self, position: int, draft_tokens: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot part the live rows."""
        seen = max(0, position - self.lag)
        row = (seen % (1 + draft_tokens), 1)
        return tuple((row,) if seen > 0 and (seen % self.period != 0 or field.name in self.carry) else () for field in self.state)

    @property
    def slot_edges(self) -> tuple[object, ...]:
        """What decides `slot_live`."""
        return ("fold", self.period, self.lag, tuple(field.name in self.carry for field in self.state))

    def live_bytes(self, position: int) -> int:
        """Bytes that matter once `position` tokens have been seen."""
        live = self.slot_live(position, 0)
        return sum(field.nbytes for field, rows in zip(self.state, live, strict=True) if rows)

    @property
    def replay_tokens(self) -> float:
        """Tokens that must be replayed if the state is lost: the group, twice with a carry."""
        return self.period * (2 if self.carry else 1)

    @property
    def kind(self) -> str:
        """The kind's name, for tables."""
        return "fold"

    @property
    def lifetime(self) -> str:
        """How long the state lives, in words."""
        return f"the open group of {self.period} tokens"


@dataclass(frozen=True, slots=True)
class Snapshot(_Derived):
    """A function of the whole prefix, such as the state of a scan. Nothing can be taken out of it again."""

    name: str
    layer: int
    state: tuple[Field, ...]
    lag: int = 0

    def slot_parts(self, draft_tokens: int) -> tuple[Part, ...]:
        """One row for each field of the state."""
        return tuple(Part(field, 1) for field in self.state)

    def slot_live(self, position: int, draft_tokens: int) -> tuple[tuple[RowRange, ...], ...]:
        """For each slot part the live rows."""
        return (((0, 1),) if position - self.lag > 0 else (),) * len(self.state)

    @property
    def slot_edges(self) -> tuple[object, ...]:
        """What decides `slot_live`."""
        return ("snapshot", len(self.state), self.lag)

    def live_bytes(self, position: int) -> int:
        """Bytes that matter once `position` tokens have been seen."""
        return sum(field.nbytes for field in self.state) if position - self.lag > 0 else 0

    @property
    def replay_tokens(self) -> float:
        """Tokens that must be replayed if the state is lost: all of them."""
        return math.inf

    @property
    def takes_drafts(self) -> bool:
        """Whether tokens drafted ahead can be taken back: a state for each of them would be too large."""
        return False

    @property
    def kind(self) -> str:
        """The kind's name, for tables."""
        return "snapshot"

    @property
    def lifetime(self) -> str:
        """How long the state lives, in words."""
        return "one state for the request"


@dataclass(frozen=True, slots=True)
class Alias(_Derived):
    """Another layer's memory under a name of this layer: it owns no bytes."""

    name: str
    layer: int
    of: str
    of_layer: int
    lag: int = 0

    @property
    def kind(self) -> str:
        """The kind's name, for tables."""
        return "alias"

    @property
    def lifetime(self) -> str:
        """How long an entry lives, in words."""
        return f"shared with layer {self.of_layer}"


Memory: TypeAlias = Log | Window | Fold | Snapshot | Alias


def check_memories(memories: Sequence[Memory]) -> None:
    """Raises ConfigError on a list that no layout can serve: doubled names, sizes below 1, an alias of nothing."""
    seen: set[tuple[int, str]] = set()
    for memory in memories:
        key = (memory.layer, memory.name)
        if key in seen:
            raise ConfigError("memories", key, "each name once per layer")
        seen.add(key)
        if isinstance(memory, Log) and memory.stride < 1:
            raise ConfigError(f"{memory.name}.stride", memory.stride, "at least 1")
        if isinstance(memory, Window):
            if memory.size < 1:
                raise ConfigError(f"{memory.name}.size", memory.size, "at least 1")
            if memory.reset is not None and memory.reset < 1:
                raise ConfigError(f"{memory.name}.reset", memory.reset, "at least 1, or None")
            if memory.keep_first < 0:
                raise ConfigError(f"{memory.name}.keep_first", memory.keep_first, "at least 0")
        if isinstance(memory, Fold):
            if memory.period < 1:
                raise ConfigError(f"{memory.name}.period", memory.period, "at least 1")
            unknown = set(memory.carry) - {field.name for field in memory.state}
            if unknown:
                raise ConfigError(f"{memory.name}.carry", sorted(unknown), "names of fields of the state")
        if memory.lag < 0:
            raise ConfigError(f"{memory.name}.lag", memory.lag, "at least 0")
    for memory in memories:
        if isinstance(memory, Alias) and (memory.of_layer, memory.of) not in seen:
            raise ConfigError(f"{memory.name}.of", (memory.of_layer, memory.of), "the layer and name of another memory")


def replay_tokens(memories: Sequence[Memory]) -> float:
    """How many tokens before a resident log position must be recomputed to rebuild every slot memory, exactly.

    The maximum over layers of the windows below (each widens what a token depends on) plus the layer's own need; windows of
    one layer may follow each other, so they add up. 0 for logs alone; infinite with a snapshot.
    """
    below, worst = 0.0, 0.0
    for layer in sorted({memory.layer for memory in memories}):
        own = [memory for memory in memories if memory.layer == layer]
        windows = [memory.replay_tokens for memory in own if isinstance(memory, Window)]
        others = [memory.replay_tokens for memory in own if not isinstance(memory, Window) and memory.replay_tokens]
        worst = max([worst, *(below + need for need in others), *([below + sum(windows)] if windows else [])])
        below += sum(memory.size - 1 for memory in own if isinstance(memory, Window))
    return worst
