"""One line per event, key=value, units in the keys."""

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the application decides where it goes."""
    return logging.getLogger(name)


def event(logger: logging.Logger, what: str, level: int = logging.INFO, **fields: object) -> None:
    """Logs `what key=value ...`; texts with spaces are quoted."""
    if logger.isEnabledFor(level):
        parts = [
            f"{key}={value!r}" if isinstance(value, str) and " " in value else f"{key}={value}" for key, value in fields.items()
        ]
        logger.log(level, " ".join([what, *parts]))
