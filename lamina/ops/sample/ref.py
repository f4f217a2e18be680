"""The definition of sampling in plain PyTorch, on any device.

Whole-batch work is elementwise, a maximum or an argmax, whose bits cannot depend on the batch; everything that rounds sums
works on one row at a time. All filters keep a head of one order (logit descending, then token id ascending), so they compose
by intersection and none needs the probabilities of another.
"""

import torch
from torch import Tensor

from lamina.ops.sample.batch import SampleBatch

_ROWS_AT_ONCE = 64  # bounds the working memory of `token_logprobs` when a long prompt is scored


def sample(logits: Tensor, batch: SampleBatch) -> Tensor:
    """See `lamina.ops.sample.sample`."""
    edited = _edit(logits, batch)
    if edited is not logits:  # a ban must not hide a NaN
        _refuse_bad_rows(logits, allow_empty=True)
    _refuse_bad_rows(edited)
    tokens = edited.argmax(dim=-1)  # the first of equal maxima                        # [S]
    if not bool((batch.temperature > 0.0).any()):
        return tokens
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniforms)
    for row, (temperature, top_k, top_p, min_p, uniform) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if temperature > 0.0:
            tokens[row] = _draw(edited[row].contiguous(), temperature, top_k, top_p, min_p, uniform)
    return tokens


def most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Of each row of logits [S, V] its most likely token, the first of equals, and that logit; NaN if the row has any."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        ids = values.argmax(axis=1)  # many times as fast as PyTorch's
        return ids.tolist(), values[range(len(ids)), ids].tolist()
    peaks, tokens = logits.max(dim=-1)
    return tokens.tolist(), peaks.tolist()


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `lamina.ops.sample.token_logprobs`."""
    _refuse_bad_rows(logits)
    num_rows = logits.shape[0]
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    top_ids = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    top_logprobs = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        values = _log_softmax(logits[rows])  # [R, V]
        chosen = values.gather(1, tokens[rows, None])  # [R, 1]
        logprobs[rows] = chosen[:, 0]
        ranks[rows] = 1 + (values > chosen).sum(dim=-1)
        top_ids[rows] = _top_ids(values, k)
        top_logprobs[rows] = values.gather(1, top_ids[rows])
    return logprobs, ranks, top_ids, top_logprobs


def _log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of logits [R, V] fp32; sums are taken row by row because a split sum would depend on the batch."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = shifted.exp().contiguous()
    totals = torch.stack([row.sum() for row in weights])
    return shifted - totals.log()[:, None]


def _top_ids(values: Tensor, k: int) -> Tensor:
    """Ids [R, k] of the k largest of values [R, V], largest first, lowest id first among equals."""
    peaks = values.topk(min(k + 1, values.shape[1]), dim=-1)
    top_ids = peaks.indices[:, :k].clone()
    has_equals = (peaks.values[:, 1:] == peaks.values[:, :-1]).any(dim=-1)  # [R]
    for row in has_equals.nonzero().flatten().tolist():  # topk promises no order among equals
        ids = _largest(values[row], k) if k else top_ids[row]
        top_ids[row] = ids[values[row, ids].sort(descending=True, stable=True).indices]
    return top_ids


def _refuse_bad_rows(logits: Tensor, allow_empty: bool = False) -> None:
    """Raises ValueError naming the first row with a NaN or +inf, or (unless allow_empty) with nothing but -inf."""
    if logits.shape[0] == 0:
        return
    peaks = logits.amax(dim=-1)  # NaN if any is NaN                                   # [S]
    is_bad = peaks.isnan() | (peaks == torch.inf)
    if not allow_empty:
        is_bad = is_bad | (peaks == -torch.inf)
    if bool(is_bad.any()):
        row = int(is_bad.to(torch.int64).argmax())
        raise ValueError(f"logits row {row} of {logits.shape[0]} has maximum {float(peaks[row])}: finite and no NaN is needed")


def _edit(logits: Tensor, batch: SampleBatch) -> Tensor:
    """Logits after bias, bans, penalties and masks, [S, V] fp32; the input itself if nothing edits it."""
    edited = logits
    if batch.bias_rows is not None and batch.bias_ids is not None and batch.bias_values is not None:
        edited = edited.index_put((batch.bias_rows, batch.bias_ids), batch.bias_values.float(), accumulate=True)
    if batch.banned_rows is not None and batch.banned_ids is not None:
        edited = edited.index_put((batch.banned_rows, batch.banned_ids), edited.new_tensor(-torch.inf))
    counts, seen = batch.output_counts, batch.prompt_seen
    if counts is not None:
        seen = counts > 0 if seen is None else seen | (counts > 0)
    if seen is not None:
        repetition = batch.repetition.float()[:, None]
        edited = torch.where(seen, torch.where(edited > 0, edited / repetition, edited * repetition), edited)
    if counts is not None:
        edited = edited - batch.frequency.float()[:, None] * counts
        edited = edited - batch.presence.float()[:, None] * (counts > 0)
    if batch.mask_rows is not None and batch.mask_words is not None:
        kept = edited[batch.mask_rows].masked_fill(~allowed_tokens(batch.mask_words, logits.shape[1]), -torch.inf)
        edited = edited.index_copy(0, batch.mask_rows, kept)
    return edited


def allowed_tokens(words: Tensor, vocab_size: int) -> Tensor:
    """Masks of a bit per token, lowest first, in int32 words [M, W] -> [M, V] bool."""
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1  # [M, W, 32]
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The token of one row [V] fp32 whose cumulative probability, in token-id order, first exceeds `uniform`."""
    weights = ((logits.double() - logits.amax().double()) / temperature).exp()  # the most likely has weight 1    # [V]
    if min_p > 0.0:
        weights = torch.where(weights >= min_p, weights, 0.0)
    if 0 < top_k < logits.numel():
        weights = _keep(weights, _largest(logits, top_k))
    if top_p < 1.0:
        weights = _keep(weights, _nucleus(logits, weights, top_p))
    cumulative = weights.cumsum(dim=-1)  # [V]
    total = cumulative[-1]
    token = int(torch.searchsorted(cumulative, uniform * total, right=True))
    # A target that rounds up to the total lies past every token: take the one that completes the total. Both have weight > 0.
    return token if token < logits.numel() else int(torch.searchsorted(cumulative, total))


def _keep(weights: Tensor, ids: Tensor) -> Tensor:
    """Weights [V] with all but `ids` set to 0."""
    kept = torch.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept


def _largest(values: Tensor, k: int) -> Tensor:
    """Ids, ascending, of the k largest of values [V], lowest ids among equals."""
    border = values.topk(k).values[-1]
    above = (values > border).nonzero().flatten()
    equal = (values == border).nonzero().flatten()
    return torch.cat([above, equal[: k - above.numel()]]).sort().values


def _nucleus(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Ids of the fewest tokens, most likely first, whose weights reach the share `top_p` of the whole; at least one."""
    total = weights.cumsum(dim=-1)[-1]
    # Tokens this light cannot all together fill the share beyond top_p, so they are out; the rest is short to sort.
    floor = 0.5 * (1.0 - top_p) * total / weights.numel()
    ids = (weights > floor).nonzero().flatten()
    ids = ids[logits[ids].sort(descending=True, stable=True).indices]
    reached = weights[ids].cumsum(dim=-1)
    return torch.cat([ids[:1], ids[1:][reached[:-1] < top_p * total]])
