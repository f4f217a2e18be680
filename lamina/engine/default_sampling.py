"""What applies where nobody says how to sample: what the model's makers recommend in generation_config.json, as in vLLM."""

from pathlib import Path

import msgspec

from lamina.base.errors import ConfigError
from lamina.models.files import read_config, read_file
from lamina.schedule.sampling_params import SamplingParams

_FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Fields as in SamplingParams. max_tokens  most of any output, whatever is asked for; None: no such bound."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    def params(self) -> SamplingParams:
        """These as parameters; others as SamplingParams has them."""
        given = msgspec.structs.asdict(self)
        if self.max_tokens is None:
            del given["max_tokens"]
        return SamplingParams(**given)

    def most_tokens(self, asked: int | None) -> int | None:
        """`asked`, or the bound where that is less."""
        return min((most for most in (asked, self.max_tokens) if most is not None), default=None)

    def __str__(self) -> str:
        """What is not as it would be without a file; "" where nothing is."""
        plain = msgspec.structs.asdict(SamplingDefaults())
        return ", ".join(f"{name} {value:g}" for name, value in msgspec.structs.asdict(self).items() if value != plain[name])


class _Given(msgspec.Struct):
    """What is read of the file. A value that is null is not there."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def check_source(source: str) -> str:
    """The same, of the right kind. Raises ConfigError."""
    if not isinstance(source, str) or not source:
        raise ConfigError("generation_config", source, "auto, vllm, or the path of a directory")
    return source


def find_defaults(checkpoint: Path, source: str = "auto") -> SamplingDefaults:
    """Defaults of a checkpoint. source  auto: its own file, if it has one; vllm: none; else a directory with a file.

    End-of-text tokens are always the checkpoint's. Raises ConfigError naming the field, or a directory that has no file.
    """
    if source == "vllm" or (source == "auto" and read_file(checkpoint, _FILE) is None):
        return SamplingDefaults()
    try:
        place = checkpoint if source == "auto" else Path(source).expanduser()
        is_there = (place / _FILE).is_file()
    except (OSError, RuntimeError, ValueError):  # no such user, a name too long, a zero byte
        is_there = False
    if not is_there:
        raise ConfigError("generation_config", source, f"auto, vllm, or a directory with {_FILE}")
    try:
        read = {name: value for name, value in read_config(place, _FILE).items() if name in _Given.__struct_fields__}
        found = msgspec.structs.asdict(msgspec.convert(read, _Given))
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError("generation_config", str(place / _FILE), f"settings of sampling ({error})") from None
    given = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in found.items() if value is not None}
    try:
        params = SamplingParams(**given)
    except ConfigError as error:
        name = "max_new_tokens" if error.field == "max_tokens" else error.field
        raise ConfigError(f"generation_config.{name}", error.value, error.allowed) from None
    return SamplingDefaults(
        params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty, found["max_new_tokens"]
    )
