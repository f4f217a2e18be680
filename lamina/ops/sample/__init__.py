"""Drawing the next token and reporting log-probabilities. `ref.py` is the definition.

A row's result depends on that row alone, bit for bit: never on the other rows, their number or its place among them.
"""

import torch
from torch import Tensor

from lamina.ops.sample import ref
from lamina.ops.sample.batch import SampleBatch
from lamina.ops.sample.ref import allowed_tokens, most_likely

__all__ = ["SampleBatch", "allowed_tokens", "most_likely", "sample", "token_logprobs"]


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    """The token drawn for each row, int64 [S].

    logits  [S, V] fp32, not changed. -inf marks a token that cannot be drawn.
    batch   per-row settings, on the same device.
    Order   bias and bans, penalties (repetition, frequency, presence), masks, temperature, min_p, top_k, top_p, draw.
            Equal logits are ordered by token id, lowest first, so top_k keeps exactly k tokens; every filter keeps at least one.
            The draw inverts the cumulative probabilities in token-id order, in fp64; a token of probability 0 never comes out.
    Raises  ValueError if shapes or dtypes differ from the above, or naming the first row that has a NaN, a +inf,
            or nothing but -inf left.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits={tuple(logits.shape)} {logits.dtype}: [S, V] torch.float32 is needed")
    num_rows, vocab_size = logits.shape
    for name, values in (
        ("temperature", batch.temperature),
        ("top_k", batch.top_k),
        ("top_p", batch.top_p),
        ("min_p", batch.min_p),
        ("repetition", batch.repetition),
        ("presence", batch.presence),
        ("frequency", batch.frequency),
        ("uniforms", batch.uniforms),
    ):
        if tuple(values.shape) != (num_rows,):
            raise ValueError(f"{name}={tuple(values.shape)}: one value for each of {num_rows} rows is needed")
    for name, table in (("prompt_seen", batch.prompt_seen), ("output_counts", batch.output_counts)):
        if table is not None and tuple(table.shape) != (num_rows, vocab_size):
            raise ValueError(f"{name}={tuple(table.shape)}: {(num_rows, vocab_size)} is needed")
    rows, words = batch.mask_rows, batch.mask_words
    if rows is not None and (words is None or tuple(words.shape) != (rows.shape[0], -(-vocab_size // 32))):
        found = None if words is None else tuple(words.shape)
        raise ValueError(f"mask_words={found}: a bit for each token of each row is needed")
    return ref.sample(logits, batch)


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of one token per row, and the k most likely tokens, from unedited logits.

    logits   [S, V] fp32, as the model gave them (vLLM's raw_logprobs: before bias, penalties and temperature; and,
             unlike vLLM's, before a grammar's mask, so that they stay finite).
    tokens   [S] int64.   k  0 to V.
    Returns  (logprob [S] fp32, rank [S] int64, top_ids [S, k] int64, top_logprobs [S, k] fp32): rank is 1 + the number of
             tokens whose fp32 log-probability is strictly larger; the top is most likely first, equals by token id.
    Raises   ValueError if shapes differ, k is out of range, or naming the first row that has a NaN, a +inf, or nothing but -inf.
    """
    if logits.dim() != 2 or tuple(tokens.shape) != (logits.shape[0],):
        raise ValueError(f"logits={tuple(logits.shape)} tokens={tuple(tokens.shape)}: [S, V] and [S] are needed")
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"k={k}: 0 to {logits.shape[1]} is needed")
    return ref.token_logprobs(logits, tokens, k)
