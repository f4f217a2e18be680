"""A state that comes from elsewhere becomes a prefix like any other: nothing of it can be told from one that was computed here.

It is a lease whose tokens are not computed but written. All its pages are taken before the first byte comes; blocks are published
as they come, and at the end the slot is frozen in place. A request for the same tokens then has an ordinary hit. Whatever breaks
it off leaves whole, checked blocks behind, and pages that are free again.
"""

from lamina.memory.lease import Lease, Refused, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.manifest import Manifest, MoveError, check_manifest, check_piece, make_manifest
from lamina.memory.pieces import BLOCK, WINDOW, Piece, WritePage, pieces, unpack_piece
from lamina.memory.tokens import Prompt


class Landing:
    """The state after all tokens of `prompt` on its way into the ledger's pages. Made by `open_landing`.

    The ledger's orders so far must have been carried out before the first piece is taken, and its pages be nobody else's.
    """

    def __init__(self, ledger: Ledger, prompt: Prompt, lease: Lease, first_block: int) -> None:
        self._ledger = ledger
        self._prompt = prompt
        self._lease = lease
        self._left = pieces(ledger.layout, len(prompt), False, first_block)
        self._next: Piece | None = next(self._left, None)
        self._kept_blocks = lease.write_from // ledger.layout.block_tokens
        self._kept_tails = [frozenset(held) for held in lease.tails]
        start = lease.position
        for held, tail in zip(self._kept_tails, ledger.layout.tails, strict=True):
            assert all(block * tail.tokens < start for block in held)
        self._start = start
        granted = ledger.extend(lease, len(prompt) - start)
        assert granted, "a landing's pages were reserved"

    @property
    def expected(self) -> Piece | None:
        """The piece that must come next; None: all are there."""
        return self._next

    def take(
        self, kind: str, number: int, tail: int | None, checksums: bytes, body: bytes | memoryview, write: WritePage
    ) -> None:
        """Checks the next piece, then writes it. Raises MoveError, and has written nothing, for one that is wrong."""
        piece = self._next
        if piece is None or (piece.kind, piece.number, piece.tail) != (kind, number, tail):
            wanted = "nothing more" if piece is None else piece.name
            raise MoveError(f"{kind} {number} has come where {wanted} is next")
        check_piece(piece, checksums, body)
        pages = self._pages(piece)
        if pages:
            unpack_piece(write, pages, piece, body)
        self._next = next(self._left, None)
        if piece.kind == BLOCK:
            self._commit(min((piece.number + 1) * self._ledger.layout.block_tokens, len(self._prompt)))

    def _pages(self, piece: Piece) -> tuple[int, ...]:
        """Where a piece goes; nowhere if these pages have it already, as others read them."""
        if piece.kind == BLOCK:
            return () if piece.number < self._kept_blocks else (self._lease.blocks[piece.number],)
        if piece.kind == WINDOW:
            assert piece.tail is not None
            tail = self._ledger.layout.tails[piece.tail]
            is_kept = piece.number in self._kept_tails[piece.tail] and (piece.number + 1) * tail.tokens <= self._start
            return () if is_kept else self._lease.tails[piece.tail][piece.number]
        return self._lease.slot

    def _commit(self, position: int) -> None:
        """Publishes what is complete. Of an open block, and where there are windows, only the end tells."""
        lease = self._lease
        if position == len(self._prompt) or self._ledger.layout.tails:
            return
        if position > lease.committed:
            self._ledger.commit(lease, self._prompt.ids[lease.committed : position])

    def finish(self) -> None:
        """Everything is there: from now on it can be hit. Raises MoveError, and drops it, if something is missing."""
        if self._next is not None:
            missing = self._next.name
            self.cancel()
            raise MoveError(f"the state ended before {missing}")
        lease = self._lease
        self._ledger.commit(lease, self._prompt.ids[lease.committed :])
        self._ledger.finish(lease)

    def cancel(self) -> None:
        """Gives it up: the blocks that were complete stay, as far as they are of use; everything else is free."""
        self._ledger.cancel(self._lease)


def first_missing(ledger: Ledger, prompt: Prompt) -> int | None:
    """The first block that would have to come to have all of `prompt`; None where everything is here."""
    hit = ledger.longest(prompt, limit=len(prompt))
    if hit.position >= len(prompt):
        return None
    return hit.log_tokens // ledger.layout.block_tokens


def open_landing(ledger: Ledger, prompt: Prompt, manifest: Manifest, name: str) -> Landing | Wait:
    """Takes all pages for a state, after its manifest has been checked; or says why it must wait.

    Raises MoveError for a manifest that differs from what is needed here, for a state that can never fit, and where blocks that
    do not come are gone meanwhile. Nothing has been allocated then.
    """
    first = manifest.first_block
    if not 0 <= first <= ledger.layout.blocks_for(len(prompt)):
        raise MoveError(f"a state from block {first} on is not taken: the tokens have {ledger.layout.blocks_for(len(prompt))}")
    check_manifest(manifest, make_manifest(ledger.layout, ledger.index.model_id, prompt, first))
    lease = ledger.admit(prompt, 0, name=name)
    if isinstance(lease, Wait):
        return lease
    if isinstance(lease, Refused):
        raise MoveError(f"a state of {len(prompt)} tokens is not taken: {lease.reason}")
    if ledger.layout.has_logs and lease.write_from // ledger.layout.block_tokens < first:
        ledger.cancel(lease)
        raise MoveError(f"blocks before block {first}, which do not come, are not here any more")
    return Landing(ledger, prompt, lease, first)
