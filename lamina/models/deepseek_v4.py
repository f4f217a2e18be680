"""DeepSeek-V4: its stores, its weights, and the forward pass. What its layers remember is in `deepseek_v4_memory`.

ids -> embedding, copied into S residual streams
each layer:  streams -> mix -> norm -> attention -> mix back;  streams -> mix -> norm -> experts -> mix back
streams -> collapse -> norm -> head
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.compressed import AttentionStores, AttentionWeights, CompressedAttention, CompressorWeights, IndexerWeights
from lamina.layers.entries import StoreKey, StoreSpec, store_spec
from lamina.layers.moe import MixtureOfExperts
from lamina.layers.rounding import activation_dtype, rounded
from lamina.models.deepseek_v4_config import Config, Rope
from lamina.models.deepseek_v4_memory import INDEXED, Formats, entries_name, memories
from lamina.models.deepseek_v4_names import NAMES
from lamina.ops.gemm import Weight, linear, packed, packed_each
from lamina.ops.hyper import Mixer, hyper_head, hyper_post, hyper_pre
from lamina.ops.rope_norm import Yarn, inverse_frequencies, rms_norm, rope_tables
from lamina.ops.sequences import Sequences
from lamina.ops.store import StateCodec, Store, attention_codec, index_codec
from lamina.weights.loader import TensorSource

__all__ = ["NAMES", "Model", "load_model", "store_specs"]


def store_specs(config: Config, formats: Formats) -> tuple[StoreSpec, ...]:
    """Every store of every layer, with its codec: one for the entries of a memory, one for each field of a fold."""
    entry = attention_codec(formats.cache_format, config.head_dim, config.rope_dim)
    state, index_state = StateCodec(3 * config.head_dim), StateCodec(3 * config.index_dim)
    codecs = {"window": entry, "c4": entry, "c128": entry}
    if INDEXED in config.ratios:
        codecs["index"] = index_codec(formats.index_format, config.index_dim)
    states = {"c4_fold": state, "c128_fold": state, "index_fold": index_state}
    specs = []
    for memory in memories(config, formats):
        if memory.name in codecs:
            specs.append(store_spec(memory.layer, memory.name, codecs[memory.name]))
        else:
            for part in memory.slot_parts(0):
                specs.append(store_spec(memory.layer, memory.name, states[memory.name], part.field.name))
    return tuple(specs)


def attention_stores(stores: Mapping[StoreKey, Store], layer: int, ratio: int) -> AttentionStores:
    """Those of one layer."""
    own = {(key.memory, key.fields): store for key, store in stores.items() if key.layer == layer}
    by_memory = {memory: store for (memory, fields), store in own.items() if not memory.endswith("_fold")}
    folds = {(memory, fields[0]): store for (memory, fields), store in own.items() if memory.endswith("_fold")}
    fold = f"{entries_name(ratio)}_fold"
    return AttentionStores(
        window=by_memory["window"], entries=by_memory.get(entries_name(ratio)), fold_open=folds.get((fold, "open")),
        fold_next=folds.get((fold, "next")), index=by_memory.get("index"), index_open=folds.get(("index_fold", "open")),
        index_next=folds.get(("index_fold", "next")),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer."""

    attention_mixer: Mixer
    attention_norm: Tensor
    attention: CompressedAttention
    ffn_mixer: Mixer
    ffn_norm: Tensor
    ffn: MixtureOfExperts
    is_compressed: bool


