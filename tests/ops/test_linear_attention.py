"""Linear attention with decay against one row after another in fp64, over memory full of NaN; and what its bits depend on."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.ops import chunks
from lamina.ops.chunks import CHUNK
from lamina.ops.linear_attention import decayed_attention, decays
from lamina.ops.sequences import Sequences
from lamina.ops.store import Store


def _helpers() -> ModuleType:
    """tests/ops/recurrences.py"""
    name = "lamina_tests_ops_recurrences"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parent / "recurrences.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


helpers = _helpers()
Case, LONG, NEAR = helpers.Case, helpers.LONG, helpers.NEAR


class Attention:
    """The op; heads forget the faster the earlier they are."""

    def slopes(self, case: Any) -> Tensor:
        return torch.linspace(case.decay, 0, case.heads) if case.heads > 1 else torch.tensor([case.decay])

    def inputs(self, case: Any, stop: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        widths = (case.key_dim, case.key_dim, case.value_dim)
        q, k, v = (torch.randn(stop, case.heads, width, generator=generator) for width in widths)
        return q * case.key_dim**-0.5, k * 0.3, v

    def define(self, case: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v = (part.double() for part in inputs)
        kept = torch.exp(-self.slopes(case).double())[:, None, None]
        state, ys, states = torch.zeros(case.state, dtype=torch.float64), [v[:0]], [torch.zeros(0, *case.state).double()]
        for row in range(v.shape[0]):
            state = kept * state + k[row][..., None] * v[row][:, None]
            ys.append(torch.einsum("hkv,hk->hv", state, q[row])[None])
            states.append(state[None])
        return torch.cat(ys), torch.cat(states)

    def call(self, case: Any, inputs: tuple[Tensor, ...], store: Store, sequences: Sequences) -> Tensor:
        q, k, v = inputs
        return decayed_attention(q, k, v, decays(self.slopes(case)), store, sequences)


def cases() -> Iterator[Any]:
    yield Case("near", NEAR)
    yield Case("long", LONG)
    yield Case("one row each", helpers.SINGLES)
    yield Case("nothing", ((0, 0), (9, 9)))
    for heads, key_dim, value_dim in ((1, 1, 1), (6, 8, 16), (3, 7, 5), (8, 2, 4), (2, 64, 20)):
        yield Case(f"{heads} heads of {key_dim} x {value_dim}", LONG, heads, heads, key_dim, value_dim)
    yield Case("forgets at once", LONG, decay=300.0)
    yield Case("forgets nothing", LONG, decay=0.0)
    yield Case("bf16", LONG, dtype="bf16")


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_the_definition(rows: ModuleType, case: Any) -> None:
    helpers.check_definition(rows, Attention(), case)


@pytest.mark.parametrize("decay", [0.0, 0.1, 1.0])
def test_the_forms_agree(rows: ModuleType, decay: float) -> None:
    helpers.check_forms(rows, Attention(), Case("forms", ((0, 200),), 6, 6, 16, 8, decay))


HOSTILE = [(3, 3, 6, 4), (4, 4, 5, 3), (2, 2, 16, 16), (1, 1, 1, 1), (2, 2, 33, 17)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", HOSTILE)
def test_bits_of_cuts_at_chunks(
    rows: ModuleType, sizes: tuple[int, int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("cuts", ((0, 4 * CHUNK + 1), (0, 3 * CHUNK), (0, 40)), *sizes, decay=0.2, dtype=dtype)
    helpers.check_cuts_at_chunks(rows, Attention(), case, CHUNK)
    world = helpers.World(rows, Attention(), case)
    whole = world.step(world.store([0, 0, 0]), case.lengths)
    monkeypatch.setattr(chunks, "_MOST_NUMBERS", 1)  # one chunk at a time
    again = world.step(world.store([0, 0, 0]), case.lengths)
    assert all(rows.same_bits(one, two) for one, two in zip(whole, again, strict=True))


@pytest.mark.parametrize("sizes", HOSTILE)
def test_bits_of_single_rows(rows: ModuleType, sizes: tuple[int, int, int, int]) -> None:
    helpers.check_single_rows(rows, Attention(), Case("singles", helpers.SINGLES, *sizes))


def test_decays() -> None:
    """Of no rows 1, and never beyond; what is far away is exactly 0."""
    found = decays(torch.tensor([0.0, 0.5, 400.0]))
    assert found.powers.shape == (3, CHUNK + 1) and bool((found.powers[:, 0] == 1).all())
    assert found.powers[0].eq(1).all() and found.powers[2, 1:].eq(0).all()
    torch.testing.assert_close(found.powers[1], torch.exp(-0.5 * torch.arange(CHUNK + 1)))
    assert torch.equal(found.between[1, :, 0], found.powers[1, :-1]) and not found.between[:, 0, 1:].any()
