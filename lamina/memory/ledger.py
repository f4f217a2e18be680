"""The only writer of arena and index: who may run, what each request holds, what is kept and what is evicted.

Every call either does all of what it says or changes nothing. Orders (copies of pages) are collected in an outbox; they
and the steps run on one stream in the order of the calls, so a page that is freed may be given away at once.
docs/ledger.md states the effect of each call.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace

from lamina.base.errors import ConfigError
from lamina.memory.arena import Arena
from lamina.memory.check import check_books
from lamina.memory.layout import Layout
from lamina.memory.lease import CANCELLED, CLOSING, FINISHED, PREEMPTED, RUNNING, Lease, PageCounts, Refused, Stats, Wait
from lamina.memory.orders import CopyPage, Order, RestoreSlot, SaveSlot
from lamina.memory.prefix import PROMPT_LOGPROBS, Checkpoint, Hit, Node, PrefixIndex, checked_ids, encode


class Ledger:
    """Memory accounting of one arena of `num_pages` pages with one layout.

    model_id             says that equal tokens mean equal bytes; part of every root of the index.
    adopt_twins          a block that another request published first is exchanged for that one (their bits must be equal);
                         otherwise the request keeps its own page and publishes nothing deeper.
    min_checkpoint_gain  tokens that a checkpoint at a junction must save.
    Raises ConfigError (a ValueError) for arguments that are wrong by themselves and for a lease that has ended.
    """

    def __init__(
        self, layout: Layout, num_pages: int, model_id: str = "", adopt_twins: bool = True, min_checkpoint_gain: int = 256
    ) -> None:
        if num_pages < 1:
            raise ConfigError("num_pages", num_pages, "at least 1")
        if min_checkpoint_gain < 0:
            raise ConfigError("min_checkpoint_gain", min_checkpoint_gain, "at least 0")
        self.layout = layout
        self.num_pages = num_pages
        self.adopt_twins = adopt_twins
        self.min_checkpoint_gain = min_checkpoint_gain
        self.stats = Stats()
        self.arena = Arena(num_pages)
        self.index = PrefixIndex(self.arena, layout, model_id)
        self._leases: dict[Lease, None] = {}  # in order of admission
        self._outbox: list[tuple[Order, Checkpoint | None]] = []
        self._clock = 0
        self._lacking = 0  # blocks that admitted prefills still lack
        self._decoding = 0  # running decodes

    # -- looking

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases that hold pages (running and closing), oldest first."""
        return tuple(self._leases)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.arena.free

    @property
    def evictable_pages(self) -> int:
        """Pages that only the index holds: all of them can be had."""
        return self.arena.evictable

    @property
    def evictions(self) -> int:
        """Blocks and checkpoints evicted so far."""
        return self.index.evictions

    @property
    def stale_commits(self) -> int:
        """Commits that came after their lease had ended, and were ignored."""
        return self.stats.stale_commits

    def pages(self) -> PageCounts:
        """How many pages are in which state. O(1)."""
        slots = len(self._leases) * self.layout.slot_pages
        checkpoints = self.index.num_checkpoint_pages
        return PageCounts(
            self.arena.free, self.arena.held - slots, slots, self.arena.evictable - checkpoints, checkpoints
        )  # fmt: skip

    def all_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that can be hit, then pending ones. O(nodes + leases)."""
        return (*self.index.checkpoints, *(made for lease in self._leases for made in lease._pending if made.state != "gone"))

    def longest(self, tokens: Sequence[int], salt: str = "", limit: int | None = None) -> Hit:
        """What an admission of these tokens would reuse now. Changes nothing.

        limit  the largest position wanted; None: as admission would, all tokens where a hidden vector is kept, else one less.
        """
        ids = checked_ids(tokens)
        if limit is None:
            limit = self._hit_limit(len(ids))
        return _public(self._lookup(ids, salt, max(0, min(limit, len(ids)))))

    def take_orders(self) -> tuple[Order, ...]:
        """Empties the outbox: the copies to carry out, in order. Copies into checkpoints that are gone unread are left out."""
        orders = tuple(order for order, target in self._outbox if target is None or target.state != "gone" or target.was_read)
        self._outbox.clear()
        return orders

    # -- admission

    def admit(
        self, tokens: Sequence[int], max_new: int, salt: str = "", name: str = "", use_cache: bool = True
    ) -> Lease | Wait | Refused:
        """A lease at the position of the longest hit, or why there is none.

        tokens     all tokens known, at least one; a request that resumes passes its answer so far as well.
        max_new    tokens that may still be sampled. The last one is never computed, so the request ends at position
                   len(tokens) + max(max_new - 1, 0); it is Refused only if that many do not fit into an empty arena.
        use_cache  False: compute everything (prompt log-probs); what fills is still published.
        Takes the slot and, inside a block, a private copy of the open block; the rest of the prompt is reserved.
        """
        ids = checked_ids(tokens)
        if not ids:
            raise ConfigError("tokens", "[]", "at least one token")
        if max_new < 0:
            raise ConfigError("max_new", max_new, "at least 0")
        refused = self._refusal(len(ids), max_new)
        if refused is not None:
            return refused
        found = self._lookup(ids, salt, self._hit_limit(len(ids)))
        junction = self._junction(found, len(ids))
        if not use_cache:
            found = replace(found, position=0, reason=PROMPT_LOGPROBS, checkpoint=None, node=self.index.root(salt))
        assert found.node is not None
        path = self._path(found.node)
        target = self._blocks(len(ids) + (1 if max_new > 1 else 0))
        wait = self._wait(target - len(path), path)
        if wait is not None:
            return wait
        self._clock += 1
        lease = Lease(name, salt, ids, len(ids), max_new, _public(found), found.position, found.position, junction)
        lease.blocks, lease._target, lease._tip = path, target, found.node
        for page in path:
            self.arena.ref_lease(page)
        self.index.pin(found.node)
        self._fill_slot(lease, found.checkpoint)
        self._leases[lease] = None
        self._account(lease)
        self.stats.admitted += 1
        self.stats.prompt_tokens += len(ids)
        self.stats.hits += found.position > 0
        self.stats.hit_tokens += found.position
        return lease

    def fork(self, lease: Lease, max_new: int, name: str = "") -> Lease | Wait | Refused:
        """Another request that continues from the lease's accepted tokens: an ordinary admission of these tokens.

        Makes a checkpoint there if there is none and nothing is in flight, so that the hit is full.
        """
        self._require_running(lease, "fork")
        if max_new < 0:
            raise ConfigError("max_new", max_new, "at least 0")
        if not lease.committed:
            raise ConfigError("lease.committed", 0, "at least one accepted token to fork from")
        tokens = lease.tokens[: lease.committed]
        refused = self._refusal(len(tokens), max_new)
        if refused is not None:
            return refused
        if not lease.in_flight and not lease._detached and self._hit_limit(len(tokens)) == len(tokens):
            shared = self.layout.has_logs * (lease.committed // self.layout.block_tokens)
            wait = self._wait(self._blocks(len(tokens) + (1 if max_new > 1 else 0)) - shared, [])
            if wait is not None:
                return wait
            self.checkpoint(lease)
        return self.admit(tokens, max_new, lease.salt, name)

    # -- running

    def can_extend(self, lease: Lease, n: int) -> bool:
        """Whether `extend(lease, n)` would succeed."""
        self._require_running(lease, "extend")
        if n < 0:
            raise ConfigError("n", n, "at least 0")
        need = self._blocks(lease.position + n) - len(lease.blocks)
        return need <= max(0, self.arena.free + self.arena.evictable - (self._lacking - lease._lacks))

    def extend(self, lease: Lease, n: int) -> bool:
        """Plans n more tokens: takes exactly the blocks they need, evicting if it must.

        False, and nothing has changed, where there is no page that admitted prefills do not lack: preempt someone.
        """
        if not self.can_extend(lease, n):
            return False
        self._clock += 1
        need = self._blocks(lease.position + n) - len(lease.blocks)
        self.index.make_free(need, self._clock, lease.name)
        lease.blocks.extend(self.arena.take_for_lease() for _ in range(need))
        lease.position += n
        self._account(lease)
        return True

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The ids of the oldest in-flight tokens, now accepted: publishes each block that filled.

        Raises ConfigError for more tokens than are in flight and for ids that differ from those known (the prompt).
        After the end of the lease it is ignored and counted.
        """
        if lease.ended:
            self.stats.stale_commits += 1
            return
        self._require_held(lease)
        ids = checked_ids(tokens)
        if len(ids) > lease.in_flight:
            raise ConfigError("len(tokens)", len(ids), f"at most the {lease.in_flight} in flight")
        known = lease.tokens[lease.committed : lease.committed + len(ids)]
        if known != ids[: len(known)]:
            raise ConfigError("tokens", ids[: len(known)], f"the known tokens from position {lease.committed} on, {known}")
        self._clock += 1
        lease.tokens.extend(ids[len(known) :])
        lease.committed += len(ids)
        self._publish(lease)
        if lease.state == CLOSING and not lease.in_flight:
            self._close(lease)

    def rollback(self, lease: Lease, n: int) -> None:
        """Takes back the newest n in-flight tokens (rejected drafts, a failed step) with their blocks and checkpoints."""
        self._require_held(lease)
        if not 0 <= n <= lease.in_flight:
            raise ConfigError("n", n, f"from 0 to the {lease.in_flight} in flight")
        self._clock += 1
        lease.position -= n
        while lease._pending and lease._pending[-1].position > lease.position:
            self._drop_pending(lease._pending.pop())
        while len(lease.blocks) > self._blocks(lease.position):
            self.arena.unref_lease(lease.blocks.pop())
        self._account(lease)
        if lease.state == CLOSING and not lease.in_flight:
            self._close(lease)

    def checkpoint(self, lease: Lease) -> bool:
        """Freezes a copy of the slot at the planned position; it can be hit once commit has reached that position.

        False where the model needs none, nothing has been computed, one is there already, the lease's blocks are not in
        the index (twins not adopted), or no page can be had beyond what admitted prefills lack.
        """
        self._require_running(lease, "checkpoint")
        position = lease.position
        if not self.layout.slot_pages or not position or self._has_checkpoint(lease):
            return False
        if lease._detached and position // self.layout.block_tokens > self._depth(lease):
            return False
        count = self.layout.checkpoint_pages(position)
        if count > self.arena.free + self.arena.evictable - self._lacking:
            self.stats.checkpoints_skipped += 1
            return False
        self._clock += 1
        self.index.make_free(count, self._clock, lease.name)
        pages = tuple(self.arena.take_for_cache() for _ in range(count))
        made = self.index.add_pending(position, pages, self._open_page(lease), self._clock)
        self._outbox.append((SaveSlot(lease.slot, pages, position), made))
        lease._pending.append(made)
        self.stats.checkpoints += 1
        self._publish(lease)
        return True

    # -- ending

    def preempt(self, lease: Lease) -> None:
        """Gives everything up for now: the slot is frozen in place as a checkpoint, the blocks stay evictable.

        With tokens in flight it takes effect when none is left (state closing until then).
        """
        self._end(lease, PREEMPTED)

    def finish(self, lease: Lease) -> None:
        """The request is done; what it leaves is the same as after preempt."""
        self._end(lease, FINISHED)

    def cancel(self, lease: Lease) -> None:
        """Frees at once, in any state, all that is not in the index. Does nothing to a lease that has ended."""
        if lease.ended:
            return
        self._require_held(lease)
        self._clock += 1
        for page in lease.slot:
            self.arena.unref_lease(page)
        self._release(lease, CANCELLED)
        self.stats.cancelled += 1

    def drop_index(self) -> None:
        """Evicts everything that no lease stands on; with no lease, every page is free afterwards."""
        self._clock += 1
        self.index.evict_all(self._clock, "drop_index")

    def check(self) -> None:
        """Asserts I1, I2, I3, I10 and the reservations of I12. O(pages + blocks), for tests and for an idle engine."""
        check_books(self.layout, self.arena, self.index, self.leases)
        assert self._lacking == sum(lease._lacks for lease in self._leases), "I12: reservations are miscounted"
        assert self._decoding == sum(lease._decodes for lease in self._leases), "I12: decodes are miscounted"
        assert self._lacking <= self.arena.free + self.arena.evictable, "I12: an admitted prefill cannot be finished"
        for lease in self._leases:
            assert lease.state == CLOSING or lease._lacks == max(0, lease._target - len(lease.blocks)), "I12: a lack is stale"
        assert self.pages().total == self.num_pages and min(astuple(self.pages())) >= 0, "I1: pages do not add up"

    # -- parts of admission

    def _blocks(self, num_tokens: int) -> int:
        """Block pages of a request of that many tokens."""
        return self.layout.blocks_for(num_tokens) if self.layout.has_logs else 0

    def _hit_limit(self, num_tokens: int) -> int:
        """The deepest useful hit: without a hidden vector one token must be computed to get logits."""
        return num_tokens if self.layout.hidden is not None and self.layout.slot_pages else max(0, num_tokens - 1)

    def _lookup(self, ids: list[int], salt: str, limit: int) -> Hit:
        return self.index.longest(encode(ids), salt, limit, self.min_checkpoint_gain)

    def _junction(self, hit: Hit, num_tokens: int) -> int | None:
        gain = hit.differs_at - hit.position
        worth = self.layout.slot_pages > 0 and gain >= max(1, self.min_checkpoint_gain)
        return hit.differs_at if worth and hit.differs_at < num_tokens else None

    def _refusal(self, num_tokens: int, max_new: int) -> Refused | None:
        last = num_tokens + max(max_new - 1, 0)
        needed = self.layout.slot_pages + self._blocks(last)
        if needed <= self.num_pages:
            return None
        return Refused(
            needed,
            self.num_pages,
            f"{num_tokens} tokens and up to {max_new} new ones need {needed} pages ({self.layout.slot_pages} slot, "
            f"{self._blocks(last)} blocks) of {self.layout.page_bytes} B; the arena has {self.num_pages}",
        )

    def _wait(self, own_blocks: int, path: list[int]) -> Wait | None:
        """Why a request that shares `path` and needs `own_blocks` more cannot be admitted now; None if it can."""
        needed = self.layout.slot_pages + own_blocks
        pinned = sum(1 for page in path if not self.arena.lease_refs(page))
        reserved = self._lacking + (self._decoding if self.layout.has_logs else 0)
        available = max(0, self.arena.free + self.arena.evictable - pinned - reserved)
        if needed <= available:
            return None
        assert self._leases, "I12: nothing runs, yet a request that fits alone would wait"
        return Wait(
            needed,
            available,
            f"needs {needed} pages ({self.layout.slot_pages} slot, {own_blocks} blocks), could have {available}: "
            f"{self.arena.free} free and {self.arena.evictable - pinned} evictable, "
            f"of which {reserved} are reserved for running requests",
        )

    def _path(self, node: Node) -> list[int]:
        """Pages of the blocks from the root down to `node`."""
        pages: list[int] = []
        step: Node | None = node
        while step is not None:
            if step.page is not None:
                pages.append(step.page)
            step = step.parent
        return pages[::-1]

    def _fill_slot(self, lease: Lease, source: Checkpoint | None) -> None:
        """Takes the slot and, where the hit is inside a block, a block of its own; orders the copies."""
        if source is None:
            self.index.make_free(self.layout.slot_pages, self._clock, lease.name)
            lease.slot = tuple(self.arena.take_for_lease() for _ in range(self.layout.slot_pages))
            return
        opened = source.open_page
        self.index.pin_checkpoint(source)
        source.was_read = True
        count = self.layout.slot_pages + (opened is not None)
        if count <= self.arena.free + self.arena.evictable:
            self.index.make_free(count, self._clock, lease.name)
            lease.slot = tuple(self.arena.take_for_lease() for _ in range(self.layout.slot_pages))
            self._outbox.append((RestoreSlot(source.pages, lease.slot, source.position), None))
            if opened is not None:
                lease.blocks.append(self._copied(opened))
            self.index.unpin_checkpoint(source, self._clock)
            return
        # Not enough room to copy: the checkpoint's own pages become the slot, and its open block the lease's.
        self.index.evict_all(self._clock, lease.name)
        frozen, _ = self.index.take_over(source)
        for page in frozen:
            self.arena.unref_cache(page)  # the pin's reference is now the lease's
        lease.slot = (*frozen, *(self.arena.take_for_lease() for _ in range(self.layout.slot_pages - len(frozen))))
        self._outbox.append((RestoreSlot(frozen, lease.slot, source.position), None))
        if opened is not None:
            self.arena.unref_cache(opened)
            if self.arena.lease_refs(opened) == 1 and not self.arena.cache_refs(opened):
                lease.blocks.append(opened)
            else:  # somebody runs on it
                lease.blocks.append(self._copied(opened))
                self.arena.unref_lease(opened)
        self.stats.takeovers += 1

    def _copied(self, page: int) -> int:
        """A free page that gets the bytes of `page`."""
        own = self.arena.take_for_lease()
        self._outbox.append((CopyPage(page, own), None))
        return own

    # -- parts of running

    def _require_held(self, lease: Lease) -> None:
        if lease.ended:
            raise ConfigError("lease.state", lease.state, "running or closing; this lease has ended")
        if lease not in self._leases:
            raise ConfigError("lease", lease.name, "a lease of this ledger")

    def _require_running(self, lease: Lease, what: str) -> None:
        self._require_held(lease)
        if lease.state != RUNNING:
            raise ConfigError("lease.state", lease.state, f"running, to {what}")

    def _account(self, lease: Lease) -> None:
        """Brings the sums over leases up to date with one lease."""
        active = lease.state == RUNNING
        lacks = max(0, lease._target - len(lease.blocks)) if active else 0
        decodes = int(active and not lacks and lease.position >= lease.prompt_tokens)
        self._lacking += lacks - lease._lacks
        self._decoding += decodes - lease._decodes
        lease._lacks, lease._decodes = lacks, decodes

    def _depth(self, lease: Lease) -> int:
        """Blocks of the lease that are in the index."""
        assert lease._tip is not None
        return lease._tip.depth

    def _open_page(self, lease: Lease) -> int | None:
        inside = self.layout.has_logs and lease.position % self.layout.block_tokens
        return lease.blocks[-1] if inside else None

    def _block(self, lease: Lease, number: int) -> bytes:
        """The encoded tokens of one block, as far as they are known."""
        size = self.layout.block_tokens
        return encode(lease.tokens[number * size : (number + 1) * size])

    def _has_checkpoint(self, lease: Lease) -> bool:
        """Whether a checkpoint at the planned position exists, as far as its tokens are known."""
        if any(made.position == lease.position and made.state != "gone" for made in lease._pending):
            return True
        node = lease._tip
        depth, tail = divmod(lease.position, self.layout.block_tokens)
        if len(lease.tokens) < lease.position:
            return False
        while node is not None and node.depth < depth:
            node = self.index.child(node, self._block(lease, node.depth))
        if node is None or node.depth != depth:
            return False
        return self.index.find(node, encode(lease.tokens[lease.position - tail : lease.position])) is not None

    def _publish(self, lease: Lease) -> None:
        """Puts every full accepted block and every reached checkpoint into the index, in order of position."""
        self._attach_reached(lease)
        while not lease._detached and (self._depth(lease) + 1) * self.layout.block_tokens <= lease.committed:
            self._publish_block(lease)
            self._attach_reached(lease)

    def _publish_block(self, lease: Lease) -> None:
        parent = lease._tip
        assert parent is not None
        block = self._block(lease, parent.depth)
        own = lease.blocks[parent.depth] if self.layout.has_logs else None
        node, is_new = self.index.publish(parent, block, own, self._clock)
        if node is None or (node.page != own and not self.adopt_twins):
            lease._detached = True
            return
        if node.page is not None and own is not None:
            if self.adopt_twins:
                self.index.share_page(parent, block, node.page)
            if node.page != own:
                self.arena.ref_lease(node.page)
                lease.blocks[parent.depth] = node.page
                for made in lease._pending:
                    if made.open_page == own and made.state != "gone":
                        self.index.move_open_page(made, node.page)
                self.arena.unref_lease(own)
        self.stats.twins += not is_new
        self.index.pin(node)
        lease._tip = node
        self.index.unpin(parent, self._clock)

    def _attach_reached(self, lease: Lease) -> None:
        """Lets pending checkpoints of the open block be found whose tokens have all been accepted."""
        size = self.layout.block_tokens
        while lease._pending and lease._pending[0].position <= lease.committed:
            made = lease._pending[0]
            depth = made.position // size
            if depth > self._depth(lease) and not lease._detached:
                return  # its block is published first
            del lease._pending[0]
            if made.state == "gone":
                continue
            assert lease._tip is not None
            tail = encode(lease.tokens[depth * size : made.position])
            if depth != self._depth(lease) or self.index.find(lease._tip, tail) is not None:
                self._drop_pending(made)
            else:
                self.index.attach(made, lease._tip, tail)

    def _drop_pending(self, made: Checkpoint) -> None:
        if made.state != "gone":  # eviction may have been faster
            self.index.discard(made)

    # -- parts of ending

    def _end(self, lease: Lease, state: str) -> None:
        self._require_held(lease)
        self._clock += 1
        lease._ending, lease.state = state, CLOSING
        self._account(lease)
        if not lease.in_flight:
            self._close(lease)

    def _close(self, lease: Lease) -> None:
        """Freezes the slot in place, unless the same checkpoint exists, and lets go of everything else."""
        position, tip = lease.committed, lease._tip
        assert tip is not None and not lease.in_flight
        depth = position // self.layout.block_tokens
        frozen: tuple[int, ...] = ()
        if lease.slot and position and tip.depth == depth:
            tail = encode(lease.tokens[depth * self.layout.block_tokens : position])
            same = self.index.find(tip, tail)
            if same is not None:
                same.stamp = self._clock
            else:
                frozen = lease.slot[: self.layout.checkpoint_pages(position)]
                for page in frozen:
                    self.arena.ref_cache(page)
                made = self.index.add_pending(position, frozen, self._open_page(lease), self._clock)
                self._outbox.append((SaveSlot(lease.slot, frozen, position), made))
                self.index.attach(made, tip, tail)
                self.stats.checkpoints += 1
        for page in lease.slot:
            self.arena.unref_lease(page)
        self._release(lease, lease._ending)
        if lease.state == PREEMPTED:
            self.stats.preempted += 1
        else:
            self.stats.finished += 1

    def _release(self, lease: Lease, state: str) -> None:
        """Drops all but the slot and forgets the lease."""
        assert lease._tip is not None
        for made in lease._pending:
            self._drop_pending(made)
        for page in reversed(lease.blocks):
            self.arena.unref_lease(page)
        self.index.unpin(lease._tip, self._clock)
        lease.state = state
        lease.blocks, lease.slot, lease._pending, lease._tip = [], (), [], None
        self._account(lease)
        del self._leases[lease]


def _public(hit: Hit) -> Hit:
    """The hit without its objects in the index, which would live as long as it does."""
    return replace(hit, checkpoint=None, node=None)
