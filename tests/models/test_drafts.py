"""Draft blocks against an fp64 reference, however a prompt is cut and whichever guesses were rejected before."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from draft_rig import CPU, KINDS, MOST, Part, Rig, drafted, random_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.base.errors import ConfigError, WeightError
from lamina.memory.layout import make_layout
from lamina.models.deepseek_v4_names import ALL_NAMES
from lamina.models.deepseek_v4_tensors import needed_tensors
from lamina.models.files import list_stored
from lamina.models.needed import check_tensors
from lamina.models.registry import Drafts, blueprint, draft_blocks
from lamina.models.tiny import write_tiny
from lamina.runtime.arena import DeviceArena
from lamina.weights.loader import Checkpoint, read_config

#: an fp32 pass is within some hundred roundings of the fp64 one; logits are of size 1
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    for name, shape in KINDS.items():
        write_tiny(root / name, shape, 11)
    return {name: root / name for name in KINDS}


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.tobytes() == right.tobytes()


def is_clear(scores: np.ndarray) -> bool:
    """Whether no rounding can change which token of each row [N, V] is the best."""
    best = np.sort(scores, axis=1)
    return bool((best[:, -1] - best[:, -2]).min() > 10 * TOLERANCE)


#: cuts of a prompt, so that chunks end inside windows and beyond them
CUTS = ((), (1, 2, 5), (64, 129, 150))
LENGTH = 170


def test_a_chain_is_the_reference_however_a_prompt_is_cut(
    made: dict[str, Path], oracle: ModuleType, draft_oracle: ModuleType
) -> None:
    ids, directory = random_ids(LENGTH + 1, 5), made["mtp"]
    truth = draft_oracle.chained(oracle, read_config(directory), draft_oracle.weights_of(directory), ids, MOST)
    assert is_clear(truth)
    found = []
    for cuts in CUTS:
        rig = Rig(directory)
        assert drafted(rig, ids, cuts, MOST) == truth.argmax(1).tolist()
        found.append(rig.scores())
        assert np.abs(found[-1] - truth).max() <= TOLERANCE
    assert all(same(found[0], other) for other in found)


def test_a_block_is_the_reference_however_a_prompt_is_cut(
    made: dict[str, Path], oracle: ModuleType, draft_oracle: ModuleType
) -> None:
    ids, directory = random_ids(LENGTH + 1, 5), made["dspark"]
    weights = draft_oracle.weights_of(directory)
    base, scores, confidence = draft_oracle.block_drafted(oracle, read_config(directory), weights, ids)
    assert is_clear(scores)
    found = []
    for cuts in CUTS:
        rig = Rig(directory)
        assert drafted(rig, ids, cuts, 5) == scores.argmax(1).tolist()
        found.append(rig.scores())
        assert np.abs(found[-1] - base).max() <= TOLERANCE
        assert np.abs(rig.chances() - confidence).max() <= TOLERANCE
    assert all(same(found[0], other) for other in found)


@pytest.mark.parametrize("kind", KINDS)
def test_short_prompts_start_from_nothing(kind: str, made: dict[str, Path], oracle: ModuleType, draft_oracle: ModuleType) -> None:
    """One to three tokens, in a slot that a longer request had before."""
    directory, count = made[kind], 4
    config, weights = read_config(directory), draft_oracle.weights_of(directory)
    rig = Rig(directory)
    drafted(rig, random_ids(140, 8), (), count)
    for length in (1, 2, 3):
        ids = random_ids(length + 1, 30 + length)
        drafts = drafted(rig, ids, (), count)
        if kind == "mtp":
            base = scores = draft_oracle.chained(oracle, config, weights, ids, count)
        else:
            base, scores, _ = draft_oracle.block_drafted(oracle, config, weights, ids)
        assert is_clear(scores) and drafts == scores.argmax(1).tolist()[:count]
        assert np.abs(rig.scores() - base).max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_guesses_leave_nothing(kind: str, made: dict[str, Path]) -> None:
    """Two requests verify guesses of which some are wrong; drafts then have the bits of a request that never guessed."""
    count = MOST if kind == "mtp" else 5
    texts, places = (random_ids(200, 1), random_ids(60, 2)), [125, 3]
    rig, cold = Rig(made[kind], "fp8", requests=2), Rig(made[kind], "fp8")
    for request, place in enumerate(places):
        drafted(rig, texts[request][: place + 1], (), count, request)
    for accepted in ((0, 7), (7, 0), (2, 1), (3, 2)):
        parts = []
        for request, (text, place, right) in enumerate(zip(texts, places, accepted, strict=True)):
            wrong = [(token + 1) % 1000 for token in text[place + 1 + right : place + 1 + MOST]]
            ids = text[place : place + 1 + right] + wrong
            following = text[place + 1 + right]
            parts.append(Part(request, place, ids, MOST, len(wrong), following, count))
        drafts = rig.step(parts)
        found = [rig.scores(request) for request in range(2)]
        for request, right in enumerate(accepted):
            places[request] += 1 + right
            assert drafted(cold, texts[request][: places[request] + 1], (), count) == drafts[request]
            assert same(cold.scores(), found[request])


def test_a_draft_ends_where_it_is_unlikely(made: dict[str, Path]) -> None:
    for kind, directory in made.items():
        rig = Rig(directory)
        ids = random_ids(20, 3)
        whole = drafted(rig, ids, (), 5)
        assert len(whole) == 5 and drafted(rig, ids, (), 2) == whole[:2] and drafted(rig, ids, (), 0) == []
        rig.drafter.least_likely = 1.0
        assert drafted(rig, ids, (), 5) == []
        rig.drafter.least_likely = 1e-4 if kind == "mtp" else 0.05
        cut = drafted(rig, ids, (), 5)
        assert cut == whole[: len(cut)] and 0 < len(cut) < 5


def rewritten(directory: Path, target: Path, change: dict[str, Tensor | None]) -> Path:
    """A checkpoint with some tensors replaced, added, or (None) left out."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_used_once(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    values = read_config(made[kind])
    assert draft_blocks(values) == kind
    found = check_tensors(list_stored(made[kind]), ALL_NAMES, needed_tensors(values, with_drafts=True))
    assert not (found.missing or found.wrong or found.unused) and found.num_found > 100
    own = [name for name in load_file(made[kind] / "model.safetensors") if name.startswith("mtp.") and not name.endswith("scale")]
    for name in {own[0], own[len(own) // 2], own[-1]}:
        with pytest.raises(WeightError, match=name.replace(".", r"\.")):
            Rig(rewritten(made[kind], tmp_path / name, {name: None}))
    spare = rewritten(made[kind], tmp_path / "spare", {"mtp.0.embed.weight": torch.zeros(3)})
    with pytest.raises(WeightError, match=r"not used.*mtp\.0\.embed\.weight"):
        Rig(spare)
    plan = blueprint(values, "fp32", "fp32")
    layout = make_layout(plan.memories, plan.hidden, None)
    arena = DeviceArena(layout, layout.slot_pages + 1, CPU)
    with Checkpoint(spare, plan.names) as checkpoint:  # without drafts nothing of theirs is looked at
        model = plan.load(checkpoint, "fp32", lambda spec: arena.store(spec.key, spec.codec))
    assert model.drafter is None and not any(memory.name == "draft_window" for memory in plan.memories)


def test_blocks_that_nobody_can_run_are_refused(made: dict[str, Path]) -> None:
    values = read_config(made["mtp"])
    ratios = values["compress_ratios"]
    assert isinstance(ratios, list)
    for beyond in ([], [0, 0]):
        changed = json.loads(json.dumps(values)) | {"compress_ratios": ratios[:-1] + beyond}
        assert draft_blocks(changed) is None
        with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
            blueprint(changed, "fp32", "fp32", drafts=Drafts(3, True))
