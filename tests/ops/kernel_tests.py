"""What the tests of kernels share: where they run, outputs that nobody may read, and machine code made without a GPU.

Without a GPU a test file runs twice: pytest itself compiles its kernels ahead of time, and one test starts the file again under
Triton's interpreter, where `runs_kernels` tests run. On a GPU everything runs in the one process.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
#: the interpreter computes wrongly in bf16
X_DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in the process that test_interpreted starts")
compiles_kernels = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
starts_interpreter = pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")

#: an index far outside every buffer
FAR = 1 << 30


def long_but(quick: set[int], values: Iterable[object]) -> "list[pytest.ParameterSet]":
    """Parameters of which only those at the places `quick` run in `make test`; a tuple is several arguments."""
    made = []
    for place, value in enumerate(values):
        own = value if isinstance(value, tuple) else (value,)
        made.append(pytest.param(*own, marks=[] if place in quick else [pytest.mark.long]))
    return made


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the test's device that must be written before it is read: NaN, or FAR; bytes are 255, which is NaN as e4m3."""
    if dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        return torch.full(shape, 255, dtype=torch.uint8, device=DEVICE).view(dtype)
    return torch.full(shape, torch.nan if dtype.is_floating_point else FAR, dtype=dtype, device=DEVICE)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One kernel as the GPU would run it.

    text  SASS.   registers  of a thread.   stack_bytes  of a thread.   shared_bytes  of a program.
    """

    text: str
    registers: int
    stack_bytes: int
    shared_bytes: int

    def count(self, instruction: str) -> int:
        """Instructions whose name begins so: "HGMMA", "QGMMA.64x16x32", "LDG.E.128"."""
        return len(re.findall(rf"\s{re.escape(instruction)}[\s.;]", self.text))

    @property
    def spills(self) -> int:
        """Stores of registers to memory of the thread, and loads back."""
        return self.count("STL") + self.count("LDL")

    @property
    def instructions(self) -> int:
        """All of them."""
        return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", self.text, flags=re.MULTILINE))


def machine_code(
    kernel: JITFunction, signature: Mapping[str, str], constants: Mapping[str, object], capability: int = 90, warps: int = 4,
    stages: int = 3, aligned: tuple[str, ...] = (),
) -> MachineCode:  # fmt: skip
    """`kernel` compiled for compute capability 9.0 = 90, without a GPU.

    signature  type of every argument that is no constant: "*bf16", "*fp8e4nv", "*u8", "*fp32", "*i32", "i32", "fp32".
    constants  value of every constexpr argument without a default, and of every argument to be specialised (None, 1).
    aligned    integer arguments to be taken as multiples of 16; pointers always are.
    Raises     KeyError for an argument that is in neither.
    """
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    given = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default} | dict(constants)
    types = {name: "constexpr" if name in given else signature[name] for name in kernel.arg_names}
    multiples = [name for name, kind in types.items() if kind.startswith("*") or name in aligned]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = source_type(kernel, signature=types, constexprs=given, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text, usage = (_cuobjdump(option, file.name) for option in ("-sass", "-res-usage"))
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    return MachineCode(text, int(found["REG"]), int(found["STACK"]), int(compiled.metadata.shared))


class _AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    _numbers = itertools.count(1000)  # of no GPU that is here; kernels are kept by it, so that each starts with none

    def __init__(self, capability: int) -> None:
        self.target, self.number = GPUTarget("cuda", capability, 32), next(self._numbers)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def only_compiling(capability: int) -> Iterator[None]:
    """Launches compile what they would need on a GPU of this compute capability, which need not be here, and write nothing.

    Tensors may lie on the CPU. At the beginning nothing is compiled.
    """
    run, before = JITFunction.run, driver._active  # without a GPU there is none, and `active` raises

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(_AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run, driver._active = run, before


def _cuobjdump(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(kernel: Any, types: dict[str, Any], constants: dict[str, Any], capability: int, warps: int = 4) -> dict[str, Any]:
    """What a kernel becomes without a GPU; types may be records of types."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attributes: dict[tuple[int, ...], Any] = {}

    def visit(kind: Any, path: tuple[int, ...]) -> None:
        if isinstance(kind, tuple):
            for number, part in enumerate(kind):
                visit(part, (*path, number))
        elif kind.startswith("*") or kind == "i32":
            attributes[path] = [["tt.divisibility", 16]]

    for number, name in enumerate(kernel.arg_names):
        if not name.endswith("_column"):
            visit(signature[name], (number,))
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "enable_fp_fusion": False}
    return dict(triton.compile(source, target=target, options=options).asm)


def orders_of_sums(code: dict[str, Any]) -> set[tuple[str, ...]]:
    """Tiles whose rows are added up, and how threads hold them: this decides the order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code["ttgir"], flags=re.MULTILINE))
    sums = re.findall(r"\(tensor<(\w+)xf32, (#\w+)>\) -> tensor<\w*f32, #ttg.slice<\{dim = 1", code["ttgir"])
    return {(tile, layouts[layout]) for tile, layout in sums}
