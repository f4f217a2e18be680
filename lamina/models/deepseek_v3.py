"""DeepSeek-V2, V3 and V3.2: one latent per token for keys and values of all heads (MLA); V3.2 adds keys of an index (DSA)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lamina.base.errors import ConfigError
from lamina.base.formats import index_key, latent
from lamina.memory.kinds import Log, Memory
from lamina.models.attention_memory import (
    MAX_LAYERS,
    check_choices,
    check_heads,
    entry_format,
    hidden_field,
    nullable,
    replicated_note,
    unused_index_note,
)
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import flag
from lamina.models.description import Choices, Description, WeightPart
from lamina.models.network import Branch, Experts, Mlp, Network, Norm, Part, Rope, Router
from lamina.models.network_fields import end_tokens, read_rope
from lamina.models.parts_latent import Index, Latent
from lamina.models.weight_parts import Size, Storage, embedding_and_head, mlp, router, storage_of, weight_parts
from lamina.weights.names import NameScheme, Rename

Sizes = list[tuple[str, Size]]
#: of the norms between two matrices of low rank, and of the index's keys; no field of the config
_LOW_RANK_EPS = 1e-6
#: what two versions of Transformers write for a layer with an index
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's config class says where a config.json is silent, and what its layers have."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_width: int
    num_layers: int
    num_heads: int
    experts: int
    shared_experts: int
    first_dense: int
    max_positions: int
    has_router_bias: bool = True  # and sigmoids for softmax
    has_mlp_bias: bool = False
    has_index: bool = False
    draft_layers: int = 0
    cache_format: str = "bf16"


_V2 = Family(102400, 4096, 11008, 1407, 32, 32, 64, 2, 0, 2048, has_router_bias=False, has_mlp_bias=True)
_V3 = Family(129280, 7168, 18432, 2048, 61, 128, 256, 1, 3, 4096, draft_layers=1)
_V32 = Family(129280, 7168, 18432, 2048, 61, 128, 256, 1, 3, 163840, has_index=True, cache_format="fp8")


@dataclass(frozen=True, slots=True)
class Config:
    """The fields that memory and weights depend on. `sparse[i]` says whether layer i has experts."""

    store: Storage
    vocab_size: int
    hidden_size: int
    mlp_width: int
    moe_width: int
    num_layers: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    experts: int
    shared_experts: int
    sparse: tuple[bool, ...]
    draft_layers: int
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int


def describe_2(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a DeepSeek-V2 config.json."""
    return _describe(values, choices, _V2)


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a DeepSeek-V3 (R1, V3.1) config.json; entries in bf16 where no format is chosen."""
    return _describe(values, choices, _V3)


def describe_32(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a DeepSeek-V3.2 config.json; entries and index keys in fp8 where no format is chosen."""
    return _describe(values, choices, _V32)


def _describe(values: Mapping[str, object], choices: Choices, family: Family) -> Description:
    check_choices(choices)
    config = _parse(ConfigFields(values), family)
    check_heads(config.num_heads, choices.tensor_parallel)
    cache_format = choices.cache_format or family.cache_format
    index_format = (choices.index_format or "fp8") if family.has_index else None
    draft_layers = config.draft_layers if choices.draft_tokens else 0
    memories = _memories(config, cache_format, index_format, draft_layers)
    notes = []
    if draft_layers:
        notes.append("a draft layer uses the model's embedding and head: the copies that the checkpoint stores are not counted")
    elif choices.draft_tokens:
        notes.append("the config has no draft layer: drafts are taken to come from outside the model")
    elif config.draft_layers:
        notes.append(f"{config.draft_layers} draft layer(s) of the checkpoint are left out, because draft_tokens is 0")
    return Description(
        model_type=str(values.get("model_type")), memories=memories, hidden=hidden_field(memories, config.hidden_size),
        max_positions=config.max_positions, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        cache_format=cache_format, index_format=index_format, weights=_weights(config, family, draft_layers),
        notes=(*notes, *replicated_note(choices), *(() if family.has_index else unused_index_note(choices))),
    )  # fmt: skip


