"""Where a checkpoint is: in the package, in a directory, in a GGUF file, or at a hub that an optional library downloads from."""

import importlib.util
import logging
import re
from pathlib import Path

from lamina.base.config import EMBEDDED
from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.models.files import find_checkpoint, is_gguf, model_path

_LOG = get_logger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(model: str | Path) -> Path:
    """The directory of a model, or its GGUF file; nothing but safetensors, JSON and text is ever fetched.

    lamina-tiny is the model in the package; a directory of that name has to be given with a separator, as ./lamina-tiny.
    Raises ConfigError if there is none.
    """
    if not str(model):
        raise ConfigError("model", "", f"a directory, a hub id such as org/name, or {EMBEDDED}")
    path = model_path(model) if isinstance(model, str) else model.expanduser()
    if model == EMBEDDED and not (path / "config.json").is_file():
        raise ConfigError("model", EMBEDDED, "another model: this installation of Lamina does not hold its files")
    if model == EMBEDDED and Path(EMBEDDED).is_dir():
        event(_LOG, "embedded_model", logging.WARNING, name=EMBEDDED, passed_over=f"./{EMBEDDED}")
    if path.is_dir():
        return find_checkpoint(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ConfigError("model", str(model), "a directory with config.json and *.safetensors, or a *.gguf file")
    if path.suffix.lower() == ".gguf":
        raise ConfigError("model", str(model), "a GGUF file that is there")
    if not _HUB_ID.fullmatch(str(model)):
        raise ConfigError("model", str(model), f"an existing directory, a hub id such as org/name, or {EMBEDDED}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("model", str(model), "an existing directory; for a hub id install lamina[hub]")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt"]))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError("model", str(model), f"an existing directory, or a hub id that can be fetched ({first})") from None
