"""`lamina plan` as a user types it: tables that add up, one JSON object, comparisons, simulations, and errors of one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.cli import main
from lamina.models.tiny import write_tiny

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = Path(__file__).parent / "configs"
PRO, FLASH, GEMMA = (str(CONFIGS / f"{name}.json") for name in ("deepseek-v4-pro", "deepseek-v4-flash-0731", "gemma-3-27b"))

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *args: str) -> str:
    """What the command prints; it must succeed and say nothing else."""
    capsys.readouterr()
    assert main(["plan", *args]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def json_of(capsys: Capture, *args: str) -> dict[str, object]:
    text = plan(capsys, *args, "--json")
    assert text.count("\n") == 1
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, dict)
    return found


# Tables --------------------------------------------------------------------------------------------------------------


def test_the_table_answers_why_so_few_tokens(capsys: Capture) -> None:
    text = plan(capsys, PRO, "--cache-bytes", "26.09GiB")
    assert "window          61      584 B           -           -     4.35 MiB  the last 128 tokens" in text
    assert "584 B  fp8: 448 e4m3 nope + 64 bf16 rope + 8 e8m0 scale  (window, c128, c4)" in text
    assert "page        1.23 MiB (1,291,520 B): one block of 256 tokens, all logs of all layers" in text
    assert "slot        5 pages (6.16 MiB) for each running request" in text and "checkpoint  4-5 pages" in text
    assert re.search(r"^ +21,690 pages  = 21,690 blocks or 4,338 slots *$", text, re.M)
    # 9 pages of 1,291,520 B: 4 of log, 5 of slot; 21,690 / 9, and / 13 with a checkpoint of 4 pages
    assert re.search(r"^ +1K +4\.93 MiB +6\.16 MiB +11\.09 MiB +14\.5% +0\.0% +14\.4% +0\.1% +2,410 +1,668 +slots *$", text, re.M)
    assert re.search(r"^ +1M +4\.93 GiB +6\.16 MiB +4\.93 GiB +0\.3% .* +5 +5 +log *$", text, re.M)
    assert "A request of 1K tokens takes 9 pages: 4 of log and 5 of slot." in text
    assert re.search(r"^weights +792\.32 GiB +792\.32 GiB  calculated from the config", text, re.M)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_family_fits_on_a_page_of_100_columns(path: Path, capsys: Capture) -> None:
    text = plan(capsys, str(path), "--gpu", "h200", "--gpus", "2", "--requests", "2x1K")
    tables = [line for line in text.splitlines() if not line.startswith(("note: ", *"0123456789 ")) and " B  " not in line]
    assert max(map(len, tables)) <= 100
    assert "…" not in text and "nan" not in text and "inf" not in text.replace("info", "")
    for heading in ("what a request remembers", "memory of one GPU", "requests"):
        assert re.search(rf"^{heading}", text, re.M)


def test_budget_lines_add_up(capsys: Capture) -> None:
    found = json_of(capsys, PRO, "--gpu", "h200", "--gpus", "8", "--ep", "8", "--gpu-memory-utilization", "0.85")
    gpu = found["gpu"]
    assert gpu["usable_bytes"] == gpu["memory_bytes"] * 85 // 100 and gpu["name"] == "h200"
    assert gpu["weights_bytes"] == sum(line["gpu_bytes"] for line in found["weights"])
    assert gpu["workspace_bytes"] == sum(line["bytes"] for line in found["workspace"])
    assert found["pool_bytes"] == gpu["usable_bytes"] - gpu["weights_bytes"] - gpu["workspace_bytes"]
    assert found["pages"] == found["blocks"] == found["pool_bytes"] // found["page_bytes"]
    assert found["options"]["tp"] == 8 and found["options"]["ep"] == 8


def test_too_large_a_model_says_what_would_do(capsys: Capture) -> None:
    text = plan(capsys, PRO, "--gpu", "l40s")
    missing = re.search(
        r"does not fit: [\d.]+ GiB are missing on each GPU; (\d+) GPUs of this kind would do \(--tp (\d+)\)", text
    )
    assert missing is not None and missing.group(1) == missing.group(2)
    enough = json_of(capsys, PRO, "--gpu", "l40s", "--gpus", missing.group(1))
    assert enough["workloads"][0]["fits"] > 0
    found = json_of(capsys, PRO, "--gpu", "l40s")
    assert found["pool_bytes"] == 0 and found["gpu"]["gpus_needed"] == int(missing.group(1))
    assert [line["fits"] for line in found["workloads"]] == [0] * 5


def test_without_a_memory_nothing_fits_or_fails(capsys: Capture) -> None:
    found = json_of(capsys, GEMMA)
    assert found["gpu"] is found["pool_bytes"] is found["pages"] is None
    assert [line["fits"] for line in found["workloads"]] == [None] * 4  # 1K to 128K, the model's maximum
    assert "Name a GPU" in plan(capsys, GEMMA)


def test_lines_of_requests(capsys: Capture) -> None:
    found = json_of(capsys, PRO, "--cache-bytes", "26.09GiB", "--requests", "1x1M,256x4K")
    assert [(line["requests"], line["context"]) for line in found["workloads"]] == [(1, 2**20), (256, 4096)]
    # 4,101 + 256 x 21 pages of 21,690
    assert found["together"] == {"pages": 9_477, "pool_pages": 21_690, "fits": True}
    assert "All lines together need 9,477 pages, 11.40 GiB; the pool has 21,690 pages: they fit." in plan(
        capsys, PRO, "--cache-bytes", "26.09GiB", "--requests", "1x1M,256x4K"
    )
    assert "do NOT fit" in plan(capsys, PRO, "--cache-bytes", "26.09GiB", "--requests", "6x1M")


def test_sizes_and_tokens_in_all_spellings(capsys: Capture) -> None:
    one = json_of(capsys, PRO, "--memory", "141GB", "--context", "128K")
    assert one["gpu"]["memory_bytes"] == 141 * 10**9
    assert json_of(capsys, PRO, "--memory", "141000000000", "--context", "131072") == one
    blocks = json_of(capsys, PRO, "--block-tokens", "1K")
    assert blocks["block_tokens"] == 1024 and blocks["page_bytes"] > 3 * one["page_bytes"]


def test_a_checkpoint_directory_counts_exactly(tmp_path: Path, capsys: Capture) -> None:
    write_tiny(tmp_path / "tiny", "pro")
    file = tmp_path / "tiny" / "model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    found = json_of(capsys, str(tmp_path / "tiny"))
    assert found["weights_are_exact"] is True and found["weights_bytes"] == file.stat().st_size - 8 - header
    assert "from the headers of its files" in plan(capsys, str(tmp_path / "tiny"))


# Comparisons ---------------------------------------------------------------------------------------------------------


def test_two_plans_from_their_json(tmp_path: Path, capsys: Capture) -> None:
    common = (FLASH, "--requests", "8192x1K")
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text(plan(capsys, *common, "--json"))
    two.write_text(plan(capsys, *common, "--draft", "3", "--json"))
    text = plan(capsys, str(one), "--diff", str(two))
    # 8,192 requests x 3 stages x 131 rows x 584 B
    assert "+1.75 GiB at 8,192 x 1K: draft_window: new: 3 layers of 584 B (fp8), the last 128 tokens" in text
    assert "draft: 0 -> 3" in text
    found = json_of(capsys, str(one), "--diff", str(two))
    parts = {part["name"]: part["delta_bytes"] for part in found["workloads"][0]["parts"]}
    assert parts["draft_window"] == 8192 * 3 * 131 * 584 and sum(parts.values()) == found["workloads"][0]["delta_bytes"]
    # a config is planned with the options of the command line
    assert plan(capsys, str(one), "--diff", FLASH, "--requests", "8192x1K", "--draft", "3") == text


def test_what_if(capsys: Capture) -> None:
    base = (FLASH, "--memory", "400GB", "--context", "1M")
    found = json_of(capsys, *base, "--what-if", "draft=3,cache-format=bf16", "--what-if", "tp=2")
    steps = found["what_if"]
    assert [step["change"] for step in steps] == ["draft=3", "cache-format=bf16", "tp=2", "all 3 changes"]
    deltas = [step["workloads"][0]["delta_bytes"] for step in steps]
    assert sum(deltas[:3]) == deltas[3] and steps[0]["workloads"][0]["from_bytes"] == found["workloads"][0]["bytes_per_request"]
    changed = json_of(capsys, *base, "--draft", "3", "--cache-format", "bf16", "--tp", "2")
    assert steps[3]["workloads"][0]["to_bytes"] == changed["workloads"][0]["bytes_per_request"]
    assert steps[3]["workloads"][0]["to_fits"] == changed["workloads"][0]["fits"]
    text = plan(capsys, *base, "--what-if", "draft=3")
    assert "what if draft=3" in text and "weights: draft experts" in text and "all 1 changes" not in text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_against_another_engine(engine: str, capsys: Capture) -> None:
    args = (PRO, "--cache-bytes", "26.09GiB", "--context", "1K", "--against", engine)
    found = json_of(capsys, *args)
    assert found["against"]["rows"] and found["against"]["assumptions"]
    assert found["against"]["rows"][0]["ours"] == found["workloads"][0]["bytes_per_request"]
    assert "Assumptions:" in plan(capsys, *args)


# Workloads -----------------------------------------------------------------------------------------------------------


def test_a_mix_is_served_on_paper(capsys: Capture) -> None:
    args = (PRO, "--cache-bytes", "1GiB", "--context", "1K", "--mix", "chat", "--num-requests", "40", "--users", "4")
    one = json_of(capsys, *args, "--seed", "1")["simulation"]
    assert one["requests"] == one["finished"] == 40 and one["num_pages"] == 831  # 1 GiB / 1,291,520 B
    assert 1 <= one["peak_concurrency"] <= 4 and 0 < one["hit_rate"] < 1
    assert json_of(capsys, *args, "--seed", "1")["simulation"] == one
    assert json_of(capsys, *args, "--seed", "2")["simulation"] != one
    # ten times slower decodes: more of the same sessions meet
    slow = json_of(capsys, *args, "--seed", "1", "--decode-rate", "5")["simulation"]
    assert slow["mean_concurrency"] > one["mean_concurrency"]
    text = plan(capsys, *args, "--seed", "1", "--dp", "2")
    assert "40 of 40" in text and "runs on one of the 2 replicas" in text and max(map(len, text.splitlines())) <= 100


def test_a_trace_is_served_on_paper(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "trace.jsonl"
    # the same session twice: the second turn says again the 1,000 tokens and the 100 of the answer
    lines = [
        {"arrival": 0.0, "prompt_tokens": 1000, "output_tokens": 100, "session": "a", "turn": 0},
        {"arrival": 50.0, "prompt_tokens": 1200, "output_tokens": 10, "session": "a", "turn": 1},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json_of(capsys, PRO, "--cache-bytes", "1GiB", "--trace", str(file))["simulation"]
    assert found["requests"] == found["finished"] == 2 and found["peak_concurrency"] == 1
    # all but the last drawn token, whose state was never computed, is reused
    assert found["prompt_tokens"] == 2200 and found["hit_tokens"] == 1099
    file.write_text(json.dumps(lines[0]) + "\n" + '{"arrival": "soon"}\n')
    assert main(["plan", PRO, "--cache-bytes", "1GiB", "--trace", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: trace.jsonl") and printed.err.count("\n") == 1


# Output --------------------------------------------------------------------------------------------------------------


def start(*args: str, encoding: str = "utf-8") -> "subprocess.CompletedProcess[bytes]":
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, "-m", "lamina", *args], env=env, capture_output=True, timeout=120, cwd=ROOT)


def test_a_process_prints_tables_in_any_encoding() -> None:
    done = start("plan", PRO, encoding="ascii")
    assert done.returncode == 0 and done.stderr == b"" and b"what a request remembers" in done.stdout
    missing = start("plan", "no/such/config.json")
    assert missing.returncode == 1 and missing.stdout == b""
    assert missing.stderr.startswith(b"error: model='no/such/config.json' is not valid: ") and missing.stderr.count(b"\n") == 1


def test_a_page_beside_the_table(tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", PRO, "--cache-bytes", "1GiB", "--json", "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == "deepseek-v4-pro" and printed.err == f"wrote {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["plan", PRO, "--html", str(page), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_help_is_complete(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    for option in (
        "--gpu", "--memory", "--gpus", "--tp", "--ep", "--dp", "--cache-format", "--index-format", "--context", "--requests",
        "--block-tokens", "--draft", "--against", "--json", "--html", "--diff", "--what-if", "--trace", "--mix", "--cache-bytes",
        "--gpu-memory-utilization", "pool = memory x gpu-memory-utilization - weights - workspace", "Examples:",
    ):  # fmt: skip
        assert option in text
    assert max(map(len, text.splitlines())) <= 100


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "args", "expected"),
    [
        (1, ("PLAN",), "a plan can only be compared: --diff"),
        (1, (PRO, "--context", "1e6"), "context='1e6' is not valid: a whole number of tokens"),
        (1, (PRO, "--context", "2M"), "context=2097152 is not valid: from 1 to 1048576 tokens, the model's maximum"),
        (1, (PRO, "--requests", "4K"), "COUNTxTOKENS"),
        (1, (PRO, "--gpu", "h300"), "one of a100-40g"),
        (1, (PRO, "--gpu", "h200", "--memory", "1GB"), "memory"),
        (1, (GEMMA, "--gpu", "h100", "--gpus", "3"), "gpus=3 is not valid: a divisor of num_attention_heads (32)"),
        (1, (GEMMA, "--gpu", "h100", "--tp", "3"), "tp=3 is not valid"),
        (1, (PRO, "--gpus", "8", "--tp", "3"), "gpus=8 is not valid: a multiple of tp x dp = 3"),
        (1, (PRO, "--draft", "8"), "draft=8 is not valid: an integer from 0 to 7"),
        (1, (PRO, "--block-tokens", "100"), "a multiple of 128"),
        (1, (PRO, "--cache-bytes", "lots"), "cache-bytes='lots' is not valid"),
        (1, (PRO, "--memory", "0GB"), "memory='0GB' is not valid"),
        (1, (PRO, "--gpu-memory-utilization", "2"), "gpu-memory-utilization='2' is not valid"),
        (1, (PRO, "--what-if", "layers=3"), "what-if='layers=3' is not valid"),
        (1, (PRO, "--what-if", "block-tokens=100"), "a multiple of 128"),
        (1, (PRO, "--mix", "chat"), "where the weights leave a pool"),
        (1, (PRO, "--mix", "chat", "--trace", "x"), "left out where --trace is given"),
        (1, (PRO, "--memory", "80"), "with its unit: 80GB"),
        (1, (PRO, "--cache-bytes", "1GiB", "--html", PRO), "another file than model"),
        (1, (PRO, "--cache-bytes", "1GiB", "--trace", "/dev/zero"), "a regular file"),
        (1, (PRO, "--cache-bytes", "1GiB", "--mix", "chat", "--num-requests", "99999999999"), "from 1 to 10,000,000"),
        (1, (PRO, "--cache-bytes", "1GiB", "--mix", "chat", "--users", "99999999999"), "from 1 to 100,000"),
        (1, (PRO, "--cache-bytes", "1GiB", "--mix", "chat", "--decode-rate", "1e308"), "tokens/s, from 1e-6 to 1e12"),
        (1, (PRO, "--diff", "x", "--html", "y"), "left out where --diff is given"),
        (1, (PRO, "--diff", "missing.json"), "model='missing.json' is not valid"),
        (1, (PRO, "--html", "no/such/folder/page.html"), "html"),
        (1, (PRO, "--cache-bytes", "1GiB", "--trace", "missing.jsonl"), "missing.jsonl"),
        (2, (PRO, "--gpus", "two"), "argument --gpus: invalid int value: 'two'"),
        (2, (PRO, "--against", "other"), "argument --against: invalid choice: 'other'"),
        (2, (PRO, "--cache-format", "fp7"), "argument --cache-format: invalid choice: 'fp7'"),
        (2, (), "the following arguments are required: CONFIG_OR_DIR"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_an_error_is_one_line(
    code: int, args: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    if "PLAN" in args:
        Path("plan.json").write_text(plan(capsys, PRO, "--json"))
        args = ("plan.json",)
    capsys.readouterr()
    try:
        found = main(["plan", *args])
    except SystemExit as exit_code:
        found = int(str(exit_code.code))
    printed = capsys.readouterr()
    assert found == code and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and expected in printed.err, printed.err
