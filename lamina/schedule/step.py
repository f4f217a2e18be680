"""One step as plain data: planned without tensors, executed without decisions.

copies before -> slices (prefill and decode are the same thing) -> samples -> copies after, in one stream order

`Slice` and `Sample` are named tuples because a step of 256 requests makes 512 of them: 0.34 us each, a frozen dataclass 1.5 us.
A step in which all that runs decodes has them as columns, `Decodes`, and makes slices and samples only for those who look.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from lamina.memory.orders import Order
from lamina.schedule.sampling_params import SamplingParams

#: stands for the id of a token that is still being drawn: the last one drawn in the request's row, filled in on the device
UNKNOWN = -1

Numbers: TypeAlias = NDArray[np.int32]
_Item = TypeVar("_Item")


class Slice(NamedTuple):
    """Tokens [start, stop) of one request. Its size does not depend on how long the request is.

    tokens   their ids; (UNKNOWN,) where the step before is still drawing the one.   slot  pages of the slot.
    row      a number below max_requests that the request keeps while it runs: its row in the runtime's persistent tables.
    table_start, table  pages of block number table_start, table_start + 1, ... that are new or changed since the request's last
             slice, `table_start` means nothing where none is; the first slice in a row brings the whole block table, from 0 on.
    write_from  log entries that close at or before this position are in the blocks already: they are read, never written.
    valid_from  of window and folds nothing from before this position exists; 0 where they are whole. All slices of a lease agree.
    targets  ids that follow each row, where prompt log-probabilities are wanted; shorter than the slice at a prompt's end.
    num_logprobs  most likely tokens to report beside each target; None if none are wanted.
    is_decode  it is one row with exactly the token that was drawn last, and nothing is being rebuilt.
    windows  of each group of large windows the pages of the blocks that are live before or after the slice, by block number.
    num_guesses  the last so many tokens are guesses: their rows may be taken back.
    num_wanted   tokens that the model's draft blocks should draft once the next token is drawn.
    """

    request_id: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    slot: tuple[int, ...]
    row: int
    table_start: int
    table: tuple[int, ...]
    write_from: int = 0
    valid_from: int = 0
    targets: tuple[int, ...] = ()
    num_logprobs: int | None = None
    is_decode: bool = False
    windows: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ()
    num_guesses: int = 0
    num_wanted: int = 0


class Sample(NamedTuple):
    """One token to draw, from the last row of a slice or, where `slice_index` is None, from the hidden vector in the slot.

    A slice with guesses has a sample for each of them and one more, in order.
    rows_back  rows before the slice's last.   position  tokens that the hidden vector in the slot stands for.
    num_output  tokens drawn before it, those that are still being drawn included.   row  as in Slice.
    banned   ids that cannot be drawn (end tokens before min_tokens).   output  ids drawn so far, for penalties and counting.
    mask     tokens that a grammar allows, a bit per id in little-endian int32 words, lowest bit first; None: all.
    """

    request_id: int
    slice_index: int | None
    slot: tuple[int, ...]
    params: SamplingParams
    seed: int
    child: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    num_output: int
    banned: tuple[int, ...]
    row: int = 0
    mask: bytes | None = None
    rows_back: int = 0
    position: int = 0


class Member(NamedTuple):
    """One of those that decode together: what is the same in all its slices and samples, and its prompt's length."""

    request_id: int
    row: int
    slot: tuple[int, ...]
    write_from: int
    valid_from: int
    params: SamplingParams
    seed: int
    child: int
    num_prompt: int


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """Each member computes exactly the token drawn last, with nothing banned and nothing to be counted, and draws the next.

    members    who, in order; the same object as long as they are the same.
    positions  where each is.   tokens  ids, UNKNOWN where the step before is still drawing it.
    tables     (place among the members, number of the first block, pages) of what is new in their block tables.
    """

    members: tuple[Member, ...]
    positions: Numbers  # [R]
    tokens: Numbers  # [R]
    tables: tuple[tuple[int, int, tuple[int, ...]], ...]

    def slices(self) -> tuple[Slice, ...]:
        """As slices; made anew at each call."""
        tables = {place: (first, pages) for place, first, pages in self.tables}
        nothing: tuple[int, tuple[int, ...]] = (0, ())
        columns = zip(self.members, self.positions.tolist(), self.tokens.tolist(), strict=True)
        return tuple(
            Slice(
                one.request_id, start, start + 1, (token,), one.slot, one.row, *tables.get(place, nothing), one.write_from,
                one.valid_from, (), None, True,
            )
            for place, (one, start, token) in enumerate(columns)
        )  # fmt: skip

    def samples(self) -> tuple[Sample, ...]:
        """The draws that follow, one a slice."""
        return tuple(
            Sample(
                one.request_id, place, one.slot, one.params, one.seed, one.child, (), (), start + 1 - one.num_prompt, (), one.row
            )
            for place, (one, start) in enumerate(zip(self.members, self.positions.tolist(), strict=True))
        )  # fmt: skip


class Listed(Sequence[_Item]):
    """A tuple that is made when somebody looks at it; its length is known before."""

    __slots__ = ("_items", "_length", "_make")

    def __init__(self, length: int, make: Callable[[], tuple[_Item, ...]]) -> None:
        self._length, self._make = length, make
        self._items: tuple[_Item, ...] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> _Item: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[_Item, ...]: ...
    def __getitem__(self, at: int | slice) -> _Item | tuple[_Item, ...]:
        return self._all()[at]

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._all())

    def _all(self) -> tuple[_Item, ...]:
        if self._items is None:
            self._items = self._make()
        return self._items


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one launch does. decodes  its slices and samples, where these are all of one kind."""

    number: int
    copies_before: tuple[Order, ...]
    slices: Sequence[Slice]
    samples: Sequence[Sample]
    copies_after: tuple[Order, ...]
    decodes: Decodes | None = None

    @property
    def num_tokens(self) -> int:
        """Rows the model computes."""
        return sum(part.stop - part.start for part in self.slices)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability and rank (1 = most likely) of one token, and the most likely tokens beside it."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: a token a sample (None: scores not finite), its log-probs if wanted, those of each slice's targets.

    drafts  of each slice what the model's draft blocks drafted to follow its last token that counts; empty where there are none.
    """

    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    drafts: tuple[tuple[int, ...], ...] = ()

    def result(self) -> "StepResult":
        """Itself: a step that has run to its end stands for one that was launched."""
        return self


class LaunchedStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Waits for its end. Raises what went wrong in it."""
        ...
