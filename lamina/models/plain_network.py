"""The network that most families are: norm, attention, norm, feed-forward, in every layer. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lamina.models.attention_memory import FULL, NAMES, WINDOW
from lamina.models.decoder import Decoder
from lamina.models.network import Attention, Branch, Mlp, Network, Norm, Part
from lamina.models.network_fields import end_tokens, names_of, read_rope


@dataclass(frozen=True, slots=True)
class Plain:
    """What such families differ in.

    bias, out_bias, mlp_bias  of the projections.   qk_norm  norms of queries and keys, per head.
    theta, eps  of the rotary positions and the norms where the config is silent.   temperature  of the queries.
    nested      the object of the config that holds the text model.
    """

    bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    theta: float = 10000.0
    nested: str | None = None
    eps: float = 1e-6
    temperature: tuple[float, float, float] | None = None


def plain_network(
    values: Mapping[str, object], decoder: Decoder, plain: Plain, types: Sequence[str] = (), window: int | None = None,
    mlp_of: Callable[[int, str], Part] | None = None,
) -> Network:  # fmt: skip
    """The network.

    types   of each layer, full attention or a window; none: full attention.   mlp_of  (layer, prefix of its tensors) -> the
            feed-forward part, where it is not the usual one.
    """
    fields, dim = decoder.fields, decoder.head_dim
    eps = fields.number("rms_norm_eps", default=plain.eps)
    fields.must_be("hidden_act", "silu")
    rope = read_rope(fields, dim, decoder.max_positions, plain.theta)
    layers = []
    for number in range(decoder.num_layers):
        prefix = f"model.layers.{number}"
        kind = types[number] if types else FULL
        attention = Attention(
            f"{prefix}.self_attn", decoder.num_heads, decoder.kv_heads, dim, dim**-0.5, NAMES[kind], plain.bias, plain.out_bias,
            rope, window=window if kind == WINDOW else None,
            q_norm=Norm(f"{prefix}.self_attn.q_norm.weight", eps) if plain.qk_norm else None,
            k_norm=Norm(f"{prefix}.self_attn.k_norm.weight", eps) if plain.qk_norm else None, temperature=plain.temperature,
        )  # fmt: skip
        inner: Part = Mlp(f"{prefix}.mlp", decoder.mlp_width, bias=plain.mlp_bias) if mlp_of is None else mlp_of(number, prefix)
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "post_attention_layernorm"))
        layers.append((Branch(attention, before), Branch(inner, between)))
    return Network(
        decoder.vocab_size, decoder.hidden_size, "model.embed_tokens.weight", tuple(layers), Norm("model.norm.weight", eps),
        None if decoder.tied else "lm_head.weight", end_tokens(values, plain.nested), names=names_of(decoder),
    )  # fmt: skip
