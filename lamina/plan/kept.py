"""What each layer keeps, in plain numbers: all that the calculators of other engines are told about a model.

Read from the properties that every kind of memory has, so nothing here asks which kind a memory is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.memory.kinds import Memory, Part

#: how the names of draft blocks' memories begin
_DRAFT = "draft_"


@dataclass(frozen=True, slots=True)
class NotModelled:
    """Why a calculator has no figure: the other engine's rule for this is not known here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kept:
    """One memory of one layer. What does not apply is 0.

    kind         log, window, fold or snapshot.
    row_bytes    one entry of a log or a window; the whole state of a fold or a snapshot.
    stride       tokens an entry of a log stands for.   size, reset, keep_first  of a window.
    period       tokens of a fold's group.   fold_tokens  tokens that a fold sums up at most: twice the period with a carry.
    """

    name: str
    kind: str
    layer: int
    row_bytes: int
    stride: int = 0
    size: int = 0
    reset: int = 0
    keep_first: int = 0
    period: int = 0
    fold_tokens: int = 0


def kept(memories: Sequence[Memory]) -> tuple[Kept, ...]:
    """What the model itself keeps: no aliases, which own no bytes, and no draft blocks."""
    return tuple(_read(memory) for memory in memories if memory.kind != "alias" and not memory.name.startswith(_DRAFT))


def _read(memory: Memory) -> Kept:
    if memory.kind == "log":
        stride = memory.log_stride
        return Kept(memory.name, "log", memory.layer, _row(memory.block_parts(stride)), stride=stride)
    row = _row(memory.slot_parts(0))
    if memory.kind == "window":
        size, reset, keep_first, _ = memory.tail_edges
        return Kept(memory.name, "window", memory.layer, row, size=size, reset=reset, keep_first=keep_first)
    if memory.kind == "fold":
        tokens = int(memory.replay_tokens)
        groups = 2 if memory.live_bytes(tokens) else 1  # live at the end of a group: something is carried over
        return Kept(memory.name, "fold", memory.layer, row, period=tokens // groups, fold_tokens=tokens)
    assert memory.kind == "snapshot", memory.kind
    return Kept(memory.name, "snapshot", memory.layer, row)


def _row(parts: Sequence[Part]) -> int:
    return sum(part.field.nbytes for part in parts)
