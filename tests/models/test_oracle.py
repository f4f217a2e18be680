"""The rounding formats against a literal fp64 simulation, which itself is held against Transformers.

Rounding is a jump: where an exact value lies half way between two codes, fp32 and fp64 may store different ones, and both
are right. So the simulation stores what the engine stored, after checking row by row that it is the golden rounding of
the exact value, or of one nearer than an fp32 error to it. Then logits must agree as closely as without rounding.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.layers import compressed
from lamina.ops.store import Store

Array = NDArray[np.float64]
LENGTH = 300
#: an fp32 forward pass of these models is within 6e-6 of the fp64 one (measured, and asserted below at 1e-5)
EXACT = 1e-5
#: error of a row's elements before they are stored, in units of its largest: some hundred fp32 roundings
ROW_ERROR = 2e-5
#: with equal stored rows only fp32 errors are left, as without rounding
TOLERANCE = EXACT
_WHAT = {"window": "window", "c4": "entries", "c128": "entries", "index": "keys"}


def weights_of(random_models: ModuleType, name: str) -> dict[str, Array]:
    model = random_models.build(random_models.RECIPES[name])
    return {key: value.double().numpy() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["flash", "pro", "narrow", "blocks", "blocks-pro"])
def test_without_rounding_the_oracle_is_transformers(name: str, random_models: ModuleType, oracle: ModuleType) -> None:
    recipe = random_models.RECIPES[name]
    ids = random_models.token_ids(LENGTH, 200 + recipe.seed)
    reference = random_models.refer(random_models.build(recipe), ids)
    logits, margins = oracle.Oracle(recipe.config, weights_of(random_models, name)).logits(ids)
    assert np.abs(logits - reference.logits.numpy()).max() <= EXACT
    assert np.abs(np.minimum(margins, 1) - reference.margins.clamp(max=1).numpy()).max() <= EXACT


def test_golden_roundings(oracle: ModuleType) -> None:
    """Section 9 of the reference, the codes' own values, and torch's conversion as a third opinion."""
    assert [oracle.power_of_two_above(x / 448) for x in (448, 449, 1e-4)] == [1, 2, 2.0**-22]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert oracle.round_to(ties, oracle.E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert oracle.round_to(-ties, oracle.E2M1).tolist() == [0, -1, -1, -2, -2, -4, -4]
    assert oracle.round_to(np.array([6.9, 1000.0, -7.0]), oracle.E2M1).tolist() == [6, 6, -6]
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert oracle.E4M3.tolist() == codes.tolist()
    middles = (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2
    many = np.concatenate([middles, oracle.E4M3, np.random.default_rng(0).normal(size=2000) * 100])
    by_torch = torch.from_numpy(many).float().to(torch.float8_e4m3fn).double().numpy()
    assert oracle.round_to(many, oracle.E4M3).tolist() == by_torch.tolist()
    assert oracle.bf16(many).tolist() == torch.from_numpy(many).to(torch.bfloat16).double().numpy().tolist()
    eye = oracle.hadamard(np.eye(4)) * 2
    assert eye.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


class Follower:
    """Stores what an engine stored, once it is shown to be a right rounding of the exact value.

    stored  rows by (layer, what).   moved  elements where the engine's rounding is not that of the exact value; seen  all.
    """

    def __init__(self, golden: ModuleType, stored: dict[tuple[int, str], Array]) -> None:
        self.golden = golden
        self.stored = stored
        self.moved = self.seen = 0

    def __call__(self, layer: int, what: str, x: Array) -> Array:
        exact = self.golden.turn(what, x)
        own = self.golden.round(what, exact)
        if x.size == 0:
            return own
        found = self.stored[layer, what]
        assert found.shape == own.shape
        found = np.where(np.isnan(found), own, found)  # queries that had nothing to choose were never made
        error = ROW_ERROR * np.abs(exact).max(1, keepdims=True)
        low, high = self.golden.round(what, exact - error), self.golden.round(what, exact + error)
        is_right = (np.minimum(low, own) <= found) & (found <= np.maximum(high, own))
        assert is_right.all(), f"layer {layer} {what}: {np.argwhere(~is_right)[:3].tolist()}"
        self.moved += int((found != own).sum())
        self.seen += own.size
        return found


def rows_of(engine: Engine, layer: int, memory: str, start: int, stop: int) -> Array:
    """Rows [start, stop) of a memory of the one running request: ring rows by position, log entries by number."""
    (request,) = engine.scheduler.running
    assert request.lease is not None
    (store,) = (store for key, store in engine.worker.arena.stores.items() if (key.layer, key.memory) == (layer, memory))
    numbers = torch.arange(start, stop)
    if memory == "window":
        pages = torch.tensor(request.lease.slot)[store.slot_column].expand(stop - start)
        rows = store.read(pages, numbers % store.rows_per_page)
    else:
        rows = store.read(torch.tensor(request.lease.blocks)[numbers // store.rows_per_page], numbers % store.rows_per_page)
    return rows.double().numpy()


def run_engine(
    driving: ModuleType, patch: pytest.MonkeyPatch, engine: Engine, ids: list[int], ratios: tuple[int, ...], window: int
) -> tuple[Array, dict[tuple[int, str], Array]]:
    """(logits [T, V], stored rows by (layer, what)) of a prompt served in steps that fit the window, so that none is lost."""
    driving.wipe(engine)
    engine.scheduler.max_step_tokens = window
    stored: dict[tuple[int, str], list[Array]] = {}
    queries: dict[int, Array] = {}
    done = 0
    choose = compressed.index_topk

    def watch(flat: Tensor, weights: Tensor, keys: Store, *others: object) -> Tensor | None:
        """Keeps the index queries, which live in no memory."""
        (layer,) = (key.layer for key, store in engine.worker.arena.stores.items() if store is keys)
        _, heads, dim = flat.shape
        rows = queries.setdefault(layer, np.full((len(ids) + window, heads, dim), np.nan))
        rows[done : done + flat.shape[0]] = flat.double().numpy()
        return choose(flat, weights, keys, *others)  # type: ignore[arg-type]

    patch.setattr(compressed, "index_topk", watch)

    def collect(engine: Engine) -> None:
        nonlocal done
        if not engine.scheduler.running:
            return
        lease = engine.scheduler.running[0].lease
        assert lease is not None
        start, done = done, lease.committed
        for layer, ratio in enumerate(ratios):
            for memory, stride in (("window", 1), (f"c{ratio}", ratio), ("index", 4 if ratio == 4 else 0)):
                if stride:
                    rows = rows_of(engine, layer, memory, start // stride, done // stride)
                    stored.setdefault((layer, _WHAT[memory]), []).append(rows)

    group = engine.add(ids, SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, ignore_eos=True))
    with driving.Recorder(engine) as recorder:
        driving.run_all(engine, [group], collect)
    request = group.requests[0].id
    logits = [*(recorder.prompt[request, position] for position in range(len(ids) - 1)), recorder.logits[request, len(ids) - 1]]
    found = {key: np.concatenate(parts) for key, parts in stored.items()}
    for layer, rows in queries.items():
        found[layer, "queries"] = rows[: len(ids)].reshape(-1, rows.shape[-1])
    return torch.stack(logits).double().numpy(), found


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("blocks", ("fp8", "fp4")),
        ("blocks-pro", ("fp8", "fp4")),
        ("narrow", ("fp8", "fp8")),
        ("pro", ("bf16", "bf16")),
        ("narrow", ("fp32", "fp32")),
    ],
)
def test_rounding_formats(
    name: str, formats: tuple[str, str], monkeypatch: pytest.MonkeyPatch,
    driving: ModuleType, random_models: ModuleType, oracle: ModuleType, checkpoint_of: Callable[[str], Path],
) -> None:  # fmt: skip
    recipe = random_models.RECIPES[name]
    ids = random_models.token_ids(LENGTH, 400 + recipe.seed)
    engine = LLM(str(checkpoint_of(name)), cache_format=formats[0], index_format=formats[1], cache_bytes="64MiB").engine
    config = recipe.config
    found, stored = run_engine(driving, monkeypatch, engine, ids, recipe.ratios, config["sliding_window"])
    golden = oracle.Rounding(*formats, config["qk_rope_head_dim"])
    follower = Follower(golden, stored) if formats != ("fp32", "fp32") else golden
    expected, margins = oracle.Oracle(config, weights_of(random_models, name), follower).logits(ids)
    ties = margins < random_models.TIE
    assert ties.sum() <= LENGTH // 100
    assert np.abs(found - expected)[~ties].max() <= TOLERANCE
    if isinstance(follower, Follower):
        assert follower.seen > 100_000 and follower.moved <= follower.seen // 1000
    exact, _ = oracle.Oracle(config, weights_of(random_models, name)).logits(ids)
    is_rounded = formats != ("fp32", "fp32")
    assert (np.abs(exact - expected).max() > 100 * TOLERANCE) == is_rounded, "the formats made no difference"
