"""MiniMax-Text-01 and -M1: lightning (linear) attention with full attention every few layers, experts everywhere. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Defaults, read_decoder
from lamina.models.description import Choices, Description
from lamina.models.recurrent import FULL, LINEAR, Mixer, describe_hybrid, listed_kinds, part, width
from lamina.models.weight_parts import Size, Storage, mlp, router

_DEFAULTS = Defaults(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=None, max_position_embeddings=131072,
)  # fmt: skip


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
