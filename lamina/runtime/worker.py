"""One model on one device: its layout from the config alone, then its arena, weights and runner."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.layers.entries import StoreSpec
from lamina.memory.layout import Layout, make_layout
from lamina.models.registry import blueprint
from lamina.ops.gemm import stable_row_multiple
from lamina.ops.store import Store
from lamina.runtime.arena import DeviceArena
from lamina.runtime.host_memory import keep_freed_memory
from lamina.runtime.runner import Runner
from lamina.schedule.step import Step, StepResult
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint

_LOG = get_logger(__name__)
_FALLBACK_MULTIPLE = 8
_ID_BYTES = 64 * 1024  # of each end of a weight file that go into the model id


class Worker:
    """Knows the model's limits and layout once made; runs steps once `load` has returned."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.directory = directory
        self.config = config
        self.blueprint = blueprint(read_config(directory), config.cache_format, config.index_format)
        self.layout: Layout = make_layout(self.blueprint.memories, self.blueprint.hidden, config.block_tokens)
        self.num_pages = config.pool_bytes // self.layout.page_bytes
        self.vocab_size = self.blueprint.vocab_size
        self.max_positions = self.blueprint.max_positions
        self.eos_token_ids = frozenset((*self.blueprint.eos_token_ids, *_generation_eos(directory)))
        self.dtype = "fp32" if config.dtype == "auto" else config.dtype

    @property
    def pads_rows(self) -> bool:
        """Whether bits are promised not to depend on what else runs."""
        return self.config.deterministic is not False

    def load(self, on_tensor: Callable[[int, int], None] | None = None) -> None:
        """Allocates the arena and reads the weights. Raises CapacityError or WeightError."""
        device = torch.device("cpu")
        keep_freed_memory()
        self.arena = DeviceArena(self.layout, self.num_pages, device)

        def make(spec: StoreSpec) -> Store:
            return self.arena.store(spec.key, spec.codec)

        with Checkpoint(self.directory, self.blueprint.names, on_tensor) as checkpoint:
            self.model = self.blueprint.load(checkpoint, self.dtype, make)
            ignored = checkpoint.ignored
        if ignored.count:
            event(_LOG, "weights_not_used", tensors=ignored.count, bytes=ignored.nbytes)
        model = self.model
        multiple = stable_row_multiple(model.product_shapes, model.batched_shapes) if self.pads_rows else 1
        if multiple is None:
            multiple = _FALLBACK_MULTIPLE
            event(_LOG, "not_deterministic", logging.WARNING, reason="bits of products depend on the row count on this machine")
        self.runner = Runner(self.model, self.arena, self.blueprint.rings, self.config.max_requests, device, multiple)

    def execute(self, step: Step) -> StepResult:
        """Runs one step to its end."""
        return self.runner.execute(step)

    def bytes_written(self) -> dict[str, int]:
        """Bytes written by the store ops so far, by memory name."""
        return self.arena.bytes_written()

    def model_id(self) -> str:
        """A digest of what equal bytes in memory mean: config, sizes and ends of the weight files, how they are computed with."""
        mode = (self.dtype, self.config.cache_format, self.config.index_format, self.config.deterministic)
        digest = hashlib.blake2b(repr(mode).encode(), digest_size=16)
        digest.update((self.directory / "config.json").read_bytes())
        for path in sorted(self.directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_ID_BYTES))
                file.seek(max(0, size - _ID_BYTES))
                digest.update(file.read(_ID_BYTES))
        return digest.hexdigest()


def _generation_eos(directory: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, which may name more than config.json does."""
    if not (directory / "generation_config.json").is_file():
        return ()
    value = read_config(directory, "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise ConfigError("generation_config.eos_token_id", value, "a token id or a list of them")
    return tuple(int(str(token)) for token in ids)
