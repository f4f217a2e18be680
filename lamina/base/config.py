"""The engine's settings: one frozen record, resolved once."""

from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, parse_bytes

CACHE_FORMATS = ("fp8", "bf16", "fp32")
INDEX_FORMATS = ("fp4", "fp8", "bf16", "fp32")
DTYPES = ("auto", "fp32", "bf16")
#: the longer names that other engines use
DTYPE_ALIASES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is run. Every field is checked where it is made; sizes may be texts such as "8GiB".

    model            directory of a checkpoint, or a hub id such as org/name.
    dtype            what activations are rounded to: fp32, bf16, or auto (fp32 on a CPU).
    cache_format     how attention entries are stored: fp8 (584 B at 512 dims), bf16 or fp32.
    index_format     how index keys are stored: fp4, fp8, bf16 or fp32.
    device           cpu.
    cache_bytes      memory for everything that requests remember, in bytes.
    max_step_tokens  most tokens computed in one step; longer prompts are cut.
    max_requests     most requests that run at once; others wait.
    max_model_len    most tokens of a request, prompt and output; None: the model's limit or what the memory holds, if less.
    block_tokens     tokens of a block; None: chosen by the layout.
    checkpoint_interval  tokens after which a point to resume from is kept on the way through a prompt or an answer; None: only
                     at their ends, and where requests part.
    deterministic    "strict": the same bits whatever else runs and however a prompt is cut; True: the same on a CPU;
                     False: products are not padded, bits may depend on the batch.
    seed             root of the seeds of requests that bring none; None: from the system.
    """

    model: str
    dtype: str = "auto"
    cache_format: str = "fp8"
    index_format: str = "fp4"
    device: str = "cpu"
    cache_bytes: int | str = GiB
    max_step_tokens: int = 1024
    max_requests: int = 256
    max_model_len: int | None = None
    block_tokens: int | None = None
    checkpoint_interval: int | None = None
    deterministic: bool | str = "strict"
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        )
        for name, value, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("cache_format", self.cache_format, CACHE_FORMATS),
            ("index_format", self.index_format, INDEX_FORMATS),
        ):
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(name, value, f"one of {', '.join(allowed)}")
        if self.device not in ("cpu", "auto"):
            raise ConfigError("device", self.device, "cpu")
        if not isinstance(self.deterministic, bool) and self.deterministic != "strict":
            raise ConfigError("deterministic", self.deterministic, '"strict", True or False')
        object.__setattr__(self, "cache_bytes", parse_bytes(self.cache_bytes, "cache_bytes"))
        for name, number, is_optional in (
            ("max_step_tokens", self.max_step_tokens, False),
            ("max_requests", self.max_requests, False),
            ("max_model_len", self.max_model_len, True),
            ("block_tokens", self.block_tokens, True),
            ("checkpoint_interval", self.checkpoint_interval, True),
        ):
            if number is None and is_optional:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(name, number, "an integer of at least 1" + (" or None" if is_optional else ""))
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError("seed", self.seed, "an integer or None")

    @property
    def pool_bytes(self) -> int:
        """cache_bytes as a number."""
        return parse_bytes(self.cache_bytes, "cache_bytes")
