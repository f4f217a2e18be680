"""A checker of JSON schemas as the tests use them, written from the standard's text and from nothing of the engine."""

import re
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def complaints(value: Json, schema: Json, root: dict[str, Json] | None = None) -> list[str]:
    """What is wrong with a value; [] if nothing is."""
    if schema is True:
        return []
    assert isinstance(schema, dict)
    root = schema if root is None else root
    found: list[str] = []
    if "$ref" in schema:
        target: Json = root
        for step in str(schema["$ref"]).split("/")[1:]:
            assert isinstance(target, dict)
            target = target[step]
        found += complaints(value, target, root)
    kinds = schema.get("type", [])
    if kinds and not any(_TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        found.append(f"{value!r} is no {kinds}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{value!r} is none of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{value!r} is not {schema['const']!r}")
    for key in ("anyOf", "oneOf"):
        if key in schema and all(complaints(value, part, root) for part in schema[key]):
            found.append(f"{value!r} matches none of {schema[key]}")
    if isinstance(value, dict):
        found += [f"{key} is missing" for key in schema.get("required", []) if key not in value]
        own = schema.get("properties", {})
        for key, item in value.items():
            if key in own:
                found += complaints(item, own[key], root)
            elif schema.get("additionalProperties") is False:
                found.append(f"{key} is not wanted")
            elif isinstance(schema.get("additionalProperties"), dict):
                found += complaints(item, schema["additionalProperties"], root)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30):
            found.append(f"{len(value)} items")
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            found += complaints(item, first[index] if index < len(first) else schema.get("items", True), root)
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30):
            found.append(f"{len(value)} characters")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{value!r} does not match {schema['pattern']}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        if not low <= value <= high:
            found.append(f"{value} is not within {low}..{high}")
    return found
