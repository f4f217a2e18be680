"""The definition, in plain PyTorch; fp32. Source: DeepSeek-V4 experts (clamp before silu, routing weight before `down`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.ops.experts.packed import Activation
from lamina.ops.gemm import Weight, Weights, linear, padded_rows
from lamina.ops.quantise import dequantise_fp4, dequantise_fp8, quantise_fp8

_ACTIVATION_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Gating:
    """What an expert computes: down(weight * gate * sigmoid(alpha * gate) * (up + shift)), with a clamp as the op says.

    biases  of gate_up [E, 2I] and of down [E, D]; the weight multiplies the second too.
    weighs_input  the routing weight multiplies what the expert reads instead.   Source: gpt-oss; Llama 4.
    ungated  relu2 or silu: down(weight * ungated(up)), and gate_up has the rows of `up` alone.   Source: Nemotron-H.
    """

    alpha: float = 1.0
    shift: float = 0.0
    biases: tuple[Tensor, Tensor] | None = None
    weighs_input: bool = False
    ungated: str | None = None


_PLAIN = Gating()


def swiglu(
    x: Tensor, gate_up: Weight, down: Weight, limit: float, weight: Tensor | None = None, gating: Gating = _PLAIN, expert: int = 0
) -> Tensor:
    """x [N, D], gate_up [2I, D] (gate rows first), down [D, I], weight [N, 1] or None, limit 0 = no clamp -> [N, D] fp32.

    expert  which of the biases are its.
    """
    if gating.weighs_input and weight is not None:
        x, weight = x * weight, None
    both = linear(x, gate_up)
    if gating.biases is not None:
        both = both + gating.biases[0][expert]
    if gating.ungated is not None:
        act = both.clamp(min=0).square_() if gating.ungated == "relu2" else both / torch.exp(-both).add_(1)
    else:
        gate, up = both.chunk(2, dim=-1)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        # not F.silu: its vector body and scalar tail give different bits
        act = (gate / torch.exp(gate * -gating.alpha).add_(1)).mul_(up + gating.shift if gating.shift else up)
    if weight is not None:
        act.mul_(weight)
    out = linear(act.to(x.dtype), down)
    if gating.biases is not None:
        bias = gating.biases[1][expert]
        out = out + (bias if weight is None else bias * weight)
    return out


def experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Weights, down: Weights, limit: float, row_multiple: int = 1,
    gating: Gating = _PLAIN,
) -> Tensor:  # fmt: skip
    """Sum over each token's experts, added in ascending expert order.

    x [T, D].   chosen [T, k] int64.   weights [T, k] fp32.   gate_up [E, 2I, D], down [E, D, I] fp32.
    row_multiple  rows given to each product are a multiple of it.   Returns [T, D] fp32.
    """
    top_k = chosen.shape[1]
    places: list[list[int]] = [[] for _ in range(len(gate_up))]  # of each expert, in the flattened choices
    for place, expert in enumerate(chosen.flatten().tolist()):
        places[expert].append(place)
    share = weights.reshape(-1, 1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, own in enumerate(places):
        if own:
            at = torch.tensor(own, device=x.device)
            rows, num = at // top_k, padded_rows(len(own), row_multiple if isinstance(gate_up, Tensor) else 1)
            inputs, weight = x.index_select(0, rows), share.index_select(0, at)
            if num > len(own):
                inputs = torch.cat([inputs, inputs.new_zeros(num - len(own), x.shape[1])])
                weight = torch.cat([weight, weight.new_zeros(num - len(own), 1)])
            found = swiglu(inputs, gate_up[expert], down[expert], limit, weight, gating, expert)
            out.index_add_(0, rows, found[: len(own)])
    return out


def experts_fp4(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    limit: float,
    activation: Activation = "fp8",
) -> Tensor:
    """`experts` from FP4 weights as they are stored, with activations rounded before both products.

    x [T, D] bf16, fp32 or fp64; the products are in fp64 if x is, else in fp32.
    chosen [T, k]; below 0 or past the last is nobody's.   weights [T, k].
    gate_up   packed u8 [E, 2I, D/2], gate rows first, and e8m0 u8 [E, 2I, D/32].   down  u8 [E, D, I/2] and u8 [E, D, I/32].
    activation  fp8: e4m3 with a power-of-two scale for every 128.   bf16: nearest bf16.   The SwiGLU's result is rounded to x's
    dtype before.   Returns [T, D] in the dtype of the products, the experts of a token added in ascending order.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=exact, device=x.device)
    rows_of_x = _rounded(x, activation, exact)
    for expert in range(gate_up[0].shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        first, second = (dequantise_fp4(codes[expert], scales[expert]).to(exact) for codes, scales in (gate_up, down))
        gate, up = (rows_of_x[token] @ first.t()).chunk(2, dim=-1)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        act = gate / (1 + torch.exp(-gate)) * up * weights[token, place, None].to(exact)
        out.index_add_(0, token, _rounded(act.to(x.dtype), activation, exact) @ second.t())
    return out


def _rounded(x: Tensor, activation: Activation, exact: torch.dtype) -> Tensor:
    """The values that a product sees."""
    if activation == "bf16":
        return x.to(torch.bfloat16).to(exact)
    return dequantise_fp8(*quantise_fp8(x, _ACTIVATION_BLOCK), _ACTIVATION_BLOCK).to(exact)
