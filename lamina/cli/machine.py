"""What this machine says of itself: processor, memory, GPUs, torch. Asks the system, nvidia-smi and torch."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import warnings
from contextlib import suppress
from pathlib import Path

from lamina.base.sizes import MiB
from lamina.base.version import __version__
from lamina.plan.doctor import Gpu, Machine

_SMI_FIELDS = "name,memory.total,memory.used,compute_cap,driver_version"
_SMI_SECONDS = 10
_TRITON = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")


def probe_machine() -> Machine:
    """This machine, as far as it can be known within seconds. Raises nothing: what cannot be found out is None."""
    torch_version, backend, problem, torch_gpus = _torch()
    listed = _nvidia_smi()
    gpus = _matched(listed, torch_gpus) if listed else torch_gpus
    total, available = _memory()
    triton = _installed(_TRITON)
    return Machine(
        system=f"{platform.system()} {platform.machine()}", processor=_processor(), cores=_cores(), memory_bytes=total,
        available_bytes=available, gpus=tuple(gpus), python=platform.python_version(), lamina=__version__,
        torch=torch_version, torch_backend=backend, torch_problem=problem, triton=triton, devices=_devices(gpus, triton),
    )  # fmt: skip


def _torch() -> tuple[str | None, str | None, str | None, list[Gpu]]:
    """(version, what it was built for, what is wrong, GPUs it can use). Whatever a broken installation raises is a finding."""
    try:
        import torch
    except Exception as error:  # a broken library raises anything
        return None, None, f"{type(error).__name__}: {error}", []
    version = str(torch.__version__)
    backend = f"cuda {torch.version.cuda}" if torch.version.cuda else f"rocm {torch.version.hip}" if torch.version.hip else "cpu"
    gpus, problem = [], None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                found = torch.cuda.get_device_properties(index)
                gpus.append(Gpu(found.name, found.total_memory, None, f"{found.major}.{found.minor}", None, torch=True))
        problem = str(caught[0].message) if caught else None
    except Exception as error:  # a driver that does not answer
        problem = f"{type(error).__name__}: {error}"
    return version, backend, problem, gpus


def _nvidia_smi() -> list[Gpu]:
    """The GPUs that the driver lists; none where it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0]:
            gpus.append(Gpu(cells[0], _mebibytes(cells[1]), _mebibytes(cells[2]), _known(cells[3]), _known(cells[4])))
    return gpus


def _matched(listed: list[Gpu], usable: list[Gpu]) -> list[Gpu]:
    """The driver's GPUs, those marked that torch can use: as many of each name as torch has, the first ones."""
    left = [gpu.name for gpu in usable]
    found = []
    for gpu in listed:
        is_usable = gpu.name in left
        if is_usable:
            left.remove(gpu.name)
        found.append(Gpu(gpu.name, gpu.memory_bytes, gpu.used_bytes, gpu.compute_capability, gpu.driver, is_usable))
    return found


def _mebibytes(cell: str) -> int | None:
    return int(cell) * MiB if cell.isdecimal() else None


def _known(cell: str) -> str | None:
    """A cell, or None for what nvidia-smi does not know: [N/A], [Not Supported]."""
    return None if not cell or cell.startswith("[") else cell


def _memory() -> tuple[int | None, int | None]:
    """(all, free now), of the machine or, if that is less, of the container. In bytes."""
    total = available = None
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
        total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total is None:
        with suppress(OSError, ValueError, AttributeError):
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, taken = _number(most), _number(used)
        if limit is not None and total is not None and limit < total:
            total = limit
            available = min(available if available is not None else limit, max(0, limit - (taken or 0)))
    return total, available


def _number(name: str) -> int | None:
    """A control group's number; None for "max" or where there is none."""
    with suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii"))
    return None


def _cores() -> int:
    """Cores that this process may use."""
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _installed(names: tuple[str, ...]) -> str | None:
    """The version of the first package that is installed."""
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _devices(gpus: list[Gpu], triton: str | None) -> tuple[str, ...]:
    """What the engine can compute on: the CPU, and a GPU of compute capability 8.0 or more that torch can use, with Triton."""
    able = [gpu for gpu in gpus if gpu.torch and gpu.compute_capability and float(gpu.compute_capability) >= 8.0]
    return ("cpu", "cuda") if able and triton is not None else ("cpu",)
