"""Running decodes by the hundred: what `Ledger.extend`, `new_blocks` and `commit` do for each, without a call for each.

A decode inside its open block takes no page and fills none: there is nothing to be counted anew. The others, a few in a step,
go through the ledger's own calls, in the order of the leases.
"""

from collections.abc import Callable, Sequence

from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.tokens import checked_ids


class Decodes:
    """A part of one ledger, whose calls it is given. spare  pages to be had beyond what admitted prefills lack.

    Leases are running and past their prompts; `commit` takes any.
    """

    def __init__(
        self, layout: Layout, spare: Callable[[], int], extend: Callable[[Lease, int], bool],
        new_blocks: Callable[[Lease], tuple[int, tuple[int, ...]]], commit: Callable[[Lease, Sequence[int]], None],
    ) -> None:  # fmt: skip
        self.are_alike = not layout.tails  # a large window moves at every token: each decode is a case of its own
        self._block_tokens = layout.block_tokens
        self._spare, self._extend, self._new_blocks, self._commit = spare, extend, new_blocks, commit

    def extend(self, leases: Sequence[Lease]) -> bool:
        """Plans one more token of each. False, and nothing has changed, where not every page can be had."""
        assert self.are_alike
        size = self._block_tokens
        others: list[Lease] = []
        for lease in leases:
            position = lease.position
            if position % size and lease._decodes:
                lease.position = position + 1
            else:
                others.append(lease)
        if len(others) > self._spare():  # each takes a page at most
            for lease in leases:
                lease.position -= lease not in others
            return False
        for lease in others:
            granted = self._extend(lease, 1)
            assert granted
        return True

    def new_blocks(self, leases: Sequence[Lease]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """(place in `leases`, number of the first block, pages) where a block table is new or changed since it was asked for."""
        changed = [place for place, lease in enumerate(leases) if lease._changed_from < len(lease.blocks)]
        return tuple((place, *self._new_blocks(leases[place])) for place in changed)

    def commit(self, leases: Sequence[Lease], tokens: Sequence[int]) -> None:
        """The id of the oldest in-flight token of each, now accepted."""
        size = self._block_tokens
        are_alike = self.are_alike
        for lease, token in zip(leases, checked_ids(tokens), strict=True):
            seen = lease.committed + 1
            ids = lease.tokens
            if seen % size and len(ids) < seen <= lease.position and lease._decodes and not lease._pending and are_alike:
                ids.append(token)
                lease.committed = seen
            else:
                self._commit(lease, (token,))
