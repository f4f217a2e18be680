"""What a checkpoint of each family that runs holds, known without torch: one line each, the same families as `registry.py`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lamina.models import deepseek_v4_names, deepseek_v4_tensors
from lamina.models.needed import Needed
from lamina.weights.names import NameScheme


@dataclass(frozen=True, slots=True)
class Contents:
    """How a family's tensors are named, and those that a config asks for."""

    names: NameScheme
    needed: Callable[[Mapping[str, object]], Iterator[Needed]]


#: by model_type of config.json
CHECKPOINTS: dict[str, Contents] = {
    "deepseek_v4": Contents(deepseek_v4_names.NAMES, deepseek_v4_tensors.needed_tensors),
}
