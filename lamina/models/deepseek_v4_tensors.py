"""DeepSeek-V4's tensors: those that `deepseek_v4.load_model` takes, with their shapes. A test compares the two; no torch."""

from collections.abc import Iterator, Mapping

from lamina.models.deepseek_v4_config import Config, Draft, parse_config, parse_draft
from lamina.models.deepseek_v4_memory import INDEXED
from lamina.models.needed import Needed


def needed_tensors(values: Mapping[str, object], with_drafts: bool = False) -> Iterator[Needed]:
    """Every tensor of the main model, and of its draft blocks if wanted. Raises ConfigError for a config that cannot be read."""
    config = parse_config(values)
    yield Needed("embed.weight", (config.vocab_size, config.hidden_size))
    for layer in range(config.num_layers):
        yield from _layer(config, f"layers.{layer}.", config.ratios[layer], layer < config.num_hash_layers)
    yield from _mixer(config, "hc_head_", config.streams, 1)
    yield Needed("norm.weight", (config.hidden_size,))
    yield Needed("head.weight", (config.vocab_size, config.hidden_size))
    if with_drafts:
        yield from _draft_blocks(config, parse_draft(values, config))


def _draft_blocks(config: Config, draft: Draft) -> Iterator[Needed]:
    width, last = config.hidden_size, f"mtp.{draft.blocks - 1}."
    for block in range(draft.blocks):
        yield from _layer(config, f"mtp.{block}.", 0, is_hash=False)
    if draft.taps:
        yield Needed("mtp.0.main_proj.weight", (width, draft.taps * width))
        yield Needed("mtp.0.main_norm.weight", (width,))
        yield Needed(last + "markov_head.markov_w1.weight", (config.vocab_size, draft.markov_rank))
        yield Needed(last + "markov_head.markov_w2.weight", (config.vocab_size, draft.markov_rank))
        yield Needed(last + "confidence_head.proj.weight", (1, width + draft.markov_rank))
    else:
        yield Needed("mtp.0.e_proj.weight", (width, width))
        yield Needed("mtp.0.h_proj.weight", (width, width))
        yield Needed("mtp.0.enorm.weight", (width,))
        yield Needed("mtp.0.hnorm.weight", (width,))
    yield Needed(last + "norm.weight", (width,))
    yield from _mixer(config, last + "hc_head_", config.streams, 1)


def _layer(config: Config, prefix: str, ratio: int, is_hash: bool) -> Iterator[Needed]:
    width = config.hidden_size
    mixed = config.streams * (2 + config.streams)
    yield from _mixer(config, prefix + "hc_attn_", mixed, 3)
    yield Needed(prefix + "attn_norm.weight", (width,))
    yield from _attention(config, prefix + "attn.", ratio)
    yield from _mixer(config, prefix + "hc_ffn_", mixed, 3)
    yield Needed(prefix + "ffn_norm.weight", (width,))
    yield from _ffn(config, prefix + "ffn.", is_hash)


def _mixer(config: Config, prefix: str, rows: int, parts: int) -> Iterator[Needed]:
    yield Needed(prefix + "fn", (rows, config.streams * config.hidden_size))
    yield Needed(prefix + "base", (rows,))
    yield Needed(prefix + "scale", (parts,))


def _attention(config: Config, prefix: str, ratio: int) -> Iterator[Needed]:
    width, dim, rank, groups = config.hidden_size, config.head_dim, config.q_lora_rank, config.o_groups * config.o_lora_rank
    yield Needed(prefix + "wq_a.weight", (rank, width))
    yield Needed(prefix + "q_norm.weight", (rank,))
    yield Needed(prefix + "wq_b.weight", (config.num_heads * dim, rank))
    yield Needed(prefix + "wkv.weight", (dim, width))
    yield Needed(prefix + "kv_norm.weight", (dim,))
    yield Needed(prefix + "wo_a.weight", (groups, config.num_heads // config.o_groups * dim))
    yield Needed(prefix + "wo_b.weight", (width, groups))
    yield Needed(prefix + "attn_sink", (config.num_heads,))
    if ratio:
        yield from _compressor(config, prefix + "compressor.", ratio, dim)
    if ratio == INDEXED:
        yield from _compressor(config, prefix + "indexer.compressor.", ratio, config.index_dim)
        yield Needed(prefix + "indexer.weights_proj.weight", (config.index_heads, width))
        yield Needed(prefix + "indexer.wq_b.weight", (config.index_heads * config.index_dim, rank))


def _compressor(config: Config, prefix: str, ratio: int, dim: int) -> Iterator[Needed]:
    rows = dim * (2 if ratio == INDEXED else 1)
    yield Needed(prefix + "wkv.weight", (rows, config.hidden_size))
    yield Needed(prefix + "wgate.weight", (rows, config.hidden_size))
    yield Needed(prefix + "ape", (ratio, rows))
    yield Needed(prefix + "norm.weight", (dim,))


def _ffn(config: Config, prefix: str, is_hash: bool) -> Iterator[Needed]:
    yield Needed(prefix + "gate.weight", (config.num_experts, config.hidden_size))
    if is_hash:
        yield Needed(prefix + "gate.tid2eid", (config.vocab_size, config.experts_per_token), is_integer=True)
    else:
        yield Needed(prefix + "gate.bias", (config.num_experts,))
    yield from _expert(config, prefix + "shared_experts.")
    for expert in range(config.num_experts):
        yield from _expert(config, f"{prefix}experts.{expert}.")


def _expert(config: Config, prefix: str) -> Iterator[Needed]:
    yield Needed(prefix + "w1.weight", (config.expert_width, config.hidden_size))
    yield Needed(prefix + "w2.weight", (config.hidden_size, config.expert_width))
    yield Needed(prefix + "w3.weight", (config.expert_width, config.hidden_size))
