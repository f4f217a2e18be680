"""Copies that the ledger orders and the runtime carries out, in order, on the step's stream. No tensors."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class SaveSlot:
    """Write the live part of a slot at `position` as a checkpoint. The pages may overlap (a slot frozen in place)."""

    slot: tuple[int, ...]
    checkpoint: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class RestoreSlot:
    """Write a checkpoint at `position` back into a slot. The pages may overlap (a checkpoint taken over)."""

    checkpoint: tuple[int, ...]
    slot: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy one whole page: an open block that gets a writer of its own."""

    source: int
    target: int


Order: TypeAlias = SaveSlot | RestoreSlot | CopyPage
