"""One step as plain data: planned without tensors, executed without decisions.

copies before -> slices (prefill and decode are the same thing) -> samples -> copies after, in one stream order
"""

from dataclasses import dataclass

from lamina.memory.orders import Order
from lamina.schedule.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, stop) of one request. Its size does not depend on how long the request is.

    tokens   their ids.   slot  pages of the slot.
    row      a number below max_requests that the request keeps while it runs: its row in the runtime's persistent tables.
    table_start, table  pages of block number table_start, table_start + 1, ... that are new or changed since the request's last
             slice; the first slice in a row brings the whole block table, from 0 on.
    write_from  log entries that close at or before this position are in the blocks already: they are read, never written.
    valid_from  of window and folds nothing from before this position exists; 0 where they are whole. All slices of a lease agree.
    targets  ids that follow each row, where prompt log-probabilities are wanted; shorter than the slice at a prompt's end.
    num_logprobs  most likely tokens to report beside each target; None if none are wanted.
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


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw, from the last row of a slice or, where `slice_index` is None, from the hidden vector in the slot.

    banned   ids that cannot be drawn (end tokens before min_tokens).   output  ids drawn so far, for penalties and counting.
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


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one launch does."""

    number: int
    copies_before: tuple[Order, ...]
    slices: tuple[Slice, ...]
    samples: tuple[Sample, ...]
    copies_after: tuple[Order, ...]

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
    """What a step gave: a token a sample (None: scores not finite), its log-probs if wanted, those of each slice's targets."""

    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]
