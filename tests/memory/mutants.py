"""Seeded faults. Each is a small change to the code under test that the random traces must notice."""

from collections.abc import Callable, Sequence

import pytest

import lamina.memory.prefix as prefix
import lamina.memory.tokens as tokens
from lamina.memory import kept
from lamina.memory.arena import Arena
from lamina.memory.decodes import Decodes
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.pins import Pins
from lamina.memory.prefix import Checkpoint, Node, PrefixIndex, TailPages
from lamina.memory.publisher import Publisher
from lamina.memory.tails import Tail
from lamina.memory.tokens import Prompt, encode
from lamina.memory.windows import Windows

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    """Registers a fault under the name of its function."""
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def forgets_the_open_block_of_a_dropped_checkpoint(mp: pytest.MonkeyPatch) -> None:
    def discard(self: PrefixIndex, checkpoint: Checkpoint) -> None:
        self.take_over(checkpoint)
        for page in checkpoint.pages:
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
    original = Publisher.publish

    def publish(self: Publisher, lease: Lease, now: int) -> None:
        early = lease.position > lease.committed and len(lease.tokens) > lease.committed
        lease.committed += early
        original(self, lease, now)
        lease.committed -= early

    mp.setattr(Publisher, "publish", publish)


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
    original = PrefixIndex._deepest_checkpoint

    def shallower(self: PrefixIndex, tokens: bytes, node: Node, limit: int) -> Checkpoint | None:
        best = original(self, tokens, node, limit)
        less = original(self, tokens, node, best.position - 1) if best is not None else None
        return less or best

    mp.setattr(PrefixIndex, "_deepest_checkpoint", shallower)


@mutant
def believes_keys_without_comparing_tokens(mp: pytest.MonkeyPatch) -> None:
    strong = tokens.block_key

    def weak(parent: bytes, block: bytes) -> bytes:
        return strong(parent, block[:4] + bytes(len(block) - 4))

    mp.setattr(tokens, "block_key", weak)
    mp.setattr(prefix, "block_key", weak)
    mp.setattr(PrefixIndex, "child", lambda self, node, block, key=None: self._nodes.get(key or weak(node.key, block)))


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
    original = Publisher._publish_block

    def publish(self: Publisher, lease: Lease, now: int) -> None:
        assert lease._tip is not None
        depth = lease._tip.depth
        own = lease.blocks[depth] if lease.blocks else None
        if own is not None:
            self.arena.ref_lease(own)
        original(self, lease, now)
        if own is not None and lease.blocks[depth] == own:
            self.arena.unref_lease(own)

    mp.setattr(Publisher, "_publish_block", publish)


@mutant
def ignores_the_salt(mp: pytest.MonkeyPatch) -> None:
    original = prefix.root_key
    mp.setattr(prefix, "root_key", lambda model_id, layout_id, salt: original(model_id, layout_id, ""))


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
    original = Publisher._attach_reached

    def attach(self: Publisher, lease: Lease) -> None:
        for made in lease._pending:
            made.position += made.position < lease.committed
        original(self, lease)

    mp.setattr(Publisher, "_attach_reached", attach)


@mutant
def lets_decodes_eat_what_prefills_lack(mp: pytest.MonkeyPatch) -> None:
    def can_extend(self: Ledger, lease: Lease, n: int) -> bool:
        return self._needed(lease, n) <= self.arena.free + self.arena.evictable

    mp.setattr(Ledger, "can_extend", can_extend)


