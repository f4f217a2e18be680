"""Expert routing on a GPU, learned or by table, in one launch.

route(logits, ...)       as `ref.route` and `ref.route_by_table`
route_plain(logits, ...) as the routers of `softmax.py`
refuses(machine, case)   why this machine or these shapes are not served, or None
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lamina.ops.machine import Machine
from lamina.ops.route import RouteCase, kernels
from lamina.ops.rows import Rows

_MOST_EXPERTS, _MOST_CHOSEN = 1024, 64


def refuses(machine: Machine, case: RouteCase) -> str | None:
    """Why `case` is not served here, in one line, or None."""
    if machine.device != "cuda" and not triton.knobs.runtime.interpret:
        return f"runs on NVIDIA GPUs, not on {machine.device}"
    if not 1 <= case.experts <= _MOST_EXPERTS:
        return f"the number of experts must be 1 to {_MOST_EXPERTS}, not {case.experts}"
    if not 1 <= case.top_k <= min(case.experts, _MOST_CHOSEN):
        return f"the experts of a token must be 1 to {min(case.experts, _MOST_CHOSEN)}, not {case.top_k}"
    return None


def route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top_k: int, scale: float, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Experts of each row [T, k] int32, and their weights [T, k] fp32, which sum to `scale`. Padding rows get -1 and 0.

    logits  [T, E] fp32, contiguous.
    bias    [E] fp32: the k largest of score + bias, the largest first, ties to the lowest expert; or
    table   [V, k] int32 or int64: those of the row's token, in the table's order.   tokens [T] int32 or int64.
    """
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous() and (bias is None) != (table is None)
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        kernels.route[(num_tokens,)](
            logits, bias, table, tokens, rows.owners, chosen, weights, scale,
            EXPERTS=num_experts, SIZE=triton.next_power_of_2(num_experts), TOP_K=top_k, PLACES=triton.next_power_of_2(top_k),
            HAS_TABLE=table is not None, num_warps=1,
        )  # fmt: skip
    return chosen, weights


def route_plain(
    logits: Tensor, bias: Tensor | None, kind: str, top_k: int, normalises: bool, scale: float, rows: Rows, groups: int = 1,
    kept: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Experts of each row [T, k] int32, the best first, ties to the lowest, and their weights [T, k] fp32. Padding: -1 and 0.

    logits  [T, E] fp32, contiguous.   bias  [E] fp32, for the selection alone, or None.
    kind    softmax, chosen, chosen_sigmoid or sigmoid: `route_softmax`, `route_chosen` or `route_sigmoid` of `softmax.py`.
    groups, kept  softmax, sigmoid: only experts of the `kept` best of so many groups, a divisor of E, may be chosen.
    """
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous() and num_experts % groups == 0
    assert groups == 1 or kind in ("softmax", "sigmoid")
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        kernels.route_plain[(num_tokens,)](
            logits, bias, rows.owners, chosen, weights, scale,
            EXPERTS=num_experts, SIZE=triton.next_power_of_2(num_experts), TOP_K=top_k, PLACES=triton.next_power_of_2(top_k),
            KIND=kind, NORMALISES=normalises, GROUPS=groups if kept < groups else 1, KEPT=kept, num_warps=1,
        )  # fmt: skip
    return chosen, weights
