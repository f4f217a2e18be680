"""The definition, in plain PyTorch; fp32. Source: DeepSeek-V4 experts (clamp before silu, routing weight before `down`)."""

import torch
from torch import Tensor

from lamina.ops.gemm import linear, padded_rows


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """x [N, D], gate_up [2I, D] (gate rows first), down [D, I], weight [N, 1] or None, limit 0 = no clamp -> [N, D] fp32."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    # not F.silu: its vector body and scalar tail give different bits
    act = (gate / torch.exp(-gate).add_(1)).mul_(up)
    if weight is not None:
        act.mul_(weight)
    return linear(act.to(x.dtype), down)


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float, row_multiple: int = 1
) -> Tensor:
    """Sum over each token's experts, added in ascending expert order.

    x [T, D].   chosen [T, k] int64.   weights [T, k] fp32.   gate_up [E, 2I, D], down [E, D, I] fp32.
    row_multiple  rows given to each product are a multiple of it.   Returns [T, D] fp32.
    """
    top_k = chosen.shape[1]
    places: list[list[int]] = [[] for _ in range(gate_up.shape[0])]  # of each expert, in the flattened choices
    for place, expert in enumerate(chosen.flatten().tolist()):
        places[expert].append(place)
    share = weights.reshape(-1, 1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, own in enumerate(places):
        if own:
            at = torch.tensor(own, device=x.device)
            rows, num = at // top_k, padded_rows(len(own), row_multiple)
            inputs, weight = x.new_zeros(num, x.shape[1]), share.new_zeros(num, 1)
            inputs[: len(own)] = x.index_select(0, rows)
            weight[: len(own)] = share.index_select(0, at)
            out.index_add_(0, rows, swiglu(inputs, gate_up[expert], down[expert], limit, weight)[: len(own)])
    return out
