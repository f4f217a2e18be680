"""The definition, in plain PyTorch; fp32: `attend_heads` with one row that is key and value of all heads."""

import torch
from torch import Tensor

from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads import attend_heads as grouped
from lamina.ops.sequences import Sequences


def attend_latent(
    q: Tensor, q_turned: Tensor, past: Past, case: HeadsCase, sequences: Sequences, selected: Tensor | None = None
) -> Tensor:
    """Softmax attention of each query over all rows up to its own, [T, H * rank] fp32; rows of padding are zeros.

    q  [T, H * rank] fp32, against latents.   q_turned [T, H * rope] fp32, against rotated keys.   The step's rows are stored.
    selected  [T, case.top_k] int64 positions, ascending, of queries that see more than top_k rows, which read no others.
    """
    whole = torch.cat([q.unflatten(1, (case.heads, -1)), q_turned.unflatten(1, (case.heads, -1))], dim=-1)
    return grouped(whole, (), past, case, sequences, selected).flatten(1)
