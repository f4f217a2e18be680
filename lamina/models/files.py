"""What a checkpoint's files say, whatever holds them: a directory with config.json and *.safetensors, or one GGUF file. No torch.

The one place that knows both. A GGUF file answers for the JSON files that the model had before it was converted.
"""

import importlib.util
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec

from lamina.base.config import EMBEDDED
from lamina.base.errors import ConfigError
from lamina.models.config_fields import check_end_tokens
from lamina.models.gguf_config import config_values, converted_tensors
from lamina.models.gguf_tokenizer import tokenizer_config, tokenizer_json
from lamina.weights import headers
from lamina.weights.gguf_header import QUANTISED, SUFFIX, read_gguf
from lamina.weights.headers import Stored

CONFIG = "config.json"
_GENERATION = "generation_config.json"
_EMBEDDED = Path(__file__).resolve().parent / "lamina_tiny"
_MADE = frozenset((CONFIG, "tokenizer.json", "tokenizer_config.json"))


def is_gguf(checkpoint: Path) -> bool:
    """Whether it is a GGUF file, by its name."""
    return checkpoint.suffix.lower() == SUFFIX and checkpoint.is_file()


def model_path(model: str) -> Path:
    """Where `model` says that a checkpoint is; lamina-tiny, with no separator, is the one in the package.

    A directory of that name is meant by a path with a separator: ./lamina-tiny.
    """
    return _EMBEDDED if model == EMBEDDED else Path(model).expanduser()


def model_text(model: str | Path) -> str:
    """`model` as a text; a Path always means a place, also where its last part is lamina-tiny."""
    return f"./{model}" if isinstance(model, Path) and str(model) == EMBEDDED else str(model)


def is_embedded(checkpoint: Path) -> bool:
    """Whether it is the model in the package."""
    return os.path.realpath(checkpoint) == os.path.realpath(_EMBEDDED)  # it ends where links go in circles


def model_name(checkpoint: Path) -> str:
    """What a checkpoint is called: lamina-tiny, or the name of its directory or file."""
    return EMBEDDED if is_embedded(checkpoint) else checkpoint.name


def about_embedded() -> str:
    """What the model in the package is, in a line."""
    if not (_EMBEDDED / CONFIG).is_file():
        raise ConfigError("model", EMBEDDED, "another model: this installation of Lamina does not hold its files")
    size = sum(file.stat().st_size for file in _EMBEDDED.iterdir())
    return f"embedded model {EMBEDDED} ({size / 1e6:.0f} MB, trained: simple English, looks things up in long contexts)"


def find_checkpoint(path: Path) -> Path:
    """`path`, or the GGUF file in the directory `path` if there is one and no config.json. ConfigError if there are several."""
    if not path.is_dir() or (path / CONFIG).exists():
        return path
    found = sorted(one for one in path.iterdir() if is_gguf(one))
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:5])
        raise ConfigError("model", str(path), f"a directory with one GGUF file, or one of its files: {names}")
    return found[0] if found else path


def read_file(checkpoint: Path, name: str) -> bytes | None:
    """The bytes of the JSON or text file `name` of a checkpoint; None if it has none.

    A GGUF file has config.json, tokenizer.json and tokenizer_config.json. Raises ConfigError or WeightError where it is not
    what it says, OSError where it cannot be read.
    """
    if is_gguf(checkpoint):
        stat = checkpoint.stat()
        return _made(checkpoint.resolve(), name, stat.st_size, stat.st_mtime_ns) if name in _MADE else None
    path = checkpoint / name
    return path.read_bytes() if path.is_file() else None


def read_config(checkpoint: Path, name: str = CONFIG) -> dict[str, object]:
    """The object in the JSON file `name` of a checkpoint. Raises ConfigError as `headers.read_config`, WeightError."""
    if not is_gguf(checkpoint):
        return headers.read_config(checkpoint, name)
    if name != CONFIG:
        raise ConfigError("model", str(checkpoint), f"a directory that holds {name}")
    return config_values(read_gguf(checkpoint))


def list_stored(checkpoint: Path) -> list[Stored]:
    """Every tensor of a checkpoint, by shard and position; those of a GGUF file under their names before it was converted."""
    if not is_gguf(checkpoint):
        return headers.list_stored(checkpoint)
    found = converted_tensors(read_gguf(checkpoint))
    return [Stored(checkpoint, one.name, one.tensor.dtype, one.tensor.shape, one.tensor.nbytes) for one in found]


def missing_library(tensors: Iterable[Stored]) -> str | None:
    """The extra of this package that brings what reads them, if it is not installed."""
    needs = any(tensor.dtype in QUANTISED for tensor in tensors)
    return "gguf" if needs and importlib.util.find_spec("gguf") is None else None


def weight_files(checkpoint: Path) -> list[Path]:
    """The files that hold tensors, by name."""
    return [checkpoint] if is_gguf(checkpoint) else sorted(checkpoint.glob("*.safetensors"))


@lru_cache(maxsize=8)
def _made(path: Path, name: str, size: int, changed_ns: int) -> bytes | None:
    file = read_gguf(path)
    made = {CONFIG: config_values, "tokenizer.json": tokenizer_json, "tokenizer_config.json": tokenizer_config}[name](file)
    return None if made is None else msgspec.json.encode(made)


def generation_end_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End tokens of generation_config.json, which may name more than config.json does. Raises ConfigError."""
    if read_file(directory, _GENERATION) is None:
        return ()
    value = read_config(directory, _GENERATION).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise ConfigError("generation_config.eos_token_id", value, "a token id or a list of them")
    found = tuple(int(str(token)) for token in ids)
    check_end_tokens("generation_config.eos_token_id", found, vocab_size)
    return found
