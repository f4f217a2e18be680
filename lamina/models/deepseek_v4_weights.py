"""DeepSeek-V4: the weights by component, as the official checkpoints store them. No tensors, no torch."""

from collections.abc import Mapping

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.deepseek_v4_config import Config, Draft
from lamina.models.description import WeightPart
from lamina.models.weight_parts import Size, Storage, embedding_and_head, mlp, router, storage_of, weight_parts

Sizes = list[tuple[str, Size]]


def storages(values: Mapping[str, object]) -> tuple[Storage, Storage]:
    """How linear layers and routed experts are stored.

    Quantised checkpoints keep FP8 blocks with power-of-two scales and FP4 experts with one every 32 inputs (`expert_dtype`
    absent or fp4), or FP8 everywhere with fp32 scales (`expert_dtype` fp8).   Without `quantization_config` nothing is quantised.
    """
    fields = ConfigFields(values)
    store = storage_of(fields)
    if store.codes is None:
        return store, store
    if store.codes != "e4m3":
        raise ConfigError("quantization_config.quant_method", "mxfp4", "fp8")
    expert_dtype = fields.get("expert_dtype") or "fp4"
    if expert_dtype == "fp8":
        return store, store
    if expert_dtype != "fp4":
        raise ConfigError("expert_dtype", expert_dtype, "fp4 or fp8")
    return Storage(store.dtype, "e4m3", store.block, "e8m0"), Storage(store.dtype, "e2m1", (1, 32), "e8m0")


def weights(values: Mapping[str, object], config: Config, draft: Draft | None) -> tuple[WeightPart, ...]:
    """Every tensor of the checkpoint by component, draft blocks only if `draft` is given. Router biases count as parameters.

    The tables of hash-routed layers (int64, an expert list per token id) are bytes without parameters.
    """
    store, experts = storages(values)
    sizes = embedding_and_head(store, config.vocab_size, config.hidden_size, tied=False)
    for layer, ratio in enumerate(config.ratios):
        sizes += _layer(config, store, experts, ratio, is_hash=layer < config.num_hash_layers)
    sizes += [("norms", store.tensor(config.hidden_size)), ("hyper-connections", _collapse(config, store))]
    if draft is not None:
        for name, size in _draft_blocks(config, draft, store, experts):
            sizes.append(("draft experts" if name == "experts" else "draft blocks", size))
    return weight_parts(sizes, {"low-rank projections": "none", "draft experts": "expert"})


def _layer(config: Config, store: Storage, experts: Storage, ratio: int, is_hash: bool) -> Sizes:
    """One decoder layer: attention with what its ratio adds, experts, norms and the two mixers of the residual streams."""
    width, dim, heads = config.hidden_size, config.head_dim, config.num_heads
    groups = config.o_groups * config.o_lora_rank
    attention = store.linear(heads * dim, config.q_lora_rank) + store.linear(groups, heads // config.o_groups * dim)
    attention += store.linear(width, groups) + store.tensor(heads, dtype="fp32")
    sizes = [
        ("attention", attention),
        ("low-rank projections", store.linear(config.q_lora_rank, width) + store.linear(dim, width)),
        ("norms", store.tensor(config.q_lora_rank) + store.tensor(dim) + store.tensor(width) * 2),
    ]
    if ratio:
        sizes.append(("compressor", _compressor(config, store, ratio, dim, overlapping=ratio == 4)))
    if ratio == 4:
        index = store.linear(config.index_heads * config.index_dim, config.q_lora_rank)
        index += store.tensor(config.index_heads, width)
        sizes.append(("index", index + _compressor(config, store, ratio, config.index_dim, overlapping=True)))
    parts = config.streams * (2 + config.streams)  # before, after, and from each stream to each
    mixer = store.tensor(parts, config.streams * width, dtype="fp32") + store.tensor(parts + 3, dtype="fp32")
    sizes.append(("hyper-connections", mixer * 2))
    scores = router(store, width, config.num_experts)
    if is_hash:
        table = store.tensor(config.vocab_size, config.experts_per_token, dtype="int64")
        sizes.append(("router", scores + Size(0, table.nbytes)))
    else:
        sizes.append(("router", scores + store.tensor(config.num_experts, dtype="fp32")))
    sizes.append(("experts", mlp(experts, width, config.expert_width) * config.num_experts))
    sizes.append(("shared experts", mlp(store, width, config.expert_width)))
    return sizes


def _compressor(config: Config, store: Storage, ratio: int, dim: int, overlapping: bool) -> Size:
    """Two projections, never quantised, a bias per position of a group, and a norm."""
    rows = dim * (2 if overlapping else 1)
    projections = store.tensor(rows, config.hidden_size) * 2
    return projections + store.tensor(ratio, rows, dtype="fp32") + store.tensor(dim)


def _collapse(config: Config, store: Storage) -> Size:
    """The mixer that makes one vector of the residual streams before the head."""
    streams = config.streams
    return store.tensor(streams, streams * config.hidden_size, dtype="fp32") + store.tensor(streams + 1, dtype="fp32")


def _draft_blocks(config: Config, draft: Draft, store: Storage, experts: Storage) -> Sizes:
    """Decoder layers without compression, and what feeds and ends them; embedding and head are the main model's.

    MTP: each block joins the token's embedding with the residual streams and ends like the model.
    DSpark: the first block takes the tapped outputs; the last one ends like the model, with a Markov and a confidence head.
    """
    width = config.hidden_size
    sizes: Sizes = []
    for _ in range(draft.blocks):
        sizes += _layer(config, store, experts, ratio=0, is_hash=False)
    end = _collapse(config, store) + store.tensor(width)
    if not draft.taps:
        each = end + store.linear(width, width) * 2 + store.tensor(width) * 2
        return [*sizes, ("ends", each * draft.blocks)]
    taps = store.linear(width, draft.taps * width) + store.tensor(width)
    heads = store.tensor(config.vocab_size, draft.markov_rank) * 2 + store.tensor(1, width + draft.markov_rank)
    return [*sizes, ("ends", end + taps + heads)]
