"""From one GPU's memory to the pool: the share that is used, less the weights of the fullest GPU, less a workspace.

    pool = memory x gpu_memory_utilization - weights - workspace          on each GPU; a replica (tp GPUs) has one such pool

Tensor-parallel weights are divided over tp GPUs, experts over the larger of tp and ep (whole ones over ep: the fullest GPU counts
where they do not divide), the rest is on every GPU; replicas (dp) have the attention's weights each. The workspace is the only
estimate.
"""

from collections.abc import Sequence
from fractions import Fraction

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Memory
from lamina.models.description import Description, WeightPart
from lamina.plan.gpus import memory_of
from lamina.plan.records import Budget, Mesh, PlanOptions, WeightLine

#: split of weights that are in the checkpoint and are not loaded
UNUSED = "unused"
#: hidden vectors of 2 bytes that a token's computation has alive at once: residual streams in and out, queries and outputs of
#: all heads, gate, up and down of its experts; the shipped V4 models need 26 and 28
_HIDDEN_VECTORS = 32
_HIDDEN_BYTES = 2
#: scores and probabilities of one sample, fp32
_LOGIT_BYTES = 2 * 4


def weight_lines(parts: Sequence[WeightPart], mesh: Mesh, num_experts: int | None = None) -> tuple[WeightLine, ...]:
    """The components with what the fullest GPU holds of each. num_experts: of a layer; None if unknown, taken to divide then.

    Raises ConfigError for more expert-parallel GPUs than experts.
    """
    if num_experts is not None and mesh.ep is not None and mesh.ep > num_experts:
        raise ConfigError("ep", mesh.ep, f"at most {num_experts}, the experts of a layer")
    return tuple(
        WeightLine(part.component, part.num_params, part.nbytes, part.split, _on_gpu(part, mesh, num_experts))
        for part in parts
        if part.nbytes
    )


def _on_gpu(part: WeightPart, mesh: Mesh, num_experts: int | None) -> int:
    ways = {"tensor": mesh.tp, "expert": mesh.expert_ways, "none": 1}
    if part.split == UNUSED:
        return 0
    if part.split not in ways:
        raise ConfigError(f"{part.component}.split", part.split, f"one of {', '.join([*ways, UNUSED])}")
    if part.split == "expert" and num_experts is not None and mesh.ep is not None:
        most = -(-num_experts // mesh.ep)  # whole experts of the fullest of ep groups, each cut over the group's GPUs
        return -(-part.nbytes * most * mesh.ep // (num_experts * mesh.expert_ways))
    return -(-part.nbytes // ways[part.split])


def entry_bytes(memory: Memory) -> int:
    """Bytes of one entry, or of the state where there are no entries."""
    parts = memory.tail_parts(1) or memory.block_parts(memory.log_stride) or memory.slot_parts(0)
    return sum(part.field.nbytes for part in parts)


def step_bytes(memories: Sequence[Memory]) -> int:
    """Bytes of the entries that one token adds in the layer that adds most: a step keeps them before it stores them."""
    by_layer: dict[int, int] = {}
    for memory in memories:
        if memory.tail_parts(1) or memory.block_parts(memory.log_stride):
            by_layer[memory.layer] = by_layer.get(memory.layer, 0) + -(-entry_bytes(memory) // memory.log_stride)
    return max(by_layer.values(), default=0)


def workspace(description: Description, options: PlanOptions) -> tuple[tuple[str, int], ...]:
    """An estimate of what a step needs besides weights and pool: (what, bytes).

    max_step_tokens x 32 hidden vectors x 2 B, max_step_tokens x the entries a token adds in one layer,
    max_requests x vocabulary x 8 B (scores and probabilities). Not divided over tensor-parallel GPUs.
    """
    rows = options.max_step_tokens
    return (
        ("activations of a step", rows * _HIDDEN_VECTORS * description.hidden_size * _HIDDEN_BYTES),
        ("entries of a step", rows * step_bytes(description.memories)),
        ("logits", options.max_requests * description.vocab_size * _LOGIT_BYTES),
    )


def make_budget(options: PlanOptions, weights: Sequence[WeightLine], space: Sequence[tuple[str, int]]) -> Budget:
    """The pool of one replica. With cache_bytes it is that; without any memory it is unknown."""
    memory = memory_of(options)
    if options.cache_bytes is not None:
        return Budget(pool_bytes=options.cache_bytes)
    if memory is None:
        return Budget()
    usable = int(memory * Fraction(str(options.gpu_memory_utilization)))
    weights_bytes, space_bytes = sum(line.gpu_bytes for line in weights), sum(size for _, size in space)
    left = usable - weights_bytes - space_bytes
    return Budget(memory, usable, weights_bytes, space_bytes, max(left, 0), max(-left, 0))
