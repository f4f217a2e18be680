"""What a network's steps need on a GPU beside its weights and its cache, from its data alone. No torch."""

from lamina.models.network import Attention, Experts, Mlp, Network, Parallel
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.models.parts_latent import Latent


def row_bytes(network: Network) -> int:
    """Bytes of the tensors between the ops for each row of a step, at most, with a third more."""
    most = max(_part_bytes(branch.part, network.hidden_size) for branches in network.layers for branch in branches)
    return (most + 16 * network.hidden_size) * 4 // 3


def request_bytes(network: Network) -> int:
    """Bytes that a decode takes besides: attention in up to 32 parts, fp32."""
    sizes = [0]
    for branches in network.layers:
        for branch in branches:
            parts = branch.part.parts if isinstance(branch.part, Parallel) else (branch.part,)
            sizes += [32 * part.heads * (part.dim + 2) * 4 for part in parts if isinstance(part, Attention)]
            sizes += [max(8 * part.heads, 2048) * (part.rank + 2) * 4 for part in parts if isinstance(part, Latent)]
    return max(sizes)


def _part_bytes(part: object, hidden: int) -> int:
    if isinstance(part, Parallel):
        return sum(_part_bytes(each, hidden) for each in part.parts)
    if isinstance(part, Attention):
        queries = part.heads * (1 + part.is_gated)
        return (queries + 2 * part.kv_heads) * part.dim * 8 + part.heads * part.dim * 4
    if isinstance(part, Latent):  # projected, in two parts, absorbed; found, and as values; an index's queries, and its choice
        index = 0 if part.index is None else part.index.heads * (part.index.dim * 8 + 4) + 4 * part.index.top_k
        return part.heads * (2 * (part.nope + part.rope.dim) + 2 * part.rank + part.value) * 4 + 8 * (part.q_rank or 0) + index
    if isinstance(part, Experts):
        shared = _part_bytes(part.shared, hidden) if part.shared is not None else 0
        return part.router.top_k * (4 * part.width + 4 * hidden) + 8 * part.num + shared
    if isinstance(part, Mlp):
        return 16 * part.width
    if isinstance(part, DeltaRule):  # projected, convolved; gated; and what it gives
        keys, values = part.groups * part.key_dim, part.heads * part.value_dim
        return 16 * keys + 24 * values + 16 * part.heads
    if isinstance(part, DecayedAttention):
        return 40 * len(part.slopes) * part.dim
    return 0
