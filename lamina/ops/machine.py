"""Where kernels would run, as far as an implementation may refuse it."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

_ONLY_PORTABLE: ContextVar[bool] = ContextVar("only_portable", default=False)


@dataclass(frozen=True, slots=True)
class Machine:
    """device  cpu or cuda.   capability  of the GPU, (0, 0) without one.   has_triton  whether it can be imported."""

    device: str
    capability: tuple[int, int]
    has_triton: bool

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply e4m3; others read fp8 as storage and multiply in bf16."""
        return self.capability >= (8, 9)


def this_machine(device: str) -> Machine:
    """What `device` is here."""
    has_triton = importlib.util.find_spec("triton") is not None
    if torch.device(device).type != "cuda":
        return Machine("cpu", (0, 0), has_triton)
    return Machine("cuda", torch.cuda.get_device_capability(torch.device(device)), has_triton)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device, (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for compute capability 9.0 alone may be chosen there."""
    return capability_of(device) == (9, 0) and not _ONLY_PORTABLE.get()


@contextmanager
def portable_kernels(is_on: bool) -> Iterator[None]:
    """Inside, if `is_on`, no kernel is chosen that runs on one kind of GPU only."""
    token = _ONLY_PORTABLE.set(is_on)
    try:
        yield
    finally:
        _ONLY_PORTABLE.reset(token)
