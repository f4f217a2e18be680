"""Those that decode together for many steps.

Where all that runs decodes, it is taken as one cohort: counters move in loops without a call a request, and the step has columns
instead of slices. A request that comes, ends or does anything else dissolves the cohort; the next plan gathers a new one.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from lamina.memory.decodes import Decodes as LedgerDecodes
from lamina.memory.lease import Lease
from lamina.schedule.draft import Draft, Flight
from lamina.schedule.request import Request
from lamina.schedule.step import UNKNOWN, Decodes, Member


class Cohort:
    """All that runs, but for those whose last token is being drawn: each decodes, until the first draws its last token.

    flight  their requests and leases, as a step keeps them.   to_plan, to_book  steps until then.
    """

    __slots__ = ("flight", "ids", "leases", "members", "requests", "to_book", "to_plan", "unknown")

    def __init__(self, members: tuple[Member, ...], requests: list[Request], leases: list[Lease], num_steps: int) -> None:
        self.members, self.requests, self.leases = members, requests, leases
        pairs = list(zip(requests, leases, strict=True))
        self.flight = Flight(pairs, pairs)
        self.ids = frozenset(one.request_id for one in members)
        self.unknown = np.full(len(members), UNKNOWN, np.int32)
        self.to_plan = self.to_book = num_steps


class Cohorts:
    """The cohort there is, and what is kept of its members. gathers  False: there is never one."""

    def __init__(self, ledger: LedgerDecodes, gathers: bool) -> None:
        self.current: Cohort | None = None
        self._ledger = ledger
        self.gathers = gathers
        self._members: dict[int, Member] = {}  # of running requests that have been in a cohort

    def dissolve(self) -> None:
        """They go on one by one until the next is gathered."""
        self.current = None

    def leave(self, request: Request) -> None:
        """A request that stops running."""
        self._members.pop(request.id, None)
        if self.current is not None and request.id in self.current.ids:
            self.current = None

    def take(self, running: Sequence[Request], rows: Mapping[int, int], flights: Collection[Flight], draft: Draft) -> bool:
        """All that runs at once, where each is a decode. False, and nothing has changed, where not, or where memory is short.

        rows  of running requests in the runtime's tables.   flights  steps that have not been booked.
        """
        if not self.gathers:
            return False
        if self.current is None or not self.current.to_plan:
            self.current = self._gather(running, rows)
        cohort, ledger = self.current, self._ledger
        if cohort is None or len(cohort.members) > draft.budget or not ledger.extend(cohort.leases):
            self.current = None
            return False
        cohort.to_plan -= 1
        tokens = cohort.unknown
        if not any(flight is cohort.flight for flight in flights):  # not every token is being drawn
            tokens = np.array([UNKNOWN if one.num_pending else one.tokens[-1] for one in cohort.requests], np.int32)
        stops = [lease.position for lease in cohort.leases]
        for request, stop in zip(cohort.requests, stops, strict=True):
            request.num_pending += 1
            if request.peak_position < stop:
                request.peak_position = stop
        positions = np.array(stops, np.int32) - 1
        draft.decodes = Decodes(cohort.members, positions, tokens, ledger.new_blocks(cohort.leases))
        draft.flight = cohort.flight
        draft.planned = set(cohort.ids)
        draft.budget -= len(stops)
        return True

    def _gather(self, running: Sequence[Request], rows: Mapping[int, int]) -> Cohort | None:
        """The cohort there is now; None where anybody has more to do, or nobody anything."""
        found: list[tuple[Request, Lease, Member]] = []
        num_steps = 1 << 62
        for request in reversed(running):  # the last to come are the ones with prompts to compute
            left = request.max_new + len(request.prompt) - len(request.tokens) - request.num_pending
            if left <= 0:
                continue  # its last token is being drawn
            if request.thoughts is not None:
                until = request.thoughts.tokens - request.max_new + left
                if until == 0:
                    return None  # the next token may be forced
                left = min(left, until) if until > 0 else left
            member = self._members.get(request.id)
            if member is None:
                if request.drafting is not None or not is_decode(request):
                    return None
                lease, params = request.lease, request.params
                assert lease is not None
                member = self._members[request.id] = Member(
                    request.id, rows[request.id], lease.slot, lease.write_from, lease.valid_from, params, request.seed,
                    request.child, len(request.prompt),
                )  # fmt: skip
            assert request.lease is not None
            found.append((request, request.lease, member))
            num_steps = min(num_steps, left)
        if not found:
            return None
        found.reverse()
        requests, leases, members = zip(*found, strict=True)
        return Cohort(members, list(requests), list(leases), num_steps)


def is_decode(request: Request) -> bool:
    """Whether the token drawn last is all that the request has to compute, and nothing is special about drawing the next."""
    lease, num_prompt = request.lease, len(request.prompt)
    assert lease is not None
    start = lease.position
    if start < num_prompt or start != len(request.tokens) + request.num_pending - 1 or start < lease.write_from:
        return False
    if start + 1 == lease.junction or request.awaits_ids:
        return False
    num_output = start + 1 - num_prompt
    return num_output >= request.params.min_tokens and not request.is_limit(num_output)
