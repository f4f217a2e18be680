"""Where a checkpoint is: a directory, a GGUF file, or a hub id that an optional library downloads."""

import importlib.util
import re
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.models.files import find_checkpoint, is_gguf

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(model: str | Path) -> Path:
    """The directory of a model, or its GGUF file; nothing but safetensors, JSON and text is ever fetched.

    Raises ConfigError if there is none.
    """
    if not str(model):
        raise ConfigError("model", "", "a directory, or a hub id such as org/name")
    path = Path(model).expanduser()
    if path.is_dir():
        return find_checkpoint(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ConfigError("model", str(model), "a directory with config.json and *.safetensors, or a *.gguf file")
    if path.suffix.lower() == ".gguf":
        raise ConfigError("model", str(model), "a GGUF file that is there")
    if not _HUB_ID.fullmatch(str(model)):
        raise ConfigError("model", str(model), "an existing directory, or a hub id such as org/name")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("model", str(model), "an existing directory; for a hub id install lamina[hub]")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"]))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError("model", str(model), f"an existing directory, or a hub id that can be fetched ({first})") from None
