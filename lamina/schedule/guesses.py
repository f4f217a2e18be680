"""Which requests get guesses into their next step, and how many: for the scheduler, which plans and books them."""

from collections.abc import Callable, Container

from lamina.memory.ledger import Ledger
from lamina.schedule.draft import Flight
from lamina.schedule.drafting import DraftCounts, Drafting, DraftRule
from lamina.schedule.request import Request
from lamina.schedule.step import StepResult, TokenLogprobs


class Guesses:
    """rule  how tokens are drafted ahead; None: they are not.   interval  tokens between checkpoints on the way, or None."""

    def __init__(self, ledger: Ledger, rule: DraftRule | None, interval: int | None) -> None:
        self.rule = rule
        self.counts = DraftCounts(by_place=[0] * (rule.most if rule is not None else 0))
        self._ledger, self._interval = ledger, interval

    def begin(self, request: Request) -> None:
        """A request that is queued. What a grammar allows next is known for one token at a time: no guesses there."""
        rule = self.rule
        if rule is not None and request.drafting is None and request.grammar is None:
            request.drafting = Drafting(rule) if rule.with_penalties or not request.looks_at_ids else None

    def must_wait(self, request: Request) -> bool:
        """Whether the next step of a request is better planned once the token that is being drawn is known."""
        lease, drafting = request.lease, request.drafting
        if drafting is None or lease is None:
            return False
        return lease.in_flight > request.num_pending or drafting.is_ready(request.tokens)

    def wanted(self, request: Request) -> int:
        """Tokens that the model should draft to follow the one that the request draws next."""
        if request.drafting is None:
            return 0
        room = request.max_new - request.num_output - request.num_pending - 2  # the last token is never a guess
        return min(request.drafting.wanted(len(request.tokens) + request.num_pending), room) if room > 0 else 0

    def plan(self, request: Request, budget: int) -> tuple[int, ...]:
        """Guesses of what follows the token drawn last, at most `budget`; that token and these are planned in the ledger.

        Empty, and nothing has changed, where the request has more to compute, or nothing pays or fits. No slice with guesses
        reaches a position where a checkpoint is wanted, nor a token that may be forced: these are computed alone.
        """
        lease, drafting = request.lease, request.drafting
        assert lease is not None
        if drafting is None or request.num_pending or lease.in_flight:
            return ()
        start, num_prompt = lease.position, len(request.prompt)
        if start < num_prompt or start != len(request.tokens) - 1 or start < lease.write_from:
            return ()
        cuts = [lease.junction] if lease.junction is not None else []
        if self._interval is not None:
            cuts.append((start // self._interval + 1) * self._interval)
        if request.thoughts is not None:
            cuts.append(num_prompt + request.thoughts.tokens)
        most = min(budget, request.max_new - request.num_output - 1, *(cut - start - 2 for cut in cuts if cut > start))
        guesses = drafting.guesses(request.tokens, most) if most > 0 else ()
        if not guesses:
            return ()
        room = max(self._ledger.room(lease, 1 + len(guesses)) - 1, 0)
        guesses = guesses[: self._ledger.layout.most_guesses(start, room)]
        if guesses:
            granted = self._ledger.extend(lease, 1 + len(guesses))
            assert granted
        return guesses

    def settle(
        self, flight: Flight, result: StepResult, requests: Container[int],
        take: Callable[[Request, int | None, TokenLogprobs | None], None],
    ) -> int:  # fmt: skip
        """Takes in what a step drew, of each request up to the first token that differs from its guess; the rest never was.

        take  called with each token that counts, once all before it have been committed; it may end the request.
        Returns results that came too late for their requests. The first row of each slice has been committed before.
        """
        num_late = at = 0
        while at < len(flight.samples):
            request, lease = flight.samples[at]
            guesses = flight.guesses.get(request.id, ())
            if request.lease is not lease or request.id not in requests:
                num_late += 1
            else:
                request.num_pending -= 1
                drafting, num_right = request.drafting, 0
                before = (drafting.accepted, drafting.rejected) if drafting is not None else (0, 0)
                for place in range(1 + len(guesses)):
                    if place:
                        self._ledger.commit(lease, guesses[place - 1 : place])
                    token = result.tokens[at + place]
                    is_right = place < len(guesses) and token == guesses[place]
                    num_right += is_right
                    if drafting is not None:  # a token that ends the request is told with what is true by then
                        drafting.accepted, drafting.rejected = before[0] + num_right, before[1] + len(guesses) - num_right
                    take(request, token, result.logprobs[at + place])
                    if not is_right or request.lease is not lease:
                        break
                if guesses and drafting is not None:
                    self.counts.note(len(guesses), num_right)
                    drafting.accepted, drafting.rejected = before
                    drafting.note(len(guesses), num_right, len(request.tokens))
            if guesses and not lease.ended:
                self._ledger.rollback(lease, lease.in_flight)  # one that is closing ends with it
            at += 1 + len(guesses)
        self.propose(flight, result)
        return num_late

    def propose(self, flight: Flight, result: StepResult) -> None:
        """Keeps what the model drafted in a step."""
        for (request, lease), drafts in zip(flight.slices, result.drafts, strict=False):
            if drafts and request.lease is lease and request.drafting is not None:
                request.drafting.propose(len(request.tokens), drafts)
