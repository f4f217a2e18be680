"""DeepSeek-V4's blocks: the stores of their memories, what one computes, and how it is loaded from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lamina.layers.compressed import AttentionStores, AttentionWeights, CompressedAttention, CompressorWeights, IndexerWeights
from lamina.layers.entries import StoreKey, StoreSpec, store_spec
from lamina.layers.moe import MixtureOfExperts
from lamina.layers.rounding import rounded
from lamina.models.deepseek_v4_config import Config, Draft, Rope
from lamina.models.deepseek_v4_memory import INDEXED, Formats, entries_name, memories
from lamina.ops.gemm import Weight, packed, packed_each
from lamina.ops.hyper import Mixer, hyper_post, hyper_pre
from lamina.ops.rope_norm import Yarn, inverse_frequencies, rms_norm
from lamina.ops.sequences import Sequences
from lamina.ops.store import StateCodec, Store, attention_codec, index_codec
from lamina.weights.loader import TensorSource


def store_specs(config: Config, formats: Formats, draft: Draft | None = None) -> tuple[StoreSpec, ...]:
    """Every store of every layer, with its codec: one for the entries of a memory, one for each field of a fold."""
    entry = attention_codec(formats.cache_format, config.head_dim, config.rope_dim)
    state, index_state = StateCodec(3 * config.head_dim), StateCodec(3 * config.index_dim)
    codecs = {"window": entry, "c4": entry, "c128": entry, "draft_window": entry}
    if INDEXED in config.ratios:
        codecs["index"] = index_codec(formats.index_format, config.index_dim)
    states = {"c4_fold": state, "c128_fold": state, "index_fold": index_state}
    specs = []
    for memory in memories(config, formats, draft):
        if memory.name in codecs:
            specs.append(store_spec(memory.layer, memory.name, codecs[memory.name]))
        else:
            for part in memory.slot_parts(0):
                specs.append(store_spec(memory.layer, memory.name, states[memory.name], part.field.name))
    return tuple(specs)


def attention_stores(stores: Mapping[StoreKey, Store], layer: int, ratio: int, window: str = "window") -> AttentionStores:
    """Those of one layer. window  what the layer's window is called."""
    own = {(key.memory, key.fields): store for key, store in stores.items() if key.layer == layer}
    by_memory = {memory: store for (memory, fields), store in own.items() if not memory.endswith("_fold")}
    folds = {(memory, fields[0]): store for (memory, fields), store in own.items() if memory.endswith("_fold")}
    fold = f"{entries_name(ratio)}_fold"
    return AttentionStores(
        window=by_memory[window], entries=by_memory.get(entries_name(ratio)), fold_open=folds.get((fold, "open")),
        fold_next=folds.get((fold, "next")), index=by_memory.get("index"), index_open=folds.get(("index_fold", "open")),
        index_next=folds.get(("index_fold", "next")),
    )  # fmt: skip


