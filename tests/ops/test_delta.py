"""The gated delta rule against one row after another in fp64, over memory full of NaN; and what its bits depend on."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.ops import chunks
from lamina.ops.chunks import CHUNK
from lamina.ops.delta import gated_delta
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


class Delta:
    """The op, with inputs of a kind.

    keys  random; same: all alike; turning: each a little further than the last; huge or tiny: of other lengths; zero.
    learns  what every row has, or random.
    """

    def __init__(self, keys: str = "random", learns: float | None = None) -> None:
        self.keys, self.learns = keys, learns

    def inputs(self, case: Any, stop: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        q, k = random(stop, case.groups, case.key_dim), random(stop, case.groups, case.key_dim)
        if self.keys == "same":
            k[:] = k[:1]
        elif self.keys == "turning":
            angle = torch.arange(stop)[:, None] * 1.0
            k[..., 0], k[..., 1:] = angle.cos(), 0
            if case.key_dim > 1:
                k[..., 1] = angle.sin()
        k *= {"huge": 1e4, "tiny": 1e-3, "zero": 0.0}.get(self.keys, 1.0)
        learns, forgets = torch.sigmoid(random(stop, case.heads)), -case.decay * random(stop, case.heads).abs()
        if self.learns is not None:
            learns.fill_(self.learns)
        return q, k, random(stop, case.heads, case.value_dim), forgets, learns

    def define(self, case: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, forgets, learns = (part.double() for part in inputs)
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(case.heads // case.groups, 1) for x in (q * case.key_dim**-0.5, k))
        state, ys, states = torch.zeros(case.state, dtype=torch.float64), [v[:0]], [torch.zeros(0, *case.state).double()]
        for row in range(v.shape[0]):
            state = torch.exp(forgets[row])[:, None, None] * state
            new = learns[row][:, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
            state = state + torch.einsum("hk,hv->hkv", k[row], new)
            ys.append(torch.einsum("hkv,hk->hv", state, q[row])[None])
            states.append(state[None])
        return torch.cat(ys), torch.cat(states)

    def call(self, case: Any, inputs: tuple[Tensor, ...], store: Store, sequences: Sequences) -> Tensor:
        q, k, v, forgets, learns = inputs
        return gated_delta(q, k, v, forgets, learns, store, sequences)


def cases() -> Iterator[tuple[Delta, Any]]:
    yield Delta(), Case("near", NEAR)
    yield Delta(), Case("long", LONG)
    yield Delta(), Case("one row each", helpers.SINGLES)
    yield Delta(), Case("nothing", ((0, 0), (9, 9)))
    for heads, groups, key_dim, value_dim in ((1, 1, 1, 1), (6, 1, 8, 16), (3, 3, 7, 5), (8, 4, 2, 4), (2, 2, 64, 20)):
        yield Delta(), Case(f"{heads} heads in {groups} of {key_dim} x {value_dim}", LONG, heads, groups, key_dim, value_dim)
    yield Delta(), Case("forgets at once", LONG, decay=300.0)
    yield Delta(), Case("forgets nothing", LONG, decay=0.0)
    yield Delta(), Case("bf16", LONG, dtype="bf16")
    for keys in ("same", "turning", "huge", "tiny", "zero"):
        yield Delta(keys), Case(f"{keys} keys", LONG)
        yield Delta(keys, 1.0), Case(f"{keys} keys, learns all, forgets nothing", LONG, decay=0.0)
    yield Delta(learns=0.0), Case("learns nothing", LONG)


CASES = list(cases())


@pytest.mark.parametrize(("op", "case"), CASES, ids=[case.name for _, case in CASES])
def test_the_definition(rows: ModuleType, op: Delta, case: Any) -> None:
    helpers.check_definition(rows, op, case)


@pytest.mark.parametrize("decay", [0.0, 0.05, 20.0])
@pytest.mark.parametrize("keys", ["random", "same"])
def test_the_forms_agree(rows: ModuleType, keys: str, decay: float) -> None:
    helpers.check_forms(rows, Delta(keys), Case("forms", ((0, 200),), 6, 2, 16, 8, decay))


HOSTILE = [(3, 3, 6, 4), (4, 2, 5, 3), (2, 1, 16, 16), (1, 1, 1, 1), (2, 2, 33, 17)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", HOSTILE)
def test_bits_of_cuts_at_chunks(
    rows: ModuleType, sizes: tuple[int, int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("cuts", ((0, 4 * CHUNK + 1), (0, 3 * CHUNK), (0, 40)), *sizes, decay=0.2, dtype=dtype)
    helpers.check_cuts_at_chunks(rows, Delta(), case, CHUNK)
    world = helpers.World(rows, Delta(), case)
    whole = world.step(world.store([0, 0, 0]), case.lengths)
    monkeypatch.setattr(chunks, "_MOST_NUMBERS", 1)  # one chunk at a time
    again = world.step(world.store([0, 0, 0]), case.lengths)
    assert all(rows.same_bits(one, two) for one, two in zip(whole, again, strict=True))


@pytest.mark.parametrize("sizes", HOSTILE)
def test_bits_of_single_rows(rows: ModuleType, sizes: tuple[int, int, int, int]) -> None:
    case = Case("singles", helpers.SINGLES, *sizes)
    helpers.check_single_rows(rows, Delta(), case)
    helpers.check_single_rows(rows, Delta(), replace(case, lengths=(*helpers.SINGLES, (63, 64), (5, 6))))
