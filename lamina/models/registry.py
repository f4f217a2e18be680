"""Which families of models run. One line each; `families.py` has those whose memory is known."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lamina.base.config import AUTO, MOST_DRAFTS
from lamina.base.errors import ConfigError
from lamina.layers.entries import StoreKey, StoreSpec
from lamina.layers.rounding import activation_dtype
from lamina.memory.kinds import Field, Memory
from lamina.models import deepseek_v4
from lamina.models.deepseek_v4_config import Config, parse_draft
from lamina.models.deepseek_v4_config import parse_config as parse_deepseek_v4
from lamina.models.deepseek_v4_memory import Formats, hidden_field, memories
from lamina.models.description import Choices
from lamina.models.families import NETWORKS, describe
from lamina.models.implementations import Choice, implementations, refusals
from lamina.models.network import Network
from lamina.models.network_model import load_network
from lamina.models.network_sizes import request_bytes, row_bytes
from lamina.ops.machine import Machine
from lamina.ops.rows import Rows
from lamina.ops.sequences import Sequences
from lamina.ops.store import EntryCodec, Store
from lamina.weights.loader import TensorSource
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


class LoadedDeviceModel(Protocol):
    """A model ready to run on a GPU. `order` is decode or prefill: which fixed order the sums take."""

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios that its layers have."""
        ...

    def forward(self, tokens: Tensor, rows: Rows, order: Literal["decode", "prefill"], max_context: int) -> Tensor:
        """tokens [T] int32 -> final hidden vectors [T, D] fp32."""
        ...

    def logits(self, hidden: Tensor, order: Literal["decode", "prefill"]) -> Tensor:
        """hidden [S, D] -> [S, V] fp32."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model is loaded to.

    activation  fp8 or bf16: what products with quantised weights read.
    only_portable  no kernel is chosen that runs on one kind of GPU only.
    is_strict  bits never depend on where a request is cut.
    """

    device: torch.device
    machine: Machine
    dtype: torch.dtype
    activation: Literal["fp8", "bf16"]
    only_portable: bool = False
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model known from its config alone: what it remembers, and how to load it into stores.

    token_bytes  of the tensors between the ops, for each row of a step on a GPU.   request_bytes  what a decode takes besides.
    refuses      why a GPU's kernels do not serve it, or None.
    """

    memories: tuple[Memory, ...]
    hidden: Field | None
    rings: tuple[int, ...]
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    names: NameScheme
    load: Callable[[TensorSource, str, "StoreMaker"], LoadedModel]
    load_device: Callable[[TensorSource, Target, "StoreMaker"], LoadedDeviceModel]
    token_bytes: int
    request_bytes: int
    refuses: Callable[[Target], str | None]


StoreMaker = Callable[[StoreSpec], Store]


@dataclass(frozen=True, slots=True)
class Drafts:
    """How many tokens are drafted ahead at most, and whether the model's own draft blocks do it."""

    tokens: int = 0
    by_model: bool = False


def _deepseek_v4(values: Mapping[str, object], cache_format: str, index_format: str, drafts: Drafts) -> Blueprint:
    config = parse_deepseek_v4(values)
    formats = Formats(cache_format, index_format)
    blocks = parse_draft(values, config) if drafts.by_model else None
    if blocks is not None and not blocks.can_run:
        raise ConfigError("num_nextn_predict_layers", blocks.blocks, "1: a chain of one block is what drafts")
    specs = {spec.key: spec for spec in deepseek_v4.store_specs(config, formats, blocks)}

    def load(source: TensorSource, dtype: str, make: StoreMaker) -> LoadedModel:
        return deepseek_v4.load_model(config, source, dtype, lambda key: make(specs[key]), formats, blocks)

    def load_device(source: TensorSource, target: Target, make: StoreMaker) -> LoadedDeviceModel:
        from lamina.models.deepseek_v4_device import load_device_model  # needs Triton

        return load_device_model(
            config, source, target.dtype, lambda key: make(specs[key]), formats, target.device, target.machine, target.activation,
            target.only_portable, blocks,
        )  # fmt: skip

    def refuses(target: Target) -> str | None:
        dtype = "fp32" if target.dtype == torch.float32 else "bf16"
        kernels = "portable" if target.only_portable else "auto"
        choice = Choice(dtype, cache_format, index_format, target.activation, kernels)
        return "; ".join(refusals(implementations(values, target.machine, choice))) or None

    return Blueprint(
        memories=memories(config, formats, blocks), hidden=hidden_field(config, blocks), rings=(config.window + drafts.tokens,),
        vocab_size=config.vocab_size, max_positions=config.max_positions, eos_token_ids=config.eos_token_ids,
        names=deepseek_v4.NAMES if blocks is None else deepseek_v4.ALL_NAMES, load=load, load_device=load_device,
        token_bytes=_token_bytes(config),
        request_bytes=16 * config.num_heads * (config.head_dim + 2) * 4, refuses=refuses,  # attention in up to 16 parts, fp32
    )  # fmt: skip


