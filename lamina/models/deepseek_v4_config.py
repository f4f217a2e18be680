"""DeepSeek-V4's config.json, in either spelling: the official one, or what Transformers writes. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields, check_end_tokens

_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequency interpolation for long contexts."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one layer type."""

    theta: float
    yarn: YarnScaling | None


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the forward pass needs. `ratios[i]` is 0 for a window alone, 4 with an index, 128 without."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratios: tuple[int, ...]
    rope: Rope
    compressed_rope: Rope
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    num_hash_layers: int
    routed_scale: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The blocks that draft tokens ahead.

    blocks  how many are stored.   layers  those of the main model whose outputs feed them (DSpark), none for a block that is
    fed the last residual streams (MTP).   markov_rank  width of DSpark's Markov head.
    length  tokens that DSpark drafts at once.   noise  token id that stands for those it is to draft.
    """

    blocks: int
    layers: tuple[int, ...] = ()
    markov_rank: int = 0
    length: int = 0
    noise: int = 0

    @property
    def taps(self) -> int:
        """Layers of the main model whose outputs feed the blocks."""
        return len(self.layers)

    @property
    def can_run(self) -> bool:
        """Whether there are blocks to draft with; several that are no stages of one draft have nobody to run them."""
        return self.blocks > 0 and (self.taps > 0 or self.blocks == 1)


def parse_draft(values: Mapping[str, object], config: Config) -> Draft:
    """The draft blocks of a checkpoint: as many as the schedule has entries beyond the layers, whatever else is said.

    Without a schedule `num_nextn_predict_layers` counts. A block is DSpark's where the config has `dspark_block_size`.
    """
    fields = ConfigFields(values)
    listed = fields.items("compress_ratios")
    if listed is not None:
        blocks = len(listed) - config.num_layers
        beyond = [ratio for ratio in listed[config.num_layers :] if ratio != 0]
        if beyond:
            raise ConfigError("compress_ratios", beyond[0], f"0 beyond the {config.num_layers} layers")
    else:
        blocks = fields.integer("num_nextn_predict_layers", default=1, high=100)
    if not blocks or fields.get("dspark_block_size") is None:
        return Draft(blocks)
    taps = fields.items("dspark_target_layer_ids") or []
    if not taps or any(not isinstance(tap, int) or isinstance(tap, bool) or not 0 <= tap < config.num_layers for tap in taps):
        raise ConfigError("dspark_target_layer_ids", taps, f"a list of layers below {config.num_layers}")
    return Draft(
        blocks=blocks,
        layers=tuple(int(str(tap)) for tap in taps),
        markov_rank=fields.integer("dspark_markov_rank", low=1),
        length=fields.integer("dspark_block_size", low=1, high=64),
        noise=fields.integer("dspark_noise_token_id", default=128_799, high=config.vocab_size - 1),
    )


def parse_config(values: Mapping[str, object]) -> Config:
    """The config of a checkpoint. Raises ConfigError naming the field, the value and what is allowed."""
    fields = ConfigFields(values)
    for name, allowed in (
        ("num_key_value_heads", 1), ("n_shared_experts", 1), ("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True),
        ("attention_bias", False), ("tie_word_embeddings", False), ("hidden_act", "silu"), ("mlp_bias", False),
    ):  # fmt: skip
        fields.must_be(name, allowed)
    num_layers = fields.integer("num_hidden_layers", low=1, high=10_000)
    head_dim = fields.integer("head_dim", default=512, low=2)
    rope_dim = _rope_dim(fields, head_dim)
    rope, compressed = _ropes(fields)
    config = Config(
        vocab_size=fields.integer("vocab_size", low=1),
        hidden_size=fields.integer("hidden_size", low=1),
        num_layers=num_layers,
        num_heads=fields.integer("num_attention_heads", low=1),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=fields.integer("q_lora_rank", low=1),
        o_groups=fields.integer("o_groups", low=1),
        o_lora_rank=fields.integer("o_lora_rank", low=1),
        window=fields.integer("sliding_window", low=1),
        ratios=_ratios(fields, num_layers),
        rope=rope,
        compressed_rope=compressed,
        index_heads=fields.integer("index_n_heads", default=64, low=1),
        index_dim=fields.integer("index_head_dim", default=128, low=2),
        index_topk=fields.integer("index_topk", default=512, low=1),
        num_experts=fields.integer("n_routed_experts", "num_local_experts", low=1),
        experts_per_token=fields.integer("num_experts_per_tok", low=1),
        expert_width=fields.integer("moe_intermediate_size", low=1),
        num_hash_layers=_hash_layers(fields, num_layers),
        routed_scale=fields.number("routed_scaling_factor", default=1.5),
        swiglu_limit=fields.number("swiglu_limit", default=0.0),
        streams=fields.integer("hc_mult", default=4, low=1, high=64),
        sinkhorn_iterations=fields.integer("hc_sinkhorn_iters", default=20, low=1, high=1000),
        hyper_eps=fields.number("hc_eps", default=1e-6),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_positions=fields.integer("max_position_embeddings", default=1_048_576, low=1),
        eos_token_ids=_eos(fields),
    )
    if config.num_heads % config.o_groups:
        raise ConfigError("o_groups", config.o_groups, f"a divisor of num_attention_heads ({config.num_heads})")
    if config.experts_per_token > config.num_experts:
        raise ConfigError("num_experts_per_tok", config.experts_per_token, f"at most n_routed_experts ({config.num_experts})")
    if 4 in config.ratios and config.index_dim < config.rope_dim:
        raise ConfigError("index_head_dim", config.index_dim, f"at least the rotated dims ({config.rope_dim})")
    return config


def _rope_dim(fields: ConfigFields, head_dim: int) -> int:
    """Rotated dims of a head: given, or a part of it."""
    factor: float | None = None
    if fields.get("qk_rope_head_dim") is None:
        nested = fields.nested("rope_parameters")
        main = nested.nested("main") if nested is not None else None
        source = main if main is not None and main.get("partial_rotary_factor") is not None else fields
        factor = source.number("partial_rotary_factor", default=64 / 512)
        if factor > 1:
            raise ConfigError(fields.prefix + "partial_rotary_factor", factor, "a number up to 1")
    dim = int(head_dim * factor) if factor is not None else fields.integer("qk_rope_head_dim", low=2)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError("qk_rope_head_dim", dim, f"an even number up to head_dim ({head_dim})")
    return dim


def _ratios(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """The layer schedule from `compress_ratios` (entries beyond the layers belong to draft blocks) or `layer_types`."""
    listed, types = fields.items("compress_ratios"), fields.items("layer_types")
    if listed is not None:
        if len(listed) < num_layers:
            raise ConfigError("compress_ratios", f"{len(listed)} entries", f"one for each of the {num_layers} layers")
        for layer, ratio in enumerate(listed):
            if isinstance(ratio, bool) or ratio not in (0, 4, 128):
                raise ConfigError(f"compress_ratios[{layer}]", ratio, "0, 4 or 128")
        return tuple(int(str(ratio)) for ratio in listed[:num_layers])
    if types is None:
        raise ConfigError("compress_ratios", None, "a list with 0, 4 or 128 for each layer (or layer_types)")
    if len(types) < num_layers:
        raise ConfigError("layer_types", f"{len(types)} entries", f"one for each of the {num_layers} layers")
    rates = fields.nested("compress_rates")
    if rates is not None:
        for name, ratio in _TYPES.items():
            if ratio:
                rates.must_be(name, ratio)
    for layer, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ConfigError(f"layer_types[{layer}]", kind, f"one of {', '.join(_TYPES)}")
    return tuple(_TYPES[str(kind)] for kind in types[:num_layers])


def _hash_layers(fields: ConfigFields, num_layers: int) -> int:
    """Leading layers that route by token id, from `num_hash_layers` or `mlp_layer_types`."""
    types = fields.items("mlp_layer_types")
    if fields.get("num_hash_layers") is not None or types is None:
        return min(fields.integer("num_hash_layers", default=3), num_layers)
    if len(types) < num_layers or any(kind not in ("hash_moe", "moe") for kind in types):
        raise ConfigError("mlp_layer_types", types, f"hash_moe or moe for each of the {num_layers} layers")
    count = types[:num_layers].count("hash_moe")
    if types[:count] != ["hash_moe"] * count:
        raise ConfigError("mlp_layer_types", types, "hash_moe layers first")
    return count


def _yarn(fields: ConfigFields) -> YarnScaling | None:
    kind = fields.get("rope_type", "type")
    if kind is None or kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(fields.prefix + "type", kind, "yarn or default")
    fields.must_be("attention_factor", 1.0)
    return YarnScaling(
        factor=fields.number("factor", low=1.0),
        original_positions=fields.integer("original_max_position_embeddings", low=1),
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
    )


def _ropes(fields: ConfigFields) -> tuple[Rope, Rope]:
    """Rotary embeddings of plain and of compressed layers, from either spelling."""
    nested = fields.nested("rope_parameters")
    main = nested.nested("main") if nested is not None else None
    compress = nested.nested("compress") if nested is not None else None
    scaling = fields.nested("rope_scaling")
    if compress is None:
        compress_theta = fields.number("compress_rope_theta", default=160_000.0, low=1.0)
        source = scaling if scaling is not None else nested
        compressed = Rope(compress_theta, _yarn(source) if source is not None else None)
    else:
        compressed = Rope(compress.number("rope_theta", default=160_000.0, low=1.0), _yarn(compress))
    theta = (main if main is not None else fields).number("rope_theta", default=10_000.0, low=1.0)
    if main is not None and _yarn(main) is not None:
        raise ConfigError("rope_parameters.main.rope_type", "yarn", "default")
    return Rope(theta, None), compressed


def _eos(fields: ConfigFields) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise ConfigError("eos_token_id", value, "a token id or a list of them")
    found = tuple(int(str(token)) for token in ids)
    check_end_tokens("eos_token_id", found, fields.integer("vocab_size", low=1))
    return found
