"""What the ledger hands out: leases, refusals and counts. Only the ledger writes a lease."""

from array import array
from dataclasses import dataclass, field, replace

from lamina.memory.layout import Layout
from lamina.memory.prefix import FULL_HIT, Checkpoint, Hit, Node, TailPages
from lamina.memory.states import CANCELLED, FINISHED, PREEMPTED, RUNNING
from lamina.memory.tokens import Prompt


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds. Read it freely; only the ledger writes it.

    tokens     ids known so far: the prompt, then every accepted token, as int32.
    position   tokens planned; the slot is at this position once the planned steps have run.
    committed  tokens accepted; position - committed are in flight.
    blocks     page ids, the block table: ceil(position / block_tokens) of them, at the start also those of the resident log
               beyond it (none in a model without logs).
    tails      for each large window the pages of its live blocks, by block number.
    slot       page ids of the slot.   hit  what the prefix lookup found.
    write_from the log of tokens before this is there already and is not written again.
    valid_from nothing of the slot's memories exists before this: an empty slot started here to be rebuilt up to write_from.
    cuts       where the planned steps end that are in flight, ascending; kept where there are large windows.
    junction   where this request leaves a path that is stored, if a checkpoint there would save enough; end a slice there.
    state      running | closing | finished | preempted | cancelled.
    owner      a short text kept with what it publishes first.
    """

    name: str
    salt: str
    tokens: "array[int]"
    prompt_tokens: int
    max_new: int
    hit: Hit
    position: int
    committed: int
    junction: int | None
    blocks: list[int] = field(default_factory=list)
    tails: list[TailPages] = field(default_factory=list)
    slot: tuple[int, ...] = ()
    write_from: int = 0
    valid_from: int = 0
    cuts: list[int] = field(default_factory=list)
    state: str = RUNNING
    owner: str = ""
    _prompt: Prompt | None = field(default=None, repr=False)
    _changed_from: int = field(default=0, repr=False)  # first block whose page the caller has not been told
    _tip: Node | None = field(default=None, repr=False)
    _detached: bool = field(default=False, repr=False)  # a twin won: nothing deeper is published
    _pending: list[Checkpoint] = field(default_factory=list, repr=False)  # by position; wait for their tokens
    _ending: str = field(default="", repr=False)  # the state that a closing lease will have
    _target: int = field(default=0, repr=False)  # tokens it was admitted for
    _lacks: int = field(default=0, repr=False)  # pages that it may still need on its way there
    _own_window_pages: int = field(default=0, repr=False)  # pages of large windows that no other running request holds
    _decodes: int = field(default=0, repr=False)  # 1 if it counts as a running decode

    @property
    def window_pages(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        """`tails` as a step carries it: of each group (block number, pages) of what is held now."""
        return tuple(tuple(blocks.items()) for blocks in self.tails)

    @property
    def in_flight(self) -> int:
        """Tokens planned whose results have not been committed."""
        return self.position - self.committed

    @property
    def is_exact(self) -> bool:
        """Whether the slot at the planned position is what a computation from the beginning would give."""
        return self._is_exact_at(self.position)

    def _is_exact_at(self, position: int) -> bool:
        return not self.valid_from or position >= self.write_from

    @property
    def ended(self) -> bool:
        """Whether the lease holds nothing any more."""
        return self.state in (FINISHED, PREEMPTED, CANCELLED)


@dataclass(frozen=True, slots=True)
class Wait:
    """The request fits, but not now: pages needed, pages it could have, and why."""

    needed: int
    available: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request can never fit, even alone: pages needed, pages there are, and why."""

    needed: int
    total: int
    reason: str


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; every page is in exactly one, so they add up to the arena.

    blocks       block pages that at least one running request (or a mover) holds, each counted once, also if the index holds it.
    tails        pages of large windows that at least one running request holds.
    slots        slot pages of running requests.
    cached       pages that only the index holds: full blocks, open blocks of checkpoints, and their large windows.
    checkpoints  pages of frozen slots, pending ones included.
    """

    free: int
    blocks: int
    tails: int
    slots: int
    cached: int
    checkpoints: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.free + self.blocks + self.tails + self.slots + self.cached + self.checkpoints


@dataclass(slots=True, eq=False)
class Hold:
    """What a mover (to another process, the host or disk) reads; made by `Ledger.hold`, ended by `Ledger.release`.

    position    tokens that the bytes stand for.   blocks  pages of the log.   checkpoint  pages of the frozen slot.
    tails       for each large window the pages of its live blocks.
    Nothing of it is evicted, given away or overwritten until it is released; rows past `position` may still be appended.
    """

    position: int
    blocks: tuple[int, ...]
    checkpoint: tuple[int, ...]
    tails: tuple[TailPages, ...]
    _node: Node | None = field(default=None, repr=False)
    _source: Checkpoint | None = field(default=None, repr=False)


@dataclass(slots=True)
class Stats:
    """Counters that only grow."""

    admitted: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    checkpoints: int = 0
    checkpoints_skipped: int = 0
    takeovers: int = 0
    replays: int = 0
    replayed_tokens: int = 0
    twins: int = 0
    preempted: int = 0
    finished: int = 0
    cancelled: int = 0
    stale_commits: int = 0


@dataclass(slots=True)
class Lookups:
    """How well prompts are found, counted once a request. misses  by the reason why the lookup went no further."""

    num: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)

    def note(self, hit: Hit, prompt_tokens: int) -> None:
        """One more request has been admitted."""
        self.num += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += min(hit.position, prompt_tokens)
        if hit.reason != FULL_HIT:
            self.misses[hit.reason] = self.misses.get(hit.reason, 0) + 1


def public(hit: Hit) -> Hit:
    """The hit without its objects in the index, which would live as long as it does."""
    return replace(hit, checkpoint=None, node=None)


def refused(layout: Layout, num_pages: int, num_tokens: int, max_new: int) -> Refused:
    """Why a request can never fit into an arena of `num_pages` pages."""
    last = num_tokens + max(max_new - 1, 0)
    needed = layout.peak_pages(last)
    text = f"{num_tokens} tokens and up to {max_new} new ones need {needed} pages ({_parts(layout, last)}) of"
    return Refused(needed, num_pages, f"{text} {layout.page_bytes} B; the arena has {num_pages}")


def waiting(
    layout: Layout, num_tokens: int, needed: int, available: int, num_shared: int, could: str, num_reserved: int
) -> Wait:  # fmt: skip
    """Why a request that will have `num_tokens` tokens must wait. `could` says what there is, before what is reserved."""
    parts = f"{_parts(layout, num_tokens)}, {num_shared} of them shared"
    reserved = f"of which {num_reserved} are reserved for running requests"
    return Wait(needed, available, f"needs {needed} pages ({parts}), could have {available}: {could}, {reserved}")


def _parts(layout: Layout, num_tokens: int) -> str:
    """What a request's pages are for, in words."""
    windows = layout.most_tail_pages(num_tokens)
    blocks = f"{layout.slot_pages} slot, {layout.block_pages(num_tokens)} blocks"
    return blocks + (f", {windows} windows" if windows else "")
