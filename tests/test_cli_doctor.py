"""`lamina doctor` as a user starts it: what is printed, exit codes, and the machine it asks."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import lamina
from lamina.cli import machine as machine_module
from lamina.cli import main, make_parser
from lamina.cli.machine import probe_machine
from lamina.plan.doctor import Machine

ROOT = Path(__file__).resolve().parent.parent
TinyOf = Callable[[str, str], Path]
_KEYS = {"verdict", "reasons", "limits", "machine", "model"}


@pytest.fixture(autouse=True)
def no_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No nvidia-smi but what a test puts into this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def doctor(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """(exit code, stdout); nothing goes to stderr."""
    code = main(["doctor", *map(str, args)])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


def as_json(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, dict[str, object]]]:
    code, out = doctor(capsys, *args, "--json")
    whole = json.loads(out)
    assert set(whole) == _KEYS and out.count("\n") == 1
    assert (whole["verdict"], code) in (("yes", 0), ("no", 1)) and bool(whole["reasons"]) == bool(code)
    return code, whole


def test_as_a_program(tiny_of: TinyOf, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    good, bad = tiny_of("flash", "official"), tmp_path / "ärger"
    shutil.copytree(good, bad)
    (bad / "model.safetensors").unlink()
    cases = ((good, 0, f"yes  {good.name} runs here, with 1 limit"), (bad, 1, "no   ?rger does not run here"))
    for directory, code, first in cases:
        command = [sys.executable, "-m", "lamina", "doctor", str(directory)]
        done = subprocess.run(command, env=env, capture_output=True, encoding="ascii", timeout=120)
        assert (done.returncode, done.stderr) == (code, "") and done.stdout.splitlines()[0] == first


def test_a_checkpoint_that_runs(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_of("flash", "official")
    code, out = doctor(capsys, directory)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == f"yes  {directory.name} runs here, with 1 limit"
    rows = {line.split()[0]: line for line in lines if line and not line.startswith((" ", "yes"))}
    assert list(rows) == ["model", "files", "tensors", "weights", "cache", "tokenizer", "machine", "GPU", "software"]
    assert "deepseek_v4 (runs)" in rows["model"] and "1 file, 504 tensors" in rows["files"]
    assert "1,024 tokens" in rows["tokenizer"] and f"torch {torch.__version__}" in rows["software"]
    assert "1.00 GiB (fp8 entries, fp4 index) holds 7 x 1,048,576 or " in rows["cache"]
    assert all(len(line) <= 130 for line in lines)


def test_formats_and_sizes_count(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_of("flash", "official")
    most = []
    for options in (["--cache-format", "fp8"], ["--cache-format", "bf16"], ["--cache-format", "fp32", "--index-format", "fp32"]):
        _, whole = as_json(capsys, directory, "--cache-bytes", "8MiB", *options)
        capacity = whole["model"]["capacity"]
        assert isinstance(capacity, dict) and capacity["cache_bytes"] == 8 << 20
        most.append(capacity["most_tokens"])
        engine = lamina.LLM(
            directory, cache_bytes="8MiB", cache_format=options[1], index_format=options[3] if len(options) > 2 else "fp4"
        ).engine
        assert most[-1] == engine.max_model_len
    assert most[0] > most[1] > most[2] > 0


def test_json_has_everything(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, whole = as_json(capsys)
    assert code == 0 and whole["model"] is None
    assert set(whole["machine"]) == {one.name for one in fields(Machine)}
    assert whole["machine"]["lamina"] == lamina.__version__ and whole["machine"]["torch"] == torch.__version__
    code, whole = as_json(capsys, tiny_of("pro", "transformers"))
    model = whole["model"]
    assert code == 0 and model["runs"] is True and model["tensors"]["missing"] == 0  # type: ignore[index]
    code, whole = as_json(capsys, tmp_path)
    assert code == 1 and whole["model"]["tensors"] is None


def test_many_reasons_are_cut_short_but_not_in_json(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(tiny_of("flash", "official"), directory)
    (directory / "model.safetensors").unlink()
    for index in range(30):
        (directory / f"m-{index:02d}.safetensors").write_bytes(b"\0")
    listed = {f"t{index}": f"m-{index:02d}.safetensors" for index in range(30)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    code, out = doctor(capsys, directory)
    assert code == 1 and out.count("  x ") == 13 and "and 18 more reasons (--json has them all)" in out
    _, whole = as_json(capsys, directory)
    assert len(whole["reasons"]) == 30


def test_nothing_in_a_checkpoint_is_markup(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "[bold red]x[bold]"
    shutil.copytree(tiny_of("flash", "official"), directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "[link=http://a]b[/link]\x1b[2J"}))
    code, out = doctor(capsys, directory)
    assert (
        code == 1 and "no   [bold red]x[bold] does not run here" in out and "[link=http://a]b[/link]" in out and "\x1b" not in out
    )


def test_tokenizers_that_the_engine_refuses(tiny_of: TinyOf, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(tiny_of("flash", "official"), directory)
    (directory / "tokenizer.json").write_text("{}")
    code, out = doctor(capsys, directory)
    assert code == 1 and "x tokenizer=" in out
    (directory / "tokenizer.json").unlink()
    code, out = doctor(capsys, directory)
    assert code == 0 and "no tokenizer.json: prompts must be token ids" in out
    os.truncate(_touched(directory / "tokenizer.json"), 1 << 33)  # 8 GiB of nothing
    code, out = doctor(capsys, directory)
    assert code == 1 and "tokenizer.json is larger than 256.00 MiB" in out


def _touched(path: Path) -> Path:
    path.touch()
    return path


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("much", "0", "-1GiB"):
        assert main(["doctor", f"--cache-bytes={size}"]) == 1
        assert capsys.readouterr().err.startswith("error: cache_bytes=")
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--cache-format", "fp16"])
    assert caught.value.code == 2
    help_text = make_parser().format_help()
    assert "doctor" in help_text


# The machine -------------------------------------------------------------------------------------------------------------


def smi(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_this_machine() -> None:
    machine = probe_machine()
    assert machine.cores == len(os.sched_getaffinity(0)) and machine.devices == ("cpu",)
    assert machine.memory_bytes is not None and machine.available_bytes is not None
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.torch == torch.__version__ and machine.torch_problem is None
    assert len(machine.gpus) == torch.cuda.device_count() if torch.cuda.is_available() else machine.gpus == ()


def test_what_nvidia_smi_says(no_smi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(no_smi, "echo 'NVIDIA H200, 143771, 523, 9.0, 570.172.08'; echo 'NVIDIA H200, 143771, 523, 9.0, 570.172.08'")
    first, second = probe_machine().gpus
    assert first == second and (first.name, first.compute_capability, first.driver) == ("NVIDIA H200", "9.0", "570.172.08")
    assert (first.memory_bytes, first.used_bytes, first.torch) == (143_771 << 20, 523 << 20, False)
    code, out = doctor(capsys)
    assert code == 0
    assert "2 x NVIDIA H200, 140.40 GiB (523.00 MiB used), compute 9.0, driver 570.172.08" in " ".join(out.split())
    assert "2 GPUs would stay idle" in out and ("built for the CPU" in out) == (torch.version.cuda is None)
    smi(no_smi, "echo 'NVIDIA GB10, [N/A], [N/A], 12.1, 580.95'")
    (only,) = probe_machine().gpus
    assert (only.name, only.memory_bytes, only.used_bytes) == ("NVIDIA GB10", None, None)


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "echo 'a, b'",
        "printf '\\377\\376, 1\\n\\n,,,,\\n'",
        "kill -9 $$",
        "exec /absent",
    ],
)
def test_a_driver_that_does_not_answer(no_smi: Path, script: str) -> None:
    smi(no_smi, script)
    assert probe_machine().gpus == ()


def test_a_driver_that_hangs(no_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = shutil.which("sleep", path="/usr/bin:/bin")
    smi(no_smi, f"exec {sleep} 60")
    monkeypatch.setattr(machine_module, "_SMI_SECONDS", 0.2)
    assert probe_machine().gpus == ()


def test_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_of: TinyOf
) -> None:
    directory = tiny_of("flash", "official")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out = doctor(capsys, directory)
    assert code == 1 and "x torch cannot be imported: ModuleNotFoundError" in out and "torch missing" in out
    assert "all 417 needed are right" in out  # the checkpoint is judged without torch
