"""Predicted = held at every step, for requests that share, fork, end early, are preempted or were evicted."""

import random
from pathlib import Path

import pytest

from lamina import SamplingParams
from lamina.base.config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.watch import Watch
from lamina.models.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("watch") / "model"
    write_tiny(directory)
    return directory


@pytest.mark.parametrize(
    ("seed", "is_tight", "deterministic"), [(0, False, "strict"), (1, False, False), (2, True, "strict"), (3, True, False)]
)
def test_predicted_is_held_at_every_step(model: Path, seed: int, is_tight: bool, deterministic: bool | str) -> None:
    draw = random.Random(seed)
    page = 34_816
    pages = 16 if is_tight else 1000
    budget = draw.choice([100, 300])
    config = EngineConfig(
        str(model), cache_bytes=page * pages, max_step_tokens=budget, max_requests=4, deterministic=deterministic
    )
    engine = Engine(config)
    assert engine.layout.page_bytes == page
    watch = Watch(engine)
    common = [draw.randrange(3, 1000) for _ in range(520)]
    for index, (length, tail, n) in enumerate([(256, 0, 1), (300, 5, 3), (512, 3, 1), (300, 5, 1), (5, 0, 1)]):
        prompt = common[:length] + [draw.randrange(3, 1000) for _ in range(tail)]
        engine.add(prompt, SamplingParams(max_tokens=draw.choice([1, 2, 12]), n=n, seed=1, ignore_eos=True), index)
    while engine.has_work:
        assert watch.step()
        report = watch.memory()
        assert report is not None
        assert report.is_equal, report
    assert (engine.ledger.evictions > 0) == is_tight
    assert watch.speed.prefill_tokens > 0 and watch.speed.prefill_rate is not None


def test_a_request_of_one_step_is_seen_whole(model: Path) -> None:
    engine = Engine(EngineConfig(str(model), cache_bytes="8MiB"))
    watch = Watch(engine)
    assert watch.memory() is None
    group = engine.add([5, 6, 7, 8, 9], SamplingParams(max_tokens=1))
    assert watch.step() and group.is_finished
    report = watch.memory()
    assert report is not None and report.is_equal
    assert report.positions == (5,) and report.checkpoints == (5,)
    held = {line.name: line.held for line in report.lines}
    assert held["window"] and held["checkpoints"] and held["padding"]
    written = {line.name: line.written for line in report.lines}
    entry = 64 + 64 * 2 + 8  # 64 unrotated dims in fp8, 64 rotated ones in bf16, scales
    assert written["window"] == 5 * 5 * entry  # five tokens, five layers
    assert written["c4"] == 2 * entry and written["c128"] == 0
    assert watch.speed.prefill_tokens == 5 and watch.speed.drawn == 1 and watch.speed.decode_rate is None


def test_a_wrong_figure_is_not_equal(model: Path) -> None:
    engine = Engine(EngineConfig(str(model), cache_bytes="8MiB"))
    watch = Watch(engine)
    engine.add([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert watch.step() and watch.step()
    stray = engine.ledger.arena.take_for_cache()  # a page that no request accounts for
    assert watch.step()
    report = watch.memory()
    assert report is not None and not report.is_equal
    engine.ledger.arena.unref_cache(stray)
