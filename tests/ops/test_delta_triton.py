"""The gated delta rule of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.delta import gated_delta as define
from lamina.ops.machine import Machine
from lamina.ops.rows import Rows
from lamina.ops.sequences import Sequences
from lamina.ops.ssm import softplus
from lamina.ops.store import Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.delta import kernels
from lamina.ops.delta.triton import Rule, gated_delta, refuses
from tests.ops.kernel_recurrences import LONG, NEAR, SINGLES, Case, check_company, check_cuts, check_definition
from tests.ops.kernel_tests import (
    DEVICE,
    HAS_GPU,
    compiles_kernels,
    long_but,
    machine_code,
    runs_kernels,
    starts_interpreter,
)


class Delta:
    """kinds  same: all keys alike and wholly learnt, nothing forgotten; forgets: all of it at once; huge, tiny: lengths."""

    def width(self, case: Case) -> int:
        return 2 * case.groups * case.key_dim + case.heads * case.value_dim + 2 * case.heads

    def values(self, case: Case, stop: int, generator: torch.Generator) -> Tensor:
        found = torch.randn(stop, self.width(case), generator=generator)
        keys = case.groups * case.key_dim
        if case.kind == "same":
            found[:, keys : 2 * keys] = found[:1, keys : 2 * keys]
            found[:, -2 * case.heads : -case.heads], found[:, -case.heads :] = 30.0, -30.0
        elif case.kind == "forgets":
            found[:, -case.heads :] = 300.0
        elif case.kind in ("huge", "tiny"):
            found[:, : 2 * keys] *= {"huge": 1e4, "tiny": 1e-3}[case.kind]
        return found

    def parts(self, case: Case, x: Tensor) -> tuple[Tensor, ...]:
        keys, values = case.groups * case.key_dim, case.heads * case.value_dim
        return x.split([2 * keys + values, case.heads, case.heads], dim=1)

    def rule(self, case: Case) -> Rule:
        draw = torch.Generator().manual_seed(5)
        decay, bias = -torch.rand(case.heads, generator=draw), torch.randn(case.heads, generator=draw)
        return Rule(decay, bias, case.groups, case.key_dim, case.value_dim)

    def define(self, case: Case, x: Tensor, store: Store, sequences: Sequences) -> Tensor:
        mixed, learns, steps = self.parts(case, x)
        keys, rule = case.groups * case.key_dim, self.rule(case)
        q, k, v = mixed.split([keys, keys, case.heads * case.value_dim], dim=1)
        q, k, v = (part.unflatten(1, (count, -1)) for part, count in ((q, case.groups), (k, case.groups), (v, case.heads)))
        forgets = softplus(steps + rule.step_bias) * rule.decay
        return define(q, k, v, forgets, torch.sigmoid(learns), store, sequences).flatten(1)

    def launch(self, case: Case, x: Tensor, store: Store, rows: Rows, out: Tensor) -> None:
        kept = self.rule(case)
        rule = Rule(kept.decay.to(DEVICE), kept.step_bias.to(DEVICE), kept.groups, kept.key_dim, kept.value_dim)
        gated_delta(*self.parts(case, x), rule, store, rows, out)


CASES = [
    Case(), Case(SINGLES, heads=4, groups=2, key_dim=7, value_dim=20), Case(LONG, kind="same"), Case(((0, 0), (9, 9))),
    Case(((5, 140),), kind="forgets"), Case(LONG, heads=3, groups=3, key_dim=33, value_dim=40),
    Case(SINGLES, key_dim=128, value_dim=130), Case(SINGLES), Case(LONG, heads=1, groups=1, key_dim=1, value_dim=1),
    Case(LONG, kind="huge"), Case(LONG, kind="tiny"), Case(LONG, cache="bf16"), Case(SINGLES, cache="bf16"),
    Case(NEAR, heads=4, groups=2, key_dim=16, value_dim=5, kind="same"),
    Case(((5, 140),), key_dim=64, value_dim=40, inputs=torch.bfloat16),
    Case(SINGLES, inputs=torch.bfloat16), Case(LONG, kind="same", inputs=torch.bfloat16),
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("case", long_but({0, 1, 2, 14}, CASES), ids=str)
def test_the_definition(case: Case, rows: ModuleType) -> None:
    check_definition(Delta(), case, rows)


@runs_kernels
def test_bits_do_not_depend_on_the_other_rows(rows: ModuleType) -> None:
    check_company(Delta(), Case(), rows)


@runs_kernels
@pytest.mark.long
@pytest.mark.parametrize("cache", ["fp32", "bf16"])
def test_cuts_change_no_bit(cache: str, rows: ModuleType) -> None:
    """Wherever they are, down to single rows."""
    for cuts in ((7,), tuple(range(1, 12))):
        check_cuts(Delta(), Case(cache=cache), 12, cuts, rows)


@pytest.mark.skipif(HAS_GPU, reason="asks about other machines")
def test_refusals() -> None:
    assert refuses(Machine("cuda", (9, 0), True), 128) is None
    assert refuses(Machine("cuda", (9, 0), True), 257) == "keys of the delta rule must have 1 to 256 dims, not 257"


TYPES = {
    **dict.fromkeys(("starts", "stops", "first_rows", "slots"), "*i32"), **dict.fromkeys(("x", "learns", "steps"), "*bf16"),
    **dict.fromkeys(("step_bias", "decay", "out", "states"), "*fp32"),
    **dict.fromkeys(("x_stride", "learns_stride", "steps_stride", "state_page", "slot_stride", "slot_column"), "i32"),
    "scale": "fp32",
}  # fmt: skip
STRIDES = ("x_stride", "learns_stride", "steps_stride", "state_page")


@compiles_kernels
@pytest.mark.parametrize("capability", long_but({1}, [80, 90]))
def test_machine_code(capability: int) -> None:
    """States stay in registers."""
    shape = {"HEADS": 32, "GROUPS": 16, "DK": 128, "WK": 128}
    values = {"DV": 128, "STORED_BF16": False}
    code = machine_code(kernels.walk, TYPES, shape | values | {"BLOCK": 8}, capability, warps=1, aligned=STRIDES)
    assert code.spills == 0 and code.stack_bytes == 0 and code.registers <= 128


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
