"""Experts whose tensors lie together in one, or that have no gate: data for `build_experts.py`. No torch."""

from dataclasses import dataclass

from lamina.models.network import Mlp, Router
from lamina.weights.names import NameScheme, Rename, Split

#: the names of MXFP4 tensors, [E, rows, columns / 32, 16] and scales [E, rows, columns / 32], expert by expert
PACKED_NAMES = NameScheme(
    renames=(
        Rename(r"\.experts\.(gate_up_proj|down_proj)_blocks$", r".experts.\1.weight"),
        Rename(r"\.experts\.(gate_up_proj|down_proj)_scales$", r".experts.\1.scale"),
    ),
    splits=(Split(r"(.*\.experts)\.(gate_up_proj|down_proj)\.(weight|scale)", (r"\1.{index}.\2.\3",)),),
)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """`num` gated experts of `width`: `{prefix}.gate_up_proj` [E, D, 2I] and `{prefix}.down_proj` [E, I, D], and a shared one.

    gate, gate_bias  names of the router's tensors.
    is_packed        the tensors are MXFP4, by the names that PACKED_NAMES gives, [2I, D] and [D, I] of each expert.
    is_interleaved   gate and up take turns in the 2I; else the gate comes first.
    bias             `{prefix}.gate_up_proj_bias` [E, 2I], `{prefix}.down_proj_bias` [E, D].
    limit, alpha, shift   gate * sigmoid(alpha * gate) * (up + shift), the gate at most `limit`, up within it; 0: no limit.
    weighs_input     a routing weight multiplies what the expert reads instead of what it gives.
    """

    prefix: str
    num: int
    width: int
    router: Router
    gate: str
    gate_bias: str | None = None
    shared: Mlp | None = None
    is_packed: bool = False
    is_interleaved: bool = False
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.0
    shift: float = 0.0
    weighs_input: bool = False


@dataclass(frozen=True, slots=True)
class UngatedExperts:
    """`num` experts of `width`, down(activation(up(x))), and a shared one.

    prefix   experts are `{prefix}.experts.{e}.up_proj.weight` and `down_proj`.   gate  name of the router's tensor.
    activation  relu2 or silu.
    latent   width between the projections fc1_latent_proj and fc2_latent_proj around the routed experts; None: there are none.
    """

    prefix: str
    num: int
    width: int
    router: Router
    gate: str
    shared: Mlp | None = None
    activation: str = "relu2"
    latent: int | None = None
    latent_bias: bool = False
