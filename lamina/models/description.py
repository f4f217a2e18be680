"""A model as its config.json alone describes it: what its layers remember and what its weights weigh. No tensors.

The same facts serve the memory plan of every family and the engine of those that run.
"""

from dataclasses import dataclass

from lamina.memory.kinds import Field, Memory


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user may choose about a model's memory; a format of None leaves the choice to the family.

    cache_format     attention entries: fp8, bf16 or fp32.   index_format  index keys: fp4, fp8, bf16 or fp32.
    tensor_parallel  GPUs that share each layer's heads.   draft_tokens  tokens drafted ahead; 0 leaves draft blocks out.
    """

    cache_format: str | None = None
    index_format: str | None = None
    tensor_parallel: int = 1
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightPart:
    """The weights of one component, all layers together.

    nbytes  as the official checkpoint stores them, scales included.
    split   "tensor": divided over the tensor-parallel GPUs; "expert": divided over the expert-parallel GPUs (over the
            tensor-parallel ones where there are none); "none": every GPU has all of them.
    """

    component: str
    num_params: int
    nbytes: int
    split: str = "tensor"


@dataclass(frozen=True, slots=True)
class Description:
    """A model's memories and weights.

    memories       what every layer remembers on one GPU of a tensor-parallel group.
    hidden         the final hidden vector kept with each slot; None where the model has nothing but logs.
    cache_format, index_format  the formats in force; index_format None where the model has no index.
    notes          what was assumed, a sentence each; shown with the plan.
    """

    model_type: str
    memories: tuple[Memory, ...]
    hidden: Field | None
    max_positions: int
    vocab_size: int
    hidden_size: int
    cache_format: str
    index_format: str | None
    weights: tuple[WeightPart, ...]
    notes: tuple[str, ...] = ()
