"""Tests that need a GPU: skipped without one. `make test-gpu` runs them with the PyTorch and the Triton that are there.

LAMINA_TEST_DEVICE=cpu runs those of the server, which hold on any device, on a CPU.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lamina import LLM, SamplingParams

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in this folder."""
    anywhere = {"test_serve.py"} if os.environ.get("LAMINA_TEST_DEVICE") == "cpu" else set()
    if not torch.cuda.is_available():
        for item in items:
            if _FOLDER in item.path.parents and item.path.name not in anywhere:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Answer(NamedTuple):
    """Greedy tokens, and the log-probabilities of the likeliest tokens at each: equal only if the scores have the same bits."""

    tokens: tuple[int, ...]
    scores: tuple[tuple[tuple[int, float], ...], ...]


Serve = Callable[..., list[Answer]]


@pytest.fixture(scope="session")
def serve() -> Serve:
    """serve(llm, prompts, tokens=24, salt="") -> an Answer for each prompt, all served together."""

    def run(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int = 24, salt: str = "") -> list[Answer]:
        params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=20, ignore_eos=True)
        found = []
        for output in llm.generate([list(prompt) for prompt in prompts], params, cache_salt=salt):
            own = output.outputs[0]
            assert own.logprobs is not None and len(own.token_ids) == tokens
            scores = tuple(tuple(sorted((token, one.logprob) for token, one in row.items())) for row in own.logprobs)
            found.append(Answer(tuple(own.token_ids), scores))
        return found

    return run


@pytest.fixture(scope="session")
def words() -> Callable[[int, int], list[int]]:
    """words(count, seed) -> random token ids of the tiny models that are no control tokens."""

    def draw(count: int, seed: int) -> list[int]:
        return torch.randint(3, 1000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return draw
