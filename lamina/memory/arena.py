"""Who holds which page: one free list and two reference counts per page. No bytes are touched here.

    lease_refs   running requests that hold the page (blocks and slots)
    cache_refs   objects of the prefix index that hold it (nodes and checkpoints)

A page is free when both are 0, held when lease_refs > 0, and evictable when only the index holds it. Users may pin pages of the
index: such a page, while no request holds it, is pinned instead of evictable.
"""

from collections.abc import Sequence


class Arena:
    """`num_pages` equal pages, numbered from 0. Every method is O(1), or O(pages given).

    free, held, evictable and pinned are disjoint and add up to num_pages, at every moment.
    A wrong use (unknown page, double free, nothing free) is a bug of ours and fails an assertion.
    """

    __slots__ = (
        "_cache_refs", "_evictable", "_free", "_held", "_lease_refs", "_pin_refs", "_pinned", "num_pages", "num_with_pins",
    )  # fmt: skip

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages={num_pages} is negative"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 goes first, the last page freed is taken next
        self._lease_refs = [0] * num_pages
        self._cache_refs = [0] * num_pages
        self._pin_refs = [0] * num_pages
        self._held = 0
        self._evictable = 0
        self._pinned = 0
        self.num_with_pins = 0  # pages that users pinned, held ones included

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that at least one running request holds."""
        return self._held

    @property
    def evictable(self) -> int:
        """Pages that only the index holds."""
        return self._evictable

    @property
    def pinned(self) -> int:
        """Pages that users pinned and no request holds."""
        return self._pinned

    def state(self, page: int) -> str:
        """free, held, cached or pinned, as one letter."""
        if self._lease_refs[page]:
            return "h"
        return ("p" if self._pin_refs[page] else "c") if self._cache_refs[page] else "f"

    def is_evictable(self, page: int) -> bool:
        """Whether only the index holds the page, and nobody pinned it."""
        return not self._lease_refs[page] and not self._pin_refs[page] and self._cache_refs[page] > 0

    def pin_refs(self, page: int) -> int:
        """How many pins of users hold the page."""
        return self._pin_refs[page]

    def pin(self, page: int) -> None:
        """One more pin of a user on a page of the index."""
        assert self._cache_refs[page], f"page {page} is pinned and not in the index"
        self._pin_refs[page] += 1
        if self._pin_refs[page] == 1:
            self.num_with_pins += 1
            if not self._lease_refs[page]:
                self._evictable -= 1
                self._pinned += 1

    def unpin(self, page: int) -> None:
        """One pin less."""
        assert self._pin_refs[page] > 0, f"page {page} is not pinned"
        self._pin_refs[page] -= 1
        if not self._pin_refs[page]:
            self.num_with_pins -= 1
            if not self._lease_refs[page]:
                self._pinned -= 1
                self._evictable += 1

    def lease_refs(self, page: int) -> int:
        """How many running requests hold the page."""
        self._check(page)
        return self._lease_refs[page]

    def cache_refs(self, page: int) -> int:
        """How many index objects hold the page."""
        self._check(page)
        return self._cache_refs[page]

    def take_for_lease(self) -> int:
        """A free page, now held by one running request."""
        page = self._take()
        self._lease_refs[page] = 1
        self._held += 1
        return page

    def take_for_cache(self) -> int:
        """A free page, now held by one index object."""
        page = self._take()
        self._cache_refs[page] = 1
        self._evictable += 1
        return page

    def take_many_for_lease(self, count: int) -> list[int]:
        """So many free pages, each now held by one running request."""
        if not count:
            return []
        assert count <= len(self._free), "no page is free"
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        refs = self._lease_refs
        for page in pages:
            refs[page] = 1
        self._held += count
        return pages

    def ref_lease(self, page: int) -> None:
        """One more running request holds a page that is not free."""
        self._check_used(page)
        if self._lease_refs[page] == 0:
            self._held += 1
            if self._pin_refs[page]:
                self._pinned -= 1
            else:
                self._evictable -= 1
        self._lease_refs[page] += 1

    def unref_lease(self, page: int) -> None:
        """One running request less; the page is freed if nothing else holds it."""
        self._check(page)
        assert self._lease_refs[page] > 0, f"page {page} is not held by a request"
        self._lease_refs[page] -= 1
        if self._lease_refs[page] == 0:
            self._held -= 1
            if self._pin_refs[page]:
                self._pinned += 1
            elif self._cache_refs[page]:
                self._evictable += 1
            else:
                self._free.append(page)

    def ref_many_for_lease(self, pages: Sequence[int]) -> None:
        """One more running request holds these pages, none of which is free."""
        leases, caches, pins, new, pinned = self._lease_refs, self._cache_refs, self._pin_refs, 0, 0
        for page in pages:
            held = leases[page]
            assert held or caches[page], f"page {page} is free"
            if not held:
                new += 1
                pinned += pins[page] > 0
            leases[page] = held + 1
        self._held += new
        self._evictable -= new - pinned
        self._pinned -= pinned

    def unref_many_for_lease(self, pages: Sequence[int]) -> None:
        """One running request less for these pages, the last one first; those that nobody else holds are freed."""
        leases, caches, pins, free = self._lease_refs, self._cache_refs, self._pin_refs, self._free
        gone = kept = pinned = 0
        for page in reversed(pages):
            held = leases[page] - 1
            assert held >= 0, f"page {page} is not held by a request"
            leases[page] = held
            if not held:
                gone += 1
                if caches[page]:
                    kept += 1
                    pinned += pins[page] > 0
                else:
                    free.append(page)
        self._held -= gone
        self._evictable += kept - pinned
        self._pinned += pinned

    def ref_cache(self, page: int) -> None:
        """One more index object holds a page that is not free."""
        self._check_used(page)
        self._cache_refs[page] += 1

    def unref_cache(self, page: int) -> None:
        """One index object less; the page is freed if nothing else holds it."""
        self._check(page)
        assert self._cache_refs[page] > 0, f"page {page} is not held by the index"
        self._cache_refs[page] -= 1
        assert self._cache_refs[page] or not self._pin_refs[page], f"page {page} is pinned and given up"
        if self._cache_refs[page] == 0 and self._lease_refs[page] == 0:
            self._evictable -= 1
            self._free.append(page)

    def check(self) -> None:
        """Asserts that the counters are what the reference counts say (I1). O(pages)."""
        free = set(self._free)
        assert len(free) == len(self._free), "I1: a page is twice in the free list"
        unused = {page for page in range(self.num_pages) if not self._lease_refs[page] and not self._cache_refs[page]}
        assert free == unused, f"I1: free list and reference counts differ in pages {sorted(free ^ unused)}"
        assert all(count >= 0 for count in (*self._lease_refs, *self._cache_refs)), "I1: a count is negative"
        held = sum(1 for count in self._lease_refs if count)
        assert self._held == held, f"I1: held={self._held}, counted {held}"
        pinned = sum(1 for pins, leases in zip(self._pin_refs, self._lease_refs, strict=True) if pins and not leases)
        assert self._pinned == pinned, f"I1: pinned={self._pinned}, counted {pinned}"
        assert self.num_with_pins == sum(1 for pins in self._pin_refs if pins), "I1: pages with pins are miscounted"
        assert self._evictable == self.num_pages - held - len(free) - pinned, f"I1: evictable={self._evictable}"

    def _take(self) -> int:
        assert self._free, "no page is free"
        return self._free.pop()

    def _check(self, page: int) -> None:
        assert 0 <= page < self.num_pages, f"page {page} is not one of {self.num_pages}"

    def _check_used(self, page: int) -> None:
        self._check(page)
        assert self._lease_refs[page] or self._cache_refs[page], f"page {page} is free"
