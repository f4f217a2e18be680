"""Parts of a network whose heads share one latent row per token, as data. No torch."""

from dataclasses import dataclass

from lamina.models.network import Rope


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a latent attention: which `top_k` tokens a query attends to. Its first rope.dim dims are rotated in halves.

    prefix   of wq_b, wk, k_norm (a layer norm with bias, `eps`) and weights_proj.   memory  name of the layer's index keys.
    """

    prefix: str
    memory: str
    heads: int
    dim: int
    top_k: int
    eps: float


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention over latents of `rank` dims and a rotated key of rope.dim dims that all heads share.

    prefix   of q_proj, or q_a_proj, q_a_layernorm and q_b_proj where queries have a low rank; kv_a_proj_with_mqa,
             kv_a_layernorm, kv_b_proj, o_proj.
    q_rank   of the queries, None for q_proj.   nope, value  dims of a head: of its key without positions, and of its value.
    scale    of the scores.   eps  of the low ranks' norms.   bias  of what reads the input (not q_proj) and of o_proj.
    """

    prefix: str
    memory: str
    heads: int
    q_rank: int | None
    rank: int
    nope: int
    value: int
    rope: Rope
    scale: float
    eps: float
    bias: bool = False
    index: Index | None = None