def _memories(config: Config, cache_format: str, index_format: str | None, draft_layers: int) -> tuple[Memory, ...]:
    """A latent and perhaps an index key per layer and token; a draft layer's, which needs the next token, lags one behind."""
    entry = entry_format(cache_format, latent(cache_format, config.kv_rank, config.rope_dim))
    key = entry_format(index_format, index_key(index_format, config.index_dim)) if index_format is not None else None
    kept: list[Memory] = []
    for layer in range(config.num_layers + draft_layers):
        prefix, lag = ("", 0) if layer < config.num_layers else ("draft_", 1)
        kept.append(Log(f"{prefix}latent", layer, entry, 1, lag))
        if key is not None:
            kept.append(Log(f"{prefix}index", layer, key, 1, lag))
    return tuple(kept)


def _parse(fields: ConfigFields, family: Family) -> Config:
    fields.must_be("moe_layer_freq", 1)
    if not family.has_mlp_bias:
        fields.must_be("mlp_bias", False)
    layers = fields.integer("num_hidden_layers", default=family.num_layers, low=1, high=MAX_LAYERS)
    q_rank = nullable(fields, "q_lora_rank", 1536)
    if q_rank is None and family.has_index:
        raise ConfigError("q_lora_rank", None, "an integer: the index reads the low-rank query")
    return Config(
        store=storage_of(fields),
        vocab_size=fields.integer("vocab_size", default=family.vocab_size, low=1),
        hidden_size=fields.integer("hidden_size", default=family.hidden_size, low=1),
        mlp_width=fields.integer("intermediate_size", default=family.intermediate_size, low=1),
        moe_width=fields.integer("moe_intermediate_size", default=family.moe_width, low=1),
        num_layers=layers,
        num_heads=fields.integer("num_attention_heads", default=family.num_heads, low=1),
        q_rank=q_rank,
        kv_rank=fields.integer("kv_lora_rank", default=512, low=1),
        nope_dim=fields.integer("qk_nope_head_dim", default=128, low=1),
        rope_dim=fields.integer("qk_rope_head_dim", default=64, low=1),
        value_dim=fields.integer("v_head_dim", default=128, low=1),
        index_heads=fields.integer("index_n_heads", default=64, low=1),
        index_dim=fields.integer("index_head_dim", default=128, low=1),
        experts=fields.integer("n_routed_experts", "num_local_experts", "num_experts", default=family.experts, low=1),
        shared_experts=fields.integer("n_shared_experts", default=family.shared_experts),
        sparse=_sparse(fields, layers, family.first_dense),
        draft_layers=fields.integer("num_nextn_predict_layers", "num_mtp_layers", default=family.draft_layers, high=100),
        attention_bias=flag(fields, "attention_bias", False),
        mlp_bias=family.has_mlp_bias and flag(fields, "mlp_bias", False),
        tied=flag(fields, "tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", default=family.max_positions, low=1),
    )


