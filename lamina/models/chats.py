"""Which chat format a checkpoint has. Needs no torch."""

import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.chat.dsml import APRIL_EFFORTS, LATER_EFFORTS, DsmlFormat
from lamina.chat.formats import ChatFormat
from lamina.chat.jinja import JinjaFormat
from lamina.models.files import CONFIG, read_file

_LOG = get_logger(__name__)
_DSML_MODELS = frozenset({"deepseek_v4"})
_T = TypeVar("_T", bound=msgspec.Struct)
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Config(msgspec.Struct):
    """What of config.json says which format. dspark_block_size tells releases apart: the later one drafts with DSpark."""

    model_type: str = ""
    dspark_block_size: int | None = None


class _AddedToken(msgspec.Struct):
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """A token is a text or a record with its content; a template is a text or a list of named ones."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    sep_token: str | _AddedToken | None = None
    cls_token: str | _AddedToken | None = None
    mask_token: str | _AddedToken | None = None


def added_tokens(directory: Path) -> tuple[str, ...]:
    """The added tokens of tokenizer.json, which a user's text must not bring to life; () without the file."""
    return tuple(token.content for token in _read(directory, "tokenizer.json", _Tokenizer()).added_tokens)


def find_chat_format(directory: Path, chat_template: Path | None = None, name: str | None = None) -> ChatFormat | None:
    """As `chat_format`, for the model_type of the checkpoint's config.json. Raises ConfigError, also where that is missing."""
    try:
        config = read_file(directory, CONFIG)
        if config is None:
            raise ConfigError("model", str(directory), f"a directory with a readable {CONFIG}")
        found = msgspec.json.decode(config, type=_Config)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("model", str(directory), f"a directory with a readable {CONFIG} ({error})") from None
    return chat_format(found.model_type, directory, chat_template, name)


def chat_format(
    model_type: str, directory: Path, chat_template: str | Path | None = None, name: str | None = None
) -> ChatFormat | None:
    """The format of a checkpoint, or None if it has none.

    chat_template  a file with a Jinja template, which then counts for every family.
    name           "dsml" or "jinja" asks for one of them; None: dsml for the families that were trained on it, else the
                   directory's template (chat_template.jinja, chat_template.json or tokenizer_config.json).
    Whether a dsml model is of the April release or of the later one (other texts for the efforts) its config.json says.
    Raises ConfigError if a file is bad or what is asked for is not there.
    """
    if name not in (None, "dsml", "jinja"):
        raise ConfigError("chat_format", name, "dsml or jinja")
    tokens = frozenset(added_tokens(directory))
    if chat_template is None and (name == "dsml" or (name is None and model_type in _DSML_MODELS)):
        if tokens and "<｜User｜>" not in tokens:
            event(_LOG, "chat_format", logging.WARNING, name="dsml", why="the tokenizer has not its control tokens: spelled")
        is_later = _read(directory, CONFIG, _Config()).dspark_block_size is not None
        return DsmlFormat(LATER_EFFORTS if is_later else APRIL_EFFORTS, has_think_tokens=not tokens or "</think>" in tokens)
    config = _read(directory, "tokenizer_config.json", _TokenizerConfig())
    templates = _templates(directory, config) if chat_template is None else {"default": _read_text(Path(chat_template))}
    if not templates:
        if name == "jinja":
            raise ConfigError("chat_format", name, f"dsml, as {directory} holds no template, or --chat-template FILE")
        return None
    try:
        return JinjaFormat(templates, _special_texts(config), tokens)
    except ConfigError as error:
        if chat_template is None:
            raise
        raise ConfigError("chat_template", str(chat_template), error.allowed) from None


def _templates(directory: Path, config: _TokenizerConfig) -> dict[str, str]:
    """By name, from the place that Transformers looks at first."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return {"default": _read_text(file)}
    found = _read(directory, "chat_template.json", _TokenizerConfig()).chat_template or config.chat_template
    if isinstance(found, list):
        return {item.name: item.template for item in found}
    return {} if found is None else {"default": found}


def _special_texts(config: _TokenizerConfig) -> dict[str, str]:
    tokens = [config.bos_token, config.eos_token, config.unk_token, config.pad_token]
    tokens += [config.sep_token, config.cls_token, config.mask_token]
    return {
        name: token if isinstance(token, str) else token.content
        for name, token in zip(_TOKEN_NAMES, tokens, strict=True)
        if token is not None
    }


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", str(path), f"a readable file in UTF-8 ({error})") from None


def _read(directory: Path, name: str, missing: _T) -> _T:
    """The fields of a JSON file that count here, or `missing` without the file."""
    try:
        found = read_file(directory, name)
        return missing if found is None else msgspec.json.decode(found, type=type(missing))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        path = directory / name
        raise ConfigError(path.stem, str(path), f"readable JSON ({error})") from None
