"""What the families given as networks read alike from a config.json. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder
from lamina.models.network import Rope
from lamina.weights.names import NameScheme, Rename

_FP8_BLOCK = 128
#: a factor of positions lies between these
_LEAST, _MOST = 1e-6, 1e12
#: what is in checkpoints and not used
_UNUSED = "unused."
#: the text model inside one for images and sound, as older and newer releases write it, and what is not the text model's
_TEXT_OF_SEVERAL = (
    Rename(r"^language_model\.lm_head\.", "lm_head."),
    Rename(r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
    Rename(r"^(?:model\.)?(?:vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\.", _UNUSED),
)


def read_rope(
    fields: ConfigFields, dim: int, max_positions: int, theta: float, layer_type: str | None = None, is_pairs: bool = False,
    partial: float = 1.0,
) -> Rope:  # fmt: skip
    """The rotary positions of a head of `dim` dims.

    They are in `rope_parameters`, for each layer type apart where the family has several, or in `rope_theta` and `rope_scaling`.
    theta, partial  what the family's config class says where the config is silent: base, and share of the dims that are rotated.
    """
    found = fields.nested("rope_parameters")
    if found is not None and layer_type is not None and any(isinstance(value, dict) for value in found.values.values()):
        found = found.nested(layer_type)
    scaling = found or fields.nested("rope_scaling") or ConfigFields({}, fields.prefix)
    base = scaling.number("rope_theta", default=fields.number("rope_theta", default=theta))
    kind = scaling.get("rope_type", "type") or "default"
    if not isinstance(kind, str):
        raise ConfigError(f"{scaling.prefix}rope_type", kind, "a text")
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ("default", "linear", "llama3", "yarn", "longrope"):
        raise ConfigError(f"{scaling.prefix}rope_type", kind, "default, linear, llama3, yarn or longrope")
    share = scaling.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=partial))
    numbers = dict(scaling.values)
    if "original_max_position_embeddings" not in numbers and "original_max_position_embeddings" in fields.values:
        numbers["original_max_position_embeddings"] = fields.values["original_max_position_embeddings"]
    told = tuple((name, _frozen(value)) for name, value in sorted(numbers.items()) if kind != "default")
    rotated = int(dim * min(share, 2.0))
    if base <= 1:
        raise ConfigError(f"{scaling.prefix if 'rope_theta' in scaling.values else fields.prefix}rope_theta", base, "above 1")
    _check_scaling(ConfigFields(numbers, scaling.prefix), kind, rotated // 2, max_positions)
    if rotated < 1 or rotated + rotated % 2 > dim or (rotated % 2 and kind != "default"):
        allowed = f"a share of the {dim} dims of a head that is a number of pairs"
        raise ConfigError(f"{scaling.prefix}partial_rotary_factor", share, allowed)
    return Rope(rotated, base, kind, told, is_pairs, max_positions)


def _check_scaling(scaling: ConfigFields, kind: str, pairs: int, max_positions: int) -> None:
    """Refuses numbers that `rope.py` cannot calculate with, and what depends on how long a request becomes."""
    original = "original_max_position_embeddings"
    if kind in ("linear", "llama3", "yarn"):
        _bounded(scaling, "factor")
    if kind == "llama3":
        _bounded(scaling, original, low=1)
        low, high = _bounded(scaling, "low_freq_factor"), _bounded(scaling, "high_freq_factor")
        if high <= low:
            raise ConfigError(f"{scaling.prefix}high_freq_factor", high, f"above low_freq_factor ({low})")
    if kind in ("yarn", "longrope") and scaling.get("attention_factor") is not None:
        _bounded(scaling, "attention_factor", low=0.0)
    if kind == "yarn":
        _bounded(scaling, original, default=float(max_positions), low=1)
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            _bounded(scaling, name, default=1.0, low=0.0)
        if not isinstance(scaling.get("truncate"), bool | None):
            raise ConfigError(f"{scaling.prefix}truncate", scaling.get("truncate"), "true or false")
    if kind == "longrope":
        found = _bounded(scaling, original, default=float(max_positions), low=2)
        if scaling.get("factor") is not None:
            _bounded(scaling, "factor")
        for name in ("short_factor", "long_factor"):
            listed = scaling.items(name) or []
            told = [each for each in listed if isinstance(each, int | float) and not isinstance(each, bool)]
            numbers = [each for each in told if _LEAST <= each <= _MOST]
            if len(numbers) != pairs or len(listed) != pairs:
                raise ConfigError(f"{scaling.prefix}{name}", listed, f"a list of {pairs} numbers above 0")
        if max_positions > found and scaling.get("short_factor") != scaling.get("long_factor"):
            allowed = f"max_position_embeddings ({max_positions}): a request that grows longer would turn the keys it remembers"
            raise ConfigError(f"{scaling.prefix}{original}", found, allowed)


def _bounded(scaling: ConfigFields, name: str, default: float | None = None, low: float = _LEAST) -> float:
    found = scaling.number(name, default=default, low=low)
    if found > _MOST:
        raise ConfigError(scaling.prefix + name, found, f"a number from {low} to {_MOST}")
    return found


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def end_tokens(values: Mapping[str, object], nested: str | None = None) -> tuple[int, ...]:
    """`eos_token_id` of a config, or of the object `nested` in it: none, one or several."""
    inner = ConfigFields(values).nested(nested) if nested is not None else None
    value = values.get("eos_token_id")
    if value is None and inner is not None:
        value = inner.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise ConfigError("eos_token_id", value, "a token id or a list of them")
    return tuple(int(str(token)) for token in ids)


def names_of(
    decoder: Decoder, renames: tuple[Rename, ...] = (), ignored: tuple[str, ...] = (), scheme: NameScheme | None = None
) -> NameScheme:
    """How the tensors of a family are named: `model.` and `lm_head.`, as Transformers writes them.

    Stored frequencies of rotary embeddings are not used, nor is a head beside tied embeddings.   scheme  has splits and suffixes.
    Matrices may be fp8 in blocks of 128 x 128; raises ConfigError for what else is quantised, MXFP4 experts without a scheme too.
    """
    base = scheme or NameScheme()
    quantised = f"{decoder.fields.prefix}quantization_config"
    if decoder.store.codes is not None:
        if decoder.store.block != (_FP8_BLOCK, _FP8_BLOCK):
            raise ConfigError(f"{quantised}.weight_block_size", decoder.store.block, f"[{_FP8_BLOCK}, {_FP8_BLOCK}]")
        base = replace(base, scale_suffix=".weight_scale_inv")
    elif decoder.expert_store.codes is not None and scheme is None:
        raise ConfigError(f"{quantised}.quant_method", "mxfp4", "fp8, or none, for this model_type")
    text = _TEXT_OF_SEVERAL if decoder.is_nested else ()
    every = (*renames, *text, Rename(r"^.*\.rotary_emb\.inv_freq$", f"{_UNUSED}inv_freq"), *base.renames)
    tied = ("lm_head.",) if decoder.tied else ()
    return NameScheme(every, base.splits, (_UNUSED, *tied, *ignored, *base.ignored), base.weight_suffix, base.scale_suffix)
