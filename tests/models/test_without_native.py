"""Models without the C kernels: a few that run every definition which stands in for one."""

import os
import subprocess
import sys
from pathlib import Path

NAMES = ("gemma3", "bamba")


def test_answers_are_those_of_transformers() -> None:
    """One process in which LAMINA_NATIVE=0; scores of all positions, and greedy tokens."""
    path = Path(__file__).parent / "test_families.py"
    tests = [f"{path}::test_scores_and_tokens_are_those_of_transformers[{name}]" for name in NAMES]
    line = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", *tests]
    environment = {**os.environ, "LAMINA_NATIVE": "0"}
    done = subprocess.run(line, env=environment, cwd=path.parents[2], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and f"{len(NAMES)} passed" in done.stdout, (done.stdout + done.stderr)[-3000:]
