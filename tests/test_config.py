"""Settings that must not pass: each is refused where it is made, in one line that names it."""

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest

from lamina import LLM, SamplingParams
from lamina.base.config import EngineConfig, for_gpus_only
from lamina.base.errors import ConfigError
from lamina.base.keywords import CALL_ELSEWHERE, LLM_ELSEWHERE, SAMPLING_ELSEWHERE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", ""), ("device", "tpu"), ("device", "CUDA"), ("device", "cuda:"), ("device", "cuda:-1"), ("device", "cuda:01"),
        ("device", "cuda:128"), ("device", "cuda:٣"), ("device", "cuda\n"), ("device", 0), ("device", None),
        ("kernels", "fast"), ("kernels", None), ("activation_format", "fp4"), ("activation_format", 8),
        ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.01), ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "0.9"), ("gpu_memory_utilization", True),
        ("cache_bytes", 0), ("cache_bytes", True), ("max_step_tokens", 0), ("max_step_tokens", True), ("max_requests", None),
        ("deterministic", 1), ("deterministic", "yes"), ("warmup", "no"), ("warmup", None), ("warmup", 0), ("dtype", None),
    ],
)  # fmt: skip
def test_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig("model", **{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{name}=") and "\n" not in message


def test_settings_for_gpus_alone_are_told_from_others() -> None:
    assert for_gpus_only(EngineConfig("model", cache_bytes="1GiB", deterministic=True, seed=1)) == ()
    given = EngineConfig("model", kernels="portable", warmup=False, gpu_memory_utilization=0.5, activation_format="bf16")
    assert for_gpus_only(given) == ("gpu_memory_utilization", "kernels", "activation_format", "warmup")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "cuda:99"])
def test_defaults_follow_the_device(device: str) -> None:
    assert EngineConfig("model", device=device).max_step_tokens == 4096
    assert EngineConfig("model", device="auto").max_step_tokens is None  # not known yet
    assert EngineConfig("model").max_step_tokens == 1024


@pytest.mark.parametrize(
    ("make", "name", "words"),
    [
        (LLM, "max_num_seqs", "it is max_requests here"), (LLM, "tensor_parallel_size", "a model runs on one device"),
        (LLM, "enforce_eager", "warmup=False"), (LLM, "max_modl_len", "did you mean max_model_len?"),
        (LLM, "trust_remote_code", "leave it out"), (LLM, "max_num_seq", "did you mean max_num_seqs? it is max_requests here"),
        (LLM, "qqqqqqq", "it has activation_format, block_tokens, cache_bytes"),
        (SamplingParams, "best_of", "take the best"), (SamplingParams, "use_beam_search", "n draws several outputs"),
        (SamplingParams, "temprature", "did you mean temperature?"), (SamplingParams, "max_new_tokens", "it is max_tokens here"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_is_one_line_that_names_it(make: Callable[..., object], name: str, words: str) -> None:
    given = {"model": "nowhere"} if make is LLM else {}
    with pytest.raises(TypeError) as caught:
        make(**given, **{name: 1})
    message = str(caught.value)
    assert message.startswith(f"{make.__name__} has no argument {name!r}: ") and words in message and "\n" not in message
    assert isinstance(caught.value, ConfigError) and caught.value.field == name


def test_names_of_other_engines_are_no_names_here_and_lead_to_ones_that_are() -> None:
    for call, table in ((LLM, LLM_ELSEWHERE), (SamplingParams, SAMPLING_ELSEWHERE), (LLM.generate, CALL_ELSEWHERE)):
        known = set(inspect.signature(call).parameters)
        assert not known & table.keys()
        named = [hint.removeprefix("it is ").split(" here")[0] for hint in table.values() if hint.startswith("it is ")]
        assert set(named) <= known


def test_an_llm_takes_every_setting_of_the_engine() -> None:
    assert {field.name for field in fields(EngineConfig)} <= set(inspect.signature(LLM).parameters)
