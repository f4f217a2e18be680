"""Lengths and workloads in words, GPUs by name, and how many GPUs share what."""

import pytest

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB
from lamina.plan.gpus import GPUS, memory_of, resolve_mesh
from lamina.plan.records import Mesh, PlanOptions, RequestLine
from lamina.plan.request_lines import format_tokens, parse_contexts, parse_requests, parse_tokens
from lamina.plan.what_if import parse_changes, parse_share


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("1000000", 10**6), ("1K", 1024), ("128k", 131_072), ("1M", 1_048_576), (" 2m ", 2_097_152), ("1", 1)],
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "0", "0K", "-1", "1e6", "1.5K", "1_000", "1,000", "1G", "1MiB", "K", "x", "٤", "1 K", "9" * 13, "9" * 5000, "\0"]
)
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match=r"128K \(= 131072\) or 1M \(= 1048576\)"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("tokens", "text"), [(1, "1"), (1024, "1K"), (1000, "1,000"), (131_072, "128K"), (1_048_576, "1M"), (1_049_600, "1,025K")]
)
def test_tokens_in_short(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


def test_request_lines() -> None:
    assert parse_requests("1x1M,256x4K") == (RequestLine(1, 1 << 20), RequestLine(256, 4096))
    assert parse_requests(" 3X100 ") == (RequestLine(3, 100),)
    assert parse_contexts("1K,100") == (1024, 100)


@pytest.mark.parametrize("text", ["", "4K", "0x4K", "x4K", "4x", "4x0", "4x1e6", "1x1M,", "-1x4K", "4 x 4K", "4x4Kx2", "1.5x4K"])
def test_what_is_no_request_line(text: str) -> None:
    with pytest.raises(ConfigError, match="requests"):
        parse_requests(text)


def test_gpus_have_the_memory_that_cuda_reports() -> None:
    assert memory_of(PlanOptions()) is None
    assert memory_of(PlanOptions(memory_bytes=5)) == 5
    assert memory_of(PlanOptions(gpu="H200")) == int(139.8 * GiB)
    assert memory_of(PlanOptions(gpu="rtx_pro_6000")) == int(94.97 * GiB)
    # names with a size in them have less than it in GiB, and more than 95 % of it
    for name, size in (("a100-80g", 80), ("a100-40g", 40)):
        assert 0.95 * size < GPUS[name] < size
    with pytest.raises(ConfigError, match=r"one of a100-40g, .*h200.*141GB"):
        memory_of(PlanOptions(gpu="h300"))
    with pytest.raises(ConfigError, match="memory"):
        memory_of(PlanOptions(gpu="h200", memory_bytes=5))


@pytest.mark.parametrize(
    ("asked", "mesh"),
    [
        ({}, Mesh(1, 1, 1)),
        ({"gpus": 8}, Mesh(8, 8, 1)),
        ({"gpus": 8, "dp": 8}, Mesh(8, 1, 8)),
        ({"gpus": 8, "tp": 2}, Mesh(8, 2, 4)),
        ({"tp": 2, "dp": 3}, Mesh(6, 2, 3)),
        ({"tp": 4}, Mesh(4, 4, 1)),
        ({"dp": 4}, Mesh(4, 1, 4)),
        ({"ep": 8}, Mesh(8, 8, 1, 8)),
        ({"gpus": 8, "dp": 8, "ep": 8}, Mesh(8, 1, 8, 8)),
        ({"gpus": 8, "tp": 8, "ep": 2}, Mesh(8, 8, 1, 2)),
    ],
)
def test_meshes(asked: dict[str, int], mesh: Mesh) -> None:
    assert resolve_mesh(PlanOptions(**asked)) == mesh


def test_experts_are_divided_over_the_larger_group() -> None:
    assert Mesh(8, 8, 1).expert_ways == 8  # cut by tensor parallelism
    assert Mesh(8, 1, 8).expert_ways == 1  # every replica has all of them
    assert Mesh(8, 1, 8, 8).expert_ways == 8  # spread over the replicas
    assert Mesh(8, 8, 1, 2).expert_ways == 8  # 2 groups of experts, each expert cut over 4 GPUs


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"gpus": 0}, "gpus=0"), ({"tp": -1}, "tp=-1"), ({"gpus": 8, "tp": 3}, "gpus=8"),
        ({"gpus": 8, "tp": 2, "dp": 2}, "gpus=8"),
        ({"gpus": 8, "ep": 3}, "ep=3.*one of 1, 2, 4, 8"), ({"gpus": 6, "tp": 2, "ep": 3}, "ep=3.*one of 1, 2, 6"),
        ({"gpus": 10**6}, "gpus"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(asked: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        resolve_mesh(PlanOptions(**asked))


def test_changes() -> None:
    options = PlanOptions(gpu="h100")
    changes = parse_changes(["draft=3,cache-format=bf16", "--tp=2", " block_tokens = 1K ", "memory=141GB", "gpu=b200"])
    assert [change.text for change in changes[:3]] == ["draft=3", "cache-format=bf16", "tp=2"]
    for change in changes:
        options = change.apply(options)
    assert options == PlanOptions(gpu="b200", draft_tokens=3, cache_format="bf16", tp=2, block_tokens=1024)
    assert parse_changes(["memory=141GB"])[0].apply(PlanOptions(gpu="h100")).memory_bytes == 141 * 10**9


@pytest.mark.parametrize(
    "text", ["", "draft", "draft=", "=3", "layers=3", "draft=3,", "draft=-1", "draft=1e3", "index-format=fp2"]
)
def test_what_is_no_change(text: str) -> None:
    with pytest.raises(ConfigError, match=r"what-if|draft|index-format"):
        parse_changes([text])[0].apply(PlanOptions())


@pytest.mark.parametrize("text", ["0", "1.01", "-0.5", "nan", "inf", "x", "", "1e-400000000000"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ConfigError, match="gpu-memory-utilization"):
        parse_share(text, "gpu-memory-utilization")
