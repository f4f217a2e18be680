"""A step while it is being planned, who is in it, and those that decode together for many steps."""

from typing import NamedTuple

import numpy as np

from lamina.memory.lease import Lease
from lamina.memory.orders import Order
from lamina.schedule.request import Request
from lamina.schedule.step import UNKNOWN, Decodes, Listed, Member, Sample, Slice, Step


class Flight(NamedTuple):
    """Who the slices and samples of a launched step are for, and the leases that they had then."""

    slices: list[tuple[Request, Lease]]
    samples: list[tuple[Request, Lease]]


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


class Draft:
    """A step that is being planned. budget  rows that are left.   planned  requests that have a part in it."""

    __slots__ = ("budget", "checkpoints", "decodes", "flight", "planned", "samples", "slices")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: Decodes | None = None  # all there is, so far
        self.slices: list[Slice] = []
        self.samples: list[Sample] = []
        self.flight = Flight([], [])
        self.checkpoints: list[tuple[Lease, bool]] = []  # and whether it is made to last
        self.planned: set[int] = set()

    def spread(self) -> None:
        """Others join: decodes become slices and samples among others."""
        if self.decodes is not None:
            self.slices, self.samples = list(self.decodes.slices()), list(self.decodes.samples())
            self.flight = Flight(list(self.flight.slices), list(self.flight.samples))
            self.decodes = None

    def step(self, number: int, before: tuple[Order, ...], after: tuple[Order, ...]) -> Step:
        """As it is now."""
        decodes = self.decodes
        if decodes is None:
            return Step(number, before, tuple(self.slices), tuple(self.samples), after)
        count = len(decodes.members)
        return Step(number, before, Listed(count, decodes.slices), Listed(count, decodes.samples), after, decodes)
