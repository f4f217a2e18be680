"""A process in which Triton's interpreter runs test files, each in a fork that finds PyTorch and Triton imported.

    python interpreter.py      a line "LOG <tab> FILE <tab> MARKS" in, the exit code of the file's tests out

Of each file only the tests run that are skipped elsewhere, for want of a GPU, and whose marks are MARKS: "long", "not long".
"""

import os
import sys
from pathlib import Path

#: why a test is skipped in the process that has no interpreter
REASON = "runs in the process that test_interpreted starts"
ROOT = Path(__file__).resolve().parents[2]


def run(log: str, file: str, marks: str) -> int:
    """The exit code of pytest in a fork; what it prints is in `log`."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        arguments = ["-o", "addopts=--import-mode=importlib -p no:cacheprovider", "-m", marks, file]
        code = int(pytest.main(arguments, plugins=[OnlyKernels()]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


class OnlyKernels:
    """Leaves out what runs without the interpreter too."""

    def pytest_collection_modifyitems(self, config: "pytest.Config", items: "list[pytest.Item]") -> None:
        """Deselects all but the tests marked with REASON."""
        chosen = [item for item in items if any(mark.kwargs.get("reason") == REASON for mark in item.iter_markers("skipif"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import pytest
    import torch
    import triton.language  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(run(*line.rstrip("\n").split("\t")), file=answers)
