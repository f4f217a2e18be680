"""Qwen3-Next: gated delta layers with full attention every few layers, experts and a shared expert. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Part, Rope, Router
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_delta import DeltaRule
from lamina.models.parts_scan import stored_of
from lamina.models.recurrent import FULL, LINEAR, Mixer, describe_hybrid, layer_numbers, listed_kinds, part, width
from lamina.models.weight_parts import Size, Storage, mlp, router

_DEFAULTS = Defaults(
    vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48, num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, max_position_embeddings=32768,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta scan: every value head has a state [key_dim, value_dim]; queries have as many heads as keys."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def share(self, tensor_parallel: int) -> "GatedDelta":
        """Key heads are divided, and the value heads of each go with them."""
        keys = part("linear_num_key_heads", self.key_heads, tensor_parallel)
        values = part("linear_num_value_heads", self.value_heads, tensor_parallel)
        return GatedDelta(keys, values, self.key_dim, self.value_dim, self.kernel)

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, ...]:
        """[value heads, key_dim, value_dim]."""
        return self.value_heads, self.key_dim, self.value_dim

    def weights(self, store: Storage, hidden: int) -> Size:
        """Projections in (queries, keys, values, gate; two scalars a head) and out, convolution, decay and step, norm."""
        values = self.value_heads * self.value_dim
        total = store.linear(self.channels + values, hidden) + store.linear(2 * self.value_heads, hidden)
        total += store.linear(hidden, values) + store.tensor(self.channels, self.kernel)
        return total + store.tensor(self.value_heads) * 2 + store.tensor(self.value_dim)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Qwen3-Next config. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    scan, bias = _scan(fields), flag(fields, "attention_bias", False)
    gate = store.linear(decoder.num_heads * decoder.head_dim, hidden, bias)
    attention, with_experts = decoder.attention(bias, qk_norm=True) + gate, _layers_with_experts(decoder)
    mixers, sizes = [], [("norms", decoder.norms(2))]
    for layer, kind in enumerate(_kinds(decoder)):
        if kind == FULL:
            mixers.append(Mixer(attends=True))
            sizes.append(("attention", attention))
        else:
            mixers.append(Mixer(attends=False, scan=scan))
            sizes.append(("linear attention", scan.weights(store, hidden)))
        sizes += _experts(decoder) if layer in with_experts else [("mlp", mlp(store, hidden, decoder.mlp_width))]
    return describe_hybrid(decoder, choices, mixers, sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a Qwen3-Next computes. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, scan, stored = decoder.fields, _scan(decoder.fields), stored_of(decoder)
    fields.must_be("hidden_act", "silu")
    eps, bias = fields.number("rms_norm_eps", default=1e-6), flag(fields, "attention_bias", False)
    rope, with_experts = _rope(decoder), _layers_with_experts(decoder)
    layers = []
    for number, kind in enumerate(_kinds(decoder)):
        prefix = f"model.layers.{number}"
        if kind == FULL:
            name = f"{prefix}.self_attn"
            norms = [Norm(f"{name}.{each}.weight", eps, "rms1") for each in ("q_norm", "k_norm")]
            mixer: Part = Attention(
                name, decoder.num_heads, decoder.kv_heads, decoder.head_dim, decoder.head_dim**-0.5, "kv", bias, bias, rope,
                q_norm=norms[0], k_norm=norms[1], is_gated=True,
            )  # fmt: skip
        else:
            mixer = DeltaRule(
                f"{prefix}.linear_attn", scan.key_heads, scan.key_dim, scan.value_heads, scan.value_dim, scan.kernel, eps, stored
            )
        inner = _mixture(fields, f"{prefix}.mlp") if number in with_experts else Mlp(f"{prefix}.mlp", decoder.mlp_width)
        before, between = (
            Norm(f"{prefix}.{each}.weight", eps, "rms1") for each in ("input_layernorm", "post_attention_layernorm")
        )
        layers.append((Branch(mixer, before), Branch(inner, between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.norm.weight", eps, "rms1"), None if decoder.tied else "lm_head.weight", end_tokens(values),
        names=names_of(decoder, ignored=("mtp.",)),  # the block that drafts
    )  # fmt: skip


def _rope(decoder: Decoder) -> Rope:
    """A quarter of each head is rotated where the config says nothing else."""
    rope = read_rope(decoder.fields, decoder.head_dim, decoder.max_positions, 10000.0, partial=0.25)
    if rope.dim < 2 or rope.dim % 2 or rope.dim > decoder.head_dim:
        allowed = f"a share of head_dim ({decoder.head_dim}) that is an even number of dims"
        raise ConfigError(f"{decoder.fields.prefix}partial_rotary_factor", rope.dim / decoder.head_dim, allowed)
    return rope


def _mixture(fields: ConfigFields, name: str) -> Experts:
    """Experts, and the shared one with its gate."""
    count = width(fields, "num_experts", default=512)
    routing = Router(
        "softmax", fields.integer("num_experts_per_tok", default=10, low=1, high=count), flag(fields, "norm_topk_prob", True)
    )
    shared = Mlp(f"{name}.shared_expert", width(fields, "shared_expert_intermediate_size", default=512))
    return Experts(
        name, count, width(fields, "moe_intermediate_size", default=512), routing, f"{name}.gate.weight", shared,
        f"{name}.shared_expert_gate.weight",
    )  # fmt: skip


def _scan(fields: ConfigFields) -> GatedDelta:
    keys, values = width(fields, "linear_num_key_heads", default=16), width(fields, "linear_num_value_heads", default=32)
    if values % keys:
        raise ConfigError(f"{fields.prefix}linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
    key_dim, value_dim = width(fields, "linear_key_head_dim", default=128), width(fields, "linear_value_head_dim", default=128)
    return GatedDelta(keys, values, key_dim, value_dim, width(fields, "linear_conv_kernel_dim", default=4))


def _kinds(decoder: Decoder) -> list[str]:
    """The kind of each layer: listed, or full attention in the last of every `full_attention_interval` layers."""
    every = width(decoder.fields, "full_attention_interval", default=4)
    listed = listed_kinds(decoder.fields, decoder.num_layers, "layer_types")
    return listed or [LINEAR if (layer + 1) % every else FULL for layer in range(decoder.num_layers)]


def _layers_with_experts(decoder: Decoder) -> frozenset[int]:
    """The last of every `decoder_sparse_step` layers, without those in `mlp_only_layers`."""
    fields = decoder.fields
    step, dense = width(fields, "decoder_sparse_step", default=1), layer_numbers(fields, "mlp_only_layers", decoder.num_layers)
    if not width(fields, "num_experts", default=512, low=0):
        return frozenset()
    return frozenset(range(step - 1, decoder.num_layers, step)) - (dense or frozenset())


def _experts(decoder: Decoder) -> list[tuple[str, Size]]:
    """Router, experts, and the shared expert with its gate."""
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    count = width(fields, "num_experts", default=512)
    shared = mlp(store, hidden, width(fields, "shared_expert_intermediate_size", default=512)) + store.tensor(1, hidden)
    expert = mlp(decoder.expert_store, hidden, width(fields, "moe_intermediate_size", default=512))
    return [("router", router(store, hidden, count)), ("experts", expert * count), ("shared experts", shared)]