def _sparse(fields: ConfigFields, layers: int, first_dense: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first `first_k_dense_replace`, unless `mlp_layer_types` says it for each."""
    types = fields.items("mlp_layer_types")
    if types is None:
        first = fields.integer("first_k_dense_replace", default=first_dense)
        return tuple(layer >= first for layer in range(layers))
    if len(types) != layers or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError("mlp_layer_types", types, f"dense or sparse for each of the {layers} layers")
    return tuple(kind == "sparse" for kind in types)


def _weights(config: Config, family: Family, draft_layers: int) -> tuple[WeightPart, ...]:
    """Every tensor by component. Router biases, which choose experts, count as parameters."""
    store, width = config.store, config.hidden_size
    sizes = embedding_and_head(store, config.vocab_size, width, config.tied)
    for is_sparse in config.sparse:
        sizes += _layer(config, family, is_sparse)
    sizes.append(("norms", store.tensor(width)))
    for _ in range(draft_layers):
        for name, size in _layer(config, family, is_sparse=True):
            sizes.append(("draft experts" if name == "experts" else "draft layers", size))
        sizes.append(("draft layers", store.tensor(width, 2 * width) + store.tensor(width) * 3))
    return weight_parts(sizes, {"low-rank projections": "none", "draft experts": "expert"})


def _layer(config: Config, family: Family, is_sparse: bool) -> Sizes:
    store, width, heads, bias = config.store, config.hidden_size, config.num_heads, config.attention_bias
    queries, norms = heads * (config.nope_dim + config.rope_dim), store.tensor(config.kv_rank) + store.tensor(width) * 2
    attention = store.linear(heads * (config.nope_dim + config.value_dim), config.kv_rank)
    attention += store.linear(width, heads * config.value_dim, bias)
    low_rank = store.linear(config.kv_rank + config.rope_dim, width, bias)
    if config.q_rank is None:
        attention += store.linear(queries, width)
    else:
        attention += store.linear(queries, config.q_rank)
        low_rank += store.linear(config.q_rank, width, bias)
        norms += store.tensor(config.q_rank)
    sizes = [("attention", attention), ("low-rank projections", low_rank), ("norms", norms)]
    if family.has_index and config.q_rank is not None:
        index = store.linear(config.index_heads * config.index_dim, config.q_rank) + store.linear(config.index_dim, width)
        sizes.append(("index", index + store.tensor(config.index_heads, width) + store.tensor(config.index_dim) * 2))
    if not is_sparse:
        return [*sizes, ("mlp", mlp(store, width, config.mlp_width, config.mlp_bias))]
    scores = router(store, width, config.experts)
    if family.has_router_bias:
        scores += store.tensor(config.experts, dtype="fp32")
    sizes += [("router", scores), ("experts", mlp(store, width, config.moe_width) * config.experts)]
    if config.shared_experts:
        sizes.append(("shared experts", mlp(store, width, config.moe_width * config.shared_experts, config.mlp_bias)))
    return sizes


# What is computed -----------------------------------------------------------------------------------------------------


def network_2(values: Mapping[str, object]) -> Network:
    """What a DeepSeek-V2 (or V2-Lite) computes."""
    return _network(values, _V2)


def network_3(values: Mapping[str, object]) -> Network:
    """What a DeepSeek-V3 (R1, V3.1) computes, without its draft layers."""
    return _network(values, _V3)


def network_32(values: Mapping[str, object]) -> Network:
    """What a DeepSeek-V3.2 computes, without its draft layers."""
    return _network(values, _V32)


def _network(values: Mapping[str, object], family: Family) -> Network:
    fields = ConfigFields(values)
    config = _parse(fields, family)
    fields.must_be("hidden_act", "silu")
    fields.must_be("num_key_value_heads", config.num_heads)
    if config.store.codes not in (None, "e4m3") or (config.store.codes and config.store.block != (128, 128)):
        raise ConfigError("quantization_config", values.get("quantization_config"), "none, or fp8 in blocks of 128 x 128")
    rope, eps = _rope(fields, config, family), fields.number("rms_norm_eps", default=1e-6)
    routing = _router(fields, config, family) if any(config.sparse) else None
    layers = []
    for layer, is_sparse in enumerate(config.sparse):
        prefix = f"model.layers.{layer}"
        attention = _attention(fields, config, family, f"{prefix}.self_attn", rope)
        name, inner = f"{prefix}.mlp", None
        if is_sparse and routing is not None:
            inner = _experts(config, name, routing)
        part: Part = inner or Mlp(name, config.mlp_width, bias=config.mlp_bias)
        before, between = (Norm(f"{prefix}.{name}.weight", eps) for name in ("input_layernorm", "post_attention_layernorm"))
        layers.append((Branch(attention, before), Branch(part, between)))
    return Network(
        config.vocab_size, config.hidden_size, "model.embed_tokens.weight", tuple(layers), Norm("model.norm.weight", eps),
        None if config.tied else "lm_head.weight", end_tokens(values), names=_names(config),
    )  # fmt: skip


def _names(config: Config) -> NameScheme:
    """As Transformers and the hub write them; draft layers come after the others and are not used."""
    drafts = tuple(f"model.layers.{config.num_layers + draft}." for draft in range(config.draft_layers))
    head = ("lm_head.",) if config.tied else ()
    renames = (Rename(r"^.*\.rotary_emb\.inv_freq$", "unused.inv_freq"),)
    return NameScheme(renames, ignored=("unused.", *head, *drafts), scale_suffix=".weight_scale_inv")


def _rope(fields: ConfigFields, config: Config, family: Family) -> Rope:
    """The rotary positions of the last dims of a head; V3 alone may have them in halves."""
    if family is not _V3:
        fields.must_be("rope_interleave", True)
    if config.rope_dim % 2:
        raise ConfigError("qk_rope_head_dim", config.rope_dim, "an even number of dims")
    rope = read_rope(fields, config.rope_dim, config.max_positions, 10000.0, is_pairs=flag(fields, "rope_interleave", True))
    if rope.dim != config.rope_dim:
        raise ConfigError("qk_rope_head_dim", config.rope_dim, "dims that are all rotated (partial_rotary_factor 1)")
    return rope


def _attention(fields: ConfigFields, config: Config, family: Family, prefix: str, rope: Rope) -> Latent:
    index = None
    if family.has_index:
        fields.must_be("indexer_rope_interleave", False)
        if any(kind not in _INDEXED for kind in fields.items("layer_types") or ()):
            raise ConfigError("layer_types", fields.get("layer_types"), f"{' or '.join(_INDEXED)} in every layer")
        if config.index_dim < config.rope_dim:
            raise ConfigError("index_head_dim", config.index_dim, f"at least qk_rope_head_dim ({config.rope_dim})")
        top_k = fields.integer("index_topk", default=2048, low=1)
        index = Index(f"{prefix}.indexer", "index", config.index_heads, config.index_dim, top_k, _LOW_RANK_EPS)
    scale = (config.nope_dim + config.rope_dim) ** -0.5 * _temperature(rope) ** 2
    return Latent(
        prefix, "latent", config.num_heads, config.q_rank, config.kv_rank, config.nope_dim, config.value_dim, rope, scale,
        _LOW_RANK_EPS, config.attention_bias, index,
    )  # fmt: skip


def _temperature(rope: Rope) -> float:
    """What stretched positions multiply queries and keys by, beside the factor of their rotation. Source: `mscale_all_dim`."""
    found = ConfigFields(dict(rope.scaling), "rope_scaling.")
    share = found.number("mscale_all_dim", default=0.0)
    factor = found.number("factor", default=1.0)
    return 0.1 * share * math.log(factor) + 1.0 if share and factor > 1 else 1.0


def _experts(config: Config, name: str, routing: Router) -> Experts:
    shared = Mlp(f"{name}.shared_experts", config.moe_width * config.shared_experts, bias=config.mlp_bias)
    if routing.bias is not None:
        routing = replace(routing, bias=f"{name}.{routing.bias}")
    return Experts(
        name, config.experts, config.moe_width, routing, f"{name}.gate.weight", shared if config.shared_experts else None
    )


def _router(fields: ConfigFields, config: Config, family: Family) -> Router:
    """V2: the best softmax scores, of all experts or of the groups with the largest. V3: sigmoids and a bias, of groups."""
    top_k = fields.integer("num_experts_per_tok", default=8 if family.has_router_bias else None, low=1, high=config.experts)
    scale = fields.number("routed_scaling_factor", default=2.5 if family.has_router_bias else 1.0)
    if family.has_router_bias:
        fields.must_be("scoring_func", "sigmoid")
        fields.must_be("topk_method", "noaux_tc")
        groups, kept = _groups(fields, config, top_k, (8, 4), least=2)
        return Router("sigmoid", top_k, flag(fields, "norm_topk_prob", True), scale, "gate.e_score_correction_bias", groups, kept)
    fields.must_be("scoring_func", "softmax")
    fields.must_be("norm_topk_prob", False)
    method, groups, kept = fields.get("topk_method") or "greedy", 1, 1
    if method == "group_limited_greedy":
        groups, kept = _groups(fields, config, top_k, (None, None), least=1)
    elif method != "greedy":
        raise ConfigError("topk_method", method, "greedy or group_limited_greedy")
    return Router("softmax", top_k, False, scale, groups=groups, kept=kept)


def _groups(
    fields: ConfigFields, config: Config, top_k: int, defaults: tuple[int | None, int | None], least: int
) -> tuple[int, int]:
    """(groups of experts, how many of them a token may choose from); a group has at least `least` experts."""
    for name in ("n_group", "topk_group"):
        if name in fields.values and fields.values[name] is None:
            raise ConfigError(name, None, "an integer")
    groups = fields.integer("n_group", default=defaults[0], low=1)
    if config.experts % groups or config.experts // groups < least:
        raise ConfigError("n_group", groups, f"equal groups of at least {least} of the {config.experts} experts")
    kept = fields.integer("topk_group", default=defaults[1], low=1, high=groups)
    if top_k > kept * (config.experts // groups):
        raise ConfigError("topk_group", kept, f"enough groups of {config.experts // groups} for {top_k} experts a token")
    return groups, kept
