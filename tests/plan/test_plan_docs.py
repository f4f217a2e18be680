"""docs/plan.md shows what the command prints, and names every field of its JSON."""

import json
import re
from pathlib import Path

import pytest

from lamina.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_example_is_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = re.findall(r"```\n\$ lamina (plan tests/configs/[^\n]*)\n(.*?)```", TEXT, re.S)[0]
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_every_field_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "tests" / "configs" / "deepseek-v4-pro.json"
    assert main(["plan", str(config), "--json", "--what-if", "draft=1", "--against", "vllm", "--requests", "1x1K"]) == 0
    found = json.loads(capsys.readouterr().out)
    named = set(re.findall(r"`(\w+)`", TEXT))
    lines = [name for key in ("memories", "weights", "workspace", "workloads") for name in found[key][0]]
    assert not {*found, *lines} - named
