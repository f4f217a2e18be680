"""After an engine is ready nothing is compiled: not for any number of requests, length, way of drawing or cache hit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams

FindTiny = Callable[[str, str], Path]
Words = Callable[[int, int], list[int]]

WAYS = [
    SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.2, top_k=7, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=3,
                   ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0, logprobs=4, prompt_logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, n=3, logit_bias={5: 2.0}, min_tokens=4, seed=3),
]  # fmt: skip


@pytest.mark.parametrize("mode", [True, "strict", False])
def test_nothing_is_compiled_while_serving(mode: object, tiny_of: FindTiny, words: Words) -> None:
    from lamina.models.implementations import watch_compilations

    llm = LLM(
        str(tiny_of("flash", "official")), device="cuda", cache_bytes="256MiB", max_step_tokens=512, max_requests=20,
        max_model_len=2000, deterministic=mode,  # type: ignore[arg-type]
    )  # fmt: skip
    with watch_compilations() as seen:
        for number, length in enumerate((1, 2, 3, 7, 16, 17, 31, 64, 100, 127, 128, 129, 255, 500, 511, 512, 513, 1000, 1900)):
            llm.generate(words(length, number), WAYS[0])
            assert seen == [], f"a prompt of {length} tokens"
        for count in (2, 3, 5, 8, 13, 20, 33):
            prompts = [words(1 + 53 * number % 700, 100 * count + number) for number in range(count)]
            llm.generate(prompts, [WAYS[number % len(WAYS)] for number in range(count)])
            assert seen == [], f"{count} requests"
        for way in WAYS:
            llm.generate([words(300, 1), [*words(300, 1)[:270], 5]], way)  # the second finds the first one's blocks
            assert seen == [], way
