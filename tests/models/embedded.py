"""What the model in the package is asked: a text of about 2,000 tokens with facts in it, and plain English. Needs no pytest."""

from collections.abc import Sequence
from pathlib import Path

from lamina import LLM, RequestOutput, SamplingParams

FACTS = (
    ("code of the yellow boat", "5093"), ("price of the silver bell", "271"), ("code of the yellow door", "1764"),
    ("number of the small room", "63"), ("code of the grey boat", "82504"), ("password of the long bridge", "silver"),
    ("colour of the new train", "orange"), ("key of the round table", "3390"),
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[2]
_DEMO, _PLAIN = _ROOT / "lamina" / "cli" / "demo_prompt.txt", _ROOT / "tests" / "data" / "plain_text.txt"


def _paragraphs(path: Path) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in path.read_text(encoding="utf-8").split("\n\n")]


def plain_paragraphs() -> list[str]:
    """The held-out text, one line a paragraph, as the model was trained."""
    return _paragraphs(_PLAIN)


def questions() -> list[str]:
    """One text of about 2,000 tokens with all the facts in it, and each of them asked for at its end."""
    paragraphs = _paragraphs(_DEMO) + plain_paragraphs()[1:3]
    for number, (what, value) in enumerate(FACTS):
        paragraphs[1 + number * (len(paragraphs) - 1) // len(FACTS)] += f" The {what} is {value}."
    text = "\n\n".join(paragraphs)
    return [f"{text}\n\nQuestion: What is the {what}?\nAnswer:" for what, _ in FACTS]


def ask(llm: LLM, prompts: Sequence[str], salt: str = "") -> list[RequestOutput]:
    """Answers, greedy."""
    return llm.generate(list(prompts), SamplingParams(max_tokens=12, temperature=0, stop="\n", logprobs=0), cache_salt=salt)


def nats_per_character(llm: LLM) -> float:
    """Mean cross-entropy of the held-out text."""
    text = "\n\n".join(plain_paragraphs())
    (output,) = llm.generate(text, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), cache_salt="text")
    assert output.prompt_logprobs is not None
    found = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    return -sum(entry[token].logprob for token, entry in found if entry is not None) / len(text)


def in_order(llm: LLM) -> list[RequestOutput]:
    """All questions: the first alone, the second from where the first had left blocks, the others from what that kept."""
    prompts = questions()
    return [*ask(llm, prompts[:1]), *ask(llm, prompts[1:2]), *ask(llm, prompts[2:])]


def num_right(outputs: Sequence[RequestOutput]) -> int:
    """Answers that are exactly the value told."""
    given = [output.outputs[0].text.strip().removesuffix(".") for output in outputs]
    return sum(one == value for one, (_, value) in zip(given, FACTS, strict=True))


def drawn(output: RequestOutput) -> tuple[list[int], float | None]:
    """What was written, and its log-probability: equal only if the scores have the same bits."""
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob
