"""Settings that must not pass: each is refused where it is made, in one line that names it."""

import pytest

from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError


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


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "cuda:99"])
def test_defaults_follow_the_device(device: str) -> None:
    assert EngineConfig("model", device=device).max_step_tokens == 4096
    assert EngineConfig("model", device="auto").max_step_tokens is None  # not known yet
    assert EngineConfig("model").max_step_tokens == 1024