class Model:
    """The loaded model. `forward` gives final hidden vectors; `logits` turns some of them into scores."""

    def __init__(
        self, config: Config, dtype: torch.dtype, embed: Tensor, blocks: tuple[Block, ...], head_mixer: Mixer, norm: Tensor,
        head: Weight,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.embed = embed
        self.blocks = blocks
        self.head_mixer = head_mixer
        self.norm = norm
        self.head = head
        self.inv_freq = rope_frequencies(config, config.rope)
        self.compressed_inv_freq = rope_frequencies(config, config.compressed_rope)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios whose groups a step must plan."""
        return tuple(sorted({ratio for ratio in self.config.ratios if ratio}))

    @property
    def product_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the products whose bits must not depend on the number of rows."""
        weights: list[Weight] = [self.head, self.head_mixer.fn]
        for block in self.blocks:
            attention = block.attention.weights
            weights += [attention.w_in, attention.wq_b, *attention.wo_a, attention.wo_b, block.attention_mixer.fn]
            weights += [block.ffn.gate, block.ffn.gate_up[0], block.ffn.down[0], block.ffn.shared_gate_up, block.ffn.shared_down]
            weights += [attention.indexer.wq_b] if attention.indexer is not None else []
        return tuple(sorted({(weight.shape[1], weight.shape[0]) for weight in weights if isinstance(weight, Tensor)}))

    @property
    def batched_shapes(self) -> tuple[tuple[int, int], ...]:
        """The same of attention's batched products: scores, then weighted sums of rows."""
        dim, index = self.config.head_dim, self.config.index_dim
        return ((dim, 64), (dim, 192), (64, dim), (192, dim), (index, 64))

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] int64 (padding included) -> final hidden vectors [T, D] fp32, normed."""
        plain = rope_tables(sequences.positions, self.inv_freq)
        compressed = rope_tables(sequences.positions, self.compressed_inv_freq)
        streams = self.embed[tokens][:, None].repeat(1, self.config.streams, 1)
        for block in self.blocks:
            cos, sin = compressed if block.is_compressed else plain
            mixed, post, comb = hyper_pre(streams, block.attention_mixer)
            x = rounded(rms_norm(rounded(mixed, self.dtype), block.attention_norm, self.config.norm_eps), self.dtype)
            out = block.attention.forward(x, cos, sin, sequences)
            streams = rounded(hyper_post(streams, out, post, comb), self.dtype)
            mixed, post, comb = hyper_pre(streams, block.ffn_mixer)
            x = rounded(rms_norm(rounded(mixed, self.dtype), block.ffn_norm, self.config.norm_eps), self.dtype)
            out = block.ffn.forward(x, tokens, sequences)
            streams = rounded(hyper_post(streams, out, post, comb), self.dtype)
        return rms_norm(rounded(hyper_head(streams, self.head_mixer), self.dtype), self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] fp32 (rows padded by the caller) -> [S, V] fp32."""
        return linear(hidden, self.head)


def rope_frequencies(config: Config, rope: Rope) -> Tensor:
    """Angle per position of each rotated pair, [rope_dim / 2] fp32."""
    scaling = rope.yarn
    yarn = None
    if scaling is not None:
        yarn = Yarn(scaling.factor, scaling.original_positions, scaling.beta_fast, scaling.beta_slow)
    return inverse_frequencies(config.rope_dim, rope.theta, yarn)


def load_model(
    config: Config, checkpoint: TensorSource, dtype: str, stores: Callable[[StoreKey], Store], formats: Formats
) -> Model:
    """Takes every tensor of the checkpoint once and binds the layers to their stores.

    dtype   fp32 or bf16: what activations are rounded to.   Raises WeightError for a missing, misshapen or unused tensor.
    """
    loader = _Loader(
        config, checkpoint, activation_dtype(dtype), {spec.key: stores(spec.key) for spec in store_specs(config, formats)}
    )
    model = loader.model()
    checkpoint.finish()
    return model


