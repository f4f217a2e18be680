"""The layers of `heads.py` and `sparse.py` on a GPU: weights as stored, the ops' kernels."""

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from lamina.layers.stored import without_codes
from lamina.ops.attend_heads import HeadsCase, Past
from lamina.ops.attend_heads.triton import attend_heads, gate_heads, keep_rows, project_heads
from lamina.ops.experts import Gating
from lamina.ops.experts.plain import PlainExperts, experts_plain
from lamina.ops.gated.triton import gated
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, linear
from lamina.ops.quantise.triton import quantise_rows
from lamina.ops.route.triton import route_plain
from lamina.ops.rows import Rows

#: a head's norm: weight [d] fp32 or None, eps
HeadNorm = tuple[Tensor | None, float]


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """What all layers of a step share.

    angles  (cos, sin) [T, r / 2] fp32 of each rotary embedding.   dtype  what is kept between products.
    has_fp8 products with fp8 weights multiply fp8 rows.   max_context  no request has more tokens after the step.
    is_strict  bits never depend on where a request is cut.   own  the step's rows of layers that others read, by layer.
    """

    rows: Rows
    order: Order
    max_context: int
    angles: tuple[tuple[Tensor, Tensor], ...]
    dtype: torch.dtype
    has_fp8: bool
    is_strict: bool = False
    own: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    _warmths: dict[tuple[float, float, float], Tensor] = field(default_factory=dict)

    def warmth(self, temperature: tuple[float, float, float] | None) -> Tensor | None:
        """[T] fp32 that multiplies queries at position p: 1 + amount * log(1 + floor((p + first) / step))."""
        if temperature is None:
            return None
        if temperature not in self._warmths:
            step, amount, first = temperature
            steps = torch.floor((self.rows.positions.float() + first) / step)
            self._warmths[temperature] = torch.log(steps + 1.0) * amount + 1.0
        return self._warmths[temperature]

    def times(self, x: Activation, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
        """x @ weight.T; fp8 codes meet fp8 weights alone."""
        return linear(x if weight.is_fp8 else without_codes(x), weight, dtype, self.order)


def row_means(x: Tensor, context: DeviceContext) -> Tensor:
    """The mean of each row of x [T, n] fp32, [T, 1]: a product, so that its bits depend on no other row."""
    ones = StoredWeight(torch.ones(1, x.shape[1], dtype=torch.float32, device=x.device))
    return context.times(Activation(x.contiguous()), ones, torch.float32) * (1 / x.shape[1])


class DeviceLayer(Protocol):
    """What a residual branch computes."""

    @property
    def bias(self) -> Tensor | None:
        """Of the result, which whoever takes it adds."""
        ...

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        ...

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceHeads:
    """`heads.GroupedAttention`; w_in and the norms have dims in the checkpoint's order, of which the first r turn.

    is_gated  w_in has the rows of each head's gate behind those of its query.
    shares  the layer whose rows are read instead of own ones: w_in then has queries alone.   is_shared  others read this layer's.
    norm_all  q_norm and k_norm go over all heads' dims.

    bias  of the result, which whoever takes it adds.
    """

    w_in: StoredWeight
    b_in: Tensor | None
    w_out: StoredWeight
    bias: Tensor | None
    past: Past
    case: HeadsCase
    angle: int | None
    is_pairs: bool
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm_eps: float = 0.0
    norm_after_rope: bool = False
    temperature: tuple[float, float, float] | None = None
    is_gated: bool = False
    shares: int | None = None
    is_shared: bool = False
    layer: int = 0
    norm_all: bool = False

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.w_in.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        rows, dtype = context.rows, context.dtype
        both = context.times(x, self.w_in, dtype if self.b_in is None else torch.float32)
        turns = None if self.angle is None else context.angles[self.angle]
        case = self.case if self.shares is None else replace(self.case, kv_heads=0)
        queries, own = project_heads(
            both, self.b_in, case, self.past, rows, dtype, turns, self.is_pairs, self.q_norm, self.k_norm, self.v_norm_eps,
            self.norm_after_rope, context.warmth(self.temperature), self.is_gated, self.norm_all,
        )  # fmt: skip
        if self.shares is not None:
            own = context.own[self.shares]
        out = attend_heads(queries, own, self.past, self.case, rows, context.order, context.max_context)
        if self.is_shared:
            context.own[self.layer] = own
        elif self.shares is None:
            self._keep(own, rows)
        if self.is_gated:
            gate_heads(out, both, self.b_in, self.case.heads, rows)
        read = quantise_rows(out) if context.has_fp8 and self.w_out.is_fp8 else Activation(out)
        return context.times(read, self.w_out, dtype if self.bias is None else torch.float32)

    def finish(self, context: DeviceContext) -> None:
        """After the last layer: keeps rows that other layers have read."""
        if self.is_shared:
            self._keep(context.own[self.layer], context.rows)

    def _keep(self, own: tuple[Tensor, ...], rows: Rows) -> None:
        if self.past.store.place.kind == "slot" and not rows.is_single:
            keep_rows(own, self.past.store, rows)


@dataclass(frozen=True, slots=True)
class DeviceMlp:
    """`heads.GatedMlp`.   bias  of the result, which whoever takes it adds."""

    w_in: StoredWeight
    b_in: Tensor | None
    w_out: StoredWeight
    bias: Tensor | None
    activation: str
    has_gate: bool = True
    multipliers: tuple[float, float] = (1.0, 1.0)
    cut: float | None = None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.w_in.is_fp8

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        dtype = context.dtype
        is_exact = dtype == torch.float32 or self.b_in is None
        wide = context.times(x, self.w_in, dtype if is_exact else torch.float32)
        has_codes, bias = context.has_fp8 and self.w_out.is_fp8, self.b_in
        if self.cut is not None:
            wide, bias = self._cut(wide, self.cut, context), None
        inner = gated(wide, bias, self.activation, self.has_gate, self.multipliers[0], dtype, has_codes)
        scale = self.multipliers[1]
        found = context.times(inner, self.w_out, dtype if self.bias is None and scale == 1 else torch.float32)
        return found if scale == 1 else found * scale

    def _cut(self, wide: Tensor, cut: float, context: DeviceContext) -> Tensor:
        """[gate | up] with what lies above each gate row's mean and `cut` standard deviations, else 0, in place of the gate."""
        gate, up = (wide.float() if self.b_in is None else wide.float() + self.b_in).chunk(2, dim=1)
        gate = gate - row_means(gate, context)
        gate = (gate - row_means(gate * gate, context).sqrt() * cut).clamp(min=0)
        return torch.cat([gate, up], dim=1)


@dataclass(frozen=True, slots=True)
class DeviceProjection:
    """`projection.Projection`; bias fp32."""

    weight: StoredWeight
    bias: Tensor | None = None

    def forward(self, x: Activation, context: DeviceContext, dtype: torch.dtype) -> Tensor:
        """x [T, in] -> [T, out], rounded to `dtype`."""
        if self.bias is None:
            return context.times(x, self.weight, dtype)
        return (context.times(x, self.weight, torch.float32) + self.bias).to(dtype)


@dataclass(frozen=True, slots=True)
class DeviceRouter:
    """kind, top_k, normalises, scale, groups, kept  as `models.network.Router` says.   bias  [E] fp32, for the choice alone."""

    kind: str
    top_k: int
    normalises: bool
    scale: float
    bias: Tensor | None = None
    groups: int = 1
    kept: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSparse:
    """`sparse.SparseMlp`.

    gate_bias  [E] fp32, of the logits.   limit, gating  as `ops/experts` says.
    enter, leave  the routed experts read enter(x), and give to leave.
    """

    gate: StoredWeight
    router: DeviceRouter
    experts: PlainExperts
    shared: DeviceMlp | None = None
    shared_gate: StoredWeight | None = None
    limit: float = 0.0
    gate_bias: Tensor | None = None
    gating: Gating = field(default_factory=Gating)
    enter: DeviceProjection | None = None
    leave: DeviceProjection | None = None

    @property
    def bias(self) -> Tensor | None:
        """None: it is added here."""
        return None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return self.experts.gate_up.is_fp8 or (self.shared is not None and self.shared.reads_fp8)

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]; rows of padding visit no routed expert."""
        router = self.router
        logits = context.times(x, self.gate, torch.float32)
        if self.gate_bias is not None:
            logits = logits + self.gate_bias
        chosen, weights = route_plain(
            logits, router.bias, router.kind, router.top_k, router.normalises, router.scale, context.rows, router.groups,
            router.kept,
        )  # fmt: skip
        shared = None
        if self.shared is not None:
            shared = self.shared.forward(x, context)
            if self.shared.bias is not None:
                shared = shared + self.shared.bias
            if self.shared_gate is not None:
                shared = shared.float() / (torch.exp(-context.times(x, self.shared_gate, torch.float32)) + 1)
        read = x if self.enter is None else Activation(self.enter.forward(x, context, context.dtype))
        if self.leave is None:
            return experts_plain(
                read, chosen, weights, self.experts, self.limit, shared, context.dtype, gating=self.gating
            )  # fmt: skip
        routed = experts_plain(read, chosen, weights, self.experts, self.limit, None, context.dtype, gating=self.gating)
        found = self.leave.forward(Activation(routed), context, torch.float32 if shared is not None else context.dtype)
        return found if shared is None else (found.to(context.dtype).float() + shared).to(context.dtype)


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """Layers that read the same input."""

    layers: tuple[DeviceLayer, ...]

    @property
    def bias(self) -> Tensor | None:
        """None: it is added here."""
        return None

    @property
    def reads_fp8(self) -> bool:
        """Whether its input is multiplied as fp8 where that is done."""
        return any(layer.reads_fp8 for layer in self.layers)

    def forward(self, x: Activation, context: DeviceContext) -> Tensor:
        """x [T, D] -> [T, D]."""
        total: Tensor | None = None
        for layer in self.layers:
            found = layer.forward(x, context).float()
            if layer.bias is not None:
                found = found + layer.bias
            found = found.to(context.dtype).float()
            total = found if total is None else total + found
        assert total is not None
        return total
