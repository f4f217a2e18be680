"""A request as the scheduler sees it: token ids, counters, and the lease it holds while it runs."""

from dataclasses import dataclass, field
from enum import Enum

from lamina.memory.lease import Lease
from lamina.memory.prefix import Hit
from lamina.memory.tokens import Prompt
from lamina.schedule.drafting import Drafting
from lamina.schedule.grammar import GrammarState, allows_any
from lamina.schedule.policy import Turn
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Once `tokens` tokens are drawn the next one is `end`, unless one of `ends`, which all end the thoughts, came before."""

    tokens: int
    end: int
    ends: frozenset[int]


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One output of one prompt; a prompt with n outputs is n of these.

    tokens   prompt and output ids known so far; the last drawn one is known before it is computed.
    max_new  most tokens it may draw, the model's length included.   stop_ids  ids that end it.
    encoded  its tokens as the ledger looks them up, while it waits.
    num_pending  tokens that launched steps are drawing for it; they come after `tokens`.
    priority lower comes first.   owner  a short text shown with what it leaves in the cache.
    turn     its place among all requests (see policy.py), given when it is queued.   num_overtaken  how many were admitted before
             it as there was no memory for it.   refused_room, asked_at  pages there were, and the step, when it was last asked.
    expected_hit  tokens that a lookup found while it waited; -1: none was made.
    grammar  what its output must match; None: anything.
    keep_at  tokens of the prompt after which the next turn of a chat will differ: a point to resume from is kept there.
    thoughts how many it may have; None: any number.   error  why it ended with "error".
    drafting  where guesses of its next tokens come from; None: there are none.
    group    id of the first of its siblings; `child` counts them from 0.   parent  the sibling whose prompt it waits for.
    """

    id: int
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_new: int
    stop_ids: frozenset[int]
    salt: str = ""
    child: int = 0
    parent: "Request | None" = None
    tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    encoded: Prompt | None = None
    first_hit: Hit | None = None
    cached_tokens: int = 0
    has_prompt_checkpoint: bool = False
    is_prompt_done: bool = False
    num_pending: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    peak_position: int = 0
    priority: int = 0
    owner: str = ""
    turn: Turn = (0, 0)
    num_overtaken: int = 0
    refused_room: int = -1
    asked_at: int = 0
    expected_hit: int = -1
    grammar: GrammarState | None = None
    keep_at: int | None = None
    thoughts: ThoughtLimit | None = None
    error: str = ""
    drafting: Drafting | None = None
    looks_at_ids: bool = field(init=False)  # drawing needs to know what was drawn before
    awaits_ids: bool = field(init=False)  # the next token cannot be planned before the last one is known here

    def __post_init__(self) -> None:
        self.tokens.extend(self.prompt)
        self.looks_at_ids = self.params.has_penalties
        self.awaits_ids = self.looks_at_ids or self.grammar is not None

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def accepted_drafts(self) -> int:
        """Tokens drafted ahead for it that were drawn then."""
        return 0 if self.drafting is None else self.drafting.accepted

    @property
    def rejected_drafts(self) -> int:
        """Tokens drafted ahead for it that were not, or came after one that was not."""
        return 0 if self.drafting is None else self.drafting.rejected

    @property
    def has_computed_prompt(self) -> bool:
        """Whether siblings need not wait for its prompt any more."""
        return self.is_prompt_done or self.state is RequestState.FINISHED

    @property
    def awaits_result(self) -> bool:
        """Whether a launched step is drawing a token for it."""
        return self.num_pending > 0

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next token can be drawn while the last one is not known here, and is wanted whatever that one is."""
        num_output = len(self.tokens) + self.num_pending - len(self.prompt)
        return not self.awaits_ids and num_output < self.max_new and not self.is_limit(num_output)

    def is_limit(self, num_output: int) -> bool:
        """Whether the token after so many may be one that nobody draws: then all before it must be known."""
        return self.thoughts is not None and num_output == self.thoughts.tokens

    def forced(self, num_output: int) -> int | None:
        """The id that has to come after so many tokens; None: any."""
        thoughts = self.thoughts
        if thoughts is None or num_output != thoughts.tokens or not thoughts.ends.isdisjoint(self.output):
            return None
        return thoughts.end

    def banned(self, num_output: int) -> tuple[int, ...]:
        """Ids that cannot be drawn after so many tokens, whatever a mask says."""
        own = self.stop_ids if num_output < self.params.min_tokens else frozenset()
        return tuple(sorted(own.union(self.grammar.banned) if self.grammar is not None else own))

    def has_next(self) -> bool:
        """Whether anything at all may be drawn next."""
        mask = self.grammar.mask() if self.grammar is not None else None
        return mask is None or allows_any(mask, self.banned(self.num_output))

    def goes_on(self, token: int) -> bool:
        """Tells the grammar of the last token. False if nothing may follow."""
        return self.grammar is None or (self.grammar.accept(token) and self.has_next())

    @property
    def output(self) -> list[int]:
        """Ids drawn so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are to be computed by this one (the first of its siblings)."""
        return self.params.prompt_logprobs is not None and self.child == 0


def by_turn(request: Request) -> Turn:
    """What lists of requests are sorted by."""
    return request.turn
