"""Random traces over a ledger's public face, with a pretend device and independent oracles after every call."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import pytest

from lamina.base.errors import CapacityError, ConfigError
from lamina.memory import kept
from lamina.memory.layout import Layout
from lamina.memory.lease import Hold, Lease, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.prefix import Checkpoint, Hit, Node
from tests.memory.device import FREE, Device, prefix_digest

OPS = (*["admit"] * 4, *["extend"] * 7, *["commit"] * 5, *["checkpoint"] * 2, *["preempt"] * 2, "finish", "cancel",
       "rollback", "fork", "lookup", "hold", "release", "forget", "keep")  # fmt: skip
SALTS = ("", "other")
#: prompts begin with one of these, so that paths are shared, left and met again
STEMS = ((0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1), (0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0), (1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 1, 0))


@dataclass(eq=False)
class Run:
    """What the trace knows about one lease, by its own book-keeping."""

    lease: Lease
    salt: str
    truth: list[int]  # the tokens that the device has really computed, then what is left of the prompt
    prompt: int
    max_new: int
    position: int
    committed: int
    ending: str = ""
    frozen_slot: tuple[int, ...] = field(default=())


class Trace:
    """Drives one ledger. Every `step` is one call; small integers choose it, so that failures shrink well.

    lag      how many calls later than planned orders are looked at; 0: carried out at once.
    """

    def __init__(self, layout: Layout, num_pages: int, adopt_twins: bool = True, gain: int = 1, deep: int = 4) -> None:
        self.layout = layout
        self.ledger = Ledger(layout, num_pages, adopt_twins=adopt_twins, min_checkpoint_gain=gain)
        self.device = Device(layout, num_pages)
        self.gain = gain
        self.keeps = True  # users pin and drop
        self.adopt_twins = adopt_twins
        self.deep = deep  # all bytes are compared every so many steps
        self.runs: list[Run] = []
        self.holds: list[tuple[Hold, str, list[int]]] = []
        self.read: list[Checkpoint] = []  # by movers: these keep their own pages
        self.accepted: set[tuple[str, tuple[int, ...]]] = set()
        self.past: list[tuple[str, list[int]]] = []  # what ended, newest last
        self.replay = int(min(layout.replay, 1 << 30))
        self.count = 0
        self.late = 0
        self.seen = {"hit": 0, "wait": 0, "refused": 0, "full": 0, "twins": 0, "replayed": 0, "held": 0}
        self.seen |= {"pinned": 0, "dropped": 0, "guessed": 0}

    # -- one call

    def step(self, op: int, x: int, y: int, z: int) -> None:
        """One call and all checks. Raises AssertionError where an invariant is broken."""
        self.count += 1
        name = OPS[op % len(OPS)]
        if name == "admit":
            salt, tokens = self.prompt(x, y, z)
            self.admit(tokens or [1], z % 6 + z % 3 * self.layout.draft_tokens, salt, z % 11 != 0)
        elif name == "lookup":
            salt, tokens = self.prompt(x, y, z)
            self.check_lookup(tokens, salt, None if z % 3 else z % 14)
            if z % 17 == 0:
                self.ledger.drop_index()
        elif name == "forget":
            for made in [c for c in self.ledger.index.checkpoints if c.evictable][x % 2 :]:
                self.ledger.index.discard(made)  # as an eviction would: what is left is the log
            if self.past and y % 3:
                salt, tokens = max(self.past, key=lambda item: len(item[1]))
                self.admit([*tokens, *[z & 1] * (x % 3)] or [1], z % 6, salt)
        elif name == "hold":
            self.hold(*self.prompt(x, y | 1, z))
        elif name == "keep":
            if self.keeps:
                self.keep(x, y)
        elif name == "release":
            if self.holds:
                self.ledger.release(self.holds.pop(x % len(self.holds))[0])
        elif self.runs:
            self.call(name, self.runs[x % len(self.runs)], y, z)
        self.settle()
        self.check()

    def prompt(self, x: int, y: int, z: int) -> tuple[str, list[int]]:
        """Something new, something half known, or something that has run before, perhaps continued."""
        more = [z >> bit & 1 for bit in range(x % 9)]
        if y % 2 and self.past:
            salt, tokens = self.past[z % len(self.past)]
            return salt, [*tokens, *more[: x % 3]]
        return SALTS[(x + y) % 7 == 0], [*STEMS[x % 3][: y % 13], *more]

    def call(self, name: str, run: Run, y: int, z: int) -> None:
        """A call about one lease."""
        lease = run.lease
        if lease.state == "closing" and name in ("extend", "checkpoint", "fork"):
            name = "commit"
        if name == "extend" and self.layout.draft_tokens and z % 2 and self.may_guess(run):
            self.guess(run, y, z)
        elif name == "extend":
            self.extend(run, y % 7, z)
        elif name == "commit":
            n = y % (run.position - run.committed + 1) if z % 2 else run.position - run.committed
            if self.layout.tails and run.committed + n not in lease.cuts:  # between these nothing of a large window was stored
                n = run.position - run.committed
            self.commit(run, n)
        elif name == "checkpoint":
            before = self.state()
            if not self.ledger.checkpoint(lease):
                assert self.state() == before, "a failing checkpoint changed something"
        elif name == "preempt":
            self.end(run, "preempted")
        elif name == "finish":
            self.end(run, "finished")
        elif name == "cancel":
            self.ledger.cancel(lease)
            self.forget(run, "cancelled")
            self.late_commit(run)
        elif name == "rollback":
            n = y % (run.position - run.committed + 1)
            self.rollback(run, n)
        elif name == "fork" and run.committed:
            before = self.state()
            child = self.ledger.fork(lease, z % 5, f"fork {self.count}")
            if isinstance(child, Lease):
                self.started(child, run.truth[: run.committed], z % 5, run.salt)
            else:
                assert self.state() == before, "a failing fork changed something"

    def admit(self, tokens: Sequence[int], max_new: int, salt: str, use_cache: bool = True) -> Run | Wait | Refused:
        hit = self.check_lookup(tokens, salt, None)
        before = self.state()
        needed, available, total = self.room(tokens, max_new, hit if use_cache else None)
        result = self.ledger.admit(tokens, max_new, salt, f"request {self.count}", use_cache)
        if isinstance(result, Refused):
            slack = sum(tail.pages for tail in self.layout.tails)  # a window may start anywhere in a block
            assert result.needed > self.ledger.num_pages, "I12: refused, though it fits alone"
            assert 0 <= result.needed - total <= slack, "I12: refused, though it fits alone"
        elif isinstance(result, Wait):
            assert self.runs or self.holds, "I12: waits, though nothing runs"
            if not self.layout.tails and not self.holds:
                assert needed > available, f"I12: waits, though {needed} pages of {available} would do"
                assert (result.needed, result.available) == (needed, available)
        if not isinstance(result, Lease):
            assert self.state() == before, "a failing admission changed something"
            self.seen["wait" if isinstance(result, Wait) else "refused"] += 1
            return result
        assert total <= self.ledger.num_pages, "admitted, though it can never fit"
        assert self.layout.tails or needed <= available, "I12: admitted over what is reserved"
        assert result.position == (hit.position if use_cache else 0)
        assert result.write_from == (hit.log_tokens if use_cache else 0)
        assert result.valid_from == (hit.position if use_cache and hit.replayed else 0)
        self.seen["replayed"] += use_cache and hit.replayed
        parts = hit.seen_before
        worth = self.layout.has_state and parts < len(tokens) and parts - hit.position >= max(1, self.gain)
        assert result.junction == (parts if worth else None), "the junction is wrong"
        self.seen["hit"] += result.position > 0
        self.seen["full"] += result.position == len(tokens)
        return self.started(result, tokens, max_new, salt)

    def started(self, lease: Lease, tokens: Sequence[int], max_new: int, salt: str) -> Run:
        run = Run(lease, salt, list(tokens), len(tokens), max_new, lease.position, lease.position)
        self.runs.append(run)
        return run

    def extend(self, run: Run, n: int, z: int) -> bool:
        lease = run.lease
        if lease.junction is not None and lease.position < lease.junction < lease.position + n:
            n = lease.junction - lease.position
        n = min(n, max(run.prompt + max(run.max_new, 1) - 1 - run.position, 0))
        before = self.state()
        most = self.ledger.room(lease, n)
        assert 0 <= most <= n and (most == n or not self.ledger.can_extend(lease, most + 1)), "room is not the most"
        possible = self.ledger.can_extend(lease, n)
        decodes, is_decode = self.ledger.decodes, n == 1 and run.position >= run.prompt
        if is_decode and z % 2 and decodes.are_alike and decodes.extend([lease]):
            assert possible, "decodes together got more than one by one"
        else:
            assert self.state() == before, "a failing extend changed something"
            assert self.ledger.extend(lease, n) == possible == (most == n)
        if not possible:
            assert self.state() == before, "a failing extend changed something"
            waits = self.layout.tails and run.position > run.committed  # windows of the step before come back first
            goes_on = bool(self.holds or most)
            assert goes_on or run.position >= run.prompt or waits, "I12: an admitted request cannot finish its prompt"
            assert goes_on or len(self.runs) > 1 or run.position > run.committed, "I12: one that fits alone cannot go on"
            if self.layout.tails and most:
                return self.extend(run, most, z)
            return False
        start, stop = run.position, run.position + n
        while len(run.truth) < stop:
            run.truth.append(z >> len(run.truth) % 5 & 1)
        run.position = stop
        self.settle()  # orders so far come before this slice
        self.check_written(run, start)
        self.device.compute(run.salt, run.truth, start, stop, lease.blocks, lease.slot, lease)
        if lease.position == lease.junction:
            self.ledger.checkpoint(lease)
        return True

    def may_guess(self, run: Run) -> bool:
        return run.prompt <= run.position == run.committed and run.position >= run.lease.write_from

    def guess(self, run: Run, y: int, z: int) -> None:
        """A token and guesses of what follows, of which the first few are right; now and then the request ends meanwhile."""
        lease, start = run.lease, run.position
        most = min(self.layout.draft_tokens, run.prompt + max(run.max_new, 1) - 2 - start)
        if lease.junction is not None and lease.junction > start:
            most = min(most, lease.junction - start - 2)
        most = self.layout.most_guesses(start, max(self.ledger.room(lease, 1 + most) - 1, 0)) if most > 0 else 0
        if most < 1:
            return
        count = 1 + y % most
        right = (y >> 4) % (count + 1)
        assert self.ledger.extend(lease, 1 + count)
        run.position = start + 1 + count
        self.settle()
        self.check_written(run, start)
        while len(run.truth) < start + 1 + right:
            run.truth.append(z >> len(run.truth) % 5 & 1)
        wrong = [z >> place & 1 for place in range(count - right)]
        self.device.compute(run.salt, [*run.truth, *wrong], start, run.position, lease.blocks, lease.slot, lease)
        self.seen["guessed"] += 1
        if z % 7 == 1:
            self.end(run, "preempted" if y % 2 else "finished")
        for _ in range(1 + right):
            self.commit(run, 1)
            self.ledger.check()
        if right < count:
            self.ledger.rollback(lease, count - right)
            run.position = run.committed
            self.closed(run)

    def commit(self, run: Run, n: int) -> None:
        lease = run.lease
        tokens = run.truth[run.committed : run.committed + n]
        for end in range(run.committed + 1, run.committed + n + 1):
            self.accepted.add((run.salt, tuple(run.truth[:end])))
        run.committed += n
        if n == 1 and run.committed % 3:
            self.ledger.decodes.commit([lease], tokens)
        else:
            self.ledger.commit(lease, tokens)
        if lease.state == "running" and self.adopt_twins and self.layout.has_logs:
            self.check_moved(run, max(run.committed - n, lease.write_from) // self.layout.block_tokens)
        self.closed(run)

    def check_moved(self, run: Run, first: int) -> None:
        """Checkpoints inside a block that has just been published hold the published page, not one of their own."""
        size = self.layout.block_tokens
        known = self.stored(run.salt)
        for number in range(first, run.committed // size):
            for tokens, item in known:
                is_inside = isinstance(item, Checkpoint) and item.position // size == number and item not in self.read
                if isinstance(item, Checkpoint) and is_inside and tuple(run.truth[: len(tokens)]) == tokens:
                    assert item.open_page in (None, run.lease.blocks[number]), "I1: a checkpoint keeps the page of a twin"

    def rollback(self, run: Run, n: int) -> None:
        self.settle()
        position = run.position - n
        if position > run.committed and not self.ledger._windows.is_whole(run.lease, position):
            before = self.state()
            with pytest.raises(ConfigError):
                self.ledger.rollback(run.lease, n)
            assert self.state() == before
            return
        if n:  # drafts are kept out of folds and live rows
            lease = run.lease
            writable = Lease(
                lease.name, run.salt, lease.tokens, 0, 0, lease.hit, 0, 0, None, write_from=1 << 30, valid_from=lease.valid_from,
                tails=[{} for _ in self.layout.tails],
            )  # fmt: skip
            self.device.compute(run.salt, run.truth, max(0, position - 8), position, [], lease.slot, writable)
        self.ledger.rollback(run.lease, n)
        run.position = position
        del run.truth[max(run.position, run.prompt) :]
        self.closed(run)

    def digest(self, run: Run, seen: int) -> bytes:
        return prefix_digest(run.salt, tuple(run.truth[:seen]))

    def end(self, run: Run, state: str) -> None:
        run.ending = state
        (self.ledger.preempt if state == "preempted" else self.ledger.finish)(run.lease)
        assert run.lease.state == (state if run.position == run.committed else "closing")
        self.closed(run)

    def closed(self, run: Run) -> None:
        """An ending takes effect when nothing is in flight; what it leaves can be hit in full."""
        if not run.ending or run.position != run.committed:
            return
        self.forget(run, run.ending)
        if self.layout.has_state and run.committed and self.adopt_twins and run.lease._is_exact_at(run.committed):
            found = self.ledger.longest(run.truth[: run.committed], run.salt, run.committed)
            assert found.position == run.committed, "I4: what has been frozen is not found"
        self.late_commit(run)

    def forget(self, run: Run, state: str) -> None:
        assert run.lease.state == state and not run.lease.blocks and not run.lease.slot
        self.runs.remove(run)
        self.past = [*self.past[-5:], (run.salt, run.truth[: run.committed])]

    def late_commit(self, run: Run) -> None:
        before = self.state()
        self.ledger.commit(run.lease, [1, 0])
        self.late += 1
        assert self.ledger.stale_commits == self.late and self.state() == before, "a late commit changed something"

    # -- what users keep

    def keep(self, x: int, y: int) -> None:
        """Pins, unpins or drops a prefix; what cannot be done changes nothing."""
        pins = [pin.key.hex() for pin in self.ledger.pins.all]
        if x % 4 == 3 and pins:
            kept.unpin(self.ledger, pins[y % len(pins)])
            return
        listed = kept.prefixes(self.ledger, 1 << 30)
        if not listed:
            return
        row, before, free = listed[y % len(listed)], self.state(), self.ledger.free_pages
        assert row.is_pinned == (row.key in pins)
        if x % 4 < 2:
            try:
                kept.pin(self.ledger, row.key)
                self.seen["pinned"] += 1
            except CapacityError:
                assert self.state() == before, "a failing pin changed something"
        elif not row.is_pinned:
            freed = kept.drop(self.ledger, row.key)
            assert freed == self.ledger.free_pages - free
            assert freed == row.pages or self.runs or self.holds or self.ledger.pins, "I6: dropped pages are not free"
            left = {one.key: one.checkpoints for one in kept.prefixes(self.ledger, 1 << 30)}
            others = [one for one in listed if one.key != row.key]
            assert all(left.get(one.key) == one.checkpoints for one in others), "I6: dropped what another prefix goes on from"
            self.seen["dropped"] += freed > 0

    # -- movers

    def hold(self, salt: str, tokens: list[int]) -> None:
        before = self.state()
        held = self.ledger.hold(tokens, salt)
        if held is None:
            assert self.state() == before
            return
        assert 0 < held.position <= len(tokens)
        self.holds.append((held, salt, tokens[: held.position]))
        self.read += [held._source] if held._source is not None else []
        self.seen["held"] += 1

    def check_holds(self) -> None:
        """I14: what a mover reads has the bytes it had, whatever has been evicted or ended since."""
        for held, salt, tokens in self.holds:
            if self.layout.has_logs:
                self.device.check_log(salt, tokens, held.position, held.blocks)
            if self.layout.has_state:
                self.device.check_slot(salt, tokens, held.position, held.checkpoint, frozen=True)
                self.device.check_tails(salt, tokens, held.position, held.tails)

    # -- the device

    def settle(self) -> None:
        """Carries out what has been ordered; then nobody may care for the bytes of free pages."""
        for order in self.ledger.take_orders():
            self.device.execute(order)
        for page in range(self.ledger.num_pages):
            if not self.ledger.arena.lease_refs(page) and not self.ledger.arena.cache_refs(page):
                self.device.pages[page] = FREE

    def check_written(self, run: Run, start: int) -> None:
        """I10: what is about to be written belongs to this lease alone, and is not published."""
        others = {page for other in self.runs if other is not run for page in (*other.lease.blocks, *other.lease.slot)}
        published = {node.page for node in self.ledger.index.nodes}
        frozen = {page for made in self.ledger.all_checkpoints() for page in made.pages}
        first = max(start, run.lease.write_from) // self.layout.block_tokens
        for page in (*run.lease.blocks[first:], *run.lease.slot):
            assert page not in others, f"I10: two leases write page {page}"
            assert page not in published and page not in frozen, f"I10: page {page} is read-only and written"

    # -- oracles

    def state(self) -> tuple[object, ...]:
        """All that a failing call must leave alone."""
        leases = tuple(
            (run.lease.position, run.lease.committed, tuple(run.lease.blocks), run.lease.slot, run.lease.state)
            for run in self.runs
        )
        pins = tuple(pin.key for pin in self.ledger.pins.all), self.ledger.arena.pinned
        known = len(self.ledger.index), len(self.ledger.all_checkpoints())
        return self.ledger.pages(), leases, self.ledger.evictions, known, pins

    def room(self, tokens: Sequence[int], max_new: int, hit: Hit | None) -> tuple[int, int, int]:
        """Pages that an admission needs, could have, and that the whole request needs alone: by counting."""
        size, arena = self.layout.block_tokens, self.ledger.arena
        logs = bool(self.layout.block_spans)
        last = len(tokens) + max(max_new - 1, 0)
        windows = max((self.window_pages(p) for p in range(last)), default=0)
        target = -(-(len(tokens) + (max_new > 1)) // size) * logs
        total = self.layout.slot_pages + -(-(len(tokens) + max(max_new - 1, 0)) // size) * logs + windows
        path = [] if hit is None else self.path_pages(hit)
        reserved = 0
        for run in self.runs:
            if run.lease.state == "running" and logs:
                lack = -(-(run.prompt + (run.max_new > 1)) // size) - len(run.lease.blocks)
                reserved += lack if lack > 0 else int(run.position >= run.prompt)
        gives_way = 0 if self.runs or self.holds else arena.pinned  # to a request that could not run otherwise
        own = sum(not arena.lease_refs(page) and (bool(gives_way) or not arena.pin_refs(page)) for page in path)
        available = arena.free + arena.evictable + gives_way - own - reserved
        return self.layout.slot_pages + target - len(path), max(0, available), total

    def window_pages(self, position: int) -> int:
        """Pages of large windows while the token at `position` is computed."""
        pages = 0
        for tail in self.layout.tails:
            spans = (*tail.live_blocks(position), *tail.live_blocks(position + 1))
            pages += tail.pages * len({block for first, stop in spans for block in range(first, stop)})
        return pages

    def path_pages(self, hit: Hit) -> list[int]:
        """Pages of the full blocks that a hit stands on, found by comparing tokens."""
        depth = hit.log_tokens // self.layout.block_tokens
        return [node.page for node in self.oracle_path[:depth] if node.page is not None]

    def stored(self, salt: str) -> list[tuple[tuple[int, ...], Node | Checkpoint]]:
        """Everything resident below a salt with the whole of its tokens."""
        root = self.ledger.index.root(self.ledger.prompt([0], salt))
        found: list[tuple[tuple[int, ...], Node | Checkpoint]] = []
        for node in self.ledger.index.nodes:
            tokens, top = _tokens(node)
            if top.key == root.key:
                found.append((tokens, node))
                for tails in node.checkpoints.values():
                    found += [((*tokens, *_ids(tail)), made) for tail, made in tails.items()]
        return found

    def check_lookup(self, tokens: Sequence[int], salt: str, limit: int | None) -> Hit:
        """I4: the lookup equals brute force over all that is resident."""
        wanted = tuple(tokens)
        most = len(wanted) if self.layout.hidden is not None and self.layout.slot_pages else max(0, len(wanted) - 1)
        most = most if limit is None else min(limit, len(wanted))
        before = self.state()
        hit = self.ledger.longest(list(tokens), salt, limit)
        assert self.state() == before, "a lookup changed something"
        stored = self.stored(salt)
        nodes = {known: item for known, item in stored if isinstance(item, Node)}
        self.oracle_path = []
        size = self.layout.block_tokens
        while (len(self.oracle_path) + 1) * size <= len(wanted) and wanted[: (len(self.oracle_path) + 1) * size] in nodes:
            self.oracle_path.append(nodes[wanted[: (len(self.oracle_path) + 1) * size]])
        best = 0
        log = min(len(self.oracle_path), most // size) * size
        if not self.layout.has_state:
            best = log
        for known, item in stored:
            if isinstance(item, Checkpoint) and best < len(known) <= most and wanted[: len(known)] == known:
                best = len(known)
        start = max(0, log - self.replay - 1) // size * size
        replayed = self.layout.has_state and start > best
        best = max(best, start) if self.layout.has_state else best
        assert (hit.replayed, hit.log_tokens) == (replayed, max(best, log)), "I4: the log that a hit stands on"
        assert hit.seen_before == hit.differs_at or (hit.seen_before % size == 0 and hit.seen_before > hit.differs_at)
        common = max((_common(wanted, known) for known, _ in stored), default=0)
        assert hit.position == best, f"I4: hit at {hit.position}, the best is {best}"
        assert hit.resident == len(self.oracle_path), "I4: resident depth"
        assert hit.differs_at == common, f"I4: differs at {hit.differs_at}, not {common}"
        possible = most if self.layout.has_state else most - most % size
        whole = "full hit" if possible == most else "only whole blocks are kept"
        is_short = not possible and most > 0 and not common  # less than a block, of which nothing is known
        assert (hit.reason == whole) == (best >= possible and not is_short), "the reason is wrong"
        assert hit.is_first <= (not stored[1:] and not best and not common), "something is stored"
        assert hit.why
        return hit

    def check(self) -> None:
        """All invariants that hold between calls."""
        self.ledger.check()
        pages = self.ledger.pages()
        assert sum(astuple(pages)) == self.ledger.num_pages, "I1: pages do not add up"
        assert pages.slots == len(self.runs) * self.layout.slot_pages
        if not self.holds:
            assert pages.blocks == len({page for run in self.runs for page in run.lease.blocks})
            assert pages.cached + pages.checkpoints == self.ledger.evictable_pages + self.ledger.arena.pinned
            rows = kept.memory_states(self.ledger)
            page_bytes, arena = self.layout.page_bytes, self.ledger.arena
            assert sum(row.held_bytes for row in rows) == arena.held * page_bytes
            assert sum(row.cached_bytes for row in rows) == (arena.evictable + arena.pinned) * page_bytes
        for run in self.runs:
            lease = run.lease
            assert (lease.position, lease.committed) == (run.position, run.committed), "a position is wrong"
            assert list(lease.tokens) == run.truth[: max(run.prompt, run.committed)], "known tokens are wrong"
            start = max(run.position, lease.hit.log_tokens // self.layout.block_tokens * self.layout.block_tokens)
            start = start if lease.write_from else run.position
            if self.layout.has_logs:
                assert len(lease.blocks) == -(-start // self.layout.block_tokens), "I2: blocks"
        self.check_holds()
        self.check_bytes(full=self.count % self.deep == 0)

    def check_bytes(self, full: bool) -> None:
        """I9: what leases and, now and then, the index hold are the bytes that their tokens give."""
        for run in self.runs if full else self.runs[-1:]:
            if self.layout.has_logs:
                self.device.check_log(run.salt, run.truth, run.position, run.lease.blocks)
            if run.lease.is_exact:  # else the slot is being rebuilt
                self.device.check_slot(run.salt, run.truth, run.position, run.lease.slot, frozen=False)
                self.device.check_tails(run.salt, run.truth, run.position, run.lease.tails)
        if not full:
            return
        for salt in SALTS:
            for tokens, item in self.stored(salt):
                assert not tokens or (salt, tokens) in self.accepted, "I2: published, though not accepted"
                path = _pages(item if isinstance(item, Node) else item.node)
                if isinstance(item, Checkpoint):
                    path += [item.open_page] if item.open_page is not None else []
                    used = {span.page for span in self.layout.checkpoint_spans(item.position) if span.rows}
                    least = min(1, self.layout.slot_pages)
                    assert len(item.pages) == max(used, default=least - 1) + 1, "I2: a checkpoint keeps surplus pages"
                    self.device.check_slot(salt, tokens, item.position, item.pages, frozen=True)
                    self.device.check_tails(salt, tokens, item.position, item.tails)
                if path:
                    self.device.check_log(salt, tokens, len(tokens), path)

    def close(self) -> None:
        """I6: after all have ended and the index is emptied, every page is free."""
        for run in list(self.runs):
            self.ledger.cancel(run.lease)
            self.forget(run, "cancelled")
        self.settle()
        self.check()
        while self.holds:
            self.ledger.release(self.holds.pop()[0])
        self.check()
        for pin in self.ledger.pins.all:
            kept.unpin(self.ledger, pin.key.hex())
        self.ledger.drop_index()
        self.ledger.check()
        assert self.ledger.pages().free == self.ledger.num_pages, "I6: pages are lost"
        assert not self.ledger.index.nodes, "I6: nodes are left"


def _ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4))


def _tokens(node: Node) -> tuple[tuple[int, ...], Node]:
    parts: list[tuple[int, ...]] = []
    while node.parent is not None:
        parts.append(_ids(node.tokens))
        node = node.parent
    return tuple(token for part in reversed(parts) for token in part), node


def _pages(node: Node | None) -> list[int]:
    pages: list[int] = []
    while node is not None and node.parent is not None:
        pages += [node.page] if node.page is not None else []
        node = node.parent
    return pages[::-1]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
