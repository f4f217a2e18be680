"""Jamba: Mamba layers with full attention in between, and experts in some layers. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Defaults, flag, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Part, Router
from lamina.models.network_fields import end_tokens, names_of
from lamina.models.parts_scan import ChannelScan, stored_of
from lamina.models.recurrent import Mixer, describe_hybrid, part, width, width_or_auto
from lamina.models.weight_parts import Size, Storage, mlp, router

_DEFAULTS = Defaults(
    vocab_size=65536, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=262144,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba scan: every one of `channels` channels has `state_size` numbers. rank: width of the steps' projection."""

    channels: int
    state_size: int
    kernel: int
    rank: int
    conv_bias: bool
    bias: bool

    def share(self, tensor_parallel: int) -> "Mamba":
        """Channels are divided."""
        channels = part("mamba_expand x hidden_size", self.channels, tensor_parallel)
        return Mamba(channels, self.state_size, self.kernel, self.rank, self.conv_bias, self.bias)

    @property
    def state(self) -> tuple[int, ...]:
        """[channels, state_size]."""
        return self.channels, self.state_size

    def weights(self, store: Storage, hidden: int) -> Size:
        """Projections in and out, convolution, the projections of steps, B and C with their norms, decay and skip."""
        selected = self.rank + 2 * self.state_size
        total = store.linear(2 * self.channels, hidden, self.bias) + store.linear(hidden, self.channels, self.bias)
        total += store.tensor(self.channels, self.kernel) + (store.tensor(self.channels) if self.conv_bias else Size())
        total += store.linear(selected, self.channels) + store.linear(self.channels, self.rank, bias=True)
        return total + store.tensor(selected) + store.tensor(self.channels, self.state_size) + store.tensor(self.channels)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a Jamba config. Raises ConfigError naming the field."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, store, hidden = decoder.fields, decoder.store, decoder.hidden_size
    fields.must_be("sliding_window", None)
    attends = _every(fields, "attn_layer_period", "attn_layer_offset", 8, 4)
    has_experts = _every(fields, "expert_layer_period", "expert_layer_offset", 2, 1)
    experts = width(fields, "num_experts", "num_local_experts", default=16)
    expert, scan = mlp(decoder.expert_store, hidden, decoder.mlp_width), _scan(fields, hidden)
    mixers, sizes = [], [("norms", decoder.norms(2))]
    for layer in range(decoder.num_layers):
        if layer % attends[0] == attends[1]:
            mixers.append(Mixer(attends=True))
            sizes.append(("attention", decoder.attention()))
        else:
            mixers.append(Mixer(attends=False, scan=scan))
            sizes.append(("mamba", scan.weights(store, hidden)))
        if experts > 1 and layer % has_experts[0] == has_experts[1]:
            sizes += [("router", router(store, hidden, experts)), ("experts", expert * experts)]
        else:
            sizes.append(("mlp", mlp(store, hidden, decoder.mlp_width)))
    return describe_hybrid(decoder, choices, mixers, sizes)


def network(values: Mapping[str, object]) -> Network:
    """What a Jamba computes."""
    decoder = read_decoder(values, _DEFAULTS)
    fields, dim, eps = decoder.fields, decoder.head_dim, decoder.fields.number("rms_norm_eps", default=1e-6)
    fields.must_be("hidden_act", "silu")
    fields.must_be("sliding_window", None)
    attends = _every(fields, "attn_layer_period", "attn_layer_offset", 8, 4)
    has_experts = _every(fields, "expert_layer_period", "expert_layer_offset", 2, 1)
    experts = width(fields, "num_experts", "num_local_experts", default=16)
    top_k = fields.integer("num_experts_per_tok", default=2, low=1, high=experts) if experts > 1 else 1
    routing = Router("softmax", top_k, normalises=False)
    scan, stored, layers = _scan(fields, decoder.hidden_size), stored_of(decoder), []
    for layer in range(decoder.num_layers):
        prefix = f"model.layers.{layer}"
        if layer % attends[0] == attends[1]:
            name = f"{prefix}.self_attn"
            mixer: Part = Attention(name, decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, "kv")
        else:
            mixer = ChannelScan(
                f"{prefix}.mamba", scan.channels, scan.state_size, scan.kernel, scan.rank, eps, stored, scan.bias, scan.conv_bias
            )
        feed_forward: Part = Mlp(f"{prefix}.feed_forward", decoder.mlp_width)
        if experts > 1 and layer % has_experts[0] == has_experts[1]:
            name = f"{prefix}.feed_forward"
            feed_forward = Experts(name, experts, decoder.mlp_width, routing, f"{name}.router.weight")
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "pre_ff_layernorm"))
        layers.append((Branch(mixer, before), Branch(feed_forward, between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers),
        Norm("model.final_layernorm.weight", eps), None if decoder.tied else "lm_head.weight", end_tokens(values),
        names=names_of(decoder),
    )  # fmt: skip


def _scan(fields: ConfigFields, hidden: int) -> Mamba:
    return Mamba(
        channels=hidden * width(fields, "mamba_expand", default=2), state_size=width(fields, "mamba_d_state", default=16),
        kernel=width(fields, "mamba_d_conv", default=4), rank=width_or_auto(fields, "mamba_dt_rank", -(-hidden // 16)),
        conv_bias=flag(fields, "mamba_conv_bias", True), bias=flag(fields, "mamba_proj_bias", False),
    )  # fmt: skip


def _every(fields: ConfigFields, period: str, offset: str, period_default: int, offset_default: int) -> tuple[int, int]:
    """(period, offset): the layers i with i mod period = offset."""
    every, first = width(fields, period, default=period_default), width(fields, offset, default=offset_default, low=0)
    if first >= every:
        raise ConfigError(offset, first, f"less than {period} ({every})")
    return every, first
