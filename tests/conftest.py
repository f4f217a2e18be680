"""What several test files share: helper modules, random models on disk, and engines that run them.

Helper modules lie beside the tests and are loaded by path, because test folders are no packages.
"""

import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

_FOLDER = Path(__file__).parent


def load_helper(relative: str) -> ModuleType:
    """The module at `relative` under tests/, loaded once."""
    name = "lamina_tests_" + relative.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _FOLDER / relative)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --needs-all."""
    parser.addoption("--needs-all", action="store_true", help="fail if a test is skipped for a package that is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first, all in one worker and its one process with an interpreter; the other steals what is short."""
    items.sort(key=lambda item: not item.name.startswith("test_interpreted"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kernels run in the interpreter in two parts: what `make test` runs, and the long tests."""
    if "run_interpreted" in metafunc.fixturenames:
        parts = [pytest.param("not long", id="short"), pytest.param("long", marks=pytest.mark.long)]
        metafunc.parametrize("run_interpreted", parts, indirect=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With --needs-all: a test that was skipped because something is not installed is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--needs-all"):
        return
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)]
    if missing := sorted({reason for reason in reasons if re.search(r"not installed|could not import|No module named", reason)}):
        reporter.write_line("")
        for reason in missing:
            reporter.write_line(f"error: tests were skipped: {reason}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and two test workers would fight for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_models() -> ModuleType:
    """tests/models/random_models.py"""
    return load_helper("models/random_models.py")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """tests/models/oracle.py"""
    return load_helper("models/oracle.py")


@pytest.fixture(scope="session")
def draft_oracle() -> ModuleType:
    """tests/models/draft_oracle.py"""
    return load_helper("models/draft_oracle.py")


@pytest.fixture(scope="session")
def driving() -> ModuleType:
    """tests/engine/driving.py"""
    return load_helper("engine/driving.py")


@pytest.fixture(scope="session")
def serving() -> ModuleType:
    """tests/server/serving.py"""
    return load_helper("server/serving.py")


@pytest.fixture(scope="session")
def rows() -> ModuleType:
    """tests/ops/rows.py"""
    return load_helper("ops/rows.py")


@pytest.fixture
def run_interpreted(request: pytest.FixtureRequest, interpreter: Callable[[str, str], None]) -> Callable[[str], None]:
    """run_interpreted(file): runs a file's tests of kernels in Triton's interpreter, the long ones or the others."""

    def run(file: str) -> None:
        interpreter(file, request.param)

    return run


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], None]]:
    """interpreter(file, "long" or "not long"): runs those tests of kernels in Triton's interpreter; fails as they fail.

    One process for all files (tests/ops/interpreter.py): importing PyTorch and Triton takes longer than many of them.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    logs = tmp_path_factory.mktemp("interpreted")
    process: subprocess.Popen[str] | None = None

    def run(file: str, part: str, timeout_s: float = 900) -> None:
        nonlocal process
        if process is None:
            command = [sys.executable, str(_FOLDER / "ops" / "interpreter.py")]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert process.stdin is not None and process.stdout is not None
        log = logs / f"{Path(file).stem}-{part.replace(' ', '-')}.log"
        process.stdin.write(f"{log}\t{file}\t{part}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.stdout.readline()
        text = log.read_text(errors="replace") if log.exists() else ""
        if part == "long" and code == f"{int(pytest.ExitCode.NO_TESTS_COLLECTED)}\n":
            return  # none of this file's is long
        assert code == "0\n", f"exit code {code.strip() or 'none'}\n{text[-6000:]}"
        assert " passed" in text

    yield run
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="session")
def checkpoint_of(random_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a named random model, written on first use."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            random_models.build(random_models.RECIPES[name]).save_pretrained(made[name])
        return made[name]

    return find


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The directory of a tiny checkpoint, by shape and file format, written on first use; it has a tokenizer."""
    from lamina.models.tiny import write_tiny

    made: dict[tuple[str, str], Path] = {}

    def find(shape: str, file_format: str) -> Path:
        key = (shape, file_format)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("-".join(key))
            write_tiny(made[key], shape, 1, file_format)
        return made[key]

    return find
