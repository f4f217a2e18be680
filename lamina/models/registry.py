"""Which families of models run. One line each; `families.py` has those whose memory is known."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.entries import StoreKey, StoreSpec
from lamina.memory.kinds import Field, Memory
from lamina.models import deepseek_v4
from lamina.models.deepseek_v4_config import parse_config as parse_deepseek_v4
from lamina.models.deepseek_v4_memory import Formats, hidden_field, memories
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store
from lamina.weights.loader import Checkpoint
from lamina.weights.names import NameScheme


class LoadedModel(Protocol):
    """A model ready to run."""

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios whose groups a step must plan."""
        ...

    @property
    def product_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of its products with weights."""
        ...

    @property
    def batched_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of its batched products."""
        ...

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] -> final hidden vectors [T, D] fp32."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> [S, V] fp32."""
        ...


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model known from its config alone: what it remembers, and how to load it into stores."""

    memories: tuple[Memory, ...]
    hidden: Field | None
    rings: tuple[int, ...]
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    names: NameScheme
    load: Callable[[Checkpoint, str, "StoreMaker"], LoadedModel]


StoreMaker = Callable[[StoreSpec], Store]


def _deepseek_v4(values: Mapping[str, object], cache_format: str, index_format: str) -> Blueprint:
    config = parse_deepseek_v4(values)
    formats = Formats(cache_format, index_format)
    specs = {spec.key: spec for spec in deepseek_v4.store_specs(config, formats)}

    def load(checkpoint: Checkpoint, dtype: str, make: StoreMaker) -> LoadedModel:
        def store(key: StoreKey) -> Store:
            return make(specs[key])

        return deepseek_v4.load_model(config, checkpoint, dtype, store, formats)

    return Blueprint(
        memories=memories(config, formats), hidden=hidden_field(config), rings=(config.window,),
        vocab_size=config.vocab_size, max_positions=config.max_positions, eos_token_ids=config.eos_token_ids,
        names=deepseek_v4.NAMES, load=load,
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[Mapping[str, object], str, str], Blueprint]] = {"deepseek_v4": _deepseek_v4}


def blueprint(values: Mapping[str, object], cache_format: str, index_format: str) -> Blueprint:
    """The blueprint of a config.json. Raises ConfigError for an unknown model_type, naming the known ones."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ConfigError("model_type", kind, f"one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[kind](values, cache_format, index_format)
