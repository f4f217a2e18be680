"""DeepSeek-V4: the forward pass. What its layers remember is in `deepseek_v4_memory`, a layer in `deepseek_v4_blocks`.

ids -> embedding, copied into S residual streams
each layer:  streams -> mix -> norm -> attention -> mix back;  streams -> mix -> norm -> experts -> mix back
streams -> collapse -> norm -> head
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.layers.entries import StoreKey
from lamina.layers.rounding import activation_dtype, rounded
from lamina.models.deepseek_v4_blocks import Block, Loader, rope_frequencies, store_specs
from lamina.models.deepseek_v4_config import Config, Draft
from lamina.models.deepseek_v4_drafts import BlockDrafter, ChainDrafter, load_drafter
from lamina.models.deepseek_v4_memory import Formats
from lamina.models.deepseek_v4_names import ALL_NAMES, NAMES
from lamina.ops.gemm import Weight, linear, packed
from lamina.ops.hyper import Mixer, hyper_head
from lamina.ops.rope_norm import rms_norm, rope_tables
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store
from lamina.weights.loader import TensorSource

__all__ = ["ALL_NAMES", "NAMES", "Model", "load_model", "store_specs"]


class Model:
    """The loaded model. `forward` gives final hidden vectors; `logits` turns some of them into scores.

    drafter  its draft blocks, where they were loaded.
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, embed: Tensor, blocks: tuple[Block, ...], head_mixer: Mixer, norm: Tensor,
        head: Weight, drafter: ChainDrafter | BlockDrafter | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.embed = embed
        self.blocks = blocks
        self.head_mixer = head_mixer
        self.norm = norm
        self.head = head
        self.drafter = drafter
        self.inv_freq = rope_frequencies(config, config.rope)
        self.compressed_inv_freq = rope_frequencies(config, config.compressed_rope)

    @property
    def hidden_size(self) -> int:
        """D, the width of a final hidden vector."""
        return self.config.hidden_size

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios whose groups a step must plan."""
        return tuple(sorted({ratio for ratio in self.config.ratios if ratio}))

    @property
    def product_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the products whose bits must not depend on the number of rows."""
        weights: list[Weight] = [self.head, self.head_mixer.fn]
        for block in self.blocks:
            weights += block.products
        if self.drafter is not None:
            weights += self.drafter.products
        return tuple(sorted({(weight.shape[1], weight.shape[0]) for weight in weights if isinstance(weight, Tensor)}))

    @property
    def batched_shapes(self) -> tuple[tuple[int, int], ...]:
        """The same of attention's batched products: scores, then weighted sums of rows."""
        dim, index = self.config.head_dim, self.config.index_dim
        return ((dim, 64), (dim, 192), (64, dim), (192, dim), (index, 64))

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] int64 (padding included) -> final hidden vectors [T, D] fp32, normed."""
        return self._forward(tokens, sequences, ())[0]

    def forward_with_features(self, tokens: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """The same with what the drafter reads of each row, [T, F] fp32: see its `features`."""
        assert self.drafter is not None
        hidden, streams, tapped = self._forward(tokens, sequences, self.drafter.taps)
        return hidden, self.drafter.features(streams, tapped)

    def _forward(self, tokens: Tensor, sequences: Sequences, taps: tuple[int, ...]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Final hidden vectors, the last residual streams [T, S, D], and the streams after each layer of `taps`."""
        plain = rope_tables(sequences.positions, self.inv_freq)
        compressed = rope_tables(sequences.positions, self.compressed_inv_freq)
        streams = self.embed[tokens][:, None].repeat(1, self.config.streams, 1)
        tapped: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            cos, sin = compressed if block.is_compressed else plain
            streams = block.forward(streams, tokens, cos, sin, sequences)
            if layer in taps:
                tapped[layer] = streams
        hidden = rms_norm(rounded(hyper_head(streams, self.head_mixer), self.dtype), self.norm, self.config.norm_eps)
        return hidden, streams, tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] fp32 (rows padded by the caller) -> [S, V] fp32."""
        return linear(hidden, self.head)


def load_model(
    config: Config, checkpoint: TensorSource, dtype: str, stores: Callable[[StoreKey], Store], formats: Formats,
    draft: Draft | None = None,
) -> Model:  # fmt: skip
    """Takes every tensor of the checkpoint once and binds the layers to their stores.

    dtype   fp32 or bf16: what activations are rounded to.   draft  the blocks to draft with; None: their tensors are not taken.
    Raises WeightError for a missing, misshapen or unused tensor.
    """
    rounding = activation_dtype(dtype)
    specs = store_specs(config, formats, draft)
    loader = Loader(config, checkpoint, rounding, {spec.key: stores(spec.key) for spec in specs})
    shape = (config.vocab_size, config.hidden_size)
    embed = rounded(loader.take("embed.weight", shape), rounding)
    blocks = tuple(loader.layer(layer) for layer in range(config.num_layers))
    mixer = loader.mixer("hc_head_", (config.streams,))
    norm = loader.take("norm.weight", (config.hidden_size,))
    head = packed(loader.take("head.weight", shape))
    drafter = None if draft is None else load_drafter(loader, draft, embed, head)
    checkpoint.finish()
    return Model(config, rounding, embed, blocks, mixer, norm, head, drafter)
