"""What a request leaves in the prefix index while it runs and when it ends."""

from lamina.memory.arena import Arena
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease, Stats
from lamina.memory.orders import SaveSlot
from lamina.memory.prefix import Checkpoint, Node, PrefixIndex
from lamina.memory.tokens import encode
from lamina.memory.windows import Windows


class Publisher:
    """Publishes blocks and checkpoints of leases; only the ledger calls it. `adopt_twins` as in the ledger."""

    def __init__(
        self, layout: Layout, arena: Arena, index: PrefixIndex, windows: Windows, stats: Stats, adopt_twins: bool
    ) -> None:
        self.layout = layout
        self.arena = arena
        self.index = index
        self.windows = windows
        self.stats = stats
        self.adopt_twins = adopt_twins

    def depth(self, lease: Lease) -> int:
        """Blocks of the lease that are in the index."""
        assert lease._tip is not None
        return lease._tip.depth

    def open_page(self, lease: Lease, position: int) -> int | None:
        """The page of the block that is open at `position`, None at a block's border."""
        block, inside = divmod(position, self.layout.block_tokens)
        return lease.blocks[block] if inside and self.layout.has_logs else None

    def _block(self, lease: Lease, number: int) -> bytes:
        """The encoded tokens of one block, as far as they are known."""
        size = self.layout.block_tokens
        return encode(lease.tokens[number * size : (number + 1) * size])

    def _key(self, lease: Lease, depth: int) -> bytes | None:
        """The key of the block that ends at `depth`, if it is one of the prompt's."""
        prompt = lease._prompt
        return prompt.key(depth) if prompt is not None and depth <= prompt.num_blocks else None

    def node_at(self, lease: Lease, depth: int) -> Node | None:
        """The published node of the lease's path at `depth`, or below it in the index as far as its tokens are known."""
        node = lease._tip
        while node is not None and node.depth > depth:
            node = node.parent
        while node is not None and node.depth < depth:
            node = self.index.child(node, self._block(lease, node.depth))
        return node

    def has_checkpoint(self, lease: Lease) -> bool:
        """Whether a checkpoint at the planned position exists, as far as its tokens are known."""
        if any(made.position == lease.position and made.state != "gone" for made in lease._pending):
            return True
        if len(lease.tokens) < lease.position:
            return False
        depth, tail = divmod(lease.position, self.layout.block_tokens)
        node, rest = self.node_at(lease, depth), encode(lease.tokens[lease.position - tail : lease.position])
        return node is not None and self.index.find(node, rest) is not None

    def publish(self, lease: Lease, now: int) -> None:
        """Puts every full accepted block and every reached checkpoint into the index, in order of position."""
        self._attach_reached(lease)
        start = lease._tip
        assert start is not None
        while not lease._detached and (self.depth(lease) + 1) * self.layout.block_tokens <= lease.committed:
            self._publish_block(lease, now)
            if lease._pending:
                self._attach_reached(lease)
        if lease._tip is not None and lease._tip is not start:  # nothing is evicted in between
            self.index.pin(lease._tip)
            self.index.unpin(start, now)

    def _publish_block(self, lease: Lease, now: int) -> None:
        parent = lease._tip
        assert parent is not None
        block = self._block(lease, parent.depth)
        own = lease.blocks[parent.depth] if self.layout.has_logs else None
        node, is_new = self.index.publish(parent, block, own, now, self._key(lease, parent.depth + 1), lease.owner)
        if node is None or (node.page != own and not self.adopt_twins):
            lease._detached = True
            return
        if node.page is not None and own is not None:
            if self.adopt_twins:
                self.index.share_page(parent, block, node.page)
            if node.page != own:
                self.arena.ref_lease(node.page)
                lease.blocks[parent.depth] = node.page
                lease._changed_from = min(lease._changed_from, parent.depth)
                for made in lease._pending:
                    if made.open_page == own and made.state != "gone":
                        self.index.move_open_page(made, node.page)
                self.arena.unref_lease(own)
        self.stats.twins += not is_new
        lease._tip = node

    def _attach_reached(self, lease: Lease) -> None:
        """Lets pending checkpoints of the open block be found whose tokens have all been accepted."""
        size = self.layout.block_tokens
        while lease._pending and lease._pending[0].position <= lease.committed:
            made = lease._pending[0]
            depth = made.position // size
            if depth > self.depth(lease) and not lease._detached:
                return  # its block is published first
            del lease._pending[0]
            if made.state == "gone":
                continue
            tail = encode(lease.tokens[depth * size : made.position])
            node = self.node_at(lease, depth) if depth <= self.depth(lease) else None
            if node is None or self.index.find(node, tail) is not None:
                self.drop_pending(made)
            else:
                self.index.attach(made, node, tail)

    def drop_pending(self, made: Checkpoint) -> None:
        """Gives up a checkpoint that cannot be hit yet."""
        if made.state != "gone":  # eviction may have been faster
            self.index.discard(made)

    def freeze(self, lease: Lease, position: int, now: int) -> tuple[SaveSlot, Checkpoint] | None:
        """Lets the slot of a lease that ends become a checkpoint where it lies; the order that packs it.

        None where there is such a checkpoint already, or the lease's blocks are not in the index.
        """
        depth = position // self.layout.block_tokens
        node = self.node_at(lease, depth) if depth <= self.depth(lease) else None
        if node is None:
            return None
        tail = encode(lease.tokens[depth * self.layout.block_tokens : position])
        same = self.index.find(node, tail)
        if same is not None:
            same.stamp = now
            return None
        frozen = lease.slot[: self.layout.checkpoint_pages(position)]
        for page in frozen:
            self.arena.ref_cache(page)
        tails = self.windows.frozen(lease, position)
        made = self.index.add_pending(position, frozen, self.open_page(lease, position), now, tails)
        made.owner = lease.owner
        self.index.attach(made, node, tail)
        self.stats.checkpoints += 1
        return SaveSlot(lease.slot, frozen, position), made
