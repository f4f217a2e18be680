"""What every byte is for: predicted from the layout before anything runs, and counted from the ledger's pages.

Block pages (held or cached), pages of large windows and slot pages are split by memory, with the arrays that lie in them;
what is left of those pages is `padding`. Checkpoint pages count whole, as `checkpoints`. Predicted and measured tables of the
same requests are equal, and each adds up to its pages x page bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.base.sizes import format_bytes
from lamina.memory.layout import Layout, bytes_by_memory
from lamina.memory.ledger import Ledger

PADDING, CHECKPOINTS = "padding", "checkpoints"


@dataclass(frozen=True, slots=True)
class Held:
    """One request as the prediction sees it.

    position       tokens planned.   checkpoints  positions of its checkpoints, the frozen slot of one that ended included.
    running        whether it holds a slot.   shared_blocks  leading full blocks that another request of the list counts.
    """

    position: int
    checkpoints: tuple[int, ...] = ()
    running: bool = True
    shared_blocks: int = 0


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A name (a memory, `padding` or `checkpoints`) and its bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes by memory. The rows add up to total, which is pages x page_bytes; the unused pages are not part of it.

    block_pages, slot_pages, checkpoint_pages, tail_pages  how many pages of each use; tail_pages are those of large windows.
    """

    rows: tuple[MemoryRow, ...]
    block_pages: int
    slot_pages: int
    checkpoint_pages: int
    page_bytes: int
    tail_pages: int = 0

    @property
    def pages(self) -> int:
        """Pages in use."""
        return self.block_pages + self.tail_pages + self.slot_pages + self.checkpoint_pages

    @property
    def total(self) -> int:
        """Bytes of the pages in use."""
        return self.pages * self.page_bytes

    def nbytes(self, name: str) -> int:
        """Bytes of one row; 0 for a name that is not there."""
        return sum(row.nbytes for row in self.rows if row.name == name)

    def table(self) -> str:
        """The rows and their sum, one a line."""
        rows = [*self.rows, MemoryRow(f"total ({self.pages} pages)", self.total)]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:<{width}}  {row.nbytes:>16,}  {format_bytes(row.nbytes):>12}" for row in rows)


def predict(layout: Layout, requests: Sequence[Held]) -> Prediction:
    """The table of these requests, computed from the layout alone."""
    blocks = slots = checkpoints = 0
    tails = [0] * len(layout.tails)
    for request in requests:
        if request.position < 0 or request.shared_blocks < 0:
            raise ConfigError("request", request, "position and shared_blocks of at least 0")
        checkpoints += sum(layout.checkpoint_pages(position) for position in request.checkpoints)
        slots += layout.slot_pages if request.running else 0
        blocks += _block_pages(layout, request)
        for group, count in enumerate(_tail_blocks(layout, request)):
            tails[group] += count
    return tabulate(layout, blocks, tails, slots, checkpoints)


def measured(layout: Layout, ledger: Ledger) -> Prediction:
    """The same table counted from the pages that leases, index and checkpoints really hold. O(pages)."""
    slots = {page for lease in ledger.leases for page in lease.slot}
    checkpoints = ledger.all_checkpoints()
    frozen = {page for checkpoint in checkpoints for page in checkpoint.pages}
    kept: list[set[tuple[int, ...]]] = [set() for _ in layout.tails]
    for held in (*(lease.tails for lease in ledger.leases), *(checkpoint.tails for checkpoint in checkpoints)):
        for group, windows in enumerate(held):
            kept[group].update(windows.values())
    used = {page for page in range(ledger.num_pages) if ledger.arena.lease_refs(page) or ledger.arena.cache_refs(page)}
    in_tails = {page for group in kept for pages in group for page in pages}
    tails = [len(group) for group in kept]
    return tabulate(layout, len(used - slots - frozen - in_tails), tails, len(slots), len(frozen))


def requests_that_fit(layout: Layout, pool_bytes: int, num_tokens: int) -> int:
    """How many requests can run in a pool up to `num_tokens` tokens each, without checkpoints and without sharing."""
    each = layout.peak_pages(num_tokens)
    if not each:
        raise ConfigError("num_tokens", num_tokens, "a length that needs memory")
    return pool_bytes // layout.page_bytes // each


def _block_pages(layout: Layout, request: Held) -> int:
    """An open block is kept by its running request or by a checkpoint inside it."""
    if not layout.has_logs:
        return 0
    full, inside = divmod(request.position, layout.block_tokens)
    kept = request.running or any(
        divmod(p, layout.block_tokens)[0] == full and p % layout.block_tokens for p in request.checkpoints
    )
    return full + int(bool(inside) and kept) - request.shared_blocks


def _tail_blocks(layout: Layout, request: Held) -> list[int]:
    """Blocks of each large window that a request and its own checkpoints hold together, each counted once."""
    points = [*request.checkpoints, *([request.position] if request.running else [])]
    spans = [[span for point in points for span in tail.live_blocks(point)] for tail in layout.tails]
    return [len({block for first, stop in group for block in range(first, stop)}) for group in spans]


def tabulate(layout: Layout, blocks: int, tails: Sequence[int], slots: int, checkpoints: int) -> Prediction:
    """The table of so many pages of blocks, blocks of each large window, and pages of slots and of checkpoints."""
    names = list(dict.fromkeys([*(memory.name for memory in layout.memories), *bytes_by_memory(layout.slot_spans)]))
    in_block, in_slot = bytes_by_memory(layout.block_spans), bytes_by_memory(layout.slot_spans)
    whole_slots = slots // layout.slot_pages if layout.slot_pages else 0
    nbytes = {name: blocks * in_block.get(name, 0) + whole_slots * in_slot.get(name, 0) for name in names}
    for tail, count in zip(layout.tails, tails, strict=True):
        for name, size in bytes_by_memory(tail.spans).items():
            nbytes[name] += count * size
    rows = [MemoryRow(name, size) for name, size in nbytes.items()]
    tail_pages = sum(tail.pages * count for tail, count in zip(layout.tails, tails, strict=True))
    padding = (blocks + tail_pages + slots) * layout.page_bytes - sum(row.nbytes for row in rows)
    rows += [MemoryRow(PADDING, padding), MemoryRow(CHECKPOINTS, checkpoints * layout.page_bytes)]
    return Prediction(tuple(rows), blocks, slots, checkpoints, layout.page_bytes, tail_pages)
