"""Which implementations an engine's operations have, for its start-up table."""

from pathlib import Path

from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.models.files import read_config
from lamina.models.implementations import Choice, implementations, machine_named


def chosen_ops(directory: Path, config: EngineConfig) -> tuple[tuple[str, str], ...]:
    """(operation, implementation) of a checkpoint, as `lamina ops` lists them; empty for a family that it does not know."""
    device = "cpu" if config.device == "cpu" else "cuda"
    choice = Choice(
        config.dtype, config.cache_format, config.index_format, config.activation_format, config.kernels, config.max_model_len
    )
    try:
        rows = implementations(read_config(directory), machine_named(device), choice)
    except ConfigError:
        return ()
    return tuple((row.op, row.implementation) for row in rows if row.is_chosen)