class AnyAttention(Protocol):
    """What a block attends with."""

    @property
    def weights(self) -> AttentionWeights:
        """Its weights."""
        ...

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """x [T, D] -> [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer, or a block that drafts. eps of the norms."""

    attention_mixer: Mixer
    attention_norm: Tensor
    attention: AnyAttention
    ffn_mixer: Mixer
    ffn_norm: Tensor
    ffn: MixtureOfExperts
    is_compressed: bool
    eps: float
    dtype: torch.dtype

    @property
    def products(self) -> list[Weight]:
        """Weights of its products."""
        attention, ffn = self.attention.weights, self.ffn
        found = [attention.w_in, attention.wq_b, *attention.wo_a, attention.wo_b, self.attention_mixer.fn]
        found += [ffn.gate, ffn.gate_up[0], ffn.down[0], ffn.shared_gate_up, ffn.shared_down]
        return found + ([attention.indexer.wq_b] if attention.indexer is not None else [])

    def forward(self, streams: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """streams [T, S, D], tokens [T], cos and sin [T, r] of the rows' positions -> streams [T, S, D]."""
        mixed, post, comb = hyper_pre(streams, self.attention_mixer)
        x = rounded(rms_norm(rounded(mixed, self.dtype), self.attention_norm, self.eps), self.dtype)
        out = self.attention.forward(x, cos, sin, sequences)
        streams = rounded(hyper_post(streams, out, post, comb), self.dtype)
        mixed, post, comb = hyper_pre(streams, self.ffn_mixer)
        x = rounded(rms_norm(rounded(mixed, self.dtype), self.ffn_norm, self.eps), self.dtype)
        out = self.ffn.forward(x, tokens, sequences)
        return rounded(hyper_post(streams, out, post, comb), self.dtype)


def rope_frequencies(config: Config, rope: Rope) -> Tensor:
    """Angle per position of each rotated pair, [rope_dim / 2] fp32."""
    scaling = rope.yarn
    yarn = None
    if scaling is not None:
        yarn = Yarn(scaling.factor, scaling.original_positions, scaling.beta_fast, scaling.beta_slow)
    return inverse_frequencies(config.rope_dim, rope.theta, yarn)


class Loader:
    """Builds the layers of one checkpoint."""

    def __init__(self, config: Config, checkpoint: TensorSource, dtype: torch.dtype, stores: Mapping[StoreKey, Store]) -> None:
        self.config = config
        self.stores = stores
        self.dtype = dtype
        self.take = checkpoint.take
        self.take_int = checkpoint.take_int

    def mixer(self, prefix: str, parts: tuple[int, ...]) -> Mixer:
        """A mixer whose rows come in parts (pre, post, comb) with a scale each."""
        config, rows = self.config, sum(parts)
        fn = packed(self.take(prefix + "fn", (rows, config.streams * config.hidden_size)))
        base, scales = self.take(prefix + "base", (rows,)), self.take(prefix + "scale", (len(parts),))
        scale = scales.repeat_interleave(torch.tensor(parts))
        return Mixer(fn, base, scale, config.sinkhorn_iterations, config.hyper_eps, config.norm_eps)

    def layer(self, layer: int) -> Block:
        """Decoder layer number `layer`."""
        config, prefix, ratio = self.config, f"layers.{layer}.", self.config.ratios[layer]
        attention = self.attention(prefix + "attn.", ratio, attention_stores(self.stores, layer, ratio))
        return self.block(prefix, attention, ratio > 0, is_hash=layer < config.num_hash_layers)

    def draft_attention(self, block: int) -> CompressedAttention:
        """Of the block number `block` of those that draft: a window alone."""
        stores = attention_stores(self.stores, self.config.num_layers + block, 0, "draft_window")
        return self.attention(f"mtp.{block}.attn.", 0, stores)

    def block(self, prefix: str, attention: AnyAttention, is_compressed: bool, is_hash: bool) -> Block:
        """What surrounds an attention."""
        config = self.config
        parts = (config.streams, config.streams, config.streams**2)
        return Block(
            attention_mixer=self.mixer(prefix + "hc_attn_", parts),
            attention_norm=self.take(prefix + "attn_norm.weight", (config.hidden_size,)),
            attention=attention,
            ffn_mixer=self.mixer(prefix + "hc_ffn_", parts),
            ffn_norm=self.take(prefix + "ffn_norm.weight", (config.hidden_size,)),
            ffn=self.ffn(prefix + "ffn.", is_hash),
            is_compressed=is_compressed,
            eps=config.norm_eps,
            dtype=self.dtype,
        )

    def attention(self, prefix: str, ratio: int, stores: AttentionStores) -> CompressedAttention:
        config = self.config
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
            weights=weights, stores=stores, ratio=ratio, heads=config.num_heads, dim=dim,
            window=config.window, eps=config.norm_eps, inv_freq=inv_freq, dtype=self.dtype,
        )  # fmt: skip

    def compressor(self, prefix: str, ratio: int, dim: int, projections: list[Tensor]) -> CompressorWeights:
        width = dim * (2 if ratio == INDEXED else 1)
        projections.append(self.take(prefix + "wkv.weight", (width, self.config.hidden_size)))
        projections.append(self.take(prefix + "wgate.weight", (width, self.config.hidden_size)))
        return CompressorWeights(ape=self.take(prefix + "ape", (ratio, width)), norm=self.take(prefix + "norm.weight", (dim,)))

    def ffn(self, prefix: str, is_hash: bool) -> MixtureOfExperts:
        config = self.config
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
