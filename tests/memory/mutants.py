"""Seeded faults. Each is a small change to the code under test that the random traces must notice."""

from collections.abc import Callable

import pytest

import lamina.memory.prefix as prefix
from lamina.memory.layout import Layout
from lamina.memory.ledger import Lease, Ledger, Wait
from lamina.memory.prefix import Checkpoint, Node, PrefixIndex, encode

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    """Registers a fault under the name of its function."""
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def forgets_the_open_block_of_a_dropped_checkpoint(mp: pytest.MonkeyPatch) -> None:
    def discard(self: PrefixIndex, checkpoint: Checkpoint) -> None:
        for page in self.take_over(checkpoint)[0]:
            self.arena.unref_cache(page)

    mp.setattr(PrefixIndex, "discard", discard)


@mutant
def forgets_the_page_of_an_evicted_block(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex._evict_node

    def evict(self: PrefixIndex, node: Node, now: int, whom: str) -> None:
        if node.page is not None:
            self.arena.ref_cache(node.page)
        original(self, node, now, whom)

    mp.setattr(PrefixIndex, "_evict_node", evict)


@mutant
def publishes_one_token_early(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._publish

    def publish(self: Ledger, lease: Lease) -> None:
        early = lease.position > lease.committed and len(lease.tokens) > lease.committed
        lease.committed += early
        original(self, lease)
        lease.committed -= early

    mp.setattr(Ledger, "_publish", publish)


@mutant
def takes_a_block_too_many(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Layout, "blocks_for", lambda self, n: n // self.block_tokens + 1)


@mutant
def evicts_what_a_lease_stands_on(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Node, "evictable", property(lambda n: n.resident and n.parent is not None and not (n.children or n.checkpoints)))


@mutant
def evicts_parents_before_children(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Node, "evictable", property(lambda n: n.resident and n.parent is not None and not (n.pins or n.checkpoints)))


@mutant
def evicts_blocks_below_a_checkpoint(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Node, "evictable", property(lambda n: n.resident and n.parent is not None and not (n.pins or n.children)))


@mutant
def hits_without_comparing_the_tail(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(PrefixIndex, "find", lambda self, node, tail: next(iter(node.checkpoints.get(len(tail) // 4, {}).values()), None))


@mutant
def hits_the_shallowest_checkpoint(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex._restorable

    def restorable(self: PrefixIndex, tokens: bytes, node: Node, limit: int) -> tuple[Node, Checkpoint | None]:
        best = original(self, tokens, node, limit)
        shallower = original(self, tokens, best[0], best[1].position - 1) if best[1] is not None else best
        return shallower if shallower[1] is not None else best

    mp.setattr(PrefixIndex, "_restorable", restorable)


@mutant
def believes_keys_without_comparing_tokens(mp: pytest.MonkeyPatch) -> None:
    strong = prefix.block_key
    mp.setattr(prefix, "block_key", lambda parent, block: strong(parent, block[:4] + bytes(len(block) - 4)))
    mp.setattr(PrefixIndex, "child", lambda self, node, block: self._nodes.get(prefix.block_key(node.key, block)))


@mutant
def shares_the_open_block_instead_of_copying(mp: pytest.MonkeyPatch) -> None:
    def copied(self: Ledger, page: int) -> int:
        self.arena.ref_lease(page)
        return page

    mp.setattr(Ledger, "_copied", copied)


@mutant
def copies_nothing_into_the_new_open_block(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Ledger, "_copied", lambda self, page: self.arena.take_for_lease())


@mutant
def junction_is_off_by_one(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._junction

    def junction(self: Ledger, hit: prefix.Hit, num_tokens: int) -> int | None:
        found = original(self, hit, num_tokens)
        return None if found is None else found + 1

    mp.setattr(Ledger, "_junction", junction)


@mutant
def leaves_checkpoints_on_the_page_of_a_twin(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(PrefixIndex, "share_page", lambda self, parent, block, page: None)


@mutant
def keeps_the_page_of_an_adopted_twin(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._publish_block

    def publish(self: Ledger, lease: Lease) -> None:
        assert lease._tip is not None
        depth = lease._tip.depth
        own = lease.blocks[depth] if lease.blocks else None
        if own is not None:
            self.arena.ref_lease(own)
        original(self, lease)
        if own is not None and lease.blocks[depth] == own:
            self.arena.unref_lease(own)

    mp.setattr(Ledger, "_publish_block", publish)


@mutant
def ignores_the_salt(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.root
    mp.setattr(PrefixIndex, "root", lambda self, salt: original(self, ""))


@mutant
def shows_a_checkpoint_before_its_tokens_are_accepted(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.checkpoint

    def checkpoint(self: Ledger, lease: Lease) -> bool:
        made = original(self, lease)
        new = lease._pending[-1] if made and lease._pending else None
        start = lease._tip.depth * self.layout.block_tokens if lease._tip is not None else 0
        if new is not None and lease._tip is not None and start <= new.position < start + self.layout.block_tokens:
            tail = encode(lease.tokens[start : new.position])
            if len(tail) == 4 * (new.position - start) and self.index.find(lease._tip, tail) is None:
                self.index.attach(lease._pending.pop(), lease._tip, tail)
        return made

    mp.setattr(Ledger, "checkpoint", checkpoint)


@mutant
def freezes_the_surplus_of_the_slot_as_well(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Layout, "checkpoint_pages", lambda self, position: self.slot_pages)


@mutant
def saves_the_slot_one_token_late(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._attach_reached

    def attach(self: Ledger, lease: Lease) -> None:
        for made in lease._pending:
            made.position += made.position < lease.committed
        original(self, lease)

    mp.setattr(Ledger, "_attach_reached", attach)


@mutant
def lets_decodes_eat_what_prefills_lack(mp: pytest.MonkeyPatch) -> None:
    def can_extend(self: Ledger, lease: Lease, n: int) -> bool:
        need = self._blocks(lease.position + n) - len(lease.blocks)
        return need <= self.arena.free + self.arena.evictable

    mp.setattr(Ledger, "can_extend", can_extend)


@mutant
def admits_over_the_reservations(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._wait

    def wait(self: Ledger, own_blocks: int, path: list[int]) -> Wait | None:
        kept, self._lacking = self._lacking, 0
        try:
            return original(self, own_blocks, path)
        finally:
            self._lacking = kept

    mp.setattr(Ledger, "_wait", wait)


@mutant
def counts_the_path_as_evictable(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._wait
    mp.setattr(Ledger, "_wait", lambda self, own_blocks, path: original(self, own_blocks, []))


@mutant
def refuses_one_token_too_soon(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._refusal
    mp.setattr(Ledger, "_refusal", lambda self, num_tokens, max_new: original(self, num_tokens, max_new + 1))


@mutant
def rollback_keeps_the_blocks(mp: pytest.MonkeyPatch) -> None:
    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        lease.position -= n
        while lease._pending and lease._pending[-1].position > lease.position:
            self._drop_pending(lease._pending.pop())
        if lease.state == "closing" and not lease.in_flight:
            self._close(lease)

    mp.setattr(Ledger, "rollback", rollback)


@mutant
def rollback_keeps_the_checkpoints(mp: pytest.MonkeyPatch) -> None:
    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        lease.position -= n
        while len(lease.blocks) > self._blocks(lease.position):
            self.arena.unref_lease(lease.blocks.pop())
        self._account(lease)
        if lease.state == "closing" and not lease.in_flight:
            self._close(lease)

    mp.setattr(Ledger, "rollback", rollback)


@mutant
def forgets_pending_checkpoints_at_the_end(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Ledger, "_drop_pending", lambda self, made: None)


@mutant
def takes_over_an_open_block_that_others_use(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._copied

    def copied(self: Ledger, page: int) -> int:
        if self.arena.free > 0 and self.index.num_checkpoint_pages > 0:
            return original(self, page)
        self.arena.ref_lease(page)
        return page

    mp.setattr(Ledger, "_copied", copied)


@mutant
def believes_late_commits(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.commit

    def commit(self: Ledger, lease: Lease, tokens: list[int]) -> None:
        if lease.ended:
            lease.committed += len(tokens)
            self.index.evict_all(0, "")
        original(self, lease, tokens)

    mp.setattr(Ledger, "commit", commit)


@mutant
def restores_before_the_save_that_it_reads(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.take_orders
    mp.setattr(Ledger, "take_orders", lambda self: original(self)[::-1])


@mutant
def full_hit_without_a_hidden_vector(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Ledger, "_hit_limit", lambda self, num_tokens: num_tokens)
