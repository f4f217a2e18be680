"""The invariants of the memory accounting, asserted by counting everything again. For tests and for an idle engine."""

from collections import Counter
from collections.abc import Sequence

from lamina.memory.arena import Arena
from lamina.memory.layout import Layout
from lamina.memory.lease import Hold, Lease
from lamina.memory.pins import Pin
from lamina.memory.prefix import Node, PrefixIndex, TailPages
from lamina.memory.tokens import block_key


def check_books(layout: Layout, arena: Arena, index: PrefixIndex, leases: Sequence[Lease], holds: Sequence[Hold] = ()) -> None:
    """Asserts I1, I2, I3 and I10; the message starts with the number of the one that is broken. O(pages + blocks)."""
    arena.check()
    _check_index(layout, arena, index)
    read = Counter(page for held in holds for page in held.blocks)
    for lease in leases:
        _check_lease(layout, arena, lease, read)
    _check_references(arena, index, leases, holds)
    _check_windows(layout, leases)


def _check_index(layout: Layout, arena: Arena, index: PrefixIndex) -> None:
    """I3, and what the tree keeps twice."""
    nodes = index.nodes
    known = set(map(id, nodes))
    children: Counter[int] = Counter(id(node.parent) for node in nodes if node.parent is not None)
    for node in nodes:
        assert node.resident and node.children == children[id(node)], "I3: the number of children is wrong"
        if node.parent is None:
            assert node.depth == 0 and node.page is None
            assert node.pins or node.kept or node.children or node.checkpoints, "I3: an empty root is kept"
        else:
            assert id(node.parent) in known, "I3: a resident node has a parent that is not"
            assert node.depth == node.parent.depth + 1 and node.key == block_key(node.parent.key, node.tokens)
            assert (node.page is not None) == layout.has_logs
        tails = sorted(tail for same_length in node.checkpoints.values() for tail in same_length if tail)
        blocks = [other.tokens for other in nodes if other.parent is node] if node.children else []
        assert list(node.edges) == sorted([*tails, *blocks]), "I3: the edges of a node are not its children and tails"
        assert node.queued >= 0 or not node.evictable, "I1: a node could be evicted and is not queued"
    for checkpoint in index.checkpoints:
        tip = checkpoint.node
        assert checkpoint.state == "resident" and tip is not None and id(tip) in known, "I3: a checkpoint without its log"
        depth, tail = divmod(checkpoint.position, layout.block_tokens)
        assert tip.depth == depth and len(checkpoint.tail) == 4 * tail, "I3: a checkpoint hangs at the wrong depth"
        assert len(checkpoint.pages) == layout.checkpoint_pages(checkpoint.position), "I2: a checkpoint keeps surplus pages"
        assert (checkpoint.open_page is not None) == bool(layout.has_logs and tail), "I3: a checkpoint without its open block"
        for kept, window in zip(checkpoint.tails, layout.tails, strict=True):
            live = {b for first, stop in window.live_blocks(checkpoint.position) for b in range(first, stop)}
            assert set(kept) == live, "I3: a checkpoint without its windows"
        assert checkpoint.queued >= 0 or not checkpoint.evictable, "I1: a checkpoint could be evicted and is not queued"

    ends = {node for node in nodes if node.parent is not None and not node.children}
    assert index.recent.keys() == ends | {made for made in index.checkpoints if made.tail}, "I3: a path has no end"


def check_pins(arena: Arena, index: PrefixIndex, pins: Sequence[Pin]) -> None:
    """Every pin of a user keeps its path and its checkpoint, and nothing else is pinned."""
    nodes: Counter[int] = Counter(id(pin.node) for pin in pins)
    made: Counter[int] = Counter(id(pin.checkpoint) for pin in pins if pin.checkpoint is not None)
    pages: Counter[int] = Counter(page for pin in pins for page in index.path_pages(pin.node))
    for checkpoint in {pin.checkpoint for pin in pins if pin.checkpoint is not None}:
        assert checkpoint.state == "resident", "I5: a pinned checkpoint was evicted"
        pages.update((*checkpoint.pages, *checkpoint.shared_pages))
    assert all(pin.node.resident for pin in pins), "I5: a pinned path was evicted"
    assert all(node.kept == nodes[id(node)] for node in index.nodes), "I5: pinned nodes are miscounted"
    assert all(checkpoint.kept == made[id(checkpoint)] for checkpoint in index.checkpoints), "I5: pins are miscounted"
    assert all(arena.pin_refs(page) == pages[page] for page in range(arena.num_pages)), "I5: pinned pages are miscounted"
    assert arena.num_with_pins <= arena.num_pages // 2, "I12: more than half is pinned"


