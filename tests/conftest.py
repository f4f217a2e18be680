"""What several test files share: helper modules, random models on disk, and engines that run them.

Helper modules lie beside the tests and are loaded by path, because test folders are no packages.
"""

import importlib.util
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
def driving() -> ModuleType:
    """tests/engine/driving.py"""
    return load_helper("engine/driving.py")


@pytest.fixture(scope="session")
def rows() -> ModuleType:
    """tests/ops/rows.py"""
    return load_helper("ops/rows.py")


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
