"""What the families with a recurrent state share: scans, their memories and their weights. No tensors, no torch.

A layer that attends keeps a `Log` "kv". A layer that scans keeps a `Snapshot` "state", one for the request whatever its
length, and, where a causal convolution feeds the scan, a `Window` "conv" with the convolution's last inputs.

tensor_parallel divides the heads or channels of a scan, so that one GPU's state and window are a part, never a copy. Only
the groups of heads that share B and C may be fewer than the GPUs: each GPU then holds the one its heads need. What cannot
be divided evenly is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.base.errors import ConfigError
from lamina.memory.kinds import EntryFormat, Field, Log, Memory, Snapshot, Window
from lamina.models.config_fields import ConfigFields
from lamina.models.decoder import Decoder, describe_decoder, flag
from lamina.models.description import Choices, Description
from lamina.models.weight_parts import Size, Storage

MAX_WIDTH = 2**24
#: the kinds of mixing layer, and how `layer_types` and `layers_block_type` spell them
FULL, LINEAR = "full_attention", "linear_attention"
SPELLINGS: Mapping[str, str] = {FULL: FULL, LINEAR: LINEAR, "attention": FULL, "mamba": LINEAR, "mamba2": LINEAR}
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Scan(Protocol):
    """A recurrent mixer, as data."""

    @property
    def channels(self) -> int:
        """Channels of the convolution before the scan on one GPU of one; 0 where there is none."""
        ...

    def share(self, tensor_parallel: int) -> "Scan":
        """One GPU's part. Raises ConfigError if it cannot be divided."""
        ...

    @property
    def kernel(self) -> int:
        """Taps of the convolution."""
        ...

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of the state."""
        ...

    def weights(self, store: Storage, hidden: int) -> Size:
        """Everything between the layer's norm and its residual."""
        ...


@dataclass(frozen=True, slots=True)
class Mixer:
    """How a layer mixes tokens: it attends to everything, scans, does both side by side, or neither."""

    attends: bool
    scan: Scan | None = None


def describe_hybrid(
    decoder: Decoder, choices: Choices, mixers: Sequence[Mixer], sizes: Sequence[tuple[str, Size]], notes: Sequence[str] = ()
) -> Description:
    """The description of a model with these mixers. `sizes` are all its weights but embedding and head."""
    kept_in, blocks = state_dtype(decoder.fields), width(decoder.fields, "num_nextn_predict_layers", default=0, low=0)
    inputs_in = inputs_dtype(decoder.store.dtype, choices.cache_format)
    if choices.draft_tokens:
        raise ConfigError("draft_tokens", choices.draft_tokens, "0: a scan's state takes in tokens and cannot give drafts back")

    def memories(entry: EntryFormat) -> list[Memory]:
        kept: list[Memory] = []
        for layer, mixer in enumerate(mixers):
            if mixer.attends:
                kept.append(Log("kv", layer, entry, 1))
            if mixer.scan is not None:
                kept += scan_memories(mixer.scan.share(choices.tensor_parallel), layer, kept_in, inputs_in)
        return kept

    convolved = any(mixer.scan is not None and mixer.scan.channels for mixer in mixers)
    inputs = f", the inputs of their convolutions in {inputs_in}" if convolved else ""
    told = [*notes, f"scan states are kept in {kept_in}{inputs}"]
    if blocks:
        told.append(f"{blocks} draft block(s) of the checkpoint are not counted")
    return describe_decoder(decoder, choices, memories, sizes, told)


def scan_memories(scan: Scan, layer: int, kept_in: str, inputs_in: str) -> list[Memory]:
    """What a layer that scans remembers: its state and, before it, the last inputs of its convolution if it has one."""
    state = Snapshot("state", layer, (Field("state", kept_in, scan.state),))
    if not scan.channels:
        return [state]
    return [Window("conv", layer, EntryFormat(inputs_in, (Field("x", inputs_in, (scan.channels,)),)), scan.kernel), state]


def inputs_dtype(stored: str, cache_format: str | None) -> str:
    """What the inputs of convolutions are kept in: as the weights are stored, or fp32 where everything else is."""
    return "fp32" if cache_format == "fp32" else stored


def state_dtype(fields: ConfigFields) -> str:
    """What scan states are kept in: fp32, unless the config says otherwise."""
    for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        value = fields.get(name)
        if value is not None:
            if not isinstance(value, str) or value not in _STATE_DTYPES:
                raise ConfigError(fields.prefix + name, value, f"one of {', '.join(_STATE_DTYPES)}")
            return _STATE_DTYPES[value]
    return "fp32"


def width(fields: ConfigFields, *names: str, default: int | None = None, low: int = 1) -> int:
    """A width or a count of things in a layer."""
    return fields.integer(*names, default=default, low=low, high=MAX_WIDTH)


