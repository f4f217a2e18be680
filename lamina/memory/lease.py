"""What the ledger hands out: leases, refusals and counts. Only the ledger writes a lease."""

from dataclasses import dataclass, field

from lamina.memory.prefix import Checkpoint, Hit, Node

RUNNING, CLOSING = "running", "closing"
FINISHED, PREEMPTED, CANCELLED = "finished", "preempted", "cancelled"


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds. Read it freely; only the ledger writes it.

    tokens     ids known so far: the prompt, then every accepted token.
    position   tokens planned; the slot is at this position once the planned steps have run.
    committed  tokens accepted; position - committed are in flight.
    blocks     page ids, the block table: ceil(position / block_tokens) of them (none in a model without logs).
    slot       page ids of the slot.   hit  what the prefix lookup found.
    junction   where this request leaves a path that is stored, if a checkpoint there would save enough; end a slice there.
    state      running | closing | finished | preempted | cancelled.
    """

    name: str
    salt: str
    tokens: list[int]
    prompt_tokens: int
    max_new: int
    hit: Hit
    position: int
    committed: int
    junction: int | None
    blocks: list[int] = field(default_factory=list)
    slot: tuple[int, ...] = ()
    state: str = RUNNING
    _tip: Node | None = field(default=None, repr=False)
    _detached: bool = field(default=False, repr=False)  # a twin won: nothing deeper is published
    _pending: list[Checkpoint] = field(default_factory=list, repr=False)  # by position; wait for their tokens
    _ending: str = field(default="", repr=False)  # the state that a closing lease will have
    _target: int = field(default=0, repr=False)  # blocks it was admitted for
    _lacks: int = field(default=0, repr=False)  # of these, not yet held
    _decodes: int = field(default=0, repr=False)  # 1 if it counts as a running decode

    @property
    def in_flight(self) -> int:
        """Tokens planned whose results have not been committed."""
        return self.position - self.committed

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

    blocks       block pages that at least one running request holds, each counted once, also if the index holds it too.
    slots        slot pages of running requests.
    cached       block pages that only the index holds (full blocks, and open blocks of checkpoints).
    checkpoints  pages of frozen slots, pending ones included.
    """

    free: int
    blocks: int
    slots: int
    cached: int
    checkpoints: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.free + self.blocks + self.slots + self.cached + self.checkpoints


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
    twins: int = 0
    preempted: int = 0
    finished: int = 0
    cancelled: int = 0
    stale_commits: int = 0
