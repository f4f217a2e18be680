"""DeepSeek-V4 on a GPU: the forward pass out of the ops' kernels. `deepseek_v4` is the definition; a step's results differ from
it by rounding only. Every launch's shape follows from the number of rows and from `max_context`, so that a step can be captured
in a graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.layers.branch import Branch
from lamina.layers.device_attention import Turns
from lamina.layers.entries import StoreKey
from lamina.models.deepseek_v4_blocks import rope_frequencies, store_specs
from lamina.models.deepseek_v4_config import Config, Draft
from lamina.models.deepseek_v4_device_blocks import DeviceBlock, DeviceLoader, reads_fp8
from lamina.models.deepseek_v4_device_drafts import DeviceBlockDrafter, DeviceChainDrafter, load_device_drafter
from lamina.models.deepseek_v4_memory import Formats
from lamina.ops.experts import Activation as ExpertActivation
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, linear
from lamina.ops.hyper import Mixer
from lamina.ops.hyper.triton import boundary, end_with_streams, start
from lamina.ops.machine import Machine, portable_kernels
from lamina.ops.rope_norm.triton import rotations
from lamina.ops.rows import Rows
from lamina.ops.store import Store
from lamina.weights.loader import TensorSource


class DeviceModel:
    """The loaded model.

    has_branches  whether independent chains of a decode step run side by side.
    drafter       its draft blocks, where they were loaded.
    """

    def __init__(
        self, config: Config, dtype: torch.dtype, embed: Tensor, blocks: tuple[DeviceBlock, ...], head_mixer: Mixer, norm: Tensor,
        head: StoredWeight, has_fp8: bool, only_portable: bool,
        drafter: DeviceChainDrafter | DeviceBlockDrafter | None = None,
    ) -> None:  # fmt: skip
        self.drafter = drafter
        self.config = config
        self.only_portable = only_portable
        self.dtype = dtype
        self.embed = embed
        self.blocks = blocks
        self.head_mixer = head_mixer
        self.norm = norm
        self.head = head
        self.has_fp8 = has_fp8
        device = embed.device
        self.inv_freq = rope_frequencies(config, config.rope).to(device)
        self.compressed_inv_freq = rope_frequencies(config, config.compressed_rope).to(device)
        self.has_branches = True
        self._beside, self._inline = Branch(device, True), Branch(device, False)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios that its layers have."""
        return tuple(sorted({ratio for ratio in self.config.ratios if ratio}))

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """tokens [T] int32 (0 for padding) -> final hidden vectors [T, D] fp32, normed.

        order        decode or prefill: which of the two fixed orders of sums the products and attention take.
        max_context  no request has more tokens after the step.
        """
        with portable_kernels(self.only_portable):
            return self._forward(tokens, rows, order, max_context, ())[0]

    def forward_with_features(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> tuple[Tensor, Tensor]:
        """The same with what the drafter reads of each row, [T, F] in the activations' type."""
        assert self.drafter is not None
        with portable_kernels(self.only_portable):
            hidden, streams, tapped = self._forward(tokens, rows, order, max_context, self.drafter.taps)
            return hidden, self.drafter.features(streams, tapped)

    def _forward(
        self, tokens: Tensor, rows: Rows, order: Order, max_context: int, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Final hidden vectors, the last residual streams [T, S, D], and the streams after each layer of `taps`."""
        config, blocks = self.config, self.blocks
        branch = self._beside if self.has_branches and order == "decode" else self._inline
        plain, compressed = self._turns(rows)
        first = blocks[0]
        streams = start(self.embed, tokens, config.streams)
        at = boundary(streams, None, None, None, first.attention_mixer, first.attention_norm, self.dtype, self.has_fp8)
        tapped: dict[int, Tensor] = {}
        for number, block in enumerate(blocks):
            turns = compressed if block.is_compressed else plain
            out = block.attention.forward(at.x, turns, rows, order, max_context, branch)
            at = boundary(at.streams, out, at.post, at.comb, block.ffn_mixer, block.ffn_norm, self.dtype, self.has_fp8)
            out = block.ffn.forward(at.x, tokens, rows, order, branch)
            if number + 1 < len(blocks):
                following = blocks[number + 1]
                mixer, norm = following.attention_mixer, following.attention_norm
                at = boundary(at.streams, out, at.post, at.comb, mixer, norm, self.dtype, self.has_fp8)
                if number in taps:
                    tapped[number] = at.streams
        hidden, streams = end_with_streams(at.streams, out, at.post, at.comb, self.head_mixer, self.norm, self.dtype)
        if len(blocks) - 1 in taps:
            tapped[len(blocks) - 1] = streams
        return hidden, streams, tapped

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """hidden [S, D] fp32, rounded to the activations' type -> [S, V] fp32."""
        with portable_kernels(self.only_portable):
            return linear(Activation(hidden.to(self.dtype)), self.head, torch.float32, order)

    def _turns(self, rows: Rows) -> tuple[Turns, Turns]:
        """The rows' turns, of the layers with a window alone and of the others."""
        plain = Turns(*rotations(rows.positions, self.inv_freq), {})
        if not self.ratios:
            return plain, plain
        starts = {ratio: rotations(rows.positions, self.compressed_inv_freq, ratio) for ratio in self.ratios}
        return plain, Turns(*rotations(rows.positions, self.compressed_inv_freq), starts)


def load_device_model(
    config: Config, source: TensorSource, dtype: torch.dtype, stores: Callable[[StoreKey], Store], formats: Formats,
    device: torch.device, machine: Machine, activation: ExpertActivation, only_portable: bool = False,
    draft: Draft | None = None,
) -> DeviceModel:  # fmt: skip
    """Takes every tensor once, moves it to the device in its stored format, and binds the layers to their stores.

    activation  fp8: products with quantised weights read fp8 rows (as the model was trained); bf16: they read bf16.
    only_portable  no kernel is chosen that runs on one kind of GPU only.   draft  the blocks to draft with, or None.
    Raises WeightError for a missing, misshapen or unused tensor; ConfigError for a window that is too large.
    """
    found = {spec.key: stores(spec.key) for spec in store_specs(config, formats, draft)}
    if any(store.place.kind == "window" for store in found.values()):
        raise ConfigError("device", str(device), "cpu (windows too large for a slot have no GPU kernels for this model yet)")
    loader = DeviceLoader(config, source, dtype, found, device, machine, activation, only_portable)
    shape = (config.vocab_size, config.hidden_size)
    embed = loader.take("embed.weight", shape).to(dtype)
    blocks = tuple(loader.layer(layer) for layer in range(config.num_layers))
    mixer = loader.mixer("hc_head_", (config.streams,))
    norm = loader.take("norm.weight", (config.hidden_size,))
    head = loader.weight("head.weight", shape)
    has_fp8 = loader.has_fp8 and any(reads_fp8(block) for block in blocks)
    drafter = None if draft is None else load_device_drafter(loader, draft, embed, head)
    source.finish()
    return DeviceModel(config, dtype, embed, blocks, mixer, norm, head, has_fp8, only_portable, drafter)