def _token_bytes(config: Config) -> int:
    """Streams twice, queries with their products and codes, experts' inner rows and one fp32 row for each, with a third more."""
    streams = 3 * 2 * config.streams * config.hidden_size
    queries = 8 * config.num_heads * config.head_dim + 4 * config.index_heads * config.index_dim
    experts = config.experts_per_token * (3 * config.expert_width + 4 * config.hidden_size) + 12 * config.expert_width
    return (streams + queries + experts + 24 * config.hidden_size) * 4 // 3


def _network(values: Mapping[str, object], network: Network, cache_format: str, index_format: str) -> Blueprint:
    """The blueprint of a family that is given as a network."""
    found = describe(values, Choices(cache_format=cache_format, index_format=index_format))

    def load(source: TensorSource, dtype: str, make: StoreMaker) -> LoadedModel:
        def store(key: StoreKey, codec: EntryCodec) -> Store:
            return make(StoreSpec(key, codec))

        return load_network(network, source, activation_dtype(dtype), store, cache_format, index_format)

    def load_device(source: TensorSource, target: Target, make: StoreMaker) -> LoadedDeviceModel:
        from lamina.models.network_device import load_device_network  # needs Triton

        def store(key: StoreKey, codec: EntryCodec) -> Store:
            return make(StoreSpec(key, codec))

        has_fp8 = target.activation == "fp8" and target.machine.has_fp8 and target.dtype == torch.bfloat16
        return load_device_network(
            network, source, target.dtype, store, cache_format, target.device, has_fp8, target.only_portable, target.is_strict,
            index_format,
        )  # fmt: skip

    def refuses(target: Target) -> str | None:
        if not target.machine.has_triton:
            return "needs Triton, which is not installed"
        from lamina.models.network_device import refuses_network

        return refuses_network(network, target.machine)

    return Blueprint(
        memories=found.memories, hidden=found.hidden, rings=(), vocab_size=found.vocab_size, max_positions=found.max_positions,
        eos_token_ids=network.eos_token_ids, names=network.names, load=load, load_device=load_device,
        token_bytes=row_bytes(network), request_bytes=request_bytes(network), refuses=refuses,
    )  # fmt: skip


#: families with a model of their own, by model_type of config.json; the others are given as a network (`families.NETWORKS`)
_MODELS: dict[str, Callable[[Mapping[str, object], str, str, Drafts], Blueprint]] = {"deepseek_v4": _deepseek_v4}


def chosen_formats(values: Mapping[str, object], cache_format: str, index_format: str, dtype: str) -> tuple[str, str]:
    """(cache, index): what settings name, or what auto stands for: `dtype`, or what a model of its own was trained with."""
    has_own = values.get("model_type") in _MODELS
    automatic = ("fp8", "fp4") if has_own else (dtype, dtype)
    wanted = zip((cache_format, index_format), automatic, strict=True)
    cache, index = (own if name == AUTO else name for name, own in wanted)
    return cache, index


def draft_blocks(values: Mapping[str, object]) -> str | None:
    """What kind of draft blocks a checkpoint has that can be run, by its config.json: mtp, dspark or None."""
    if values.get("model_type") not in _MODELS:
        return None
    draft = parse_draft(values, parse_deepseek_v4(values))
    return None if not draft.can_run else "dspark" if draft.taps else "mtp"


def most_drafts(values: Mapping[str, object]) -> int:
    """The most tokens that the draft blocks of a checkpoint make at once; `draft_blocks` says that it has some."""
    draft = parse_draft(values, parse_deepseek_v4(values))
    return draft.length if draft.taps else MOST_DRAFTS


def has_draft_blocks(values: Mapping[str, object], stored: Iterable[str]) -> bool:
    """Whether tensors of the draft blocks are among the names of a checkpoint's, which may have been left out."""
    if values.get("model_type") not in _MODELS:
        return False
    return any(deepseek_v4.NAMES.is_ignored(name) for name in deepseek_v4.ALL_NAMES.rename_all(stored))


def blueprint(
    values: Mapping[str, object], cache_format: str, index_format: str, dtype: str = "fp32", drafts: Drafts | None = None
) -> Blueprint:
    """The blueprint of a config.json.

    cache_format, index_format  auto: fp8 and fp4 for the models that were trained with them, else `dtype`, what activations are
                  rounded to.
    drafts        None: nothing is drafted ahead.
    Raises ConfigError for an unknown model_type, naming the known ones.
    """
    kind = values.get("model_type")
    cache_format, index_format = chosen_formats(values, cache_format, index_format, dtype)
    if isinstance(kind, str) and kind in _MODELS:
        return _MODELS[kind](values, cache_format, index_format, drafts or Drafts())
    if not isinstance(kind, str) or kind not in NETWORKS:
        raise ConfigError("model_type", kind, f"one of {', '.join(sorted((*_MODELS, *NETWORKS)))}")
    return _network(values, NETWORKS[kind](values), cache_format, index_format)
