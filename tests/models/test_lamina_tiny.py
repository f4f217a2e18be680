"""What the model in the package has learned, in every cache format: a fault that random weights would hide shows here.

The figures are of the shipped weights. Whoever trains others prints theirs: PYTHONPATH=. python tests/models/test_lamina_tiny.py
"""

from functools import cache

import pytest

from lamina import LLM, RequestOutput
from tests.conftest import load_helper

#: nats per character of tests/data/plain_text.txt, by the formats of entries and index keys
NATS = {
    ("fp8", "fp4"): 1.0298,
    ("fp8", "fp32"): 1.0294,
    ("bf16", "fp4"): 1.0299,
    ("bf16", "fp32"): 1.0299,
    ("fp32", "fp4"): 1.0297,
    ("fp32", "fp32"): 1.0295,
}
WITHIN = 0.005  # nats per character: other processors add in another order
LEAST_RIGHT = 8  # of as many questions
OTHERS = [formats for formats in NATS if formats != ("fp8", "fp4")]
_embedded = load_helper("models/embedded.py")
ask, drawn, in_order, num_right = _embedded.ask, _embedded.drawn, _embedded.in_order, _embedded.num_right
nats_per_character, questions = _embedded.nats_per_character, _embedded.questions


@cache
def model(cache_format: str, index_format: str) -> LLM:
    return LLM(cache_bytes="64MiB", cache_format=cache_format, index_format=index_format)


@pytest.fixture(scope="module")
def answers() -> list[RequestOutput]:
    return in_order(model("fp8", "fp4"))


@pytest.mark.parametrize("formats", list(NATS), ids="-".join)
def test_it_knows_english_in_every_format(formats: tuple[str, str]) -> None:
    assert nats_per_character(model(*formats)) == pytest.approx(NATS[formats], abs=WITHIN)


def test_it_finds_what_a_long_text_says(answers: list[RequestOutput]) -> None:
    cached = [output.usage.cached_tokens for output in answers]
    length = len(answers[0].prompt_token_ids)
    assert 1_800 <= length <= 2_300
    assert cached[0] == 0 < cached[1] < length - 100 and min(cached[2:]) > length - 32
    assert num_right(answers) >= LEAST_RIGHT, [output.outputs[0].text for output in answers]


def test_the_same_answer_cold_warm_and_in_another_order(answers: list[RequestOutput]) -> None:
    llm, prompts = model("fp8", "fp4"), questions()
    (again,) = ask(llm, prompts[:1])  # asked before: nothing is computed but the head
    cold, moved = ask(llm, prompts[-1:], "another cache"), ask(llm, prompts[:1], "another cache")
    assert again.usage.cached_tokens == len(again.prompt_token_ids)
    assert cold[0].usage.cached_tokens == 0 < moved[0].usage.cached_tokens
    assert drawn(again) == drawn(moved[0]) == drawn(answers[0])
    assert drawn(cold[0]) == drawn(answers[-1])


@pytest.mark.long
@pytest.mark.parametrize("formats", OTHERS, ids="-".join)
def test_it_finds_it_in_every_format(formats: tuple[str, str]) -> None:
    outputs = in_order(model(*formats))
    assert num_right(outputs) >= LEAST_RIGHT, [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    for formats in NATS:
        llm = model(*formats)
        print(f"    {formats}: {nats_per_character(llm):.4f},  # {num_right(in_order(llm))} of {len(questions())} right")
