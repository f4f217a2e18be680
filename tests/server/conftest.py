"""Servers for the tests of this folder: real processes, real HTTP, the tiny model."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

_NAME = "lamina_tests_server_serving"


def _load() -> ModuleType:
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parent / "serving.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[_NAME]


@pytest.fixture(scope="session")
def serving() -> ModuleType:
    """tests/server/serving.py"""
    return _load()


@pytest.fixture(scope="session")
def server(tiny_of: Callable[[str, str], Path], serving: ModuleType) -> Iterator[object]:
    """A server of the tiny flash model, one for all tests that only ask it something. See serving.Served."""
    served = serving.start(tiny_of("flash", "official"), "--cache-bytes", "64MiB", "--served-model-name", "tiny")
    yield served
    assert served.stop() == 0, served.stderr()[-3000:]


@pytest.fixture(scope="module")
def start_server(tiny_of: Callable[[str, str], Path], serving: ModuleType) -> Iterator[Callable[..., object]]:
    """Starts a server of its own: start_server(*flags, key=None, environment=None). All are ended with the module."""
    started = []

    def start(*flags: str, key: str | None = None, environment: dict[str, str] | None = None) -> object:
        directory = tiny_of("flash", "official")
        served = serving.start(directory, "--served-model-name", "tiny", *flags, key=key, environment=environment)
        started.append(served)
        return served

    yield start
    for served in started:
        served.stop()
