"""One model on one device: its layout from the config alone, then its arena, weights and runner."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from lamina.base.config import EngineConfig
from lamina.base.errors import CapacityError, ConfigError
from lamina.base.log import event, get_logger
from lamina.base.sizes import GiB, format_bytes
from lamina.layers.entries import StoreSpec
from lamina.memory.layout import Layout, make_layout
from lamina.models.files import generation_end_tokens, list_stored, read_config, read_file, weight_files
from lamina.models.registry import Blueprint, Drafts, Target, blueprint, chosen_formats
from lamina.models.tensors import open_tensors
from lamina.ops.gemm import stable_row_multiple
from lamina.ops.machine import this_machine
from lamina.ops.store import Store
from lamina.runtime.arena import DeviceArena
from lamina.runtime.drafting import chosen_drafts, drafting_model
from lamina.runtime.host_memory import keep_freed_memory
from lamina.runtime.runner import Runner
from lamina.schedule.step import LaunchedStep, Step
from lamina.weights.loader import TensorSource

_LOG = get_logger(__name__)
_FALLBACK_MULTIPLE = 8
_GPU_SPARE = 2 * GiB  # index scores, captured graphs, and what the allocator cannot use
_ID_BYTES = 64 * 1024  # of each end of a weight file that go into the model id


class StepRunner(Protocol):
    """What executes steps. overlaps  whether a step may be launched before the one before has ended."""

    overlaps: bool

    @property
    def num_graphs(self) -> int:
        """Graphs that have been captured."""
        ...

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Does now what the first steps of each kind would have to do."""
        ...

    def execute(self, step: Step) -> LaunchedStep:
        """Launches one."""
        ...


