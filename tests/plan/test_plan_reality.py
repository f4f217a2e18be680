"""The plan against the engine: what `lamina plan --json` says is what a running engine has allocated and holds, to the byte."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lamina import SamplingParams
from lamina.base.config import CACHE_FORMATS, INDEX_FORMATS, EngineConfig
from lamina.cli import main
from lamina.engine.engine import Engine
from lamina.memory.plan import CHECKPOINTS, measured
from lamina.models.tiny import write_tiny

SHAPES = ("flash", "pro")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reality")
    for shape in SHAPES:
        write_tiny(root / shape, shape, seed=4)
    return {shape: root / shape for shape in SHAPES}


def planned(capsys: pytest.CaptureFixture[str], model: Path, **options: object) -> dict[str, object]:
    """What the command says."""
    capsys.readouterr()
    args = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main(["plan", str(model), "--json", *args]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def run_until_all_decode(engine: Engine, prompts: list[list[int]]) -> None:
    """Every prompt runs at once and has drawn at least one token."""
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0))
    for _ in range(64):
        engine.step()
        if [lease.position > lease.prompt_tokens for lease in engine.ledger.leases] == [True] * len(prompts):
            return
    raise AssertionError("not all prompts were computed")


@settings(
    max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_the_plan_is_what_the_engine_holds(
    data: st.DataObject, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    choices = {
        "cache_format": data.draw(st.sampled_from(CACHE_FORMATS)),
        "index_format": data.draw(st.sampled_from(INDEX_FORMATS)),
    }
    block_tokens = data.draw(st.sampled_from([None, 256, 384, 512]))
    if block_tokens is not None:
        choices["block_tokens"] = block_tokens
    length = st.one_of(st.integers(1, 700), st.sampled_from([127, 128, 255, 256, 511]))
    lengths = data.draw(st.lists(length, min_size=1, max_size=4))
    cache_bytes = data.draw(st.integers(4 << 20, 6 << 20))
    engine = Engine(EngineConfig(str(models[shape]), cache_bytes=cache_bytes, max_step_tokens=512, **choices))
    # prompts that share nothing: their first tokens differ
    prompts = [[10 + number] + [(7 * n + number) % 900 for n in range(length - 1)] for number, length in enumerate(lengths)]
    run_until_all_decode(engine, prompts)

    leases = engine.ledger.leases
    assert len(leases) == len(prompts)
    positions = [lease.position for lease in leases]
    frozen = [checkpoint.position for checkpoint in engine.ledger.all_checkpoints()]
    context = ",".join(map(str, [*positions, *frozen]))
    plan = planned(capsys, models[shape], cache_bytes=cache_bytes, context=context, **choices)
    layout = engine.layout
    assert plan["layout_id"] == layout.layout_id
    assert (plan["page_bytes"], plan["slot_pages"], plan["block_tokens"]) == (
        layout.page_bytes, layout.slot_pages, layout.block_tokens,
    )  # fmt: skip
    assert plan["pages"] == engine.num_pages == engine.ledger.num_pages
    arena = engine.worker.arena.bytes
    assert arena.numel() * arena.element_size() == plan["pages"] * plan["page_bytes"]

    lines = {line["context"]: line for line in plan["workloads"]}
    held = measured(layout, engine.ledger)
    running = [lines[position] for position in positions]
    checkpoints = sum(lines[position]["checkpoint_bytes"] for position in frozen)
    assert sorted(frozen) == sorted(lengths)  # one at each prompt's end
    assert held.total == sum(line["bytes_per_request"] for line in running) + checkpoints
    assert held.nbytes(CHECKPOINTS) == checkpoints
    for name in {name for line in running for name in line["memories"]}:
        assert held.nbytes(name) == sum(line["memories"][name] for line in running), name
    # what is live is counted row by row from what the engine's layout says of each page
    for position, line in zip(positions, running, strict=True):
        live = sum(layout.live_bytes(position).values())
        assert line["live_bytes"] == live
        assert line["padding_fraction"] == pytest.approx(1 - live / line["bytes_per_request"])


@pytest.mark.parametrize("shape", SHAPES)
def test_as_many_requests_run_as_the_plan_says(shape: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Requests are admitted until the pool is full: that many, and not one more, run at once."""
    tokens = 300
    small = planned(capsys, models[shape], context=tokens)
    page, each = small["page_bytes"], small["workloads"][0]["pages"]
    cache_bytes = (each * 5 + each - 1) * page  # five fit, and all but a page of a sixth
    plan = planned(capsys, models[shape], context=tokens, cache_bytes=cache_bytes)
    fits = plan["workloads"][0]["fits"]
    assert fits == 5
    engine = Engine(EngineConfig(str(models[shape]), cache_bytes=cache_bytes, max_step_tokens=4096))
    for number in range(8):
        prompt = [10 + number] + [(3 * n + number) % 900 for n in range(tokens - 1)]
        engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))
    most = 0
    while engine.step():
        most = max(most, len(engine.ledger.leases))
    assert most == fits
    assert math.isclose(engine.num_pages, plan["pages"])
