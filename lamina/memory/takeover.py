"""A request goes on from a checkpoint that there is no room to copy: the checkpoint is given up and its pages become the slot."""

from collections.abc import Callable

from lamina.memory.lease import Lease
from lamina.memory.orders import CopyPage, Order, RestoreSlot
from lamina.memory.prefix import Checkpoint, PrefixIndex
from lamina.memory.windows import Windows


def take_over(
    lease: Lease, source: Checkpoint, opened: int | None, index: PrefixIndex, windows: Windows,
    order: Callable[[Order], None], copied: Callable[[int], int],
) -> None:  # fmt: skip
    """Gives the lease its slot, and the blocks that the hit ends inside, out of `source`, which the caller has pinned.

    opened  the page of the open block where the lease has none yet.   order  called with each copy.   copied  a page's twin.
    """
    arena = index.arena
    assert source.pins == 1 and not source.kept, "a checkpoint is taken over that somebody else keeps"
    index.take_over(source)
    for frozen in (*source.pages, *source.shared_pages):
        arena.unref_cache(frozen)  # the pin's references are now the lease's
    for old, own in windows.share(lease, source, takes_over=True):
        order(CopyPage(old, own))
    for kept in (page for blocks in source.tails for pages in blocks.values() for page in pages):
        arena.unref_lease(kept)
    missing = index.layout.slot_pages - len(source.pages)
    lease.slot = (*source.pages, *(arena.take_for_lease() for _ in range(missing)))
    if lease.slot:
        order(RestoreSlot(source.pages, lease.slot, source.position))
    page = source.open_page
    if page is not None and opened is None:
        arena.unref_lease(page)
    elif page is not None:
        if arena.lease_refs(page) == 1 and not arena.cache_refs(page):
            lease.blocks.append(page)
        else:  # somebody runs on it
            lease.blocks.append(copied(page))
            arena.unref_lease(page)
