"""What users have pinned: paths of the index, with a checkpoint each, that are not evicted as long as anything else can run."""

import logging
from dataclasses import dataclass

from lamina.base.errors import CapacityError
from lamina.base.log import event, get_logger
from lamina.memory.arena import Arena
from lamina.memory.prefix import Checkpoint, Node, PrefixIndex

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Pin:
    """A path up to `node`, and the checkpoint from which it can be continued, where there is one."""

    key: bytes
    node: Node
    checkpoint: Checkpoint | None


class Pins:
    """The pins of one ledger, oldest first. At most half of the pages may be pinned."""

    def __init__(self, arena: Arena, index: PrefixIndex) -> None:
        self.arena = arena
        self.index = index
        self.num_dropped = 0
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pins

    @property
    def all(self) -> tuple[Pin, ...]:
        """Every one."""
        return tuple(self._pins.values())

    @property
    def limit(self) -> int:
        """Pages that may be pinned."""
        return self.arena.num_pages // 2

    def add(self, pin: Pin, spare: int) -> None:
        """Pins. spare  evictable pages that nobody has a claim to. Raises CapacityError, and nothing has changed."""
        arena, pages = self.arena, set(self.index.path_pages(pin.node))
        if pin.checkpoint is not None:
            pages.update((*pin.checkpoint.pages, *pin.checkpoint.shared_pages))
        new = [page for page in pages if not arena.pin_refs(page)]
        if arena.num_with_pins + len(new) > self.limit:
            raise CapacityError(
                f"pinning {pin.key.hex()} takes {len(new)} more pages: {arena.num_with_pins} of {arena.num_pages} are pinned, at "
                f"most {self.limit} may be: unpin something"
            )
        if sum(1 for page in new if arena.is_evictable(page)) > spare:
            self.refuse(pin.key, len(new), spare)
        self.index.keep(pin.node, pin.checkpoint)
        self._pins[pin.key] = pin

    def refuse(self, key: bytes, num_pages: int, spare: int) -> None:
        """Raises CapacityError: running requests may need what would be pinned."""
        raise CapacityError(
            f"pinning {key.hex()} takes {num_pages} more pages, but running requests may need all but {max(spare, 0)} of those "
            "that are not held: try again when fewer run"
        )

    def remove(self, key: bytes) -> None:
        """Takes a pin back; what it kept is evictable like anything else."""
        pin = self._pins.pop(key)
        self.index.let_go(pin.node, pin.checkpoint)

    def drop_oldest(self, whom: str) -> None:
        """Takes the oldest pin back as a request could not run otherwise, though nothing else runs."""
        key = next(iter(self._pins))
        self.remove(key)
        self.num_dropped += 1
        event(_LOG, "pin_dropped", logging.WARNING, key=key.hex(), request=whom, pinned_pages=self.arena.num_with_pins)
