"""The engine's settings: one frozen record, resolved once."""

import re
from dataclasses import dataclass, fields

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, parse_bytes

CACHE_FORMATS = ("fp8", "bf16", "fp32")
AUTO = "auto"
INDEX_FORMATS = ("fp4", "fp8", "bf16", "fp32")
DTYPES = ("auto", "fp32", "bf16")
KERNELS = ("auto", "portable")
ACTIVATION_FORMATS = ("auto", "fp8", "bf16")
#: what drafts tokens ahead
DRAFTS = ("none", "auto", "lookup", "mtp", "dspark")
#: most tokens drafted ahead in a step
MOST_DRAFTS = 7
#: the model in the package, by this name everywhere a model is asked for
EMBEDDED = "lamina-tiny"
_DEVICE = re.compile(r"cpu|auto|cuda(:(0|[1-9][0-9]?))?")
#: the longer names that other engines use
DTYPE_ALIASES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is run. Every field is checked where it is made; sizes may be texts such as "8GiB".

    model            directory of a checkpoint, a GGUF file, a hub id such as org/name, or lamina-tiny, the model in the package.
    dtype            what activations are rounded to: fp32, bf16, or auto (fp32 on a CPU, bf16 on a GPU).
    cache_format     how attention entries are stored: fp8 (584 B at 512 dims), bf16, fp32, or auto (fp8 for models trained with
                     it, as DeepSeek-V4; else what activations are rounded to).
    index_format     how index keys are stored: fp4, fp8, bf16, fp32, or auto (fp4 for models trained with it, as DeepSeek-V4;
                     else what activations are rounded to).
    device           cpu, cuda, cuda:1, ..., or auto (a GPU if there is one that can be used, else the CPU).
    cache_bytes      memory for everything that requests remember, in bytes; None: 1 GiB on a CPU, and on a GPU what
                     gpu_memory_utilization leaves beside the weights and the room that a step computes in.
    gpu_memory_utilization  share of the GPU's memory for weights, cache and computing, above 0 and at most 1.
    max_step_tokens  most tokens computed in one step; longer prompts are cut. None: 1,024 on a CPU, 4,096 on a GPU.
    max_requests     most requests that run at once; others wait.
    max_model_len    most tokens of a request, prompt and output; None: the model's limit or what the memory holds, if less.
    block_tokens     tokens of a block; None: chosen by the layout.
    checkpoint_interval  tokens after which a point to resume from is kept on the way through a prompt or an answer; None: only
                     at their ends, and where requests part.
    deterministic    "strict": the same bits whatever else runs and however a prompt is cut; True: the same on a CPU, on a GPU
                     the bits of a decode do not depend on what else runs, those of a prefill not on cuts at multiples of 128;
                     False: bits may depend on the batch. None: "strict" on a CPU, True on a GPU.
    warmup           on a GPU, compile kernels and capture decode graphs before the engine is ready; False: when first needed.
    kernels          auto: the fastest kernels that this GPU runs; portable: those that run on every GPU.
    activation_format  what products with fp8 and fp4 weights read: fp8, bf16, or auto (fp8 where the GPU multiplies it).
    seed             root of the seeds of requests that bring none; None: from the system.
    draft            what drafts tokens ahead, which are then checked together: none; lookup (what followed the last tokens when
                     they came before in the same request); mtp or dspark (draft blocks of the checkpoint); auto (the checkpoint's
                     draft blocks if it has some, else lookup). Outputs do not depend on it.
    draft_tokens     most tokens drafted ahead in a step, 1 to 7; None: 4, or 5 with dspark.
    """

    model: str = EMBEDDED
    dtype: str = "auto"
    cache_format: str = AUTO
    index_format: str = AUTO
    device: str = "cpu"
    cache_bytes: int | str | None = None
    max_step_tokens: int | None = None
    max_requests: int = 256
    max_model_len: int | None = None
    block_tokens: int | None = None
    checkpoint_interval: int | None = None
    deterministic: bool | str | None = None
    seed: int | None = None
    gpu_memory_utilization: float = 0.9
    kernels: str = "auto"
    activation_format: str = "auto"
    warmup: bool = True
    draft: str = "none"
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        )
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("cache_format", self.cache_format, (AUTO, *CACHE_FORMATS)),
            ("index_format", self.index_format, (AUTO, *INDEX_FORMATS)),
            ("kernels", self.kernels, KERNELS),
            ("activation_format", self.activation_format, ACTIVATION_FORMATS),
            ("draft", self.draft, DRAFTS),
        ):
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(name, value, f"one of {', '.join(allowed)}")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", self.device, "cpu, cuda, cuda:N or auto")
        if self.deterministic is not None and not isinstance(self.deterministic, bool) and self.deterministic != "strict":
            raise ConfigError("deterministic", self.deterministic, '"strict", True, False or None')
        if not isinstance(self.warmup, bool):
            raise ConfigError("warmup", self.warmup, "True or False")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", share, "a number above 0 and at most 1")
        if self.cache_bytes is not None:
            object.__setattr__(self, "cache_bytes", parse_bytes(self.cache_bytes, "cache_bytes"))
        if self.device == "cpu":
            self._default("cache_bytes", GiB)
            self._default("max_step_tokens", 1024)
            self._default("deterministic", "strict")
        elif self.device != "auto":
            self._default("max_step_tokens", 4096)
            self._default("deterministic", True)
        for name, number, is_optional in (
            ("max_step_tokens", self.max_step_tokens, True),
            ("max_requests", self.max_requests, False),
            ("max_model_len", self.max_model_len, True),
            ("block_tokens", self.block_tokens, True),
            ("checkpoint_interval", self.checkpoint_interval, True),
            ("draft_tokens", self.draft_tokens, True),
        ):
            if number is None and is_optional:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(name, number, "an integer of at least 1" + (" or None" if is_optional else ""))
        if self.draft_tokens is not None and self.draft == "none":
            raise ConfigError("draft_tokens", self.draft_tokens, 'absent where draft is "none"')
        if self.draft_tokens is not None and self.draft_tokens > MOST_DRAFTS:
            raise ConfigError("draft_tokens", self.draft_tokens, f"at most {MOST_DRAFTS}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError("seed", self.seed, "an integer or None")

    def _default(self, name: str, value: object) -> None:
        """Fills a setting whose default depends on the device."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def pool_bytes(self) -> int:
        """cache_bytes as a number; 0 as long as it is not known."""
        return 0 if self.cache_bytes is None else parse_bytes(self.cache_bytes, "cache_bytes")

    @property
    def step_tokens(self) -> int:
        """max_step_tokens as a number."""
        return self.max_step_tokens or 1024


def for_gpus_only(config: EngineConfig) -> tuple[str, ...]:
    """Settings that are not as by default and change nothing on a CPU."""
    defaults = {field.name: field.default for field in fields(config)}
    given = {
        "gpu_memory_utilization": config.gpu_memory_utilization, "kernels": config.kernels,
        "activation_format": config.activation_format, "warmup": config.warmup,
    }  # fmt: skip
    return tuple(name for name, value in given.items() if value != defaults[name])
