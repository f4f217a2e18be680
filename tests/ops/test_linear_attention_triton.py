"""Linear attention of `triton.py` against `ref.py`: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lamina.ops.linear_attention import Decays, decays
from lamina.ops.linear_attention import decayed_attention as define
from lamina.ops.machine import Machine
from lamina.ops.rows import Rows
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.ops.linear_attention import kernels
from lamina.ops.linear_attention.triton import activate, decayed_attention, gate_normed, refuses
from tests.ops.kernel_recurrences import LONG, NEAR, SINGLES, Case, World, check_company, check_cuts, check_definition
from tests.ops.kernel_tests import (
    DEVICE,
    HAS_GPU,
    compiles_kernels,
    long_but,
    machine_code,
    poisoned,
    runs_kernels,
    starts_interpreter,
)

CPU = torch.device("cpu")


class Attention:
    """kinds  forgets: all of it at once; keeps: all of it for ever."""

    def width(self, case: Case) -> int:
        return case.heads * (2 * case.key_dim + case.value_dim)

    def values(self, case: Case, stop: int, generator: torch.Generator) -> Tensor:
        return torch.randn(stop, self.width(case), generator=generator)

    def decays(self, case: Case) -> Decays:
        slopes = torch.rand(case.heads, generator=torch.Generator().manual_seed(5))
        return decays(slopes * {"forgets": 1e3, "keeps": 0.0}.get(case.kind, 1.0))

    def define(self, case: Case, x: Tensor, store: Store, sequences: Sequences) -> Tensor:
        keys, values = case.heads * case.key_dim, case.heads * case.value_dim
        q, k, v = (part.unflatten(1, (case.heads, -1)) for part in x.split([keys, keys, values], dim=1))
        return define(q, k, v, self.decays(case), store, sequences).flatten(1)

    def launch(self, case: Case, x: Tensor, store: Store, rows: Rows, out: Tensor) -> None:
        powers = self.decays(case).powers.to(DEVICE)
        decayed_attention(x, powers, case.value_dim, store, rows, case.form, out)


CASES = [
    Case(), Case(form="rows"), Case(SINGLES, "rows", 4, key_dim=7, value_dim=20), Case(LONG), Case(((0, 0), (9, 9))),
    Case(LONG, kind="forgets"), Case(LONG, kind="keeps", heads=3, key_dim=33, value_dim=40),
    Case(SINGLES, "rows", 2, key_dim=128, value_dim=130), Case(SINGLES), Case(LONG, heads=1, key_dim=1, value_dim=1),
    Case(LONG, cache="bf16"), Case(SINGLES, "rows", cache="bf16"), Case(NEAR, "rows", 4, key_dim=16, value_dim=5, kind="keeps"),
    Case(((5, 140),), key_dim=64, value_dim=40, inputs=torch.bfloat16), Case(SINGLES, "rows", inputs=torch.bfloat16),
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("case", long_but({0, 1, 2, 13}, CASES), ids=str)
def test_the_definition(case: Case, rows: ModuleType) -> None:
    check_definition(Attention(), case, rows)


@runs_kernels
@pytest.mark.parametrize("case", long_but({1}, [Case(), Case(form="rows")]), ids=str)
def test_bits_do_not_depend_on_the_other_rows(case: Case, rows: ModuleType) -> None:
    check_company(Attention(), case, rows)


@runs_kernels
@pytest.mark.parametrize("cache", long_but({1}, ["fp32", "bf16"]))
def test_cuts_change_no_bit(cache: str, rows: ModuleType) -> None:
    """Of chunks where they begin; of rows one after another wherever they are, down to single rows."""
    check_cuts(Attention(), Case(cache=cache, heads=1), 150, (64, 128), rows)
    for cuts in ((7,), tuple(range(1, 12))):
        check_cuts(Attention(), Case(cache=cache, form="rows"), 12, cuts, rows)


@runs_kernels
def test_what_is_around_it(rows: ModuleType) -> None:
    """Rows of padding are zeros, whatever lies there."""
    world = World(Attention(), Case(((0, 3), (4, 5))), rows)
    draw = torch.Generator().manual_seed(1)
    for inner in (24, 1500):
        y, wide = torch.full((6, inner), torch.nan), torch.full((6, inner + 5), torch.nan)
        y[:4], wide[:4] = torch.randn(4, inner, generator=draw), torch.randn(4, inner + 5, generator=draw) * 3
        weight, gate = torch.randn(inner, generator=draw), wide[:, 2:-3]
        mine = (y.to(DEVICE), wide.to(DEVICE)[:, 2:-3], weight.to(DEVICE))
        found = gate_normed(*mine, 1e-5, world.rows, torch.float32, poisoned(6, inner)).to(CPU)
        truth = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight * torch.sigmoid(gate)
        torch.testing.assert_close(found[:4], truth[:4], rtol=2e-5, atol=2e-5)
        assert not found[4:].any()
        found = activate(mine[1], "silu", world.rows, torch.float32).to(CPU)
        torch.testing.assert_close(found[:4], torch.nn.functional.silu(gate[:4]), rtol=2e-5, atol=2e-5)
        assert not found[4:].any()


@pytest.mark.skipif(HAS_GPU, reason="asks about other machines")
def test_refusals() -> None:
    hopper = Machine("cuda", (9, 0), True)
    assert refuses(hopper, 128, 64) is None
    assert refuses(hopper, 257, 1) == "heads of linear attention must have 1 to 256 dims, not 257"
    assert refuses(hopper, 256, 129) == "linear attention must have at most 32768 dims of all heads, not 33024"


@compiles_kernels
@pytest.mark.parametrize("capability", long_but({1}, [80, 90]))
def test_machine_code(capability: int) -> None:
    """States stay in registers, and what is products is on tensor cores."""
    types = dict.fromkeys(("starts", "stops", "first_rows", "slots"), "*i32") | {"x": "*bf16"}
    types |= dict.fromkeys(("powers", "out", "states"), "*fp32")
    types |= dict.fromkeys(("x_stride", "state_page", "slot_stride", "slot_column"), "i32")
    strides = ("x_stride", "state_page")
    shape = {"HEADS": 64, "DK": 128, "DV": 128, "WK": 128, "CHUNK": 64, "STORED_BF16": False}
    code = machine_code(kernels.walk, types, shape | {"BLOCK": 8}, capability, warps=1, aligned=strides)
    assert code.spills == 0 and code.stack_bytes == 0 and code.registers <= 128
    tiles = shape | {"BLOCK": 32 if capability == 90 else 16, "EXACT": False}
    code = machine_code(kernels.take_chunks, types, tiles, capability, stages=2, aligned=strides)
    assert code.spills == 0 and code.stack_bytes == 0 and code.shared_bytes < 96 * 1024
    assert code.count("HGMMA" if capability == 90 else "HMMA") > 0


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
