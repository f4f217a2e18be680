"""Routers of other families, as definitions in plain PyTorch; fp32. Ties go to the lowest expert.

route_softmax   softmax over all experts, the k best.             Source: Qwen3-MoE, Jamba, DeepSeek-V2 (with groups).
route_chosen    the k best logits, softmax or sigmoid of these.   Source: gpt-oss, Granite; Llama 4.
route_sigmoid   sigmoid, a bias for the selection alone, groups.  Source: DeepSeek-V3, Nemotron-H.
"""

import torch
from torch import Tensor


def _best(scores: Tensor, count: int) -> Tensor:
    """[T, count] of [T, E]: the largest, ties to the lowest index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _in_groups(scores: Tensor, groups: int, kept: int, counted: int) -> Tensor:
    """Scores with those outside the `kept` best groups at -inf; a group counts as the sum of its `counted` best."""
    if groups <= 1 or kept >= groups:
        return scores
    grouped = scores.view(scores.shape[0], groups, -1)
    worth = grouped.topk(counted, dim=-1).values.sum(-1)
    keep = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, kept), True)
    return torch.where(keep[..., None], grouped, -torch.inf).flatten(1)


def route_softmax(
    logits: Tensor, top_k: int, normalises: bool, scale: float = 1.0, groups: int = 1, kept: int = 1
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (experts [T, k], weights [T, k]): softmax of all; of the k best, which sum to 1 if `normalises`; * scale.

    groups, kept  only experts of the `kept` groups with the largest maximum may be chosen.
    """
    scores = torch.softmax(logits, dim=-1)
    chosen = _best(_in_groups(scores, groups, kept, 1), top_k)
    weights = scores.gather(1, chosen)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * scale


def route_chosen(logits: Tensor, top_k: int, independent: bool = False) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (experts [T, k], weights [T, k]): softmax of the k best logits; if `independent` their sigmoids."""
    chosen = _best(logits, top_k)
    found = logits.gather(1, chosen)
    return chosen, 1 / (1 + torch.exp(-found)) if independent else torch.softmax(found, dim=-1)


def route_sigmoid(
    logits: Tensor, bias: Tensor | None, top_k: int, normalises: bool, scale: float, groups: int = 1, kept: int = 1
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] -> (experts [T, k], weights [T, k]): sigmoids; selection adds the bias, weights do not have it.

    groups, kept  only experts of the `kept` groups with the largest sum of two may be chosen.
    """
    scores = 1 / (1 + torch.exp(-logits))
    wanted = scores if bias is None else scores + bias
    chosen = _best(_in_groups(wanted, groups, kept, 2), top_k)
    weights = scores.gather(1, chosen)
    if normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale
