"""The record that a sampling step gets besides the logits: one entry per row, and sparse edits of single logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """How each of S rows is drawn. Dense fields are [S]; sparse ones are lists of (row, token id).

    temperature, top_p, min_p  [S] fp32 or fp64; temperature 0 takes the most likely token.
    top_k                      [S] int64; 0 or less keeps all.
    repetition, presence, frequency  [S] fp32 penalties; 1, 0, 0 change nothing.
    uniforms                   [S] fp64 numbers in (0, 1), see `draws.uniform`; not looked at where temperature is 0.
    prompt_seen                [S, V] bool, tokens of the prompt; None if no row has a repetition penalty.
    output_counts              [S, V] int32, occurrences in the output so far; None if no row has a penalty.
    bias_rows, bias_ids, bias_values  [B] int64, int64, fp32: added to single logits (repeats add up).
    banned_rows, banned_ids    [N] int64: logits that become -inf, for min_tokens.
    mask_rows                  [M] int64, each row once: rows in which only some tokens may be drawn;
    mask_words                 [M, ceil(V / 32)] int32: for each of them a bit per token, lowest first, 1 where it may.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    uniforms: Tensor
    prompt_seen: Tensor | None = None
    output_counts: Tensor | None = None
    bias_rows: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    banned_rows: Tensor | None = None
    banned_ids: Tensor | None = None
    mask_rows: Tensor | None = None
    mask_words: Tensor | None = None

    @staticmethod
    def greedy(num_rows: int, device: torch.device | str = "cpu") -> "SampleBatch":
        """A batch in which every row takes its most likely token."""
        zeros = torch.zeros(num_rows, dtype=torch.float32, device=device)
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        halves = torch.full((num_rows,), 0.5, dtype=torch.float64, device=device)
        no_top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return SampleBatch(zeros, no_top_k, ones, zeros, ones, zeros, zeros, halves)


#: words of a record: what one row needs, as int64 or the bits of fp64. A row's edits are words too, id << 32 | bits of fp32,
#: ascending by id, at EDIT_START .. EDIT_STOP of the same tensor; a ban is a bias of -inf.
TEMPERATURE, TOP_P, MIN_P, UNIFORM, SEED, CHILD, POSITION, TOP_K = range(8)
#: MASK: where the row's mask begins in the same tensor, a bit per token, lowest first; 0: every token may be drawn.
REPETITION, PRESENCE, FREQUENCY, STATE_ROW, EDIT_START, EDIT_STOP, FLAGS, MASK = range(8, 16)
WORDS = 16
#: flags: drawn at random; top_k or top_p; bias, bans or penalties; the number comes from (SEED, CHILD, POSITION), not UNIFORM;
#: the seed is below 0
IS_DRAWN, IS_FILTERED, IS_EDITED, IS_SEEDED, IS_NEGATIVE = 1, 2, 4, 8, 16
#: in a state: the token is in the prompt. The other bits count its occurrences in the output.
IN_PROMPT = -(1 << 31)


@dataclass(frozen=True, slots=True)
class Records:
    """What the kernels read of S rows, and what is known of all of them when they are launched.

    words      [S * WORDS or more] int64: S records, then edits, then masks.
    state      [rows, V] int32, seen tokens, see IN_PROMPT; a record names its row or -1. None if nobody has penalties.
    has_draws, has_filters, has_edits  whether any record may have the flag.
    """

    words: Tensor
    state: Tensor | None
    has_draws: bool
    has_filters: bool
    has_edits: bool


def records_of(batch: SampleBatch, vocab_size: int) -> Records:
    """The records of a batch, made on its device without looking at a value."""
    num = batch.temperature.shape[0]
    device = batch.temperature.device
    state = None
    if batch.output_counts is not None:
        state = batch.output_counts.to(torch.int32)
    if batch.prompt_seen is not None:
        seen = batch.prompt_seen.to(torch.int32) * IN_PROMPT
        state = seen if state is None else state | seen
    words = torch.zeros(num, WORDS, dtype=torch.int64, device=device)
    reals = words.view(torch.float64)
    for word, values in (
        (TEMPERATURE, batch.temperature), (TOP_P, batch.top_p), (MIN_P, batch.min_p), (UNIFORM, batch.uniforms),
        (REPETITION, batch.repetition.float()), (PRESENCE, batch.presence.float()), (FREQUENCY, batch.frequency.float()),
    ):  # fmt: skip
        reals[:, word] = values.double()
    words[:, TOP_K] = batch.top_k
    is_filtered = ((batch.top_k > 0) & (batch.top_k < vocab_size)) | (batch.top_p < 1.0)
    is_drawn = batch.temperature > 0.0
    words[:, FLAGS] = is_drawn.to(torch.int64) * IS_DRAWN + (is_drawn & is_filtered).to(torch.int64) * IS_FILTERED
    words[:, STATE_ROW] = -1 if state is None else torch.arange(num, device=device)
    edits = _edit_words(batch)
    masks = None if batch.mask_rows is None or batch.mask_words is None else (batch.mask_rows, _mask_words(batch.mask_words))
    has_edits = edits is not None or state is not None or masks is not None
    if has_edits:
        words[:, FLAGS] += IS_EDITED
    flat = words.flatten()
    if edits is not None:
        rows, edit_words = edits
        bounds = torch.searchsorted(rows, torch.arange(num + 1, device=device)) + flat.numel()
        words[:, EDIT_START], words[:, EDIT_STOP] = bounds[:-1], bounds[1:]
        flat = torch.cat([words.flatten(), edit_words])
    if masks is not None:
        rows, mask_words = masks
        words[rows, MASK] = flat.numel() + torch.arange(rows.shape[0], device=device) * mask_words.shape[1]
        flat = torch.cat([words.flatten(), flat[words.numel() :], mask_words.flatten()])
    return Records(flat, state, True, True, has_edits)


def _mask_words(words: Tensor) -> Tensor:
    """Masks [M, W] int32 as [M, ceil(W / 2)] int64."""
    num, width = words.shape
    padded = torch.nn.functional.pad(words, (0, width % 2)).contiguous()
    return padded.view(torch.int64).reshape(num, -1)


def _edit_words(batch: SampleBatch) -> tuple[Tensor, Tensor] | None:
    """(rows, words) of all edits in the order of rows, then ids; repeats stay in their order, bans come last."""
    rows, ids, values = [], [], []
    if batch.bias_rows is not None and batch.bias_ids is not None and batch.bias_values is not None:
        rows, ids, values = [batch.bias_rows], [batch.bias_ids], [batch.bias_values.float()]
    if batch.banned_rows is not None and batch.banned_ids is not None:
        rows, ids = [*rows, batch.banned_rows], [*ids, batch.banned_ids]
        values = [*values, torch.full(batch.banned_ids.shape, -torch.inf, device=batch.banned_ids.device)]
    if not rows:
        return None
    row, token, bits = torch.cat(rows), torch.cat(ids), torch.cat(values).view(torch.int32).long() & 0xFFFFFFFF
    order = (row << 32 | token).argsort(stable=True)
    return row[order].contiguous(), (token << 32 | bits)[order]
