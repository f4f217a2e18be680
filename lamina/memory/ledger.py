"""The only writer of arena and index: who may run, what each request holds, what is kept and what is evicted.

Every call either does all of what it says or changes nothing. Orders (copies of pages) are collected in an outbox; they
and the steps run on one stream in the order of the calls, so a page that is freed may be given away at once.
docs/ledger.md states the effect of each call.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, replace

from lamina.base.errors import ConfigError
from lamina.memory.arena import Arena
from lamina.memory.check import check_books, check_pins, check_windows
from lamina.memory.decodes import Decodes
from lamina.memory.layout import Layout
from lamina.memory.lease import Hold, Lease, Lookups, PageCounts, Refused, Stats, Wait, public, refused, waiting
from lamina.memory.movers import Movers
from lamina.memory.orders import CopyPage, Order, RestoreSlot, SaveSlot
from lamina.memory.pins import Pins
from lamina.memory.prefix import PROMPT_LOGPROBS, Checkpoint, Hit, PrefixIndex
from lamina.memory.publisher import Publisher
from lamina.memory.states import CANCELLED, CLOSING, FINISHED, PREEMPTED, RUNNING
from lamina.memory.takeover import take_over
from lamina.memory.tokens import Prompt, checked_ids
from lamina.memory.windows import Windows


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
        self.min_checkpoint_gain = min_checkpoint_gain
        self.stats = Stats()
        self.lookups = Lookups()  # kept by whoever admits: once a request
        self.arena = Arena(num_pages)
        self.index = PrefixIndex(self.arena, layout, model_id)
        self._windows = Windows(self.arena, layout, self._account)
        self._publisher = Publisher(layout, self.arena, self.index, self._windows, self.stats, adopt_twins)
        self._movers = Movers(self.arena, self.index)
        self.pins = Pins(self.arena, self.index)
        self.decodes = Decodes(layout, lambda: self._spare, self.extend, self.new_blocks, self.commit)
        self._leases: dict[Lease, None] = {}  # in order of admission
        self._outbox: list[tuple[Order, Checkpoint | None]] = []
        self._clock = 0
        self._lacking = 0  # pages that admitted prefills still lack
        self._decoding = 0  # running decodes
        self._decode_pages = layout.has_logs + sum(tail.pages for tail in layout.tails)  # what the next token may take

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
    def room_to_admit(self) -> int:
        """Pages that an admission could have if it shared none. O(1)."""
        return self._spare - self._decoding * self._decode_pages

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
        slots, tails = len(self._leases) * self.layout.slot_pages, self._windows.num_pages
        frozen, pinned = self.index.num_checkpoint_pages, self.index.num_pinned_checkpoint_pages
        blocks = self.arena.held - slots - tails - pinned
        cached = self.arena.evictable + self.arena.pinned - (frozen - pinned)
        return PageCounts(self.arena.free, blocks, tails, slots, cached, frozen)

    def all_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that can be hit, then pending ones. O(nodes + leases)."""
        return (*self.index.checkpoints, *(made for lease in self._leases for made in lease._pending if made.state != "gone"))

    def prompt(self, tokens: Sequence[int], salt: str = "") -> Prompt:
        """Tokens that may be looked up or admitted several times, checked and encoded once. Raises ConfigError."""
        return self.index.prompt(tokens, salt)

    def longest(self, tokens: Sequence[int] | Prompt, salt: str = "", limit: int | None = None) -> Hit:
        """What an admission of these tokens would reuse now. Changes nothing.

        limit  the largest position wanted; None: as admission would, all tokens where a hidden vector is kept, else one less.
        """
        prompt = self._as_prompt(tokens, salt)
        if limit is None:
            limit = self._hit_limit(len(prompt))
        return public(self._lookup(prompt, max(0, min(limit, len(prompt)))))

    def take_orders(self) -> tuple[Order, ...]:
        """Empties the outbox: the copies to carry out, in order. Copies into checkpoints that are gone unread are left out."""
        orders = tuple(order for order, target in self._outbox if target is None or target.state != "gone" or target.was_read)
        self._outbox.clear()
        return orders

    # -- admission

    def admit(
        self, tokens: Sequence[int] | Prompt, max_new: int, salt: str = "", name: str = "", use_cache: bool = True,
        owner: str = "",
    ) -> Lease | Wait | Refused:  # fmt: skip
        """A lease at the position of the longest hit, or why there is none.

        tokens     all tokens known, at least one; a request that resumes passes its answer so far as well. A `Prompt` (which
                   brings its own salt) saves encoding them again.
        max_new    tokens that may still be sampled. The last one is never computed, so the request ends at position
                   len(tokens) + max(max_new - 1, 0); it is Refused only if that many do not fit into an empty arena.
        use_cache  False: compute everything (prompt log-probs); what fills is still published.
        owner      a short text kept with what it publishes first.
        Takes the slot and copies of the blocks that the hit ends inside; the rest of the prompt is reserved.
        """
        prompt = self._as_prompt(tokens, salt)
        if not len(prompt):
            raise ConfigError("tokens", "[]", "at least one token")
        if max_new < 0:
            raise ConfigError("max_new", max_new, "at least 0")
        never = self._refusal(len(prompt), max_new)
        if never is not None:
            return never
        found = self._lookup(prompt, self._hit_limit(len(prompt)))
        junction = self._junction(found, len(prompt))
        if not use_cache:
            root = self.index.root(prompt)
            found = replace(
                found, position=0, log_tokens=0, replayed=False, reason=PROMPT_LOGPROBS, checkpoint=None, node=root
            )  # fmt: skip
        assert found.node is not None
        path = self.index.path_pages(found.node)
        target = len(prompt) + (1 if max_new > 1 else 0)
        wait = self._wait(target, path, found.checkpoint)
        while wait is not None and self.pins and not self._leases and not self._movers.holds:
            self.drop_pin(name)
            wait = self._wait(target, path, found.checkpoint)
        if wait is not None:
            return wait
        self._clock += 1
        lease = Lease(
            name, prompt.salt, prompt.ids[:], len(prompt), max_new, public(found), found.position, found.position, junction,
            blocks=path, tails=[{} for _ in self.layout.tails], write_from=found.log_tokens,
            valid_from=found.position if found.replayed else 0, owner=owner,
        )  # fmt: skip
        lease._prompt, lease._target, lease._tip = prompt, target, found.node
        self.arena.ref_many_for_lease(path)
        self.index.pin(found.node)
        self._fill_slot(lease, found.checkpoint)
        if found.position:
            self.index.use(found.node, self._clock)
        self._leases[lease] = None
        self._account(lease)
        self.stats.admitted += 1
        self.stats.prompt_tokens += len(prompt)
        self.stats.hits += found.position > 0
        self.stats.hit_tokens += found.position
        self.stats.replays += found.replayed
        self.stats.replayed_tokens += found.log_tokens - found.position if found.replayed else 0
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
        tokens = self.prompt(lease.tokens[: lease.committed], lease.salt)
        never = self._refusal(len(tokens), max_new)
        if never is not None:
            return never
        if not lease.in_flight and not lease._detached and self._hit_limit(len(tokens)) == len(tokens):
            path = lease.blocks[: lease.committed // self.layout.block_tokens]
            wait = self._wait(len(tokens) + (1 if max_new > 1 else 0), path, None, self._windows.pages_to_fork(lease))
            if wait is not None:
                return wait
            self.checkpoint(lease)
        return self.admit(tokens, max_new, name=name)

    # -- running

    def can_extend(self, lease: Lease, n: int) -> bool:
        """Whether `extend(lease, n)` would succeed."""
        self._require_running(lease, "extend")
        if n < 0:
            raise ConfigError("n", n, "at least 0")
        gives_way = len(self.pins) and len(self._leases) == 1 and not self._movers.holds
        return self._needed(lease, n) <= max(0, self._spare + lease._lacks + (self.arena.pinned if gives_way else 0))

    def room(self, lease: Lease, n: int) -> int:
        """The most tokens, at most n, that `extend` would plan now."""
        if self.can_extend(lease, n):
            return n
        low, high = 0, n - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.can_extend(lease, middle) else (low, middle - 1)
        return low

    def extend(self, lease: Lease, n: int) -> bool:
        """Plans n more tokens: takes exactly the pages they need, evicting if it must.

        False, and nothing has changed, where there is no page that admitted prefills do not lack: preempt someone.
        """
        if n == 1 and lease._decodes and lease.position % self.layout.block_tokens and not self.layout.tails:
            lease.position += 1  # a decode inside its open block: no page, and nothing to be counted anew
            return True
        if not self.can_extend(lease, n):
            return False
        while self.pins and self._needed(lease, n) > max(0, self._spare + lease._lacks):
            self.drop_pin(lease.name)
        self._clock += 1
        self.index.make_free(self._needed(lease, n), self._clock, lease.name)
        lease.position += n
        if self.layout.has_logs:
            need = self.layout.blocks_for(lease.position) - len(lease.blocks)
            if need > 0:
                lease.blocks += self.arena.take_many_for_lease(need)
        if self.layout.tails:
            lease.cuts += [lease.position] if n else []
            self._windows.grow(lease, lease.position)
        self._account(lease)
        return True

    def new_blocks(self, lease: Lease) -> tuple[int, tuple[int, ...]]:
        """(number of the first, pages) of the blocks of the table that are new or changed since the last call. O(these)."""
        first = min(lease._changed_from, len(lease.blocks))
        lease._changed_from = len(lease.blocks)
        return first, tuple(lease.blocks[first:])

    def commit(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The ids of the oldest in-flight tokens, now accepted: publishes each block that filled.

        Raises ConfigError for more tokens than are in flight and for ids that differ from those known (the prompt).
        After the end of the lease it is ignored and counted.
        """
        seen = lease.committed + 1
        if len(tokens) == 1 and lease._decodes and len(lease.tokens) < seen <= lease.position and not lease._pending:
            token, is_inside = tokens[0], seen % self.layout.block_tokens
            if is_inside and not self.layout.tails and type(token) is int and 0 <= token < 1 << 31:
                lease.tokens.append(token)  # a decode that fills no block: nothing to publish
                lease.committed = seen
                return
        if lease.ended:
            self.stats.stale_commits += 1
            return
        self._require_held(lease)
        ids = checked_ids(tokens)
        if len(ids) > lease.in_flight:
            raise ConfigError("len(tokens)", len(ids), f"at most the {lease.in_flight} in flight")
        known = lease.tokens[lease.committed : lease.committed + len(ids)]
        if known != ids[: len(known)]:
            where = f"the known tokens from position {lease.committed} on, {list(known)}"
            raise ConfigError("tokens", list(ids[: len(known)]), where)
        self._clock += 1
        lease.tokens.extend(ids[len(known) :])
        lease.committed += len(ids)
        if self.layout.tails:
            del lease.cuts[: bisect_right(lease.cuts, lease.committed)]
            self._windows.trim(lease)
            self._account(lease)
        self._publisher.publish(lease, self._clock)
        if lease.state == CLOSING and not lease.in_flight:
            self._close(lease)

    def rollback(self, lease: Lease, n: int) -> None:
        """Takes back the newest n in-flight tokens (rejected drafts, a failed step) with their blocks and checkpoints.

        Raises ConfigError for more tokens than are in flight, and for a position inside a step longer than a large window.
        """
        self._require_held(lease)
        if not 0 <= n <= lease.in_flight:
            raise ConfigError("n", n, f"from 0 to the {lease.in_flight} in flight")
        position = lease.position - n
        if position > lease.committed and not self._windows.is_whole(lease, position):
            raise ConfigError("n", n, "a step's border: its windows were not stored in between")
        self._clock += 1
        lease.position = position
        while lease._pending and lease._pending[-1].position > position:
            self._publisher.drop_pending(lease._pending.pop())
        del lease.cuts[bisect_right(lease.cuts, position) :]
        if self.layout.tails and position > max([lease.committed, *lease.cuts[-1:]]):
            lease.cuts.append(position)
        keep = max(self._blocks(position), self._publisher.depth(lease))
        while len(lease.blocks) > keep and self.layout.has_logs:
            self.arena.unref_lease(lease.blocks.pop())
        lease._changed_from = min(lease._changed_from, len(lease.blocks))
        if self.layout.tails:
            self._windows.trim(lease)
        self._account(lease)
        if lease.state == CLOSING and not lease.in_flight:
            self._close(lease)

    def checkpoint(self, lease: Lease, lasts: bool = False) -> bool:
        """Freezes a copy of the slot at the planned position; hits find it once commit is there. lasts  see Checkpoint.

        False where the model needs none, nothing has been computed, one is there already, the slot is being rebuilt, the
        lease's blocks are not in the index (twins not adopted), or no page can be had beyond what admitted prefills lack.
        """
        self._require_running(lease, "checkpoint")
        position = lease.position
        if not self.layout.has_state or not position or not lease.is_exact or self._publisher.has_checkpoint(lease):
            return False
        if lease._detached and position // self.layout.block_tokens > self._publisher.depth(lease):
            return False
        count = self.layout.checkpoint_pages(position)
        if count > self._spare:
            self.stats.checkpoints_skipped += 1
            return False
        self._clock += 1
        self.index.make_free(count, self._clock, lease.name)
        pages = tuple(self.arena.take_for_cache() for _ in range(count))
        tails = self._windows.frozen(lease, position)
        made = self.index.add_pending(position, pages, self._publisher.open_page(lease, position), self._clock, tails)
        made.uses, made.owner, made.is_lasting = int(position == lease.junction), lease.owner, lasts  # a second one has come by
        if pages:
            self._outbox.append((SaveSlot(lease.slot, pages, position), made))
        lease._pending.append(made)
        self.stats.checkpoints += 1
        self._publisher.publish(lease, self._clock)
        return True

    # -- movers

    def hold(self, tokens: Sequence[int] | Prompt, salt: str = "") -> Hold | None:
        """Keeps what is stored of these tokens where it is until `release`: the longest hit that needs no replay.

        None where nothing is stored. The bytes below its position never change, whatever else runs or ends (I14).
        """
        prompt = self._as_prompt(tokens, salt)
        self._clock += 1
        return self._movers.hold(self._lookup(prompt, len(prompt)))

    def release(self, held: Hold) -> None:
        """The move is done, or given up. Raises ConfigError for a hold that is not held."""
        self._clock += 1
        self._movers.release(held, self._clock)

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
        self.arena.unref_many_for_lease(lease.slot)
        self._give_up(lease, CANCELLED)
        self.stats.cancelled += 1

    def drop_index(self) -> None:
        """Evicts everything that no lease stands on; with no lease, every page is free afterwards."""
        self._clock += 1
        self.index.evict_all(self._clock, "drop_index")

    def tick(self) -> int:
        """The next moment of its clock, for what is done to the index from outside."""
        self._clock += 1
        return self._clock

    def drop_pin(self, whom: str) -> None:
        """The oldest pin of a user gives way to a request."""
        self.pins.drop_oldest(whom)
        self.recount()

    def recount(self) -> None:
        """Brings what is reserved up to date after pins have changed: a pinned window does not come back when it is left."""
        for lease in self._leases if self.layout.tails else ():
            self._account(lease)

    def check(self) -> None:
        """Asserts I1, I2, I3, I10 and the reservations of I12. O(pages + blocks), for tests and for an idle engine."""
        check_books(self.layout, self.arena, self.index, self.leases, self._movers.holds)
        check_pins(self.arena, self.index, self.pins.all)
        assert self._lacking == sum(lease._lacks for lease in self._leases), "I12: reservations are miscounted"
        assert self._decoding == sum(lease._decodes for lease in self._leases), "I12: decodes are miscounted"
        assert self._movers.holds or self._lacking <= self.arena.free + self.arena.evictable, "I12: a prefill cannot be finished"
        for lease in self._leases:
            assert lease.state == CLOSING or lease._lacks == self._lacks(lease), "I12: a lack is stale"
        check_windows(self.leases, self._windows.num_pages)
        assert self.pages().total == self.num_pages and min(astuple(self.pages())) >= 0, "I1: pages do not add up"

    # -- parts of admission

    def _as_prompt(self, tokens: Sequence[int] | Prompt, salt: str) -> Prompt:
        return tokens if isinstance(tokens, Prompt) else self.index.prompt(tokens, salt)

    def _blocks(self, num_tokens: int) -> int:
        return self.layout.block_pages(num_tokens)

    def _hit_limit(self, num_tokens: int) -> int:
        """The deepest useful hit: without a hidden vector one token must be computed to get logits."""
        return num_tokens if self.layout.hidden is not None and self.layout.slot_pages else max(0, num_tokens - 1)

    def _lookup(self, prompt: Prompt, limit: int) -> Hit:
        return self.index.longest(prompt, limit, self.min_checkpoint_gain)

    def _junction(self, hit: Hit, num_tokens: int) -> int | None:
        worth = self.layout.has_state and hit.seen_before - hit.position >= max(1, self.min_checkpoint_gain)
        return hit.seen_before if worth and hit.seen_before < num_tokens else None

    def _refusal(self, num_tokens: int, max_new: int) -> Refused | None:
        last = num_tokens + max(max_new - 1, 0)
        needed = self.layout.peak_pages(last)
        return None if needed <= self.num_pages else refused(self.layout, self.num_pages, num_tokens, max_new)

    def _wait(self, target: int, path: list[int], source: Checkpoint | None, more: int = 0) -> Wait | None:
        """Why a request of `target` tokens (and `more` pages) that shares `path` cannot be admitted now; None if it can."""
        needed = self.layout.peak_pages(target) - len(path) + more
        pinned = sum(1 for page in path if self.arena.is_evictable(page))
        reserved = self._lacking + self._decoding * self._decode_pages
        if source is not None and self.layout.tails:
            # Shared pages that nobody else runs on are not needed again, but not to be had by evicting either. One that a
            # request runs on counts in full for both: it may let go of it and take another while this one keeps it.
            shared = {page for page in source.shared_pages if page != source.open_page}
            idle = sum(1 for page in shared if self.arena.is_evictable(page))
            needed = max(needed - idle + self._windows.open_pages(source), 0)
            pinned += idle
            reserved += self._windows.num_sole(shared)
        available = max(0, self.arena.free + self.arena.evictable - pinned - reserved)
        if needed <= available and not (self._movers.holds and self._is_stuck(path, source)):
            return None
        if not self._leases and not self._movers.holds and not self.pins and needed <= available + pinned:
            return None  # the hit's own pages are given up for it
        assert self._leases or self._movers.holds or self.pins, "I12: nothing runs, yet a request that fits alone would wait"
        could = f"{self.arena.free} free and {self.arena.evictable - pinned} evictable"
        return waiting(self.layout, target, needed, available, len(path), could, reserved)

    def _is_stuck(self, path: list[int], source: Checkpoint | None) -> bool:
        """Whether a mover holds the checkpoint that would have to become the slot, as there is no room to copy it."""
        if source is None or not source.pins:
            return False
        pinned = sum(1 for page in path if self.arena.is_evictable(page))
        return self._copies(source, len(path)) > self.arena.free + self.arena.evictable - pinned

    def _copies(self, source: Checkpoint, num_blocks: int) -> int:
        """Pages that a request which goes on from a checkpoint takes at once."""
        has_own = source.open_page is not None and source.position // self.layout.block_tokens >= num_blocks
        return self.layout.slot_pages + has_own + self._windows.open_pages(source)

    def _fill_slot(self, lease: Lease, source: Checkpoint | None) -> None:
        """Takes the slot and, of blocks that the hit ends inside, copies; orders these."""
        if source is None:
            self.index.make_free(self.layout.slot_pages, self._clock, lease.name)
            lease.slot = tuple(self.arena.take_many_for_lease(self.layout.slot_pages))
            return
        is_inside = source.open_page is not None and source.position // self.layout.block_tokens >= len(lease.blocks)
        opened = source.open_page if is_inside else None
        self.index.pin_checkpoint(source)
        source.was_read = True
        self.index.use_checkpoint(source, self._clock)
        count = self._copies(source, len(lease.blocks))
        if count <= self.arena.free + self.arena.evictable:
            self.index.make_free(count, self._clock, lease.name)
            lease.slot = tuple(self.arena.take_many_for_lease(self.layout.slot_pages))
            if lease.slot:
                self._outbox.append((RestoreSlot(source.pages, lease.slot, source.position), None))
            if opened is not None:
                lease.blocks.append(self._copied(opened))
            for old, own in self._windows.share(lease, source):
                self._outbox.append((CopyPage(old, own), None))
            self.index.unpin_checkpoint(source, self._clock)
            return
        self.index.evict_all(self._clock, lease.name)
        give = lambda order: self._outbox.append((order, None))
        take_over(lease, source, opened, self.index, self._windows, give, self._copied)
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

    @property
    def _spare(self) -> int:
        """Pages to be had beyond what admitted prefills lack."""
        return self.arena.free + self.arena.evictable - self._lacking

    def _needed(self, lease: Lease, n: int) -> int:
        """Pages that n more tokens take."""
        position = lease.position + n
        need = max(0, self._blocks(position) - len(lease.blocks)) if self.layout.has_logs else 0
        return need + (self._windows.lacking(lease, position) if self.layout.tails else 0)

    def _lacks(self, lease: Lease) -> int:
        """Pages that an admitted prompt may still need until its last token is computed."""
        if lease.state != RUNNING or lease.committed >= lease._target:  # what is in flight may be rolled back
            return 0
        need, held = self._blocks(lease._target), len(lease.blocks)
        if self.layout.tails:
            own = lease._own_window_pages - (self._windows.num_pinned(lease) if self.pins else 0)
            need, held = need + self.layout.most_tail_pages(lease._target), held + own
        return max(0, need - held)

    def _account(self, lease: Lease) -> None:
        """Brings the sums over leases up to date with one lease."""
        lacks = self._lacks(lease)
        decodes = int(lease.state == RUNNING and not lacks and lease.position >= lease.prompt_tokens)
        self._lacking += lacks - lease._lacks
        self._decoding += decodes - lease._decodes
        lease._lacks, lease._decodes = lacks, decodes

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
        position = lease.committed
        assert not lease.in_flight
        if self.layout.has_state and position and lease.is_exact and self._windows.is_whole(lease, position):
            order = self._publisher.freeze(lease, position, self._clock)
            if order is not None and order[0].checkpoint:
                self._outbox.append(order)
        self.arena.unref_many_for_lease(lease.slot)
        self._give_up(lease, lease._ending)
        if lease.state == PREEMPTED:
            self.stats.preempted += 1
        else:
            self.stats.finished += 1

    def _give_up(self, lease: Lease, state: str) -> None:
        """Drops all but the slot and forgets the lease."""
        assert lease._tip is not None
        for made in lease._pending:
            self._publisher.drop_pending(made)
        self.arena.unref_many_for_lease(lease.blocks)
        self._windows.drop_all(lease)
        self.index.unpin(lease._tip, self._clock)
        lease.state = state
        lease.blocks, lease.slot, lease.cuts, lease._pending, lease._tip, lease._prompt = [], (), [], [], None, None
        self._account(lease)
        del self._leases[lease]
