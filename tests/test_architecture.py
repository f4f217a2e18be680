"""The rules of DESIGN section 6, read from the source with `ast`. Each rule is a function from sources to complaints.

The second half feeds each rule small made-up sources that break it, and near misses that do not.
"""

import ast
import graphlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600

#: floor of each part; an import may only go down
FLOORS = {
    "server": 7, "cli": 7, "__main__": 7, "engine": 6, "plan": 6, "runtime": 5, "models": 4, "layers": 3, "schedule": 2,
    "weights": 2, "memory": 1, "ops": 1, "parallel": 1, "chat": 1,
    "base": 0,
}  # fmt: skip
#: what lies below is not all open: the two stairs (schedule and memory; weights and ops) meet in runtime, through records only
MAY_IMPORT = {
    "base": {"base"},
    "memory": {"memory", "base"},
    "ops": {"ops", "base"},
    "parallel": {"parallel", "base"},
    "chat": {"chat", "base"},
    "schedule": {"schedule", "memory", "base"},
    "weights": {"weights", "ops", "parallel", "base"},
    "layers": {"layers", "ops", "parallel", "memory.kinds", "base"},
    "models": {"models", "layers", "chat", "weights", "ops", "parallel", "memory.kinds", "base"},
    "runtime": {"runtime", "models", "layers", "weights", "ops", "parallel", "base",
                "schedule.step", "memory.layout", "memory.kinds", "memory.orders"},
    "plan": {"plan", "memory", "models.families", "models.description", "models.needed", "models.checkpoints", "models.files",
             "weights.headers", "base"},
    "engine": {"engine", "runtime", "schedule", "memory", "chat", "models.chats", "models.files", "base"},
    "top": {"top", "engine", "runtime", "schedule", "memory", "base"},
    "server": {"server", "top", "engine", "chat", "models.chats", "models.files", "base"},
    "cli": {"cli", "server", "top", "engine", "chat", "plan", "models", "base"},
    "__main__": {"cli", "base"},
}  # fmt: skip
NO_TORCH = {"base", "memory", "schedule", "plan", "chat"}
MODEL_NAMES = ("deepseek", "llama", "gemma", "qwen", "mistral", "mixtral", "kimi", "minimax", "chatglm", "gpt_oss", "gptoss")
KINDS = {"Log", "Window", "Fold", "Snapshot", "Alias"}


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its path from the root of the repository, its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Dotted name, a package by its own name."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]


def parse(files: dict[str, str]) -> list[Source]:
    return [Source(path, text, ast.parse(text, filename=path)) for path, text in sorted(files.items())]


@cache
def read_tree(*folders: str) -> list[Source]:
    """Every file of these folders; parsing them takes longer than any rule."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return parse({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})


def part_of(module: str) -> str:
    """The part a module of ours belongs to: its folder, `cli`, `__main__`, or `top` for the package and other single files."""
    names = module.split(".")
    return names[1] if len(names) > 1 and (names[1] in FLOORS or len(names) > 2) else "top"


def floor_of(part: str) -> int:
    return FLOORS["engine"] if part == "top" else FLOORS[part]


def raw_imports(source: Source) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name taken from it or None) of every import, wherever it stands, `import_module("...")` included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                start = source.package.split(".")
                base = ".".join([*start[: len(start) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, base, alias.name
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value, None


def name_of(node: ast.expr) -> str | None:
    """Last name of `name` or `a.b.name`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def our_imports(source: Source, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module of ours) of every import; `from package import module` counts as the module."""
    for line, module, name in raw_imports(source):
        if module.split(".")[0] == "lamina":
            yield line, f"{module}.{name}" if name and f"{module}.{name}" in modules else module


# The rules -----------------------------------------------------------------------------------------------------------


def check_floors(sources: list[Source]) -> list[str]:
    """Imports that go up, sideways, or into what a floor may not see."""
    modules, complaints = {source.module for source in sources}, []
    for source in sources:
        part = part_of(source.module)
        if part != "top" and part not in FLOORS:
            complaints.append(f"{source.path}:1: {part} is on no floor")
            continue
        for line, target in our_imports(source, modules):
            other = part_of(target)
            inside = target.removeprefix("lamina.")
            is_open = other in MAY_IMPORT[part] or any(inside == one or inside.startswith(one + ".") for one in MAY_IMPORT[part])
            if not is_open:
                is_up = (other == "top" or other in FLOORS) and floor_of(other) > floor_of(part)
                complaints.append(f"{source.path}:{line}: {part} imports {target} ({'upward' if is_up else 'not open to it'})")
    return complaints


def check_cycles(sources: list[Source]) -> list[str]:
    """Modules that import each other, directly or not, counting imports in functions too."""
    modules = {source.module for source in sources}
    graph = {source.module: {target for _, target in our_imports(source, modules)} for source in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' <- '.join(error.args[1])}"]
    return []


def check_torch(sources: list[Source]) -> list[str]:
    """Direct imports of torch where planning must work without it."""
    return [
        f"{source.path}:{line}: {part_of(source.module)} imports {module}"
        for source in sources
        if part_of(source.module) in NO_TORCH
        for line, module, _ in raw_imports(source)
        if module.split(".")[0] == "torch"
    ]


def docstrings_of(tree: ast.Module) -> set[int]:
    """Identities of the constants that are docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                found.add(id(first.value))
    return found