def width_or_auto(fields: ConfigFields, name: str, automatic: int) -> int:
    """A width that may also be "auto"."""
    return automatic if fields.get(name) in (None, "auto") else width(fields, name)


def listed_kinds(
    fields: ConfigFields, num_layers: int, *names: str, spellings: Mapping[str, str] = SPELLINGS
) -> list[str] | None:
    """The kind of each layer from the first of the lists `names` that is there, or None."""
    listed = fields.items(*names)
    if listed is None:
        return None
    name = next(name for name in names if fields.get(name) is not None)
    if len(listed) != num_layers:
        raise ConfigError(f"{fields.prefix}{name}", f"{len(listed)} entries", f"one for each of the {num_layers} layers")
    for layer, kind in enumerate(listed):
        if not isinstance(kind, str) or kind not in spellings:
            raise ConfigError(f"{fields.prefix}{name}[{layer}]", kind, f"one of {', '.join(spellings)}")
    return [spellings[str(kind)] for kind in listed]


def layer_numbers(fields: ConfigFields, name: str, num_layers: int) -> frozenset[int] | None:
    """A list of layers, or None where there is none."""
    listed = fields.items(name)
    if listed is None:
        return None
    found = [layer for layer in listed if isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < num_layers]
    if len(found) != len(listed):
        wrong = next(layer for layer in listed if layer not in found or isinstance(layer, bool))
        raise ConfigError(f"{fields.prefix}{name}", wrong, f"numbers of layers, from 0 to {num_layers - 1}")
    return frozenset(found)


def part(name: str, count: int, tensor_parallel: int, may_repeat: bool = False) -> int:
    """One GPU's part of `count` things; with `may_repeat` fewer things than GPUs are one on each, held by several.

    Raises ConfigError if they cannot be divided evenly.
    """
    if count % tensor_parallel == 0:
        return count // tensor_parallel
    if may_repeat and tensor_parallel % count == 0:
        return 1
    raise ConfigError(
        "tensor_parallel", tensor_parallel, f"a divisor{' or a multiple' if may_repeat else ''} of {name} ({count})"
    )


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba-2 scan: `num_heads` heads of `head_dim` channels, each channel with `state_size` numbers.

    num_groups   groups of heads that share B and C.   kernel  taps of the convolution over x, B and C.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    has_norm: bool = True

    def share(self, tensor_parallel: int) -> "Mamba2":
        """Heads are divided, and groups with them."""
        return Mamba2(
            part("the scan's heads", self.num_heads, tensor_parallel), self.head_dim, self.state_size,
            part("the scan's groups", self.num_groups, tensor_parallel, may_repeat=True), self.kernel,
        )  # fmt: skip

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of x, B and C."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[int, ...]:
        """[heads, head_dim, state_size]."""
        return self.num_heads, self.head_dim, self.state_size

    def weights(self, store: Storage, hidden: int) -> Size:
        """Projections in (gate, x, B, C, steps) and out, convolution, the heads' decay, skip and step, and the gated norm."""
        total = store.linear(self.inner + self.channels + self.num_heads, hidden, self.in_bias)
        total += store.linear(hidden, self.inner, self.out_bias)
        total += store.tensor(self.channels, self.kernel) + (store.tensor(self.channels) if self.conv_bias else Size())
        return total + store.tensor(self.num_heads) * 3 + (store.tensor(self.inner) if self.has_norm else Size())


def read_mamba2(fields: ConfigFields, hidden: int, inner: int | None = None) -> Mamba2:
    """The scan that the `mamba_*` fields describe; `inner` None stands for mamba_expand x hidden_size."""
    heads = width(fields, "mamba_n_heads", default=128)
    name = "mamba_d_ssm" if inner is not None else "mamba_expand x hidden_size"
    inner = hidden * width(fields, "mamba_expand", default=2) if inner is None else inner
    if inner % heads:
        raise ConfigError(f"{fields.prefix}mamba_n_heads", heads, f"a divisor of {name} ({inner})")
    head_dim = width_or_auto(fields, "mamba_d_head", inner // heads)
    if heads * head_dim != inner:
        raise ConfigError(f"{fields.prefix}mamba_d_head", head_dim, f"{inner // heads}: {name} ({inner}) / mamba_n_heads")
    groups, bias = width(fields, "mamba_n_groups", default=1), flag(fields, "mamba_proj_bias", False)
    check_groups(f"{fields.prefix}mamba_n_groups", groups, heads)
    return Mamba2(
        heads, head_dim, width(fields, "mamba_d_state", default=256), groups, width(fields, "mamba_d_conv", default=4),
        conv_bias=flag(fields, "mamba_conv_bias", True), in_bias=bias, out_bias=bias,
    )  # fmt: skip


def check_groups(name: str, groups: int, heads: int) -> None:
    """Refuses groups that do not divide the heads."""
    if heads % groups:
        raise ConfigError(name, groups, f"a divisor of the scan's heads ({heads})")
