"""Where plans come from: files that are what they should be, files that are not, and weights counted from headers."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lamina.base.errors import ConfigError, WeightError
from lamina.base.sizes import GiB
from lamina.models.tiny import SHAPES, write_tiny
from lamina.plan.records import PlanOptions
from lamina.plan.report import plan_json
from lamina.plan.source import open_source
from lamina.plan.stored import stored_parts
from lamina.weights.writer import write_safetensors

CONFIGS = Path(__file__).parent.parent / "configs"
PRO = CONFIGS / "deepseek-v4-pro.json"


def test_a_file_and_a_directory_give_one_plan(tmp_path: Path) -> None:
    folder = tmp_path / "V4-Pro"
    folder.mkdir()
    (folder / "config.json").write_bytes(PRO.read_bytes())
    plans = [open_source(path).plan(PlanOptions()) for path in (PRO, folder, folder / "config.json")]
    assert [plan.model for plan in plans] == ["deepseek-v4-pro", "V4-Pro", "V4-Pro"]
    assert len({plan.layout_id for plan in plans}) == 1 and not plans[1].exact_weights


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_bytes(PRO.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert open_source(Path(".")).name == open_source(Path("config.json")).name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a JSON object"), (b"[]", "a JSON object"), (b"3", "a JSON object"), (b"{", "a JSON object"),
        (b'{"model_type": "caf\xe9"}', "a JSON object"), (b"\xff\xfe{}", "a JSON object"), (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"), (b'{"a": 1, "a": 2}', "key 'a' is repeated"),
        (b"{" + b" " * (1 << 20) + b"}", "at most 1048576 bytes"), (b"{}", "model_type=None"),
        (b'{"model_type": 3}', "model_type=3"),
        (b'{"model_type": "unheard-of"}', "one of .*bamba, "), (b'{"a": ' + b"9" * 5000 + b"}", "a JSON object"),
        (b'{"model_type": "deepseek_v4"}', "num_hidden_layers"),
    ],
)  # fmt: skip
def test_files_that_are_no_config(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as found:
        open_source(path).plan(PlanOptions())
    assert "\n" not in str(found.value) and len(str(found.value)) < 2000


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"a config\.json, a directory that holds one, or a plan"):
            open_source(path)
    with pytest.raises(ConfigError, match=r"a directory that holds config\.json"):
        open_source(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="model="):
        open_source(tmp_path / "pipe")


def test_a_plan_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(open_source(PRO).plan(PlanOptions()))))
    source = open_source(path)
    assert source.is_plan and source.name == "deepseek-v4-pro"
    with pytest.raises(ConfigError, match="--diff"):
        source.plan(PlanOptions())


def test_names_cannot_command_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[2Jname.json"
    path.write_bytes(PRO.read_bytes())
    assert open_source(path).name == "\ufffd[2Jname"


# GPUs that would do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_step_tokens", [8192, 1 << 17])
def test_how_many_gpus_would_do(max_step_tokens: int) -> None:
    source, options = open_source(PRO), PlanOptions(gpu="h200", max_step_tokens=max_step_tokens)
    plan = source.plan(options)
    assert plan.budget.missing_bytes > 0 and plan.workloads[0].fits == 0
    # 128 heads in 16 groups: only divisors can share them
    enough = [n for n in (2, 4, 8, 16, 32, 64) if source.plan(replace(options, gpus=n)).workloads[0].fits]
    assert plan.budget.gpus_needed == enough[0]


def test_no_number_of_gpus_would_do() -> None:
    source = open_source(PRO)
    hopeless = source.plan(PlanOptions(memory_bytes=GiB))  # what every GPU must have is more than that
    assert hopeless.budget.missing_bytes and hopeless.budget.gpus_needed is None


def test_experts_are_counted_whole() -> None:
    # 384 experts: 24 GPUs have 16 each, 20 GPUs 20 at the most
    for gpus, most in ((24, 16), (20, 20)):
        plan = open_source(PRO).plan(PlanOptions(gpus=gpus, dp=gpus, ep=gpus))
        (experts,) = (line for line in plan.weights if line.component == "experts")
        assert experts.gpu_bytes * 384 == experts.nbytes * most


# Weights from headers ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    for shape in SHAPES:
        write_tiny(root / shape, shape)
    return {shape: root / shape for shape in SHAPES}


def tensor_bytes(directory: Path) -> int:
    """Bytes of the file less its header, as the format puts them."""
    path = directory / "model.safetensors"
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_the_bytes_of_the_files(tiny: dict[str, Path], shape: str) -> None:
    source = open_source(tiny[shape])
    plan = source.plan(PlanOptions())
    assert plan.exact_weights and plan.weights_bytes == tensor_bytes(tiny[shape])
    unused = [line for line in plan.weights if line.split == "unused"]
    assert {line.component for line in unused} == {"draft blocks", "draft experts"} and all(not line.gpu_bytes for line in unused)
    with_drafts = source.plan(PlanOptions(draft_tokens=1))
    assert with_drafts.weights_bytes == plan.weights_bytes
    assert sum(line.gpu_bytes for line in with_drafts.weights) == plan.weights_bytes
    # the config alone says the same of every component
    told = open_source(tiny[shape] / "config.json").plan(PlanOptions(draft_tokens=1))
    found = {line.component: (line.nbytes, line.split) for line in with_drafts.weights}
    assert found == {line.component: (line.nbytes, line.split) for line in told.weights}


def test_what_is_not_loaded_does_not_count_on_the_gpu(tiny: dict[str, Path]) -> None:
    plan = open_source(tiny["flash"]).plan(PlanOptions(memory_bytes=GiB))
    told = open_source(tiny["flash"] / "config.json").plan(PlanOptions(memory_bytes=GiB))
    assert plan.weights_bytes > told.weights_bytes and plan.pool_bytes == told.pool_bytes


def test_other_names(tmp_path: Path) -> None:
    # the names that most checkpoints use; layer 2 of 2 layers is a draft block
    names = {
        "model.embed_tokens.weight": ("embedding", 1),
        "lm_head.weight": ("head", 2),
        "model.norm.weight": ("norms", 3),
        "model.layers.0.self_attn.q_proj.weight": ("attention", 4),
        "model.layers.0.self_attn.q_norm.weight": ("norms", 5),
        "model.layers.0.mlp.gate_proj.weight": ("mlp", 6),
        "model.layers.0.mlp.gate.weight": ("router", 7),
        "model.layers.0.mlp.experts.3.up_proj.weight": ("experts", 8),
        "model.layers.0.mlp.experts.gate_up_proj": ("experts", 9),
        "model.layers.0.mlp.shared_experts.up_proj.weight": ("shared experts", 10),
        "model.layers.1.mamba.in_proj.weight": ("mamba", 11),
        "model.layers.1.self_attn.indexer.wk.weight": ("index", 12),
        "model.layers.1.linear_attn.conv1d.weight": ("linear attention", 13),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": ("low-rank projections", 14),
        "model.layers.2.self_attn.q_proj.weight": ("draft blocks", 15),
        "model.layers.2.mlp.experts.0.up_proj.weight": ("draft experts", 16),
        "model.vision_tower.blocks.0.attn.weight": ("other senses", 17),
        "strange": ("other", 18),
    }
    write_safetensors(
        tmp_path / "model.safetensors", {name: torch.zeros(size, dtype=torch.uint8) for name, (_, size) in names.items()}
    )
    parts = stored_parts(tmp_path, {"text_config": {"num_hidden_layers": 2}}, with_drafts=True)
    expected: dict[str, int] = {}
    for component, size in names.values():
        expected[component] = expected.get(component, 0) + size
    assert {part.component: part.nbytes for part in parts} == expected
    splits = {part.component: part.split for part in parts}
    assert splits["experts"] == splits["draft experts"] == "expert" and splits["norms"] == splits["router"] == "none"
    assert splits["attention"] == splits["draft blocks"] == "tensor"


def test_weights_that_are_not_what_they_say(tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny["flash"] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny["flash"] / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(WeightError, match="truncated"):
        open_source(tmp_path).plan(PlanOptions())
    assert not open_source(tmp_path / "config.json").plan(PlanOptions()).exact_weights
