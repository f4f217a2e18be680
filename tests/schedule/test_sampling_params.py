"""Sampling parameters: vLLM's defaults, one normal form, and a clear refusal of everything else."""

import dataclasses
import math

import numpy as np
import pytest

from lamina.base.errors import ConfigError
from lamina.schedule.sampling_params import SamplingParams

INTEGERS = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]
REALS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None,
        "stop": (), "stop_token_ids": (), "ignore_eos": False, "logprobs": None, "prompt_logprobs": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": (), "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }  # fmt: skip
    assert not params.is_greedy and not params.has_penalties


def test_normal_form() -> None:
    params = SamplingParams(
        n=np.int32(2), max_tokens=2**31 - 1, temperature=0, top_k=-1, top_p=np.float32(0.5), seed=np.int64(7), stop="END",
        stop_token_ids={9, np.int64(3), 4}, logit_bias={"7": 1, 2: -100, np.int64(3): 0.5}, logprobs=-1, repetition_penalty=2,
    )  # fmt: skip
    assert (params.n, params.top_k, params.top_p, params.seed, params.stop) == (2, 0, 0.5, 7, ("END",))
    assert params.stop_token_ids == (3, 4, 9) and params.logit_bias == ((2, -100.0), (3, 0.5), (7, 1.0))
    assert {type(value) for value in (params.n, params.seed, *params.stop_token_ids)} == {int}
    assert {type(value) for value in (params.temperature, params.top_p, params.repetition_penalty)} == {float}
    assert params.is_greedy and params.has_penalties and hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params, n=3).stop_token_ids == (3, 4, 9) and dataclasses.replace(params) == params
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a") and SamplingParams(stop=[]).stop == ()
    assert SamplingParams(seed=-1).seed is None  # vLLM's word for "no seed"
    assert params.num_logprobs(50) == 50 and params.num_prompt_logprobs(50) is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


BORDERS = {
    "n": [1, 16_384],
    "max_tokens": [1, 2**31 - 1, 2**63 - 1],
    "min_tokens": [0, 16],
    "temperature": [0, 1e-9, 50.0],
    "top_p": [1e-9, 1],
    "top_k": [0, 1, 2**63 - 1],
    "min_p": [0, 1],
    "seed": [-(2**63), 0, 2**64 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [1e-3, 100],
    "logprobs": [None, -1, 0, 10**9],
    "prompt_logprobs": [None, -1, 0, 10**9],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BORDERS.items() for value in values])
def test_borders_are_legal(field: str, value: float) -> None:
    params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert dataclasses.asdict(params)[field] == value


WRONG_TYPES = ["1", b"1", [1], {}, object(), 1j, True, False, math.nan, math.inf, -math.inf]
BAD = {
    "n": [0, -1, 16_385],
    "max_tokens": [0, -5, 2**63],
    "min_tokens": [-1, 17],
    "temperature": [-0.1],
    "top_p": [0, -0.5, 1.0001],
    "top_k": [-2, 2**63],
    "min_p": [-0.01, 1.01],
    "seed": [-(2**63) - 1, 2**64],
    "logprobs": [-2],
    "prompt_logprobs": [-2],
    "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1],
    "repetition_penalty": [0, -1],
    "stop": ["", ["a", ""], [1], 3, b"a", {"a"}, [None], True],
    "stop_token_ids": [3, "3", ["3"], [-1], [True], [1.0], {3: 1}],
    "logit_bias": [
        [1], "1", (1, 2), ((1, 2, 3),), {"x": 1}, {"-1": 1}, {-1: 1}, {True: 1}, {1.0: 1}, {"": 1}, {"²": 1}, {"9" * 5000: 1},
        {"1": 1, 1: 2}, {1: 100.5}, {1: -101}, {1: math.nan}, {1: True}, {1: "5"}, {1: None},
    ],
}  # fmt: skip
BAD_CASES = [
    *((field, value) for field, values in BAD.items() for value in values),
    *((field, value) for field in INTEGERS for value in [*WRONG_TYPES, 1.0, 1.5, np.float32(1), np.bool_(True)]),
    *((field, value) for field in REALS for value in [*WRONG_TYPES, None, 10**400, np.float32("nan"), np.bool_(False)]),
    *((field, value) for field in FLAGS for value in [0, 1, None, "true", 1.0]),
    *((field, None) for field in ("n", "min_tokens", "top_k")),
]


@pytest.mark.parametrize(("field", "value"), BAD_CASES)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    message = str(caught.value)
    assert message.startswith(f"{field}=") and message.count("\n") == 0 and len(caught.value.allowed) > 10


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    assert SamplingParams(max_tokens=40, min_tokens=40).min_tokens == 40
    with pytest.raises(ConfigError, match=r"min_tokens=41 .*max_tokens \(40\)"):
        SamplingParams(max_tokens=40, min_tokens=41)


def test_validate_for_vocab() -> None:
    good = SamplingParams(stop_token_ids=[0, 9], logit_bias={9: 1.0}, logprobs=10, prompt_logprobs=-1)
    good.validate_for_vocab(10)
    for field, value in (("stop_token_ids", [10]), ("logit_bias", {"10": 0}), ("logprobs", 11), ("prompt_logprobs", 11)):
        with pytest.raises(ConfigError, match=f"{field}=1[01] .*(0 to 9|0 to 10)"):
            SamplingParams(**{field: value}).validate_for_vocab(10)  # type: ignore[arg-type]


def test_no_limit_is_a_huge_one() -> None:
    """vLLM's None: the model's length ends the output."""
    assert SamplingParams(max_tokens=None).max_tokens == 2**63 - 1