def _check_lease(layout: Layout, arena: Arena, lease: Lease, read: Counter[int]) -> None:
    """I2 and I10 of one lease; `read` counts the movers that read a block page."""
    tip = lease._tip
    assert not lease.ended and tip is not None
    assert 0 <= lease.committed <= lease.position and lease.committed <= len(lease.tokens)
    blocks = max(layout.block_pages(lease.position), tip.depth if layout.has_logs else 0)
    assert len(lease.blocks) == blocks, f"I2: {len(lease.blocks)} blocks held at position {lease.position}, not {blocks}"
    assert lease.cuts == sorted(set(lease.cuts)) and all(cut > lease.committed for cut in lease.cuts), "I2: cuts are stale"
    last = lease.cuts[-1] if lease.cuts else lease.committed
    assert last == lease.position if layout.tails else not lease.cuts, "I2: a planned step has no cut"
    for held, window in zip(lease.tails, layout.tails, strict=True):
        points = [lease.committed, *lease.cuts]
        union = {b for p in points for first, stop in window.live_blocks(p) for b in range(first, stop)}
        least = {b for p in lease.cuts for first, stop in window.live_blocks(p) for b in range(first, stop)}
        assert least <= set(held) <= union, f"I2: window blocks {sorted(held)} held at {points}, not {sorted(union)}"
        assert all(len(pages) == window.pages for pages in held.values()), "I2: a window block is not whole"
    assert len(lease.slot) == layout.slot_pages, "I2: the slot is not whole"
    full = max(lease.committed, lease.write_from) // layout.block_tokens
    assert tip.depth <= full, "I2: a block is published that has not been accepted"
    assert tip.depth == full or lease._detached, "I2: an accepted block is not published"
    step: Node | None = tip
    while step is not None and step.parent is not None:
        assert step.resident, "I5: a block was evicted under a lease"
        if layout.has_logs:
            assert lease.blocks[step.depth - 1] == step.page, "I2: the block table differs from the published path"
        step = step.parent
    for page in lease.blocks[tip.depth :]:
        assert arena.lease_refs(page) == 1 + read[page], f"I10: page {page} is written by two leases"
    for page in lease.slot:
        assert arena.lease_refs(page) == 1 and not arena.cache_refs(page), f"I10: slot page {page} is shared"
    for made in lease._pending:
        if made.state != "gone":
            assert lease.committed < made.position <= lease.position, "I2: a pending checkpoint outside what is in flight"


def _check_references(arena: Arena, index: PrefixIndex, leases: Sequence[Lease], holds: Sequence[Hold]) -> None:
    """I1: every count equals the holders that can be found; pins equal the leases."""
    held: Counter[int] = Counter(page for lease in leases for page in (*lease.blocks, *lease.slot, *_window_pages(lease.tails)))
    frozen = {id(hold._source): hold._source for hold in holds if hold._source is not None}
    for checkpoint in frozen.values():
        assert checkpoint.state == "resident" and checkpoint.pins, "I14: a mover's checkpoint has been given up"
    frozen_pages = {page for checkpoint in frozen.values() for page in checkpoint.pages}
    for hold in holds:
        held.update((*hold.blocks, *hold.checkpoint, *_window_pages(hold.tails)))
    pending = [made for lease in leases for made in lease._pending if made.state != "gone"]
    checkpoints = [*index.checkpoints, *pending]
    cached: Counter[int] = Counter(node.page for node in index.nodes if node.page is not None)
    for checkpoint in checkpoints:
        for page in checkpoint.pages:
            assert not cached[page] and (not held[page] or page in frozen_pages), f"I10: checkpoint page {page} is shared"
            cached[page] += 1
        cached.update(checkpoint.shared_pages)
    for page in range(arena.num_pages):
        assert arena.lease_refs(page) == held[page], (
            f"I1: page {page} is held {held[page]} times, counted {arena.lease_refs(page)}"
        )
        assert arena.cache_refs(page) == cached[page], (
            f"I1: page {page} is cached {cached[page]} times, counted {arena.cache_refs(page)}"
        )
    published = {node.page for node in index.nodes if node.page is not None}
    for lease in leases:
        assert lease._tip is not None
        for page in lease.blocks[lease._tip.depth :]:
            assert page not in published, f"I10: published page {page} is written"
    pins: Counter[int] = Counter(id(node) for node in (*(lease._tip for lease in leases), *(hold._node for hold in holds)))
    for node in index.nodes:
        assert node.pins == pins[id(node)], "I5: pins differ from the leases that stand there"
    pages = sum(len(checkpoint.pages) for checkpoint in checkpoints)
    assert index.num_checkpoint_pages == pages, "I1: checkpoint pages are miscounted"
    assert index.num_pinned_checkpoint_pages == len(frozen_pages), "I1: checkpoint pages that movers read are miscounted"


def _check_windows(layout: Layout, leases: Sequence[Lease]) -> None:
    """I10 of large windows: a block that a request still writes belongs to no other request."""
    writers: Counter[int] = Counter()
    for lease in leases:
        for held, window in zip(lease.tails, layout.tails, strict=True):
            for block, pages in held.items():
                if (block + 1) * window.tokens > lease.committed:
                    writers.update(pages)
    assert all(count == 1 for count in writers.values()), "I10: a window block is written by two leases"


def _window_pages(tails: Sequence[TailPages]) -> list[int]:
    return [page for held in tails for pages in held.values() for page in pages]


def check_windows(leases: Sequence[Lease], num_pages: int) -> None:
    """I1, I12: what is counted about the pages of large windows."""
    windows = [_window_pages(lease.tails) for lease in leases]
    holders = Counter(page for pages in windows for page in pages)
    assert num_pages == len(holders), "I1: pages of large windows are miscounted"
    for lease, pages in zip(leases, windows, strict=True):
        own = sum(1 for page in pages if holders[page] == 1)
        assert lease._own_window_pages == own, "I12: a request's own windows are miscounted"
