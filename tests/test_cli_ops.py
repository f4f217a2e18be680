"""`lamina ops` and `lamina warmup` on a machine without a GPU: what is chosen, and every refusal in one line."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from lamina.base.config import EngineConfig
from lamina.cli import main, warmup
from lamina.engine.engine import Engine
from lamina.models.families import NETWORKS
from lamina.models.implementations import (
    Choice,
    Row,
    dims_of,
    implementations,
    machine_named,
    network_rows,
    refusals,
    shipped_values,
)
from lamina.models.network import Branch
from lamina.ops.catalog import DEFINITION, catalog
from lamina.ops.machine import Machine

FLASH = Path(__file__).parent / "configs" / "deepseek-v4-flash.json"
PRO = Path(__file__).parent / "configs" / "deepseek-v4-pro.json"
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
OPS = {
    "gemm", "gemm, many rows", "hyper", "rope_norm", "store", "compress", "index_topk", "attend", "route", "experts", "sample",
    "move",
}  # fmt: skip
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
Capture = pytest.CaptureFixture[str]


def listed(capsys: Capture, *args: str) -> tuple[int, dict[str, list[dict[str, object]]]]:
    """Exit code and rows by op."""
    code = main(["ops", *args, "--json"])
    found: dict[str, list[dict[str, object]]] = {}
    for row in json.loads(capsys.readouterr().out)["rows"]:
        found.setdefault(row["op"], []).append(row)
    return code, found


def chosen(rows: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """The implementation that is chosen of each op that has one."""
    return {op: row["implementation"] for op, own in rows.items() for row in own if row["is_chosen"]}


def test_a_cpu_runs_the_definitions(capsys: Capture) -> None:
    code, rows = listed(capsys, "--device", "cpu")
    assert code == 0 and set(rows) == OPS
    assert chosen(rows) == dict.fromkeys(OPS, DEFINITION)
    assert all(row["why_not"] for own in rows.values() for row in own if not row["is_chosen"])


@needs_triton
@pytest.mark.parametrize("config", [FLASH, PRO])
def test_hopper_runs_kernels_for_everything(config: Path, capsys: Capture) -> None:
    code, rows = listed(capsys, str(config), "--capability", "9.0")
    assert code == 0 and set(chosen(rows)) == OPS and DEFINITION not in chosen(rows).values()
    assert chosen(rows)["experts"] == "gluon, fp4" and chosen(rows)["gemm"] == "triton, fp8 rows"
    assert chosen(rows)["gemm, many rows"] == "gluon, fp8 rows"
    for own in rows.values():
        assert sum(bool(row["is_chosen"]) for row in own) == 1
        assert all(bool(row["why_not"]) != row["is_chosen"] for row in own)


@needs_triton
def test_what_each_choice_changes(capsys: Capture) -> None:
    for args, op, name in (
        (("--capability", "9.0", "--kernels", "portable"), "experts", "triton, fp4"),
        (("--capability", "9.0", "--kernels", "portable"), "gemm, many rows", "triton, fp8 rows"),
        (("--capability", "12.0"), "experts", "triton, fp4"),
        (("--capability", "8.0"), "gemm", "triton, bf16 rows"),
        (("--capability", "9.0", "--activation-format", "bf16"), "gemm", "triton, bf16 rows"),
        (("--capability", "9.0", "--dtype", "fp32"), "gemm", "triton, fp32 rows"),
        (("--capability", "9.0", "--dtype", "fp32"), "experts", "triton, any format"),
    ):
        code, rows = listed(capsys, *args)
        assert code == 0 and chosen(rows)[op] == name, args


@needs_triton
def test_an_old_gpu_is_refused_op_by_op(capsys: Capture) -> None:
    assert main(["ops", "--capability", "7.5"]) == 1
    printed = capsys.readouterr().out
    assert "no implementation serves attend: needs compute capability 8.0, this GPU has 7.5" in printed
    assert "sample" in printed


def test_without_triton_every_kernel_says_so() -> None:
    machine = Machine("cuda", HOPPER, has_triton=False)
    rows = implementations(shipped_values(), machine, Choice())
    assert not any(row.is_chosen for row in rows)
    assert refusals(rows) == tuple(f"{op}: Triton is not installed" for op in dict.fromkeys(row.op for row in rows))


@needs_triton
def test_dims_that_no_kernel_takes_have_their_reason() -> None:
    machine = machine_named("cuda", AMPERE)
    dims = dims_of(shipped_values(), machine, Choice())
    assert refusals(catalog(machine, dims)) == ()
    (problem,) = refusals(catalog(machine, replace(dims, top_k=4096)))
    assert problem.startswith("index_topk: ") and "4096" in problem
    assert "index_topk" not in {row.op for row in catalog(machine, replace(dims, index_heads=0))}


@needs_triton
def test_a_checkpoint_directory(tiny_of: Callable[[str, str], Path], capsys: Capture) -> None:
    code, rows = listed(capsys, str(tiny_of("flash", "official")), "--capability", "9.0")
    # one block of columns alone is not for the kernels in Gluon
    assert code == 0 and chosen(rows)["experts"] == "triton, fp4"
    code, rows = listed(capsys, str(tiny_of("flash", "transformers")), "--capability", "9.0")
    assert code == 0 and chosen(rows)["experts"] == "triton, any format" and chosen(rows)["gemm"] == "triton, bf16 rows"


def test_families_given_as_networks(capsys: Capture) -> None:
    """A row or two for each kind of part; on a CPU the definitions serve."""
    assert main(["ops", str(FLASH.parent / "jamba-1.5-mini.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ops = ["residual and norms", "scan, by channel", "MLP", "experts", "attention"]
    assert [row["op"] for row in found["rows"] if row["is_chosen"]] == ops
    assert {row["implementation"] for row in found["rows"] if row["is_chosen"]} == {"reference"} and not found["problems"]


class Strange:
    """A kind of part that has no GPU kernels."""


@needs_triton
def test_a_cpu_does_not_claim_gpu_kernels_that_there_are_not(capsys: Capture) -> None:
    """A part that no GPU kernel serves says so on a CPU too; one that a GPU would serve names the GPU."""
    rows = implementations(json.loads((FLASH.parent / "jamba-1.5-mini.json").read_text()), machine_named("cpu"), Choice())
    assert {row.why_not for row in rows if row.implementation == "triton"} == {"for NVIDIA GPUs, this is a CPU"}
    lonely = Row("Strange", "triton", "not on a CPU; on a GPU: Strange layers have no GPU kernels yet")
    network = NETWORKS["llama"](json.loads((FLASH.parent / "llama-3.1-8b.json").read_text()))
    odd = replace(network, layers=(*network.layers, (Branch(Strange(), None),)))
    assert lonely in tuple(network_rows(odd, machine_named("cpu")))
    assert main(["ops", str(FLASH.parent / "llama-3.1-8b.json"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "attention" in printed and "Mlp" not in printed and "C kernels" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("ops", "--capability", "nine"), "two numbers such as 9.0"),
        (("ops", "--device", "cpu", "--capability", "9.0"), "left out for --device cpu"),
        (("ops", "--max-model-len", "0"), "at least 1"),
        (("ops", "no-such-model"), "a config.json"),
        (("ops", str(FLASH.parent / "ministral-3-8b.json")), "weight_block_size"),
        (("ops", "--capability", "９.０"), "two numbers such as 9.0"),
        (("warmup", str(FLASH.parent), "--device", "cpu"), "nothing is compiled for a CPU"),
    ],
    ids=str,
)
def test_errors_are_one_line(args: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert main(list(args)) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("error: ") and words in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to warm up")
def test_warming_up_without_a_gpu(tiny_of: Callable[[str, str], Path], capsys: Capture) -> None:
    assert main(["warmup", str(tiny_of("flash", "official"))]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "cuda" not in printed.err
    assert printed.err.startswith("error: warmup compiles kernels for an NVIDIA GPU: there is none here, torch ")


def test_the_made_up_requests_are_served(tiny_of: Callable[[str, str], Path]) -> None:
    """On a CPU, where they compile nothing: none is refused, all end, and nothing of them stays."""
    engine = Engine(EngineConfig(str(tiny_of("flash", "official")), cache_bytes="64MiB", max_step_tokens=40))
    wanted = warmup.made_up_requests(engine.vocab_size, 40)
    assert {len(prompts[0]) for prompts, _ in wanted} >= {1, 2, 4, 8, 16, 32, 40}
    steps: list[int] = []
    engine.on_computed = lambda step: steps.append(step.num_tokens)
    with Progress(disable=True) as bar:
        warmup.serve_all(engine, bar)
    assert max(steps) == 40 and not engine.has_work
    assert engine.ledger.free_pages == engine.num_pages


@needs_triton
def test_compilations_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled for a GPU that is not here: once from its source, then from the cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lamina.models.implementations import cache_directory, watch_compilations
    from lamina.ops.move import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cache_directory() == str(tmp_path)
    kernel = kernels.move
    constants = {name: value for name, value in (("WORD", 16), ("SIZE", 256)) if name in kernel.arg_names}
    types = {name: "constexpr" if name in constants else "i32" if name.startswith("num") else "*i32" for name in kernel.arg_names}

    def compile_once() -> None:
        triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))

    with watch_compilations() as seen:
        compile_once()
        compile_once()
    compile_once()
    assert [(name, cached) for name, _, cached in seen] == [("move", False), ("move", True)]
    assert seen[0][1] > 0
