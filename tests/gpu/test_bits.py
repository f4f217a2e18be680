"""Which bits a mode promises, through the public interface: scores and tokens of whole answers, compared for equality."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lamina import LLM, SamplingParams

FindTiny = Callable[[str, str], Path]
Words = Callable[[int, int], list[int]]
Serve = Callable[..., list[object]]
Load = Callable[..., LLM]


class Case(NamedTuple):
    """An engine's mode, formats and kernels."""

    mode: bool | str
    dtype: str = "bf16"
    cache_format: str = "fp8"
    index_format: str = "fp4"
    kernels: str = "auto"
    activation: str = "auto"
    shape: str = "flash"


MODES = [Case(True), Case("strict")]
EXACT = {"dtype": "fp32", "cache_format": "fp32", "index_format": "fp32"}
#: a promise holds in every format, and with the kernels of other GPUs
CASES = [
    *MODES, Case(True, cache_format="bf16", index_format="fp8"), Case(True, **EXACT), Case(True, kernels="portable"),
    Case(True, kernels="portable", activation="bf16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def load(tiny_of: FindTiny) -> Load:
    """load(case, max_step_tokens) -> an engine on the GPU that remembers nothing; each is made once."""
    made: dict[Case, LLM] = {}

    def find(case: Case, max_step_tokens: int = 1024) -> LLM:
        if case not in made:
            made[case] = LLM(
                str(tiny_of(case.shape, "official")), device="cuda", dtype=case.dtype, cache_format=case.cache_format,
                index_format=case.index_format, kernels=case.kernels, activation_format=case.activation, cache_bytes="256MiB",
                max_step_tokens=1024, max_requests=64, max_model_len=2048, deterministic=case.mode, warmup=False,
            )  # fmt: skip
        engine = made[case].engine
        engine.ledger.drop_index()
        engine.scheduler.max_step_tokens = max_step_tokens  # another cut needs no other engine
        return made[case]

    return find


def prompt_scores(llm: LLM, prompt: list[int], salt: str) -> list[float]:
    """Log-probability of every prompt token but the first."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    reported = llm.generate(prompt, params, cache_salt=salt)[0].prompt_logprobs
    assert reported is not None
    return [row[token].logprob for row, token in zip(reported[1:], prompt[1:], strict=True) if row is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_decode_does_not_depend_on_what_else_runs(case: Case, load: Load, words: Words, serve: Serve) -> None:
    """Batches of every bucket's size and one more, other requests of all lengths around it."""
    llm = load(case)
    for length in (5, 130):
        prompt = words(length, length)
        (alone,) = serve(llm, [prompt], salt="alone")
        for count in (1, 2, 4, 7, 16, 33):
            others = [words(1 + 37 * number % 300, 1000 + number) for number in range(count)]
            salt = f"{count} others"
            serve(llm, [prompt], 1, salt)  # its prompt is there: all that is compared below is decode
            place = count // 2
            found = serve(llm, [*others[:place], prompt, *others[place:]], salt=salt)
            assert found[place] == alone, (length, count)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prefill_does_not_depend_on_cuts_at_multiples_of_128(case: Case, load: Load, words: Words, serve: Serve) -> None:
    for length in (129, 700, 1024):
        prompt = words(length, length)
        scores = prompt_scores(load(case), prompt, "scores")
        (answer,) = serve(load(case), [prompt])
        for size in (128, 384):
            assert prompt_scores(load(case, size), prompt, "scores") == scores, (length, size)
            assert serve(load(case, size), [prompt])[0] == answer, (length, size)


@pytest.mark.parametrize("case", MODES, ids=str)
def test_a_prefill_does_not_depend_on_what_else_runs(case: Case, load: Load, words: Words, serve: Serve) -> None:
    llm, prompt = load(case), words(301, 1)
    (alone,) = serve(llm, [prompt], salt="alone")
    for count in (1, 3):
        others = [words(number * 60 + 1, 50 + number) for number in range(count)]
        assert serve(llm, [prompt, *others], salt=f"before {count}")[0] == alone
        assert serve(llm, [*others, prompt], salt=f"after {count}")[-1] == alone


@pytest.mark.parametrize("case", [*MODES, Case(True, shape="pro")], ids=str)
def test_warm_is_cold(case: Case, load: Load, words: Words, serve: Serve) -> None:
    """A hit on the whole prompt and one on its first two blocks, against the same cuts cold."""
    llm, prompt = load(case, 256), words(600, 9)
    (cold,) = serve(llm, [prompt], salt="first")
    assert serve(llm, [prompt], salt="first") == [cold]
    serve(llm, [prompt[:512]], 1, salt="second")
    assert serve(llm, [prompt], salt="second") == [cold]
    llm.engine.ledger.drop_index()
    assert serve(llm, [prompt], salt="second") == [cold]


@pytest.mark.parametrize("case", [Case("strict"), Case("strict", **EXACT)], ids=str)
def test_strict_decodes_as_it_prefills(case: Case, load: Load, words: Words) -> None:
    """The scores of an answer's tokens, decoded one by one, are those of the same tokens in a prompt, wherever it is cut."""
    for length in (3, 125, 250):
        llm, prompt = load(case), words(length, length)
        params = SamplingParams(max_tokens=20, temperature=0, logprobs=0, ignore_eos=True)
        answer = llm.generate(prompt, params)[0].outputs[0]
        assert answer.logprobs is not None
        decoded = [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        for size in (1024, 100):
            whole = prompt_scores(load(case, size), prompt + list(answer.token_ids), "whole")
            assert whole[length - 1 :] == decoded, (length, size)


def test_no_promise_serves_all(load: Load, words: Words, serve: Serve) -> None:
    """Without determinism bits may differ, answers hardly."""
    assert len(serve(load(Case(False)), [words(40 + number, number) for number in range(5)])) == 5
