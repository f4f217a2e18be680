"""Angles per position of the rotary embeddings of `network.Rope`, calculated in fp32 as Transformers does."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.models.network import Rope


def rope_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """(angle per position of each pair [dim / 2] fp32, factor of cos and sin). Raises ConfigError for what is unknown."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    values = dict(rope.scaling)
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / _number(values, "factor"), 1.0
    if rope.kind == "llama3":
        return _by_wavelength(plain, values), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, values)
    if rope.kind == "longrope":
        return _longrope(rope, values)
    raise ConfigError("rope_type", rope.kind, "default, linear, llama3, yarn or longrope")


def _number(values: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = values.get(name, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"rope_scaling.{name}", value, "a number")
    return float(value)


def _by_wavelength(plain: Tensor, values: Mapping[str, object]) -> Tensor:
    """Long wavelengths are stretched, short ones not, those between in part. Source: Llama 3.1."""
    factor, low, high = _number(values, "factor"), _number(values, "low_freq_factor"), _number(values, "high_freq_factor")
    original = _number(values, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: Rope, values: Mapping[str, object]) -> tuple[Tensor, float]:
    """Source: YaRN (Peng et al. 2023), with DeepSeek's two mscale factors."""
    original = _number(values, "original_max_position_embeddings", rope.max_positions)
    factor = _number(values, "factor")
    attention = values.get("attention_factor")
    mscale, all_dims = values.get("mscale"), values.get("mscale_all_dim")

    def of(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if attention is None:
        if mscale and all_dims:
            attention = of(factor, _number(values, "mscale")) / of(factor, _number(values, "mscale_all_dim"))
        else:
            attention = of(factor)
    beta_fast, beta_slow = _number(values, "beta_fast", 32.0) or 32.0, _number(values, "beta_slow", 1.0) or 1.0

    def pair_with(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    positions = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    extrapolated, interpolated = 1.0 / positions, 1.0 / (factor * positions)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep, float(str(attention))


def _longrope(rope: Rope, values: Mapping[str, object]) -> tuple[Tensor, float]:
    """Each pair has a factor of its own; the short ones up to the original context, the long ones beyond it. Source: LongRoPE."""
    original = _number(values, "original_max_position_embeddings", rope.max_positions)
    scale = _number(values, "factor", rope.max_positions / original)
    name = "long_factor" if rope.max_positions > original else "short_factor"
    listed = values.get(name)
    if not isinstance(listed, tuple) or len(listed) != rope.dim // 2:
        raise ConfigError(f"rope_scaling.{name}", listed, f"a list of {rope.dim // 2} numbers")
    factors = torch.tensor([float(each) for each in listed], dtype=torch.float32)
    shape = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    attention = values.get("attention_factor")
    if attention is None:
        attention = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    return 1.0 / (factors * rope.theta**shape), float(str(attention))
