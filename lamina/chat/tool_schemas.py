"""JSON schemas of tools taken apart: the arguments that a call may have, and which of a value's forms is a text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lamina.base.errors import ConfigError
from lamina.chat.records import Json

Schema = Mapping[str, Json]
_MAX_REFERENCES = 32
_MAX_FORMS = 64
_OTHER_TYPES = ("object", "array", "number", "boolean", "null")
_TYPE_OF_KEYWORD = {
    "properties": "object", "required": "object", "additionalProperties": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arguments:
    """One shape of a call's arguments: properties in order, those that must be there, and whether others may be."""

    properties: Mapping[str, Json]
    required: frozenset[str]
    is_open: bool


@dataclass(slots=True)
class Forms:
    """What a value may be. texts  schemas of texts.   constants  single texts.   others  schemas that hold no text."""

    texts: list[Schema] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    others: list[Json] = field(default_factory=list)


def arguments_of(schema: Schema, name: str) -> list[Arguments]:
    """The shapes that a tool's arguments may have. Raises ConfigError for a schema that allows no object."""
    found = _shapes(schema, schema, name, 0)
    if not found:
        raise ConfigError(f"tools.{name}.parameters", _short(schema), "a schema of an object")
    return found


def _shapes(schema: Json, root: Schema, name: str, depth: int) -> list[Arguments]:
    if schema is True:
        return [Arguments({}, frozenset(), True)]
    if not isinstance(schema, Mapping):
        return []
    if depth > _MAX_REFERENCES:
        raise ConfigError(
            f"tools.{name}.parameters", _short(schema), f"a schema with at most {_MAX_REFERENCES} references in a row"
        )
    schema = resolve(schema, root, name)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        return []
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ConfigError(f"tools.{name}.parameters", _short(schema), "properties that are an object, and a list `required`")
    is_open = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    missing = [str(key) for key in required if key not in properties]
    own = Arguments({**properties, **{key: True for key in missing}}, frozenset(str(key) for key in required), is_open)
    found = [own]
    for part in _list(schema.get("allOf")):
        found = [_merged(one, other) for one in found for other in _shapes(part, root, name, depth + 1)]
        _bound(found, name)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            choices = [shape for part in _list(schema[key]) for shape in _shapes(part, root, name, depth + 1)]
            found = [_merged(one, other) for one in found for other in choices]
            _bound(found, name)
    return found


def _merged(one: Arguments, other: Arguments) -> Arguments:
    properties = {**one.properties, **{key: value for key, value in other.properties.items() if key not in one.properties}}
    properties |= {key: value for key, value in other.properties.items() if one.properties.get(key) is True}
    return Arguments(properties, one.required | other.required, one.is_open or other.is_open)


def forms_of(schema: Json, root: Schema, name: str) -> Forms:
    """The forms of one argument."""
    found = Forms()
    _split(schema, root, name, found, 0)
    return found


def _split(schema: Json, root: Schema, name: str, found: Forms, depth: int) -> None:
    if schema is False:
        return
    if depth > _MAX_REFERENCES:
        raise ConfigError(
            f"tools.{name}.parameters", _short(schema), f"a schema with at most {_MAX_REFERENCES} references in a row"
        )
    if not isinstance(schema, Mapping):
        schema = {}
    schema = resolve(schema, root, name)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else _list(schema["enum"])
        found.constants += [value for value in values if isinstance(value, str)]
        rest: list[Json] = [value for value in values if not isinstance(value, str)]
        if rest:
            found.others.append({"enum": rest})
        return
    for key in ("anyOf", "oneOf"):
        if key in schema:
            for part in _list(schema[key]):
                _split(part, root, name, found, depth + 1)
            return
    parts = _list(schema.get("allOf"))
    if len(parts) == 1:
        merged = {**schema, **(parts[0] if isinstance(parts[0], Mapping) else {})}
        del merged["allOf"]
        _split(merged, root, name, found, depth + 1)
        return
    kinds = _types(schema)
    if "string" in kinds:
        found.texts.append(schema)
    found.others += [{**schema, "type": kind} for kind in kinds if kind != "string"]  # one by one


def _types(schema: Schema) -> list[str]:
    """The types that a schema allows; what it says of one type is taken for that type."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(one) for one in kind]
    implied = [_TYPE_OF_KEYWORD[key] for key in schema if key in _TYPE_OF_KEYWORD]
    return list(dict.fromkeys(implied)) or ["string", *_OTHER_TYPES]


def resolve(schema: Schema, root: Schema, name: str) -> Schema:
    """A schema without a reference at its top. Raises ConfigError for one that leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if reference is None:
            return schema
        target: Json = root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ConfigError(f"tools.{name}.parameters", reference, "references that start with #/")
        for step in reference.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise ConfigError(f"tools.{name}.parameters", reference, "references to schemas that are there")
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    raise ConfigError(f"tools.{name}.parameters", "$ref", f"at most {_MAX_REFERENCES} references in a row")


def with_definitions(schema: Json, root: Schema) -> Json:
    """A part of a schema that can stand alone: what its references name comes with it."""
    if not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


def _bound(found: Sequence[Arguments], name: str) -> None:
    if len(found) > _MAX_FORMS:
        raise ConfigError(
            f"tools.{name}.parameters", f"{len(found)} shapes", f"at most {_MAX_FORMS} combinations of anyOf and oneOf"
        )


def _list(value: Json) -> list[Json]:
    return list(value) if isinstance(value, list) else []


def _short(schema: Json) -> str:
    text = str(schema)
    return text if len(text) <= 60 else text[:57] + "..."