@mutant
def admits_over_the_reservations(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._wait

    def wait(self: Ledger, target: int, path: list[int], source: Checkpoint | None, more: int = 0) -> Wait | None:
        kept, self._lacking = self._lacking, 0
        try:
            return original(self, target, path, source, more)
        finally:
            self._lacking = kept

    mp.setattr(Ledger, "_wait", wait)


@mutant
def counts_the_path_as_evictable(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._wait

    def wait(self: Ledger, target: int, path: list[int], source: Checkpoint | None, more: int = 0) -> Wait | None:
        return original(self, target, [], source, more - len(path))

    mp.setattr(Ledger, "_wait", wait)


@mutant
def refuses_one_token_too_soon(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._refusal
    mp.setattr(Ledger, "_refusal", lambda self, num_tokens, max_new: original(self, num_tokens, max_new + 1))


@mutant
def rollback_keeps_the_blocks(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.rollback

    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        blocks, kept = lease.blocks, list(lease.blocks)
        for page in kept if n and lease.in_flight != n else ():
            self.arena.ref_lease(page)
        original(self, lease, n)
        if n and lease.state == "running" and lease.in_flight:
            blocks[:] = kept

    mp.setattr(Ledger, "rollback", rollback)


@mutant
def rollback_keeps_the_checkpoints(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.rollback

    def rollback(self: Ledger, lease: Lease, n: int) -> None:
        pending, lease._pending = lease._pending, []
        original(self, lease, n)
        lease._pending = pending

    mp.setattr(Ledger, "rollback", rollback)


@mutant
def forgets_pending_checkpoints_at_the_end(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Publisher, "drop_pending", lambda self, made: None)


@mutant
def takes_over_an_open_block_that_others_use(mp: pytest.MonkeyPatch) -> None:
    original = Ledger._copied

    def copied(self: Ledger, page: int) -> int:
        if self.index.checkpoints:  # else the last one is being taken over
            return original(self, page)
        self.arena.ref_lease(page)
        return page

    mp.setattr(Ledger, "_copied", copied)


@mutant
def lets_decodes_run_past_their_blocks(mp: pytest.MonkeyPatch) -> None:
    def extend(self: Decodes, leases: list[Lease]) -> bool:
        for lease in leases:
            lease.position += 1
        return True

    mp.setattr(Decodes, "extend", extend)


@mutant
def publishes_nothing_of_decodes(mp: pytest.MonkeyPatch) -> None:
    original = Decodes.commit

    def commit(self: Decodes, leases: list[Lease], ids: list[int]) -> None:
        for lease, token in zip(leases, ids, strict=True):
            if lease._decodes and len(lease.tokens) == lease.committed:
                lease.tokens.append(token)
                lease.committed += 1
            else:
                original(self, [lease], [token])

    mp.setattr(Decodes, "commit", commit)


@mutant
def keeps_half_of_a_failed_extend_of_decodes(mp: pytest.MonkeyPatch) -> None:
    original = Decodes.extend

    def extend(self: Decodes, leases: list[Lease]) -> bool:
        granted = original(self, leases)
        if not granted:
            leases[0].position += 1
        return granted

    mp.setattr(Decodes, "extend", extend)


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


@mutant
def replays_too_little(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex._replay_start

    def start(self: PrefixIndex, log_tokens: int) -> int:
        found = original(self, log_tokens)
        return found + self.layout.block_tokens * (log_tokens - found > self.layout.block_tokens)

    mp.setattr(PrefixIndex, "_replay_start", start)


@mutant
def writes_the_log_again_while_it_replays(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.admit

    def admit(self: Ledger, *args: object, **kwargs: object) -> object:
        found = original(self, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(found, Lease):
            found.write_from = found.position
        return found

    mp.setattr(Ledger, "admit", admit)


@mutant
def freezes_a_slot_that_is_being_rebuilt(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Lease, "_is_exact_at", lambda self, position: True)


@mutant
def shares_the_open_window_block_instead_of_copying(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Windows, "_is_ours_alone", lambda self, page: True)
    original = Windows.share
    mp.setattr(Windows, "share", lambda self, lease, checkpoint, takes_over=False: original(self, lease, checkpoint, True))
    mp.setattr(Windows, "open_pages", lambda self, checkpoint: 0)


@mutant
def lets_go_of_a_window_block_too_soon(mp: pytest.MonkeyPatch) -> None:
    original = Tail.live_blocks

    def live(self: Tail, position: int) -> tuple[tuple[int, int], ...]:
        found = original(self, position)
        return tuple((first + (stop - first > 1), stop) for first, stop in found)

    mp.setattr(Tail, "live_blocks", live)


@mutant
def forgets_the_windows_of_a_dropped_checkpoint(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex.discard

    def discard(self: PrefixIndex, checkpoint: Checkpoint) -> None:
        checkpoint.tails = ({},) * len(checkpoint.tails)
        original(self, checkpoint)

    mp.setattr(PrefixIndex, "discard", discard)


@mutant
def keeps_no_window_in_a_checkpoint(mp: pytest.MonkeyPatch) -> None:
    def frozen(self: Windows, lease: Lease, position: int) -> tuple[TailPages, ...]:
        return ({},) * len(self.tails)

    mp.setattr(Windows, "frozen", frozen)


@mutant
def lets_a_mover_read_what_is_not_held(mp: pytest.MonkeyPatch) -> None:
    original = Ledger.hold

    def hold(self: Ledger, tokens: list[int] | Prompt, salt: str = "") -> object:
        held = original(self, tokens, salt)
        if held is not None and held._source is not None:
            self.index.unpin_checkpoint(held._source, self._clock)
            held._source = None
        return held

    mp.setattr(Ledger, "hold", hold)


# -- what users keep


@mutant
def evicts_a_pinned_block(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        Node, "evictable", property(lambda n: n.resident and n.parent is not None and not (n.pins or n.children or n.checkpoints))
    )


@mutant
def evicts_a_pinned_checkpoint(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Checkpoint, "evictable", property(lambda made: made.state != "gone" and not made.pins))


@mutant
def forgets_that_pages_are_pinned_while_somebody_runs_on_them(mp: pytest.MonkeyPatch) -> None:
    def unref_many(self: Arena, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._lease_refs[page] -= 1
            if not self._lease_refs[page]:
                self._held -= 1
                self._evictable += self._cache_refs[page] > 0
                if not self._cache_refs[page]:
                    self._free.append(page)

    mp.setattr(Arena, "unref_many_for_lease", unref_many)


@mutant
def pins_what_running_requests_may_need(mp: pytest.MonkeyPatch) -> None:
    original = Pins.add
    mp.setattr(Pins, "add", lambda self, pin, spare: original(self, pin, 1 << 30))
    mp.setattr(Pins, "limit", property(lambda self: self.arena.num_pages))


@mutant
def pins_without_a_limit(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Pins, "limit", property(lambda self: self.arena.num_pages))


@mutant
def pins_never_give_way(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Pins, "__len__", lambda self: 0)


@mutant
def a_pin_stays_on_the_page_of_a_twin(mp: pytest.MonkeyPatch) -> None:
    def move(self: PrefixIndex, checkpoint: Checkpoint, page: int) -> None:
        if checkpoint.open_page is not None and checkpoint.open_page != page and not checkpoint.pins:
            if checkpoint.kept:
                self.arena.unpin(checkpoint.open_page)
            self.arena.ref_cache(page)
            self.arena.unref_cache(checkpoint.open_page)
            checkpoint.open_page = page

    mp.setattr(PrefixIndex, "move_open_page", move)


@mutant
def drops_what_others_go_on_from(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(kept, "edges_below", lambda edges, edge: iter(()))


@mutant
def forgets_the_end_of_a_path(mp: pytest.MonkeyPatch) -> None:
    original = PrefixIndex._evict_node

    def evict(self: PrefixIndex, node: Node, now: int, whom: str) -> None:
        original(self, node, now, whom)
        assert node.parent is not None
        self.recent.pop(node.parent, None)

    mp.setattr(PrefixIndex, "_evict_node", evict)
