"""Lamina against Transformers 5.24, fp32, one unpadded sequence at a time: random models in which nothing is zero."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from lamina import LLM, SamplingParams

LENGTH = 300
TOLERANCE = 1e-4
#: a position may be excluded for a tie; more of them than this mean that the test sees too little
MAX_TIES = LENGTH // 100
NAMES = ["flash", "pro", "narrow", "blocks", "blocks-pro"]
FindCheckpoint = Callable[[str], Path]
FindTiny = Callable[[str, str], Path]
References = Callable[[str], tuple[list[int], object]]


def load(directory: Path, **settings: object) -> LLM:
    return LLM(str(directory), cache_format="fp32", index_format="fp32", cache_bytes="64MiB", **settings)  # type: ignore[arg-type]


def logits_of(driving: ModuleType, llm: LLM, ids: list[int]) -> Tensor:
    """[T, V]: the engine's scores after every token, from one cold request."""
    with driving.Recorder(llm.engine) as recorder:
        driving.wipe(llm.engine)
        (group,) = driving.serve(llm.engine, [ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        request, last = group.requests[0].id, len(ids) - 1
        return torch.stack([*(recorder.prompt[request, position] for position in range(last)), recorder.logits[request, last]])


def assert_close(found: Tensor, expected: Tensor, ties: Tensor) -> None:
    assert int(ties.sum()) <= MAX_TIES
    delta = (found - expected).abs().amax(dim=-1)
    worst = int(torch.where(ties, 0.0, delta).argmax())
    assert delta[~ties].max() <= TOLERANCE, f"position {worst}: {delta[worst]}"


@pytest.fixture(scope="module")
def references(random_models: ModuleType, checkpoint_of: FindCheckpoint) -> References:
    """Token ids and Transformers' answer for a named model."""
    made: dict[str, tuple[list[int], object]] = {}

    def find(name: str) -> tuple[list[int], object]:
        if name not in made:
            recipe = random_models.RECIPES[name]
            ids = random_models.token_ids(LENGTH, 100 + recipe.seed)
            made[name] = ids, random_models.refer(random_models.build(recipe), ids)
        return made[name]

    return find


@pytest.mark.parametrize("name", NAMES)
def test_logits_at_every_position_of_one_prompt(
    name: str, driving: ModuleType, references: References, checkpoint_of: FindCheckpoint
) -> None:
    ids, reference = references(name)
    assert_close(logits_of(driving, load(checkpoint_of(name)), ids), reference.logits, reference.ties)


#: around the ends of groups, of the window and of a block
BORDERS = [*range(1, 12), *range(125, 133), *range(253, 261), LENGTH]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("flash", range(1, LENGTH + 1)), ("pro", BORDERS), pytest.param("pro", range(1, LENGTH + 1), marks=pytest.mark.long)],
    ids=["flash", "pro at borders", "pro"],
)
def test_the_next_token_of_every_length_cold_and_together(
    name: str, lengths: Sequence[int], driving: ModuleType, references: References, checkpoint_of: FindCheckpoint
) -> None:
    """Prompts of lengths 1 to 300 in the same steps; salts keep them from sharing anything."""
    ids, reference = references(name)
    engine = load(checkpoint_of(name)).engine
    with driving.Recorder(engine) as recorder:
        driving.wipe(engine)
        params = SamplingParams(max_tokens=1, temperature=0)
        groups = [engine.add(ids[:length], params, 0, f"salt {length}") for length in lengths]
        driving.run_all(engine, groups)
        assert all(group.output.usage.cached_tokens == 0 for group in groups)
        last = [length - 1 for length in lengths]
        found = torch.stack([recorder.logits[group.requests[0].id, at] for at, group in zip(last, groups, strict=True)])
        assert_close(found, reference.logits[last], reference.ties[last])


@pytest.mark.parametrize("name", ["flash"])
def test_the_next_token_of_every_length_each_warm_from_the_one_before(
    name: str, driving: ModuleType, references: References, checkpoint_of: FindCheckpoint
) -> None:
    ids, reference = references(name)
    engine = load(checkpoint_of(name)).engine
    with driving.Recorder(engine) as recorder:
        driving.wipe(engine)
        found, last, before = [], [], 0
        for length in [*range(1, 150), *range(240, 270), LENGTH]:
            (group,) = driving.serve(engine, [ids[:length]], SamplingParams(max_tokens=1, temperature=0))
            assert group.output.usage.cached_tokens == before
            found.append(recorder.logits[group.requests[0].id, length - 1])
            last.append(length - 1)
            before = length
        assert_close(torch.stack(found), reference.logits[last], reference.ties[last])


@pytest.mark.parametrize("name", ["flash", "pro", "narrow"])
def test_greedy_answers_are_those_of_a_full_recomputation(
    name: str, random_models: ModuleType, references: References, checkpoint_of: FindCheckpoint
) -> None:
    ids, _ = references(name)
    llm = load(checkpoint_of(name))
    model = random_models.build(random_models.RECIPES[name])
    for length in (2, 120, 250):  # answers that cross the first groups, the window and a block
        prompt = ids[:length]
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        answer = output.outputs[0].token_ids
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        assert answer == scores[length - 1 : -1].argmax(-1).tolist()


def official_spelling(random_models: ModuleType, name: str) -> dict[str, object]:
    return random_models.RECIPES[name].config | {"model_type": "deepseek_v4"}


@pytest.mark.parametrize("name", ["flash", "narrow"])
def test_both_spellings_of_the_schedule_give_the_same_bits(
    name: str,
    tmp_path: Path,
    driving: ModuleType,
    random_models: ModuleType,
    references: References,
    checkpoint_of: FindCheckpoint,
) -> None:
    ids, _ = references(name)
    written = checkpoint_of(name)
    spelled = json.loads((written / "config.json").read_text())
    assert "layer_types" in spelled and "compress_ratios" not in spelled
    other = tmp_path / "official"
    shutil.copytree(written, other)
    (other / "config.json").write_text(json.dumps(official_spelling(random_models, name)))
    assert driving.same_bits(logits_of(driving, load(written), ids), logits_of(driving, load(other), ids))


@pytest.mark.parametrize("shape", ["flash", "pro"])
def test_a_tiny_checkpoint_in_both_file_formats_and_in_transformers(
    shape: str, driving: ModuleType, random_models: ModuleType, tiny_of: FindTiny
) -> None:
    """FP8 and FP4 files against the same numbers in BF16, and Transformers on the latter."""
    official, plain = tiny_of(shape, "official"), tiny_of(shape, "transformers")
    assert len(load_file(official / "model.safetensors")) > len(load_file(plain / "model.safetensors"))
    ids = random_models.token_ids(LENGTH, 7, vocab_size=1000)
    found = logits_of(driving, load(official), ids)
    assert driving.same_bits(found, logits_of(driving, load(plain), ids))
    model = DeepseekV4ForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    reference = random_models.refer(model.eval(), ids)
    assert_close(found, reference.logits, reference.ties)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_long_sequences(name: str, driving: ModuleType, random_models: ModuleType, checkpoint_of: FindCheckpoint) -> None:
    """Beyond several blocks of 256 tokens, with many entries to choose from."""
    recipe = random_models.RECIPES[name]
    ids = random_models.token_ids(2000, 300 + recipe.seed)
    reference = random_models.refer(random_models.build(recipe), ids)
    found = logits_of(driving, load(checkpoint_of(name)), ids)
    assert int(reference.ties.sum()) <= len(ids) // 100
    assert (found - reference.logits)[~reference.ties].abs().max() <= TOLERANCE
