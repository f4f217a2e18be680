"""Layers that scan, as data: what `build_scan.py` builds. No torch."""

from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder
from lamina.models.network import Part
from lamina.models.recurrent import Mamba2, state_dtype

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the states are kept in, and the convolution's inputs unless the cache is fp32: fp32 or bf16."""

    state: str
    inputs: str


@dataclass(frozen=True, slots=True)
class ChannelScan:
    """`channels` channels with `size` numbers and a decay for each of them (Mamba-1).

    prefix  of in_proj, conv1d, x_proj, dt_proj, A_log, D, out_proj and the norms dt_layernorm, b_layernorm, c_layernorm (eps).
    kernel  taps of the convolution.   rank  of the steps.   bias  of in_proj and out_proj.
    """

    prefix: str
    channels: int
    size: int
    kernel: int
    rank: int
    eps: float
    stored: Stored
    bias: bool = False
    conv_bias: bool = True


@dataclass(frozen=True, slots=True)
class HeadScan:
    """`heads` heads of `width` channels with `size` numbers, a step and a decay for each head (Mamba-2).

    prefix  of in_proj, conv1d, dt_bias, A_log, D, norm and out_proj.   groups  of heads that share b and c.
    limits  of a step.   norm_eps  None: no norm beside the gate.   before_gate  the norm comes before the gate.
    multipliers  of what in_proj gives: gates, x, b, c, steps.
    """

    prefix: str
    heads: int
    width: int
    size: int
    groups: int
    kernel: int
    stored: Stored
    norm_eps: float | None
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    before_gate: bool = False
    limits: tuple[float, float] = (0.0, _INFINITY)
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Scaled:
    """after * part(before * x)."""

    part: Part
    before: float = 1.0
    after: float = 1.0


def stored_of(decoder: Decoder) -> Stored:
    """What a family's scans are kept in. Raises ConfigError for what the engine has no rows of."""
    state = state_dtype(decoder.fields)
    if state not in ("fp32", "bf16"):
        raise ConfigError(f"{decoder.fields.prefix}mamba_ssm_dtype", state, "float32 or bfloat16")
    return Stored(state, decoder.store.dtype)


def head_scan(
    prefix: str, scan: Mamba2, stored: Stored, eps: float, limits: tuple[float, float], before_gate: bool = False,
    multipliers: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0),
) -> HeadScan:  # fmt: skip
    """The layer of a scan that a family's description has read."""
    return HeadScan(
        prefix, scan.num_heads, scan.head_dim, scan.state_size, scan.num_groups, scan.kernel, stored,
        eps if scan.has_norm else None, scan.in_bias, scan.out_bias, scan.conv_bias, before_gate, limits, multipliers,
    )  # fmt: skip


def step_limits(fields: ConfigFields, name: str = "time_step_limit") -> tuple[float, float]:
    """(least, most) of a step: a list of two numbers, of which the second may be infinite in either spelling of config.json."""
    listed = fields.items(name)
    if listed is None:
        return 0.0, _INFINITY
    numbers = [_INFINITY if value in ({"__float__": "Infinity"}, "Infinity") else value for value in listed]
    found = [float(value) for value in numbers if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(found) != 2 or len(listed) != 2 or not 0 <= found[0] <= found[1]:
        raise ConfigError(fields.prefix + name, listed, "two numbers, the least and the most of a step")
    return found[0], found[1]