def check_model_names(sources: list[Source]) -> list[str]:
    """Names of models in identifiers, strings or file names outside lamina/models; docstrings and comments may speak of them."""
    complaints = []
    for source in sources:
        if part_of(source.module) == "models":
            continue
        if any(name in source.path.lower() for name in MODEL_NAMES):
            complaints.append(f"{source.path}:1: a model's name in a file name")
        exempt, line = docstrings_of(source.tree), 1
        for node in ast.walk(source.tree):
            line = (
                node.lineno if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.alias | ast.pattern) else line
            )
            texts = [] if id(node) in exempt else [text for _, value in ast.iter_fields(node) for text in strings_in(value)]
            complaints += [
                f"{source.path}:{line}: a model's name in {t!r}" for t in texts if any(n in t.lower() for n in MODEL_NAMES)
            ]
    return complaints


def strings_in(value: object) -> list[str]:
    """The texts in one field of a node: an identifier, a constant, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [item.decode("latin-1") if isinstance(item, bytes) else item for item in values if isinstance(item, str | bytes)]


def check_kind_tests(sources: list[Source]) -> list[str]:
    """Questions for a memory's kind outside memory/kinds.py: isinstance, match, comparison of types, dispatch tables."""
    complaints = []
    for source in sources:
        if source.module == "lamina.memory.kinds":
            continue
        kinds = KINDS | {
            alias.asname
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in KINDS and alias.asname
        }
        for node in ast.walk(source.tree):
            how = kind_test(node, kinds)
            if how and isinstance(node, ast.expr | ast.pattern):
                complaints.append(f"{source.path}:{node.lineno}: asks for a memory's kind with {how}")
    return complaints


def kind_test(node: ast.AST, kinds: set[str]) -> str | None:
    """How `node` asks which kind something is, or None."""
    if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass", "register"):
        return name_of(node.func) if any(mentions(arg, kinds) for arg in node.args[-1:]) else None
    if isinstance(node, ast.MatchClass):
        return "match" if name_of(node.cls) in kinds else None
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        if any(is_or_holds(operand, kinds) for operand in operands):
            return "a comparison"
        is_by_name = any(name_of(part) == "__name__" for part in operands)
        return "its class's name" if is_by_name and any(mentions_text(operand, kinds) for operand in operands) else None
    if isinstance(node, ast.Dict) and any(key is not None and name_of(key) in kinds for key in node.keys):
        return "a table by class"
    return None


def mentions(node: ast.AST, kinds: set[str]) -> bool:
    return any(isinstance(part, ast.expr) and name_of(part) in kinds for part in ast.walk(node))