class Worker:
    """Knows the model's limits and layout once made; runs steps once `load` has returned.

    config  as given, with everything that depends on the device filled in.   drafts  how far is drafted ahead, and by whom.
    """

    runner: StepRunner

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.directory = directory
        config = _with_device(config)
        self.device = torch.device(config.device)
        self.dtype = config.dtype if config.dtype != "auto" else "bf16" if self.is_gpu else "fp32"
        values = read_config(directory)
        cache_format, index_format = chosen_formats(values, config.cache_format, config.index_format, self.dtype)
        config = replace(config, cache_format=cache_format, index_format=index_format)
        config = chosen_drafts(config, values, directory, blueprint(values, cache_format, index_format, self.dtype).memories)
        num_drafts = config.draft_tokens or 0
        self.drafts = Drafts(num_drafts, config.draft not in ("none", "lookup"))
        self.blueprint = blueprint(values, cache_format, index_format, self.dtype, self.drafts)
        self.layout: Layout = make_layout(self.blueprint.memories, self.blueprint.hidden, config.block_tokens, num_drafts)
        if self.is_gpu:
            self.target = _target(self.device, self.dtype, config, self.blueprint)
        if config.cache_bytes is None:
            config = replace(config, cache_bytes=_left_for_cache(directory, self.device, config, self.blueprint))
        self.config = config
        self.num_pages = config.pool_bytes // self.layout.page_bytes
        self.vocab_size = self.blueprint.vocab_size
        self.max_positions = self.blueprint.max_positions
        self.eos_token_ids = frozenset((*self.blueprint.eos_token_ids, *generation_end_tokens(directory, self.vocab_size)))

    @property
    def is_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return self.device.type == "cuda"

    @property
    def has_equal_twins(self) -> bool:
        """Whether the same tokens have the same bits however cut and batched: on a GPU decodes have bits of their own."""
        return self.config.deterministic == "strict" if self.is_gpu else self.config.deterministic is not False

    def load(self, on_tensor: Callable[[int, int], None] | None = None, max_model_len: int | None = None) -> None:
        """Allocates the arena and reads the weights. Raises CapacityError or WeightError.

        max_model_len  tokens of the longest request, at most the model's own limit.
        """
        keep_freed_memory()
        self.arena = DeviceArena(self.layout, self.num_pages, self.device)
        with open_tensors(self.directory, self.blueprint.names, on_tensor) as checkpoint:
            self._load(checkpoint)
            ignored = checkpoint.ignored
        if ignored.count:
            event(_LOG, "weights_not_used", tensors=ignored.count, bytes=ignored.nbytes)
        self._make_runner(min(max_model_len or self.max_positions, self.max_positions))

    def _load(self, source: TensorSource) -> None:
        def make(spec: StoreSpec) -> Store:
            return self.arena.store(spec.key, spec.codec)

        if not self.is_gpu:
            self.model = self.blueprint.load(source, self.dtype, make)
            return
        try:
            self.device_model = self.blueprint.load_device(source, self.target, make)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise CapacityError(
                f"the weights do not fit {self.device} beside cache_bytes={self.config.pool_bytes}: {format_bytes(free)} of "
                f"{format_bytes(total)} are left; lower cache_bytes or gpu_memory_utilization"
            ) from error

    def _make_runner(self, max_model_len: int) -> None:
        config = self.config
        if self.is_gpu:
            from lamina.runtime.device_runner import DeviceRunner, drafting_device_model  # they need Triton
            from lamina.runtime.device_sampler import DeviceSampler

            sampler = DeviceSampler(config.max_requests, self.vocab_size, self.device)
            self.runner = DeviceRunner(
                self.device_model, self.arena, sampler, config.max_requests, config.step_tokens, max_model_len, self.device,
                _mode(config.deterministic), drafting_device_model(self.device_model) if self.drafts.by_model else None,
            )  # fmt: skip
            return
        model = self.model
        multiple = stable_row_multiple(model.product_shapes, model.batched_shapes) if self.has_equal_twins else 1
        if multiple is None:
            multiple = _FALLBACK_MULTIPLE
            event(_LOG, "not_deterministic", logging.WARNING, reason="bits of products depend on the row count on this machine")
        drafting = drafting_model(model) if self.drafts.by_model else None
        self.runner = Runner(model, self.arena, self.blueprint.rings, config.max_requests, self.device, multiple, drafting)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles what any step may need, and captures graphs; nothing on a CPU. progress  called with (done, total)."""
        self.runner.warmup(progress)

    def execute(self, step: Step) -> LaunchedStep:
        """Launches one step; on a CPU it has run to its end."""
        return self.runner.execute(step)

    def bytes_written(self) -> dict[str, int]:
        """Bytes written by the store ops so far, by memory name."""
        return self.arena.bytes_written()

    def model_id(self) -> str:
        """A digest of what equal bytes in memory mean: config, sizes and ends of the weight files, how they are computed with."""
        config = self.config
        mode: tuple[object, ...] = (self.dtype, config.cache_format, config.index_format, config.deterministic)
        if self.is_gpu:
            mode += (self.target.machine.capability, self.target.activation, config.kernels)
        digest = hashlib.blake2b(repr(mode).encode(), digest_size=16)
        digest.update(read_file(self.directory, "config.json") or b"")
        for path in weight_files(self.directory):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_ID_BYTES))
                file.seek(max(0, size - _ID_BYTES))
                digest.update(file.read(_ID_BYTES))
        return digest.hexdigest()


def _mode(deterministic: bool | str | None) -> bool | Literal["strict"]:
    return "strict" if deterministic == "strict" else bool(deterministic)


def _with_device(config: EngineConfig) -> EngineConfig:
    """The settings with a device that is here: auto becomes a GPU that can be used, or the CPU."""
    has_gpu = torch.cuda.is_available()
    if config.device == "auto":
        able = has_gpu and torch.cuda.get_device_capability(0) >= (8, 0) and this_machine("cuda").has_triton
        return replace(config, device="cuda:0" if able else "cpu")
    if config.device == "cpu":
        return config
    if not has_gpu:
        why = "is built for the CPU" if torch.version.cuda is None else "finds no GPU"
        raise ConfigError("device", config.device, f"cpu is what there is here, torch {torch.__version__} {why}")
    index = torch.device(config.device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError("device", config.device, f"cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return replace(config, device=f"cuda:{index}")


def _target(device: torch.device, dtype: str, config: EngineConfig, plan: Blueprint) -> Target:
    """Where and how a model computes on a GPU. ConfigError if its kernels do not serve it there."""
    machine = this_machine(str(device))
    if config.activation_format == "fp8" and not machine.has_fp8:
        found = "{}.{}".format(*machine.capability)
        raise ConfigError("activation_format", "fp8", f"auto or bf16: this GPU has compute capability {found}, fp8 needs 8.9")
    activation: Literal["fp8", "bf16"] = "bf16" if config.activation_format == "bf16" or not machine.has_fp8 else "fp8"
    is_portable, is_strict = config.kernels == "portable", config.deterministic == "strict"
    target = Target(device, machine, torch.float32 if dtype == "fp32" else torch.bfloat16, activation, is_portable, is_strict)
    why = plan.refuses(target)
    if why is not None:
        raise ConfigError("device", config.device, f"cpu ({why})")
    return target


def _left_for_cache(directory: Path, device: torch.device, config: EngineConfig, plan: Blueprint) -> int:
    """Bytes of a GPU's memory that remain for requests beside the weights and what a step computes in."""
    free, total = torch.cuda.mem_get_info(device)
    stored = list_stored(directory)
    names = plan.names.rename_all(tensor.name for tensor in stored)
    weights = sum(tensor.nbytes for tensor, name in zip(stored, names, strict=True) if not plan.names.is_ignored(name))
    of_decodes = config.max_requests * (8 * plan.vocab_size + plan.request_bytes)
    work = config.step_tokens * plan.token_bytes + of_decodes + _GPU_SPARE
    usable = int(total * config.gpu_memory_utilization) - (total - free)
    left = usable - weights * 33 // 32 - work
    if left < 1:
        raise CapacityError(
            f"{device} has {format_bytes(free)} free of {format_bytes(total)}: weights take {format_bytes(weights)}, a step of "
            f"max_step_tokens={config.step_tokens} takes {format_bytes(work)}, no cache is left; lower max_step_tokens "
            f"or raise gpu_memory_utilization={config.gpu_memory_utilization}"
        )
    return left
