"""Servers for the tests of this folder: real processes, real HTTP, the tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


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
