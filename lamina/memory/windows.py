"""Who holds which blocks of the large windows. Blocks belong to running requests and checkpoints, shared by reference.

A request holds the blocks that are live at the last accepted token and at the end of each planned step: what lies
between was never stored, so a long prompt takes no more than two windows on its way.
"""

from collections.abc import Callable, Iterator

from lamina.memory.arena import Arena
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.prefix import Checkpoint, TailPages


class Windows:
    """The tail blocks of all leases of one ledger; only the ledger calls it.

    on_change  called with a lease whose pages have become its own alone, or no longer are.
    """

    def __init__(self, arena: Arena, layout: Layout, on_change: Callable[[Lease], None]) -> None:
        self.arena = arena
        self.tails = layout.tails
        self.on_change = on_change
        self._holders: dict[int, list[Lease]] = {}

    @property
    def num_pages(self) -> int:
        """Pages that at least one running request holds, each counted once."""
        return len(self._holders)

    def num_sole(self, pages: set[int]) -> int:
        """How many of these pages exactly one running request holds."""
        return sum(1 for page in pages if len(self._holders.get(page, ())) == 1)

    def num_pinned(self, lease: Lease) -> int:
        """Pages that only this request holds and a user has pinned: they are not to be had when it leaves them."""
        pages = (page for held in lease.tails for block in held.values() for page in block)
        return sum(1 for page in pages if self.arena.pin_refs(page) and len(self._holders[page]) == 1)

    def lacking(self, lease: Lease, position: int) -> int:
        """Pages to be taken so that the lease can be planned up to `position`."""
        return sum(self.tails[group].pages for group, _ in self._missing(lease, position))

    def grow(self, lease: Lease, position: int) -> None:
        """Takes what `position` needs; the pages must be free."""
        for group, block in self._missing(lease, position):
            pages = tuple(self.arena.take_for_lease() for _ in range(self.tails[group].pages))
            lease.tails[group][block] = pages
            self._take(lease, pages)

    def trim(self, lease: Lease) -> None:
        """Lets go of blocks that neither the accepted position nor a planned one needs."""
        for group, tail in enumerate(self.tails):
            ranges = {span for point in (lease.committed, *lease.cuts) for span in tail.live_blocks(point)}
            held = lease.tails[group]
            for block in [b for b in held if not any(first <= b < stop for first, stop in ranges)]:
                self._drop(lease, held.pop(block))

    def is_whole(self, lease: Lease, position: int) -> bool:
        """Whether the lease holds all that is live at `position`."""
        return not self.tails or next(self._missing(lease, position), None) is None

    def frozen(self, lease: Lease, position: int) -> tuple[TailPages, ...]:
        """What a checkpoint at `position` refers to."""
        return tuple(
            {b: lease.tails[group][b] for first, stop in tail.live_blocks(position) for b in range(first, stop)}
            for group, tail in enumerate(self.tails)
        )

    def open_pages(self, checkpoint: Checkpoint) -> int:
        """Pages of the blocks that are still written at the checkpoint's position: whoever goes on from it needs copies."""
        return sum(
            tail.pages
            for blocks, tail in zip(checkpoint.tails, self.tails, strict=True)
            if checkpoint.position % tail.tokens and checkpoint.position // tail.tokens in blocks
        )

    def pages_to_fork(self, lease: Lease) -> int:
        """Pages to have beside a request's own windows so that another may go on from the accepted position of this lease."""
        if not self.tails:
            return 0
        pages = {page for held in lease.tails for block in held.values() for page in block}
        opened = sum(tail.pages for tail in self.tails if lease.committed % tail.tokens)
        return self.num_sole(pages) + opened

    def share(self, lease: Lease, checkpoint: Checkpoint, takes_over: bool = False) -> list[tuple[int, int]]:
        """Gives the checkpoint's blocks to the lease; the copies (source, target) to be made of those still written.

        takes_over  the checkpoint is given up: a page of an open block that nobody else holds is not copied.
        """
        copies: list[tuple[int, int]] = []
        for group, (blocks, tail) in enumerate(zip(checkpoint.tails, self.tails, strict=True)):
            for block, pages in blocks.items():
                is_open = checkpoint.position < (block + 1) * tail.tokens
                mine: list[int] = []
                for page in pages:
                    if is_open and not (takes_over and self._is_ours_alone(page)):
                        mine.append(self.arena.take_for_lease())
                        copies.append((page, mine[-1]))
                    else:
                        self.arena.ref_lease(page)
                        mine.append(page)
                lease.tails[group][block] = tuple(mine)
                self._take(lease, lease.tails[group][block])
        return copies

    def drop_all(self, lease: Lease) -> None:
        """The lease ends."""
        for held in lease.tails:
            for pages in held.values():
                self._drop(lease, pages)
        lease.tails = []

    def _is_ours_alone(self, page: int) -> bool:
        """Whether a pinned page that has just been given up by the index is held by that pin alone."""
        return self.arena.lease_refs(page) == 1 and not self.arena.cache_refs(page)

    def _missing(self, lease: Lease, position: int) -> Iterator[tuple[int, int]]:
        for group, tail in enumerate(self.tails):
            held = lease.tails[group]
            for first, stop in tail.live_blocks(position):
                for block in range(first, stop):
                    if block not in held:
                        yield group, block

    def _take(self, lease: Lease, pages: tuple[int, ...]) -> None:
        for page in pages:
            holders = self._holders.setdefault(page, [])
            holders.append(lease)  # first: what a pinned page counts for depends on how many hold it
            if len(holders) == 1:
                lease._own_window_pages += 1
            elif len(holders) == 2:
                holders[0]._own_window_pages -= 1
                self.on_change(holders[0])

    def _drop(self, lease: Lease, pages: tuple[int, ...]) -> None:
        for page in pages:
            holders = self._holders[page]
            holders.remove(lease)
            if not holders:
                lease._own_window_pages -= 1
                del self._holders[page]
            elif len(holders) == 1:
                holders[0]._own_window_pages += 1
                self.on_change(holders[0])
            self.arena.unref_lease(page)
