"""What the model in the package has learned, in every cache format: a fault that random weights would hide shows here.

The figures are of the shipped weights. Whoever trains others prints theirs with `python tests/models/test_lamina_tiny.py`.
"""

from functools import cache
from pathlib import Path

import pytest

from lamina import LLM, RequestOutput, SamplingParams
from lamina.cli.demo import document

#: nats per character of tests/data/plain_text.txt, by the formats of entries and index keys
NATS = {
    ("fp8", "fp4"): 1.0326,
    ("fp8", "fp32"): 1.0327,
    ("bf16", "fp4"): 1.0324,
    ("bf16", "fp32"): 1.0326,
    ("fp32", "fp4"): 1.0324,
    ("fp32", "fp32"): 1.0326,
}
WITHIN = 0.005  # nats per character: other processors add in another order
LEAST_RIGHT = 8  # of FACTS
FACTS = (
    ("code of the yellow boat", "5093"), ("price of the silver bell", "271"), ("code of the yellow door", "1764"),
    ("number of the small room", "63"), ("code of the grey boat", "82504"), ("password of the long bridge", "silver"),
    ("colour of the new train", "orange"), ("key of the round table", "3390"),
)  # fmt: skip
OTHERS = [formats for formats in NATS if formats != ("fp8", "fp4")]
_PLAIN = Path(__file__).parents[1] / "data" / "plain_text.txt"


def plain_paragraphs() -> list[str]:
    """The held-out text, one line a paragraph, as the model was trained."""
    return [" ".join(paragraph.split()) for paragraph in _PLAIN.read_text(encoding="utf-8").split("\n\n")]


def questions() -> list[str]:
    """One text of about 2,000 tokens with all the facts in it, and each of them asked for at its end."""
    paragraphs = document().split("\n\n") + plain_paragraphs()[1:3]
    for number, (what, value) in enumerate(FACTS):
        paragraphs[1 + number * (len(paragraphs) - 1) // len(FACTS)] += f" The {what} is {value}."
    text = "\n\n".join(paragraphs)
    return [f"{text}\n\nQuestion: What is the {what}?\nAnswer:" for what, _ in FACTS]


@cache
def model(cache_format: str, index_format: str) -> LLM:
    return LLM(cache_bytes="64MiB", cache_format=cache_format, index_format=index_format)


def ask(llm: LLM, prompts: list[str], salt: str = "") -> list[RequestOutput]:
    """Answers, greedy."""
    return llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, stop="\n", logprobs=0), cache_salt=salt)


def nats_per_character(llm: LLM) -> float:
    """Mean cross-entropy of the held-out text."""
    text = "\n\n".join(plain_paragraphs())
    (output,) = llm.generate(text, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), cache_salt="text")
    assert output.prompt_logprobs is not None
    drawn = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    return -sum(found[token].logprob for token, found in drawn if found is not None) / len(text)


def in_order(llm: LLM) -> list[RequestOutput]:
    """All questions: the first alone, the second from where the first had left blocks, the others from what that kept."""
    prompts = questions()
    return [*ask(llm, prompts[:1]), *ask(llm, prompts[1:2]), *ask(llm, prompts[2:])]


def num_right(outputs: list[RequestOutput]) -> int:
    given = [output.outputs[0].text.strip().removesuffix(".") for output in outputs]
    return sum(one == value for one, (_, value) in zip(given, FACTS, strict=True))


def drawn(output: RequestOutput) -> tuple[list[int], float | None]:
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


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
        print(f"    {formats}: {nats_per_character(llm):.4f},  # {num_right(in_order(llm))} of {len(FACTS)} right")
