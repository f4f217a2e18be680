"""Sampling in Triton: two launches for the most likely token, three for a draw from all tokens, five with top_k or top_p.

Nothing is read on the host and no size depends on a value, so that all of it can be captured in a graph. A row's result does not
depend on the others. It is `ref.py`'s token for token, up to the last bit of fp64 sums, which are added in another order and
whose exponentials are another library's: a number that falls within about 1e-15 of the border of two tokens, or a nucleus
whose share is so close to top_p, can come out on the other side.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.sample import kernels
from lamina.ops.sample.batch import STATE_ROW, WORDS, Records, SampleBatch, records_of
from lamina.ops.sample.draw import kernels as draw_kernels

#: tokens of a program: of DeepSeek-V4's 129,280 a row has 64
_CHUNK = 2048
_BINS, _FINE = 16, 32
#: a longer list is not made, see `draw/kernels.py`; the list of a row is in the registers of one program
_CAP = 4096
_CHUNK_WARPS, _DRAW_WARPS, _REPORT_WARPS = 4, 8, 8
#: no product is fused with a sum: penalties are rounded as defined, and bins are the same in every kernel
_EXACT = {"enable_fp_fusion": False}
#: so many of the most likely tokens are picked, each number by a kernel of its own; more are found by sorting
_PICKED = (0, 8, 32)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a row is cut up. Tests use small ones; sums, and so last bits, depend on `chunk` and `cap`."""

    chunk: int = _CHUNK
    cap: int = _CAP


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, one operation at a time (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def refuses(machine: Machine) -> str | None:
    """Why `machine` is not served here, in one line, or None."""
    if not is_interpreted() and machine.device != "cuda":
        return f"runs on NVIDIA GPUs, not on {machine.device}"
    return None


def sample(logits: Tensor, batch: SampleBatch, cuts: Cuts | None = None) -> tuple[Tensor, Tensor]:
    """(token of each row [S] int32, whether the row is bad [S] bool), as `lamina.ops.sample.sample` defines it.

    logits   [S, V] fp32, rows may be strided; not changed.
    A bad row (a NaN, a +inf, or nothing but -inf left after the edits) gives token 0 and harms nobody.
    """
    num, vocab_size = logits.shape
    tokens = torch.empty(num, dtype=torch.int32, device=logits.device)
    is_bad = torch.empty(num, dtype=torch.uint8, device=logits.device)
    sample_into(tokens, is_bad, logits, records_of(batch, vocab_size), cuts=cuts)
    return tokens, is_bad.view(torch.bool)


def sample_into(
    tokens: Tensor,
    is_bad: Tensor,
    logits: Tensor,
    records: Records | None,
    table_rows: Tensor | None = None,
    last_tokens: Tensor | None = None,
    counts_tokens: bool = False,
    cuts: Cuts | None = None,
) -> None:
    """Draws a token for each row of `logits` into tokens [S] int32 and is_bad [S] uint8.

    records      None: every row takes its most likely token, and nothing is read but logits.
    table_rows   [S] integers (-1: nobody's) and last_tokens [rows] int32: where each token is left too; bad rows leave 0.
    counts_tokens  whether the drawn token is counted in the state of the row that its record names.
    """
    if tokens.shape[0]:
        for launch in launches(tokens, is_bad, logits, records, table_rows, last_tokens, counts_tokens, cuts or Cuts()):
            launch()


def launches(
    tokens: Tensor, is_bad: Tensor, logits: Tensor, records: Records | None, table_rows: Tensor | None,
    last_tokens: Tensor | None, counts_tokens: bool, cuts: Cuts,
) -> list[Callable[[], None]]:  # fmt: skip
    """What `sample_into` launches, in order; the benchmark times them one by one."""
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(f"logits={logits.dtype}, strides {logits.stride()}: fp32 with neighbouring tokens is needed")
    num, vocab_size = logits.shape
    stride = logits.stride(0)
    chunks = triton.cdiv(vocab_size, cuts.chunk)
    has_draws = records is not None and records.has_draws
    has_filters = has_draws and records is not None and records.has_filters
    has_edits = records is not None and records.has_edits
    state = records.state if records is not None else None
    packed = logits.new_empty(num, chunks, dtype=torch.int64)
    faults = logits.new_empty(num, chunks, dtype=torch.int32)
    edited = logits.new_empty(num, vocab_size) if has_edits else logits
    words = packed if records is None else records.words
    history = packed if state is None else state
    shape = {"VOCAB": vocab_size, "CHUNK": cuts.chunk, "CHUNKS": chunks}
    shape2 = {**shape, "CHUNKS2": triton.next_power_of_2(chunks), "EDITS": has_edits}
    grid, warps = (num * chunks,), {"num_warps": _CHUNK_WARPS, **_EXACT}
    steps: list[Callable[[], None]] = [
        lambda: kernels.peaks[grid](
            logits, stride, edited, words, history, packed, faults, **shape, EDITS=has_edits, STATE=state is not None, **warps
        )
    ]
    sums = heads = listed = plans = packed
    if has_draws:
        sums = logits.new_empty(num, chunks, dtype=torch.float64)
        counts = masses = packed
        if has_filters:
            counts, fine_counts = (logits.new_empty(num, chunks, bins, dtype=torch.int32) for bins in (_BINS, _FINE))
            masses, fine_masses = (logits.new_empty(num, chunks, bins, dtype=torch.float64) for bins in (_BINS, _FINE))
            heads = logits.new_empty(num, chunks, dtype=torch.float64)
            listed = logits.new_empty(num, cuts.cap, dtype=torch.int32)
            plans = logits.new_empty(num, 4, dtype=torch.int32)
        row = (logits, stride, edited, words, packed, sums, counts, masses)
        bins2 = {**shape2, "BINS": _BINS, "FINE": _FINE, **warps}
        steps.append(lambda: draw_kernels.weigh[grid](*row, **bins2, FILTERS=has_filters))
        if has_filters:
            steps.append(lambda: draw_kernels.refine[grid](*row, fine_counts, fine_masses, **bins2, CAP=cuts.cap))
            steps.append(
                lambda: draw_kernels.shortlist[grid](*row, fine_counts, fine_masses, heads, listed, plans, **bins2, CAP=cuts.cap)
            )
    has_rows = table_rows is not None and last_tokens is not None
    steps.append(
        lambda: draw_kernels.draw[(num,)](
            logits, stride, edited, words, packed, faults, sums, heads, listed, plans, table_rows if has_rows else packed,
            last_tokens if has_rows else packed, history, tokens, is_bad, **shape2, CAP=cuts.cap, DRAWS=has_draws,
            FILTERS=has_filters, ROWS=has_rows, COUNTS=counts_tokens and state is not None,
            num_warps=_DRAW_WARPS if has_filters else _CHUNK_WARPS, **_EXACT,
        )
    )  # fmt: skip
    return steps


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lamina.ops.sample.token_logprobs`, without looking at a value: rows that it would refuse give anything.

    Returns  (logprob [S] fp32, rank [S] int32, top_ids [S, k] int32, top_logprobs [S, k] fp32).
             The logarithm of the sum is exact to fp32, not to the bit of `ref.py`; everything else follows from it as defined.
    """
    num, computed = logits.shape[0], picked_logprobs(k, logits.shape[1])
    found = (
        logits.new_empty(num), logits.new_empty(num, dtype=torch.int32),
        logits.new_empty(num, computed, dtype=torch.int32), logits.new_empty(num, computed),
    )  # fmt: skip
    logprobs_into(*found, logits, torch.arange(num, device=logits.device), tokens.to(torch.int32))  # the type that is warmed up
    return found[0], found[1], found[2][:, :k], found[3][:, :k]


def warm_up(vocab_size: int, state: Tensor) -> None:
    """Compiles every kernel that sampling and log-probabilities may need, so that no request waits for it.

    state  [1 or more, V] int32 on the device; not changed.
    """
    device = state.device
    logits = torch.zeros(1, vocab_size, device=device)
    words = torch.zeros(WORDS, dtype=torch.int64, device=device)  # no flags: nothing is drawn or edited
    words[STATE_ROW] = -1
    tokens, last = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    is_bad, rows = torch.zeros(1, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    sample_into(tokens, is_bad, logits, None, rows, last)
    for has_edits, known in ((False, None), (True, None), (True, state)):
        for has_draws, has_filters in ((False, False), (True, False), (True, True)):
            records = Records(words, known, has_draws, has_filters, has_edits)
            sample_into(tokens, is_bad, logits, records, rows, last, known is not None)
    for k in _PICKED:
        if k <= vocab_size:
            token_logprobs(logits, tokens, k)


def picked_logprobs(k: int, vocab_size: int) -> int:
    """How many of the most likely tokens to compute where k are wanted: few different numbers, as each is compiled by itself."""
    return next((picked for picked in _PICKED if k <= picked <= vocab_size), k)


def logprobs_into(
    logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor,
    chunk: int = _CHUNK,
) -> None:  # fmt: skip
    """The same of chosen rows [R] (integers), into fp32, int32, int32 and fp32 tensors; tokens [R] integers."""
    num, k = top_ids.shape
    if not num:
        return
    vocab_size, stride = logits.shape[1], logits.stride(0)
    chunks = triton.cdiv(vocab_size, chunk)
    tops = logits.new_empty(num, chunks)
    sums = logits.new_empty(num, chunks, dtype=torch.float64)
    above = logits.new_empty(num, chunks, dtype=torch.int32)
    picked = k if k in _PICKED else 0
    best = logits.new_empty(num, chunks, max(1, picked), dtype=torch.int64)
    shape = {"VOCAB": vocab_size, "CHUNK": chunk, "CHUNKS": chunks}
    chunks2 = triton.next_power_of_2(chunks)
    grid = (num * chunks,)
    kernels.partition[grid](logits, stride, rows, tops, sums, **shape, num_warps=_CHUNK_WARPS)
    kernels.rank[grid](
        logits, stride, rows, tokens, tops, sums, above, best, **shape, CHUNKS2=chunks2, K=picked, num_warps=_CHUNK_WARPS
    )
    kernels.report[(num,)](
        logits, stride, rows, tokens, tops, sums, above, best, logprobs, ranks, top_ids, top_logprobs,
        CHUNKS=chunks, CHUNKS2=chunks2, K=picked, SIZE=triton.next_power_of_2(chunks * max(1, picked)), num_warps=_REPORT_WARPS,
    )  # fmt: skip
    if k > picked:
        peak = tops.amax(dim=1, keepdim=True)  # [R, 1]
        total = (sums * (tops - peak).double().exp()).sum(dim=1, keepdim=True).log().float()
        values = (logits[rows.long()] - peak) - total
        values, ids = values.sort(dim=1, descending=True, stable=True)
        top_ids.copy_(ids[:, :k])
        top_logprobs.copy_(values[:, :k])
