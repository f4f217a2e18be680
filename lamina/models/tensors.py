"""The tensors of a checkpoint, whatever holds them."""

from collections.abc import Callable
from pathlib import Path

from lamina.models.files import is_gguf
from lamina.models.gguf_config import converted_tensors
from lamina.weights.gguf import GgufFiles
from lamina.weights.gguf_header import read_gguf
from lamina.weights.loader import Checkpoint
from lamina.weights.names import NameScheme


def open_tensors(checkpoint: Path, names: NameScheme, on_tensor: Callable[[int, int], None] | None = None) -> Checkpoint:
    """The tensors of a directory of safetensors or of a GGUF file, under a model's own names; see `Checkpoint`."""
    files = GgufFiles(checkpoint, converted_tensors(read_gguf(checkpoint))) if is_gguf(checkpoint) else None
    return Checkpoint(checkpoint, names, on_tensor, files)
