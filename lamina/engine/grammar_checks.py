"""What is looked at in a grammar before the compiler sees it: its size and how deep it is nested, so that none takes minutes."""

import msgspec

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB
from lamina.engine.wire import Grammar

#: what the field of a request is called that brings each kind
FIELDS = {
    "json_schema": "response_format",
    "json_object": "response_format",
    "structural_tag": "response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "ebnf": "guided_grammar",
}
MAX_BYTES = 256 * KiB
MAX_REGEX = 16 * KiB
MAX_DEPTH = 128  # of JSON: each level of objects in a schema has two
MAX_NESTED = 64  # brackets of a regular expression or a grammar
MAX_PROPERTIES = 500  # of one object: the work grows with their cube
MAX_CHOICES = 4096


def check_grammar(grammar: Grammar) -> None:
    """Raises ConfigError naming the field for a grammar of an unknown kind, too large, or nested too deep."""
    kind, value = grammar.kind, grammar.value
    field = FIELDS.get(kind)
    if field is None:
        raise ConfigError("response_format", kind, f"one of {', '.join(sorted(FIELDS))}")
    size = len(value.encode("utf-8", "surrogatepass"))
    limit = MAX_REGEX if kind == "regex" else MAX_BYTES
    if size > limit:
        raise ConfigError(field, f"{size} B", f"a {kind} of at most {limit} B")
    if "\0" in value:
        raise ConfigError(field, short(value), "a text without NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(field, ascii(value)[:60], "a text without unpaired surrogates") from None
    if kind in ("json_schema", "structural_tag"):
        _check_json(field, value)
    elif kind == "choice":
        read_choices(value)
    elif kind != "json_object":
        if kind == "regex" or not value.isspace():
            _check_nesting(field, value)
        if kind == "ebnf" and not value.strip():
            raise ConfigError(field, value, "a grammar with a rule root")


def read_choices(value: str) -> list[str]:
    """The texts of a choice. Raises ConfigError."""
    allowed = f"a list of 1 to {MAX_CHOICES} different texts"
    try:
        texts = msgspec.json.decode(value.encode(), type=list[str])
    except (msgspec.DecodeError, UnicodeError):
        raise ConfigError("guided_choice", short(value), allowed) from None
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise ConfigError("guided_choice", f"{len(texts)} texts", allowed)
    return texts


def short(text: str) -> str:
    """A text as an error shows it."""
    return text if len(text) <= 60 else text[:57] + "..."


def _check_json(field: str, value: str) -> None:
    try:
        found = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(field, short(value), f"JSON ({error})") from None
    if not isinstance(found, dict | bool):
        raise ConfigError(field, short(value), "a JSON object")
    waiting: list[tuple[object, int]] = [(found, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(field, short(value), f"JSON nested at most {MAX_DEPTH} deep")
        if isinstance(item, dict):
            if isinstance(item.get("properties"), dict) and len(item["properties"]) > MAX_PROPERTIES:
                raise ConfigError(field, f"{len(item['properties'])} properties", f"at most {MAX_PROPERTIES} of one object")
            for key in ("pattern", "regex"):
                if isinstance(item.get(key), str):
                    _check_pattern(field, item[key])
            if isinstance(item.get("grammar"), str):
                _check_nesting(field, item["grammar"])
            waiting.extend((child, depth + 1) for child in item.values() if isinstance(child, dict | list))
        elif isinstance(item, list):
            waiting.extend((child, depth + 1) for child in item if isinstance(child, dict | list))


def _check_pattern(field: str, pattern: str) -> None:
    if len(pattern) > MAX_REGEX:
        raise ConfigError(field, f"a pattern of {len(pattern)} characters", f"patterns of at most {MAX_REGEX}")
    _check_nesting(field, pattern)


def _check_nesting(field: str, text: str) -> None:
    """Counts brackets, those in quotes too: a bound is wanted, not a parse."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            if depth > MAX_NESTED:
                raise ConfigError(field, short(text), f"brackets nested at most {MAX_NESTED} deep")
        elif char in ")]}":
            depth = max(0, depth - 1)
