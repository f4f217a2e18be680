"""The invariants of the memory accounting, asserted by counting everything again. For tests and for an idle engine."""

from collections import Counter
from collections.abc import Sequence

from lamina.memory.arena import Arena
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.prefix import Node, PrefixIndex, block_key


def check_books(layout: Layout, arena: Arena, index: PrefixIndex, leases: Sequence[Lease]) -> None:
    """Asserts I1, I2, I3 and I10; the message starts with the number of the one that is broken. O(pages + blocks)."""
    arena.check()
    _check_index(layout, arena, index)
    for lease in leases:
        _check_lease(layout, arena, lease)
    _check_references(arena, index, leases)


def _check_index(layout: Layout, arena: Arena, index: PrefixIndex) -> None:
    """I3, and what the tree keeps twice."""
    nodes = index.nodes
    known = set(map(id, nodes))
    children: Counter[int] = Counter(id(node.parent) for node in nodes if node.parent is not None)
    for node in nodes:
        assert node.resident and node.children == children[id(node)], "I3: the number of children is wrong"
        if node.parent is None:
            assert node.depth == 0 and node.page is None
            assert node.pins or node.children or node.checkpoints, "I3: an empty root is kept"
        else:
            assert id(node.parent) in known, "I3: a resident node has a parent that is not"
            assert node.depth == node.parent.depth + 1 and node.key == block_key(node.parent.key, node.tokens)
            assert (node.page is not None) == layout.has_logs
        tails = sorted(tail for same_length in node.checkpoints.values() for tail in same_length if tail)
        blocks = [other.tokens for other in nodes if other.parent is node] if node.children else []
        assert node.edges == sorted([*tails, *blocks]), "I3: the edges of a node are not its children and tails"
        assert node.queued or not node.evictable, "I1: a node could be evicted and is not queued"
    for checkpoint in index.checkpoints:
        node = checkpoint.node
        assert checkpoint.state == "resident" and node is not None and id(node) in known, "I3: a checkpoint without its log"
        depth, tail = divmod(checkpoint.position, layout.block_tokens)
        assert node.depth == depth and len(checkpoint.tail) == 4 * tail, "I3: a checkpoint hangs at the wrong depth"
        assert len(checkpoint.pages) == layout.checkpoint_pages(checkpoint.position), "I2: a checkpoint keeps surplus pages"
        assert (checkpoint.open_page is not None) == bool(layout.has_logs and tail), "I3: a checkpoint without its open block"
        assert checkpoint.queued or checkpoint.pins, "I1: a checkpoint could be evicted and is not queued"


def _check_lease(layout: Layout, arena: Arena, lease: Lease) -> None:
    """I2 and I10 of one lease."""
    tip = lease._tip
    assert not lease.ended and tip is not None
    assert 0 <= lease.committed <= lease.position and lease.committed <= len(lease.tokens)
    blocks = layout.blocks_for(lease.position) if layout.has_logs else 0
    assert len(lease.blocks) == blocks, f"I2: {len(lease.blocks)} blocks held at position {lease.position}, not {blocks}"
    assert len(lease.slot) == layout.slot_pages, "I2: the slot is not whole"
    full = lease.committed // layout.block_tokens
    assert tip.depth <= full, "I2: a block is published that has not been accepted"
    assert tip.depth == full or lease._detached, "I2: an accepted block is not published"
    step: Node | None = tip
    while step is not None and step.parent is not None:
        assert step.resident, "I5: a block was evicted under a lease"
        if layout.has_logs:
            assert lease.blocks[step.depth - 1] == step.page, "I2: the block table differs from the published path"
        step = step.parent
    for page in lease.blocks[tip.depth :]:
        assert arena.lease_refs(page) == 1, f"I10: page {page} is written by two leases"
    for page in lease.slot:
        assert arena.lease_refs(page) == 1 and not arena.cache_refs(page), f"I10: slot page {page} is shared"
    for made in lease._pending:
        if made.state != "gone":
            assert lease.committed < made.position <= lease.position, "I2: a pending checkpoint outside what is in flight"


def _check_references(arena: Arena, index: PrefixIndex, leases: Sequence[Lease]) -> None:
    """I1: every count equals the holders that can be found; pins equal the leases."""
    held: Counter[int] = Counter(page for lease in leases for page in (*lease.blocks, *lease.slot))
    pending = [made for lease in leases for made in lease._pending if made.state != "gone"]
    checkpoints = [*index.checkpoints, *pending]
    cached: Counter[int] = Counter(node.page for node in index.nodes if node.page is not None)
    for checkpoint in checkpoints:
        for page in checkpoint.pages:
            assert not cached[page] and not held[page], f"I10: checkpoint page {page} is shared"
            cached[page] += 1
    cached.update(checkpoint.open_page for checkpoint in checkpoints if checkpoint.open_page is not None)
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
    pins: Counter[int] = Counter(id(lease._tip) for lease in leases)
    for node in index.nodes:
        assert node.pins == pins[id(node)], "I5: pins differ from the leases that stand there"
    pages = sum(len(checkpoint.pages) for checkpoint in checkpoints)
    assert index.num_checkpoint_pages == pages, "I1: checkpoint pages are miscounted"
