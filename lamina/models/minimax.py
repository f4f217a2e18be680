"""MiniMax-Text-01 and -M1: lightning (linear) attention with full attention every few layers, experts everywhere. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Experts, Network, Norm, Part, Rope, Router
from lamina.models.network_fields import end_tokens, names_of, read_rope
from lamina.models.parts_delta import DecayedAttention
from lamina.models.parts_scan import stored_of
from lamina.models.recurrent import FULL, LINEAR, Mixer, describe_hybrid, listed_kinds, part, width
from lamina.models.weight_parts import Size, Storage, mlp, router
from lamina.weights.names import Rename

_DEFAULTS = Defaults(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=131072,
)  # fmt: skip

_THETA = 1e6
#: of the norm inside linear attention, whatever the config says of the others
_INNER_EPS = 1e-6
_RENAMES = (
    Rename(r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1."),
    # tables that follow from the config, and are rounded where the file is
    Rename(r"^.*\.self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay)$", "unused.decay"),
)


@dataclass(frozen=True, slots=True)
class Lightning:
    """Linear attention: each head has a decayed sum of key x value. No convolution comes before it."""

    num_heads: int
    head_dim: int
    kernel: int = 0
    channels: int = 0

    def share(self, tensor_parallel: int) -> "Lightning":
        """Heads are divided."""
        return Lightning(part("num_attention_heads", self.num_heads, tensor_parallel), self.head_dim)

    @property
    def state(self) -> tuple[int, ...]:
        """[heads, head_dim, head_dim]."""
        return self.num_heads, self.head_dim, self.head_dim

    def weights(self, store: Storage, hidden: int) -> Size:
        """Queries, keys and values in one projection, the output's gate, norm and projection."""
        inner = self.num_heads * self.head_dim
        total = store.linear(3 * inner, hidden) + store.linear(inner, hidden) + store.linear(hidden, inner)
        return total + store.tensor(inner)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a MiniMax config, the original's or Transformers'. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    fields.must_be("sliding_window", None)
    fields.must_be("shared_intermediate_size", 0)
    experts = width(fields, "num_local_experts", "num_experts", default=8)
    feed_forward = [
        ("router", router(store, hidden, experts)), ("experts", mlp(decoder.expert_store, hidden, decoder.mlp_width) * experts),
    ]  # fmt: skip
    scan = Lightning(decoder.num_heads, decoder.head_dim)
    mixers, sizes = [], [("norms", decoder.norms(2))]
    for kind in _kinds(fields, decoder.num_layers):
        if kind == FULL:
            mixers.append(Mixer(attends=True))
            sizes.append(("attention", decoder.attention()))
        else:
            mixers.append(Mixer(attends=False, scan=scan))
            sizes.append(("linear attention", scan.weights(store, hidden)))
        sizes += feed_forward
    return describe_hybrid(decoder, choices, mixers, sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a MiniMax that Transformers has written computes. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    rope, dim = read_rope(decoder.fields, decoder.head_dim, decoder.max_positions, _THETA), decoder.head_dim
    if rope.dim != dim:
        raise ConfigError("partial_rotary_factor", rope.dim / dim, "1: this model_type rotates whole heads")
    rotated = decoder.fields.integer("rotary_dim", default=dim)
    if rotated != dim:  # it is in configs made from an original's; Transformers rotates whole heads all the same
        raise ConfigError("rotary_dim", rotated, f"head_dim ({dim}) with this model_type, or the model_type minimax_text_01")
    return _network(values, decoder, rope, is_original=False)


def network_original(values: Mapping[str, object]) -> Network:
    """What a MiniMax-Text-01 or -M1 computes, as their makers released them. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, dim = decoder.fields, decoder.head_dim
    fields.must_be("rope_scaling", None)
    rotated = fields.integer("rotary_dim", default=dim, low=2, high=dim)
    if rotated % 2:
        raise ConfigError("rotary_dim", rotated, "an even number of dims")
    rope = replace(read_rope(fields, dim, decoder.max_positions, _THETA), dim=rotated)
    return _network(values, decoder, rope, is_original=True)


def _network(values: Mapping[str, object], decoder: Decoder, rope: Rope, is_original: bool) -> Network:
    fields, dim, heads, layers = decoder.fields, decoder.head_dim, decoder.num_heads, decoder.num_layers
    fields.must_be("hidden_act", "silu")
    eps, stored = fields.number("rms_norm_eps", default=1e-5), stored_of(decoder)
    keeps_normed = flag(fields, "postnorm", False) if is_original else True
    num = width(fields, "num_local_experts", "num_experts", default=8)
    routing = Router("softmax", fields.integer("num_experts_per_tok", default=2, low=1, high=num))

    def branch(part: Part, norm: str, name: str) -> Branch:
        kept, added = _factor(fields, name, "alpha", is_original), _factor(fields, name, "beta", is_original)
        return Branch(part, Norm(norm, eps), scale=added, kept=kept, keeps_normed=keeps_normed)

    built = []
    for number, kind in enumerate(_kinds(fields, layers)):
        prefix = f"model.layers.{number}"
        if kind == FULL:
            mixer: Part = Attention(f"{prefix}.self_attn", heads, decoder.kv_heads, dim, dim**-0.5, "kv", rope=rope)
        else:
            slopes = _slopes(heads, number, layers, is_original)
            mixer = DecayedAttention(f"{prefix}.self_attn", dim, slopes, _INNER_EPS, stored)
        name = f"{prefix}.block_sparse_moe"
        experts = Experts(name, num, decoder.mlp_width, routing, f"{name}.gate.weight", names=("w1", "w3", "w2"))
        built.append(
            (
                branch(mixer, f"{prefix}.input_layernorm.weight", kind),
                branch(experts, f"{prefix}.post_attention_layernorm.weight", "mlp"),
            )
        )
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(built), Norm("model.norm.weight", eps),
        None if decoder.tied else "lm_head.weight", end_tokens(values), names=names_of(decoder, _RENAMES),
    )  # fmt: skip


def _factor(fields: ConfigFields, branch: str, letter: str, is_original: bool) -> float:
    """What a branch (full_attention, linear_attention or mlp) multiplies: alpha what it keeps, beta what it adds."""
    names = [f"layernorm_{branch}_{letter}", f"{branch.replace('attention', 'attn')}_{letter}_factor"]
    return fields.number(*(names if is_original else names[::-1]), default=1.0, low=-math.inf)


def _slopes(heads: int, layer: int, num_layers: int, is_original: bool) -> tuple[float, ...]:
    """How fast each head of a layer forgets: the first heads most, and the last layer hardly at all.

    Slopes of 2^n heads are a geometric series; of another number the original takes those of 2^n heads and, of twice as many,
    every other one (as ALiBi does), Transformers the series itself.
    """
    if is_original:
        whole = 1 << (heads.bit_length() - 1)
        series = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
        series += [2 ** (-4 * (head + 1) / whole) for head in range(0, 2 * (heads - whole), 2)]
        share = 1 - layer / max(num_layers - 1, 1) + 1e-5
    else:
        series = [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
        share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(slope * share for slope in series)


def _kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """The kind of each layer: `attn_type_list` of the original (1 is full attention), or `layer_types`."""
    codes = fields.items("attn_type_list", "decoder_attention_types")
    if codes is None:
        alternating = [LINEAR if layer % 2 else FULL for layer in range(num_layers)]
        return listed_kinds(fields, num_layers, "layer_types") or alternating
    if len(codes) != num_layers:
        raise ConfigError("attn_type_list", f"{len(codes)} entries", f"one for each of the {num_layers} layers")
    for layer, code in enumerate(codes):
        if not isinstance(code, int) or isinstance(code, bool) or code not in (0, 1):
            raise ConfigError(f"attn_type_list[{layer}]", code, "0 (linear) or 1 (full attention)")
    return [FULL if code == 1 else LINEAR for code in codes]