class _Loader:
    """Builds the layers of one checkpoint."""

    def __init__(self, config: Config, checkpoint: TensorSource, dtype: torch.dtype, stores: Mapping[StoreKey, Store]) -> None:
        self.config = config
        self.take = checkpoint.take
        self.take_int = checkpoint.take_int
        self.dtype = dtype
        self.stores = stores

    def model(self) -> Model:
        config = self.config
        embed = rounded(self.take("embed.weight", (config.vocab_size, config.hidden_size)), self.dtype)
        blocks = tuple(self.block(layer) for layer in range(config.num_layers))
        mixer = self.mixer("hc_head_", (config.streams,))
        norm = self.take("norm.weight", (config.hidden_size,))
        head = packed(self.take("head.weight", (config.vocab_size, config.hidden_size)))
        return Model(config, self.dtype, embed, blocks, mixer, norm, head)

    def mixer(self, prefix: str, parts: tuple[int, ...]) -> Mixer:
        """A mixer whose rows come in parts (pre, post, comb) with a scale each."""
        config, rows = self.config, sum(parts)
        fn = packed(self.take(prefix + "fn", (rows, config.streams * config.hidden_size)))
        base, scales = self.take(prefix + "base", (rows,)), self.take(prefix + "scale", (len(parts),))
        scale = scales.repeat_interleave(torch.tensor(parts))
        return Mixer(fn, base, scale, config.sinkhorn_iterations, config.hyper_eps, config.norm_eps)

    def block(self, layer: int) -> Block:
        config, prefix = self.config, f"layers.{layer}."
        parts = (config.streams, config.streams, config.streams**2)
        return Block(
            attention_mixer=self.mixer(prefix + "hc_attn_", parts),
            attention_norm=self.take(prefix + "attn_norm.weight", (config.hidden_size,)),
            attention=self.attention(layer),
            ffn_mixer=self.mixer(prefix + "hc_ffn_", parts),
            ffn_norm=self.take(prefix + "ffn_norm.weight", (config.hidden_size,)),
            ffn=self.ffn(layer),
            is_compressed=config.ratios[layer] > 0,
        )

    def attention(self, layer: int) -> CompressedAttention:
        config, prefix, ratio = self.config, f"layers.{layer}.attn.", self.config.ratios[layer]
        width, dim = config.hidden_size, config.head_dim
        projections = [
            self.take(prefix + "wq_a.weight", (config.q_lora_rank, width)),
            self.take(prefix + "wkv.weight", (dim, width)),
        ]
        compressor = indexer = None
        if ratio:
            compressor = self.compressor(prefix + "compressor.", ratio, dim, projections)
        if ratio == INDEXED:
            keys = self.compressor(prefix + "indexer.compressor.", ratio, config.index_dim, projections)
            projections.append(self.take(prefix + "indexer.weights_proj.weight", (config.index_heads, width)))
            wq_b = packed(self.take(prefix + "indexer.wq_b.weight", (config.index_heads * config.index_dim, config.q_lora_rank)))
            indexer = IndexerWeights(wq_b, config.index_heads, config.index_topk, keys)
        group_width = config.num_heads // config.o_groups * dim
        wo_a = self.take(prefix + "wo_a.weight", (config.o_groups * config.o_lora_rank, group_width))
        weights = AttentionWeights(
            w_in=packed(torch.cat(projections)),
            splits=tuple(projection.shape[0] for projection in projections),
            q_norm=self.take(prefix + "q_norm.weight", (config.q_lora_rank,)),
            wq_b=packed(self.take(prefix + "wq_b.weight", (config.num_heads * dim, config.q_lora_rank))),
            kv_norm=self.take(prefix + "kv_norm.weight", (dim,)),
            wo_a=tuple(packed(part) for part in wo_a.chunk(config.o_groups)),
            wo_b=packed(self.take(prefix + "wo_b.weight", (width, config.o_groups * config.o_lora_rank))),
            sink=self.take(prefix + "attn_sink", (config.num_heads,)),
            compressor=compressor,
            indexer=indexer,
        )
        inv_freq = rope_frequencies(config, config.compressed_rope if ratio else config.rope)
        return CompressedAttention(
            weights=weights, stores=attention_stores(self.stores, layer, ratio), ratio=ratio, heads=config.num_heads, dim=dim,
            window=config.window, eps=config.norm_eps, inv_freq=inv_freq, dtype=self.dtype,
        )  # fmt: skip

    def compressor(self, prefix: str, ratio: int, dim: int, projections: list[Tensor]) -> CompressorWeights:
        width = dim * (2 if ratio == INDEXED else 1)
        projections.append(self.take(prefix + "wkv.weight", (width, self.config.hidden_size)))
        projections.append(self.take(prefix + "wgate.weight", (width, self.config.hidden_size)))
        return CompressorWeights(ape=self.take(prefix + "ape", (ratio, width)), norm=self.take(prefix + "norm.weight", (dim,)))

    def ffn(self, layer: int) -> MixtureOfExperts:
        config, prefix = self.config, f"layers.{layer}.ffn."
        width, inner, num = config.hidden_size, config.expert_width, config.num_experts
        gate = packed(self.take(prefix + "gate.weight", (num, width)))  # first: sizes are checked before they are allocated
        shared = prefix + "shared_experts."
        shared_down = packed(self.take(shared + "w2.weight", (width, inner)))
        gate_up, down = torch.empty(num, 2 * inner, width), torch.empty(num, width, inner)
        for expert in range(num):
            name = f"{prefix}experts.{expert}."
            gate_up[expert, :inner] = self.take(name + "w1.weight", (inner, width))
            gate_up[expert, inner:] = self.take(name + "w3.weight", (inner, width))
            down[expert] = self.take(name + "w2.weight", (width, inner))
        is_hash = layer < config.num_hash_layers
        return MixtureOfExperts(
            gate=gate,
            bias=None if is_hash else self.take(prefix + "gate.bias", (num,)),
            table=self.take_int(prefix + "gate.tid2eid", (config.vocab_size, config.experts_per_token), 0, num)
            if is_hash
            else None,
            gate_up=packed_each(gate_up),
            down=packed_each(down),
            shared_gate_up=packed(
                torch.cat([self.take(shared + "w1.weight", (inner, width)), self.take(shared + "w3.weight", (inner, width))])
            ),
            shared_down=shared_down,
            top_k=config.experts_per_token,
            scale=config.routed_scale,
            limit=config.swiglu_limit,
            dtype=self.dtype,
        )