def is_or_holds(node: ast.expr, kinds: set[str]) -> bool:
    """Whether an operand is a kind itself or a collection of them (a call such as Log(...) is a value, not a kind)."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(name_of(part) in kinds for part in parts)


def mentions_text(node: ast.AST, kinds: set[str]) -> bool:
    return any(isinstance(part, ast.Constant) and part.value in kinds for part in ast.walk(node))


def check_lengths(sources: list[Source]) -> list[str]:
    """Files that have grown too long."""
    counts = [(source.path, len(source.text.splitlines())) for source in sources]
    return [f"{path}: {count} lines, at most {MAX_LINES} are allowed" for path, count in counts if count > MAX_LINES]


def check_op_refs(sources: list[Source]) -> list[str]:
    """Op folders without the definition."""
    paths = {source.path for source in sources}
    folders = {path.split("/")[2] for path in paths if path.startswith("lamina/ops/") and path.count("/") > 2}
    return [f"lamina/ops/{folder}: no ref.py" for folder in sorted(folders) if f"lamina/ops/{folder}/ref.py" not in paths]


def check_loose_types(sources: list[Source]) -> list[str]:
    """`Any`, `hasattr`, and `getattr` with a default."""
    complaints = []
    for source in sources:
        for node in ast.walk(source.tree):
            found = None
            if isinstance(node, ast.Name | ast.Attribute) and name_of(node) in ("Any", "hasattr"):
                found = name_of(node)
            elif isinstance(node, ast.ImportFrom) and any(alias.name == "Any" for alias in node.names):
                found = "Any"
            elif isinstance(node, ast.Call) and name_of(node.func) == "getattr" and len(node.args) + len(node.keywords) > 2:
                found = "getattr with a default"
            if found and isinstance(node, ast.expr | ast.stmt):
                complaints.append(f"{source.path}:{node.lineno}: {found}")
    return complaints


Check = Callable[[list[Source]], list[str]]
CHECKS: list[Check] = [
    check_floors, check_cycles, check_torch, check_model_names, check_kind_tests, check_lengths, check_op_refs, check_loose_types,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_rule(check: Check) -> None:
    complaints = check(read_tree("lamina"))
    assert not complaints, "\n".join(complaints)


def test_tests_and_benchmarks_are_short_files_too() -> None:
    assert not check_lengths(read_tree("tests", "bench"))


def test_the_tree_is_seen() -> None:
    modules = {source.module for source in read_tree("lamina")}
    assert {"lamina.base.errors", "lamina.memory.kinds", "lamina.ops.sample.ref", "lamina.engine", "lamina.cli.demo"} <= modules


# The rules can fail --------------------------------------------------------------------------------------------------

TARGET_NAMES = """__init__ cli/__init__ cli/options llm base/errors memory/kinds memory/layout memory/orders memory/ledger
    ops/sequences parallel/mesh
    schedule/step schedule/scheduler weights/loader layers/linear models/registry runtime/runner engine/engine server/app"""
TARGETS = {f"lamina/{name}.py": "" for name in TARGET_NAMES.split()}


def complaints_of(check: Check, files: dict[str, str]) -> list[str]:
    return check(parse(TARGETS | files))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("lamina/base/x.py", "import lamina.memory.kinds"),
        ("lamina/base/x.py", "from lamina import llm"),
        ("lamina/base/x.py", "import lamina"),
        ("lamina/memory/x.py", "from lamina.ops import sequences"),
        ("lamina/memory/x.py", "from lamina.schedule.step import Step"),
        ("lamina/memory/x.py", "def f():\n    from lamina.engine.engine import Engine"),
        (
            "lamina/memory/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lamina.runtime.runner import Runner",
        ),
        ("lamina/memory/x.py", "from ..engine import engine"),
        ("lamina/memory/x.py", "from .. import engine"),
        ("lamina/memory/x.py", "import importlib\nimportlib.import_module('lamina.engine.engine')"),
        ("lamina/memory/x.py", "__import__('lamina.models')"),
        ("lamina/memory/x/__init__.py", "from ...engine import engine"),
        ("lamina/ops/x.py", "import lamina.memory.kinds as kinds"),
        ("lamina/ops/x.py", "from lamina.parallel import mesh"),
        ("lamina/parallel/x.py", "from lamina.ops import sequences"),
        ("lamina/schedule/x.py", "from lamina.ops.sample import sample"),
        ("lamina/schedule/x.py", "from lamina.weights import loader"),
        ("lamina/weights/x.py", "from lamina.schedule import step"),
        ("lamina/weights/x.py", "from lamina.memory import kinds"),
        ("lamina/weights/x.py", "from lamina.layers import linear"),
        ("lamina/layers/x.py", "from lamina.memory.layout import Layout"),
        ("lamina/layers/x.py", "from lamina.models import registry"),
        ("lamina/models/x.py", "from lamina.schedule.step import Step"),
        ("lamina/models/x.py", "from lamina.memory import ledger"),
        ("lamina/runtime/x.py", "from lamina.memory.ledger import Ledger"),
        ("lamina/runtime/x.py", "from lamina.memory import Ledger"),
        ("lamina/runtime/x.py", "from lamina.schedule import scheduler"),
        ("lamina/runtime/x.py", "from lamina.schedule import *"),
        ("lamina/runtime/x.py", "from lamina.engine import engine"),
        ("lamina/engine/x.py", "from lamina.server.app import App"),
        ("lamina/engine/x.py", "from lamina import llm"),
        ("lamina/engine/x.py", "from lamina.cli import main"),
        ("lamina/engine/x.py", "from lamina.cli.options import read_prompts"),
        ("lamina/server/x.py", "from lamina.cli import options"),
        ("lamina/cli/x.py", "from lamina.memory.plan import predict"),
        ("lamina/cli/x.py", "from lamina.runtime import runner"),
        ("lamina/__main__.py", "from lamina.engine import engine"),
        ("lamina/llm.py", "from lamina.server import app"),
        ("lamina/__init__.py", "from lamina.cli import main"),
        ("lamina/server/x.py", "from lamina.runtime import runner"),
        ("lamina/novel/x.py", ""),
    ],
)
def test_a_wrong_import_is_caught(path: str, text: str) -> None:
    assert [complaint for complaint in complaints_of(check_floors, {path: text}) if complaint.startswith(path)]


def test_right_imports_pass() -> None:
    imports = {
        "memory/x": [
            "from lamina.memory.kinds import Log",
            "from lamina.base import errors",
            "from . import kinds",
            "from ..base import errors",
        ],
        "schedule/x": ["from lamina.memory.ledger import Ledger", "from lamina.schedule.step import Step"],
        "weights/x": ["import lamina.ops.quantise", "from lamina.parallel import mesh"],
        "layers/x": ["from lamina.memory.kinds import Log", "from lamina.memory import kinds", "import lamina.memory.kinds"],
        "models/x": ["from lamina.layers import linear", "from lamina.weights import loader", "import torch"],
        "runtime/x": [
            "from lamina.schedule import step",
            "from lamina.memory import layout, kinds, orders",
            "import lamina.models.registry",
        ],
        "engine/x": [
            "from lamina.memory.ledger import Ledger",
            "from lamina.schedule import scheduler",
            "from lamina.runtime import runner",
        ],
        "llm": ["from lamina.engine import engine"],
        "__init__": ["from lamina.llm import LLM", "from lamina.engine.engine import Engine"],
        "cli/__init__": ["from lamina.cli import options", "import lamina", "import laminated"],
        "cli/x": ["from lamina import LLM", "from lamina.models import registry", "from lamina.cli.options import read_prompts"],
        "__main__": ["from lamina.cli import main"],
        "server/x": ["from lamina.engine import engine"],
    }
    files = {f"lamina/{name}.py": "\n".join(lines) for name, lines in imports.items()}
    assert complaints_of(check_floors, files) == []
    assert complaints_of(check_cycles, files) == []


@pytest.mark.parametrize(
    "files",
    [
        {"lamina/base/a.py": "from lamina.base import b", "lamina/base/b.py": "def f():\n    import lamina.base.a"},
        {"lamina/base/a.py": "from .b import x", "lamina/base/b.py": "from .c import x", "lamina/base/c.py": "from .a import x"},
        {"lamina/ops/a/__init__.py": "from lamina.ops.a import ref", "lamina/ops/a/ref.py": "from lamina.ops.a import Thing"},
    ],
)
def test_a_cycle_is_caught(files: dict[str, str]) -> None:
    assert "import cycle" in complaints_of(check_cycles, files)[0]


@pytest.mark.parametrize(
    "text", ["import torch", "import torch.nn as nn", "from torch import Tensor", "def f():\n    from torch.nn import x"]
)
def test_torch_is_caught_where_it_may_not_be(text: str) -> None:
    for part in NO_TORCH:
        assert len(complaints_of(check_torch, {f"lamina/{part}/x.py": text})) == 1
    assert complaints_of(check_torch, {"lamina/ops/x.py": text, "lamina/base/y.py": "import torchlike"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 'deepseek_v4'",
        "class DeepSeekThing: ...",
        "def run_llama(): ...",
        "def f(gemma): ...",
        "f(qwen=1)",
        "from lamina.models import deepseek_v4",
        "from lamina.models.deepseek_v4 import Model",
        "import lamina.models.deepseek_v4 as m",
        "x = f'is {y} Llama'",
        "x = b'mixtral'",
        "model.llama_layers",
        "def f():\n    x = 1\n    'a text about DeepSeek that is no docstring'",
        "match x:\n    case {'a': 1, **mistral}: pass",
        "def f():\n    global kimi",
    ],
)
def test_a_models_name_is_caught(text: str) -> None:
    assert len(complaints_of(check_model_names, {"lamina/ops/x.py": text})) >= 1
    assert complaints_of(check_model_names, {"lamina/models/x.py": text}) == []


def test_docstrings_comments_and_file_names() -> None:
    told = '"""DeepSeek-V4 report."""\n# llama\nclass A:\n    """Gemma."""\n    def f(self):\n        """Qwen."""\n'
    assert complaints_of(check_model_names, {"lamina/ops/x.py": told}) == []
    assert len(complaints_of(check_model_names, {"lamina/ops/deepseek.py": ""})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(m, Log)",
        "isinstance(m, (int, kinds.Window))",
        "isinstance(m, Fold | Snapshot)",
        "issubclass(c, Alias)",
        "type(m) is Log",
        "type(m) == kinds.Fold",
        "type(m) in (Log, Window)",
        "m.__class__ is Snapshot",
        "m.__class__.__name__ == 'Log'",
        "type(m).__name__ in ('Log', 'Fold')",
        "match m:\n    case Log(): pass",
        "match m:\n    case kinds.Alias(of=x): pass",
        "{Log: 1, Window: 2}[type(m)]",
        "f.register(Log)",
        "from lamina.memory.kinds import Log as Forever\nisinstance(m, Forever)",
    ],
)
def test_a_kind_test_is_caught(text: str) -> None:
    assert len(complaints_of(check_kind_tests, {"lamina/runtime/x.py": text})) == 1
    assert complaints_of(check_kind_tests, {"lamina/memory/kinds.py": text}) == []


@pytest.mark.parametrize(
    "text",
    [
        "isinstance(m, Logger)",
        "Log(entry, 4)",
        "x: Log | Window",
        "m == Log('a', 1)",
        "{'Log': 1}",
        "match m:\n    case Slot(): pass",
        "n == 'Log'",
    ],
)
def test_what_is_no_kind_test_passes(text: str) -> None:
    assert complaints_of(check_kind_tests, {"lamina/runtime/x.py": text}) == []


def test_a_long_file_is_caught() -> None:
    assert complaints_of(check_lengths, {"lamina/base/x.py": "\n" * 600}) == []
    assert len(complaints_of(check_lengths, {"lamina/base/x.py": "\n" * 601})) == 1


def test_an_op_without_definition_is_caught() -> None:
    whole = {"lamina/ops/a/__init__.py": "", "lamina/ops/a/ref.py": "", "lamina/ops/sequences.py": ""}
    assert complaints_of(check_op_refs, whole) == []
    assert complaints_of(check_op_refs, {"lamina/ops/a/__init__.py": "", "lamina/ops/b/triton.py": ""}) == [
        "lamina/ops/a: no ref.py",
        "lamina/ops/b: no ref.py",
    ]


@pytest.mark.parametrize(
    "text",
    ["from typing import Any", "x: typing.Any", "x: dict[str, Any]", "hasattr(x, 'y')", "getattr(x, 'y', None)", "has = hasattr"],
)
def test_loose_types_are_caught(text: str) -> None:
    assert len(complaints_of(check_loose_types, {"lamina/base/x.py": text})) == 1


def test_two_argument_getattr_and_any_pass() -> None:
    assert complaints_of(check_loose_types, {"lamina/base/x.py": "getattr(x, 'y')\nany(x)\nanyhow = 'Any'"}) == []
