"""A step while it is being planned, and who is in it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from lamina.memory.lease import Lease
from lamina.memory.orders import Order
from lamina.schedule.request import Request
from lamina.schedule.step import Decodes, Listed, Sample, Slice, Step

_NONE: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class Flight(NamedTuple):
    """Who the slices and samples of a launched step are for, and the leases that they had then. guesses  by request id."""

    slices: list[tuple[Request, Lease]]
    samples: list[tuple[Request, Lease]]
    guesses: Mapping[int, tuple[int, ...]] = _NONE


class Draft:
    """A step that is being planned. budget  rows that are left.   planned  requests that have a part in it."""

    __slots__ = ("budget", "checkpoints", "decodes", "flight", "guesses", "planned", "samples", "slices")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes: Decodes | None = None  # all there is, so far
        self.slices: list[Slice] = []
        self.samples: list[Sample] = []
        self.flight = Flight([], [])
        self.checkpoints: list[tuple[Lease, bool]] = []  # and whether it is made to last
        self.planned: set[int] = set()
        self.guesses: dict[int, tuple[int, ...]] = {}

    def spread(self) -> None:
        """Others join: decodes become slices and samples among others."""
        if self.decodes is not None:
            self.slices, self.samples = list(self.decodes.slices()), list(self.decodes.samples())
            self.flight = Flight(list(self.flight.slices), list(self.flight.samples))
            self.decodes = None

    def add_guesses(self, request: Request, lease: Lease, part: Slice) -> None:
        """A slice with guesses, whose samples are there already."""
        self.slices.append(part)
        self.guesses[request.id] = part.tokens[-part.num_guesses :]
        self.flight.slices.append((request, lease))
        self.flight.samples.extend([(request, lease)] * (1 + part.num_guesses))
        self.flight = Flight(self.flight.slices, self.flight.samples, self.guesses)
        self.planned.add(request.id)
        self.budget -= 1 + part.num_guesses

    def step(self, number: int, before: tuple[Order, ...], after: tuple[Order, ...]) -> Step:
        """As it is now."""
        decodes = self.decodes
        if decodes is None:
            return Step(number, before, tuple(self.slices), tuple(self.samples), after)
        count = len(decodes.members)
        return Step(number, before, Listed(count, decodes.slices), Listed(count, decodes.samples), after, decodes)
