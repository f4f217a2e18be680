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

    @staticmethod
    def greedy(num_rows: int, device: torch.device | str = "cpu") -> "SampleBatch":
        """A batch in which every row takes its most likely token."""
        zeros = torch.zeros(num_rows, dtype=torch.float32, device=device)
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        halves = torch.full((num_rows,), 0.5, dtype=torch.float64, device=device)
        no_top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return SampleBatch(zeros, no_top_k, ones, zeros, ones, zeros, zeros, halves)
