"""Which implementations of the ops a model would run with: its config.json in terms of the ops' own dims."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.deepseek_v4_config import parse_config
from lamina.models.deepseek_v4_memory import INDEXED
from lamina.models.families import NETWORKS
from lamina.models.network import Network, parts_of
from lamina.models.parts_scan import Scaled
from lamina.models.tiny import tiny_config
from lamina.ops.catalog import DEFINITION, NEEDS_TRITON, Dims, Row, catalog, refusals
from lamina.ops.machine import Machine, this_machine

__all__ = [
    "SHIPPED", "Choice", "Row", "cache_directory", "implementations", "machine_named", "network_rows", "refusals",
    "shipped_values", "watch_compilations",
]  # fmt: skip

#: what the kinds of parts of a network are, in words; another is shown by its name
_WORDS = {
    "AltUpLayer": "layer over streams", "Attention": "attention", "ChannelScan": "scan, by channel", "Closing": "streams to one",
    "DecayedAttention": "attention that decays", "DeltaRule": "gated delta rule", "Experts": "experts",
    "FusedExperts": "experts, fused tensors", "HeadScan": "scan, by head", "Latent": "latent attention", "Mlp": "MLP",
    "Opening": "one to streams", "Residual": "residual and norms", "UngatedExperts": "experts without gates",
}  # fmt: skip
#: stands for GPUs where there is none
_SOME_GPU = (9, 0)

#: whose widths stand for a model that nobody names
SHIPPED = "DeepSeek-V4-Flash"


@dataclass(frozen=True, slots=True)
class Choice:
    """What of the engine's settings counts. max_tokens  of the longest request; None: the model's limit."""

    dtype: str = "auto"
    cache_format: str = "fp8"
    index_format: str = "fp4"
    activation: str = "auto"
    kernels: str = "auto"
    max_tokens: int | None = None


def machine_named(device: str, capability: tuple[int, int] | None = None) -> Machine:
    """This machine's `device`, or one like it with a GPU of another compute capability, which need not be here."""
    if capability is None or device == "cpu":
        return this_machine(device)
    return Machine("cuda", capability, this_machine("cpu").has_triton)


def shipped_values() -> dict[str, object]:
    """A config.json with the widths of SHIPPED."""
    wide = {
        "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
        "moe_intermediate_size": 2048, "index_n_heads": 64, "index_topk": 512, "n_routed_experts": 256, "num_experts_per_tok": 6,
        "vocab_size": 129280,
    }  # fmt: skip
    return tiny_config("flash") | wide


def implementations(values: Mapping[str, object], machine: Machine, choice: Choice) -> tuple[Row, ...]:
    """All of them for a config.json. Raises ConfigError for a config that cannot be read or is of another family."""
    kind = values.get("model_type")
    if kind == "deepseek_v4":
        return catalog(machine, dims_of(values, machine, choice), choice.kernels)
    if not isinstance(kind, str) or kind not in NETWORKS:
        raise ConfigError("model_type", kind, f"one of {', '.join(sorted(('deepseek_v4', *NETWORKS)))}")
    return tuple(network_rows(NETWORKS[kind](values), machine))


def network_rows(network: Network, machine: Machine) -> Iterator[Row]:
    """Of a family that is given as a network: two rows for each kind of part."""
    is_cpu = machine.device == "cpu"
    refused: Mapping[str, str | None] = {}
    if machine.has_triton:
        from lamina.models.network_device import refusals_of  # needs Triton

        refused = refusals_of(network, Machine("cuda", _SOME_GPU, has_triton=True) if is_cpu else machine)
    for kind, words in _kinds(network).items():
        why = refused.get(kind)
        if is_cpu:
            why = f"not on a CPU; on a GPU: {why}" if why else "for NVIDIA GPUs, this is a CPU"
        elif not machine.has_triton:
            why = NEEDS_TRITON
        yield Row(words, "triton", why)
        yield Row(words, DEFINITION, None if is_cpu else "the definition, for CPUs and for tests")


def _kinds(network: Network) -> dict[str, str]:
    """Names of the kinds of parts, as `refusals_of` has them, and what to call them, in the order of a layer."""
    found: dict[str, dict[str, None]] = {"Residual": {_words("Residual"): None}}
    for part in parts_of(network):
        inner = part
        while isinstance(inner, Scaled):
            inner = inner.part
        found.setdefault(type(part).__name__, {})[_words(type(inner).__name__)] = None
    return {kind: ", ".join(words) + (", scaled" if kind == Scaled.__name__ else "") for kind, words in found.items()}


def _words(kind: str) -> str:
    return _WORDS.get(kind, kind)


def dims_of(values: Mapping[str, object], machine: Machine, choice: Choice) -> Dims:
    """A config in the ops' terms; formats are those that the config says the files are in."""
    config = parse_config(values)
    is_quantised = values.get("quantization_config") is not None
    experts = "plain" if not is_quantised else str(values.get("expert_dtype") or "fp4")
    act = choice.dtype if choice.dtype != "auto" else "fp32" if machine.device == "cpu" else "bf16"
    ratios = [ratio for ratio in config.ratios if ratio]
    tokens = choice.max_tokens or config.max_positions
    return Dims(
        hidden=config.hidden_size, streams=config.streams, heads=config.num_heads, head_dim=config.head_dim,
        rope_dim=config.rope_dim, q_rank=config.q_lora_rank, groups=config.o_groups,
        group_width=config.num_heads // config.o_groups * config.head_dim,
        index_heads=config.index_heads if INDEXED in config.ratios else 0, index_dim=config.index_dim, top_k=config.index_topk,
        max_entries=tokens // min(ratios) if ratios else 0, experts=config.num_experts,
        experts_per_token=config.experts_per_token, inner=config.expert_width, dense_format="fp8" if is_quantised else "plain",
        expert_format=experts, act=act,
        cache_format="fp8" if choice.cache_format == "auto" else choice.cache_format,
        index_format="fp4" if choice.index_format == "auto" else choice.index_format,
        activation="bf16" if choice.activation == "bf16" else "fp8",
    )  # fmt: skip


@contextmanager
def watch_compilations() -> Iterator[list[tuple[str, float, bool]]]:
    """(kernel, seconds, whether it came from the disk's cache) of everything compiled meanwhile. Needs Triton."""
    from lamina.ops.triton import watch

    with watch() as seen:
        yield seen


def cache_directory() -> str:
    """Where compiled kernels are kept. Needs Triton."""
    from lamina.ops.triton import cache_directory

    return cache_directory()
