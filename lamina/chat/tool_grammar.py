"""What an answer must look like so that its tool calls can be used: a structural tag, made of the tools' schemas.

Where a call is demanded the answer is nothing but calls. Where the model may choose, and a tool is strict, text is free until
calls begin. Texts among a DSML call's parameters are raw, all other values JSON, both by the tool's schema.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.chat.records import Json, Tool, ToolChoice
from lamina.chat.tool_schemas import Arguments, Schema, arguments_of, forms_of, with_definitions

_MARK = "｜DSML｜"
_OPEN, _CLOSE = f"<{_MARK}", f"</{_MARK}"
_BLOCK = "tool_calls>"
#: what a reader takes for the beginning of calls although it is not how they begin
_STRAY = (f"{_OPEN}invoke", f"{_OPEN}toolcalls", f"{_OPEN}tool>", f"{_OPEN}function_calls", f"{_OPEN}parameter", _CLOSE)
_MAX_SPACES = 20
_KEY_PATTERN = r"[^\"<>\n\\]{1,128}"
#: any text without "<｜" and "</｜", then a parameter's end; each state is a rule, as other ways take 100 ms a token
_RAW_TEXT = """root ::= text
text ::= [^<] text | "<" opened
opened ::= [^<｜/] text | "<" opened | "/" closing
closing ::= [^<｜] text | "<" opened | "｜DSML｜parameter>\\n"
"""
_LOW_BOUND = 256
_MAX_PROPERTIES = 500  # of one tool
_MAX_PARAMETERS = 4096  # of all tools, in every shape that their arguments may have
_MAX_SCHEMA_CHARS = 1024 * 1024  # of all tools, definitions as often as they are carried along
_LENGTHS = ('"minLength"', '"maxLength"')


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """As engine.wire.Grammar: the kind and text of a grammar, and the token after which it begins."""

    kind: str
    value: str
    after: int | None


def tool_grammar(
    format_name: str, tools: Sequence[Tool], choice: ToolChoice, parallel: bool, after: int | None
) -> ToolGrammar | None:
    """The grammar of an answer's calls; None where nothing has to be enforced, or nobody knows how the format writes calls.

    format_name  of the ChatFormat.   parallel  whether several calls may come.   after  see ToolGrammar.
    Raises ConfigError naming the tool whose schema cannot be enforced.
    """
    make = _FORMATS.get(format_name)
    wanted = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if make is None or not wanted or choice.mode == "none":
        return None
    if choice.mode == "auto" and not any(tool.is_strict for tool in wanted):
        return None
    _check_size([tool for tool in wanted if choice.mode != "auto" or tool.is_strict])
    several = parallel and choice.mode != "named"
    tag: Json = {"type": "structural_tag", "format": make(wanted, choice.mode != "auto", several)}
    return ToolGrammar("structural_tag", json.dumps(tag, ensure_ascii=False), after)


def _check_size(tools: Sequence[Tool]) -> None:
    """Raises ConfigError for schemas that no grammar could hold. A parameter that refers to definitions carries them all."""
    total = num_parameters = 0
    for tool in tools:
        properties = tool.parameters.get("properties")
        values = list(properties.values()) if isinstance(properties, Mapping) else []
        if len(values) > _MAX_PROPERTIES:
            field, found = f"tools.{tool.name}.parameters", f"{len(values)} properties"
            raise ConfigError(field, found, f"at most {_MAX_PROPERTIES} of one object")
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        try:
            num_carriers = sum("$ref" in json.dumps(value) for value in values)
            total += len(json.dumps(tool.parameters)) + num_carriers * len(json.dumps(definitions))
        except RecursionError:
            raise ConfigError(f"tools.{tool.name}.parameters", "...", "JSON nested less deeply") from None
        if total > _MAX_SCHEMA_CHARS:
            allowed = f"at most {_MAX_SCHEMA_CHARS} where calls must match them"
            raise ConfigError("tools", f"schemas of {total} characters", allowed)
        num_parameters += sum(len(shape.properties) for shape in arguments_of(tool.parameters, tool.name))
        if num_parameters > _MAX_PARAMETERS:
            raise ConfigError("tools", f"{num_parameters} parameters", f"at most {_MAX_PARAMETERS} where calls must match them")


# How DSML writes them ------------------------------------------------------------------------------------------------


def _dsml(tools: Sequence[Tool], is_demanded: bool, several: bool) -> Json:
    calls = _repeated([_invoke(tool, is_demanded) for tool in tools], several)
    if is_demanded:
        return _sequence([_text(f"\n\n{_OPEN}{_BLOCK}\n"), calls, _text(f"{_CLOSE}{_BLOCK}")])
    block = {"type": "tag", "begin": f"{_OPEN}{_BLOCK}\n", "content": calls, "end": f"{_CLOSE}{_BLOCK}"}
    return {
        "type": "triggered_tags", "triggers": [f"{_OPEN}{_BLOCK}"], "tags": [block], "stop_after_first": True,
        "excludes": list(_STRAY),
    }  # fmt: skip


def _invoke(tool: Tool, is_demanded: bool) -> Json:
    if '"' in tool.name or "\n" in tool.name:
        raise ConfigError("tools", tool.name, "names without quotation marks")
    shapes = arguments_of(tool.parameters, tool.name)
    if not is_demanded and not tool.is_strict:
        shapes = [Arguments({}, frozenset(), True)]
    contents = [_parameters(shape, tool.parameters, tool.name) for shape in shapes]
    return _sequence([_text(f'{_OPEN}invoke name="{tool.name}">\n'), _either(contents), _text(f"{_CLOSE}invoke>\n")])


def _parameters(shape: Arguments, root: Schema, name: str) -> Json:
    """One line for each; an empty line where there is none."""
    parts: list[Json] = []
    for key, schema in shape.properties.items():
        if '"' in key or "\n" in key:
            raise ConfigError(f"tools.{name}.parameters", key, "names of parameters without quotation marks")
        one = _parameter(_text(f'{_OPEN}parameter name="{key}"'), schema, root, name)
        if one is None and key in shape.required:
            raise ConfigError(f"tools.{name}.parameters", key, "a schema that allows a value")
        if one is not None:
            parts.append(one if key in shape.required else {"type": "optional", "content": one})
    if shape.is_open:
        head = _sequence([_text(f'{_OPEN}parameter name="'), {"type": "regex", "pattern": _KEY_PATTERN}, _text('"')])
        other = _parameter(head, True, root, name)
        assert other is not None
        parts.append({"type": "star", "content": other})
    if shape.required:
        return _sequence(parts)
    return _either([_text("\n"), *([_sequence(parts)] if parts else [])])


def _parameter(head: Json, schema: Json, root: Schema, name: str) -> Json:
    """One line; None where the schema allows no value."""
    forms = forms_of(schema, root, name)
    end = f"{_CLOSE}parameter>\n"
    texts: list[Json] = [_text(value) for value in dict.fromkeys(forms.constants) if _OPEN not in value and _CLOSE not in value]
    found = [_sequence([_text(' string="true">'), _either(texts), _text(end)])] if texts else []
    found += [_sequence([_text(' string="true">'), _raw(text, end)]) for text in forms.texts]
    if forms.others:
        any_of: Json = forms.others[0] if len(forms.others) == 1 else {"anyOf": forms.others}
        schema = with_definitions(any_of, root)
        value: dict[str, Json] = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_SPACES}
        if not any(word in json.dumps(schema) for word in _LENGTHS):  # the library drops lengths where texts are excluded
            value["excludes"] = [_OPEN, _CLOSE]
        found.append(_sequence([_text(' string="false">'), value, _text(end)]))
    return _sequence([head, _either(found)]) if found else None


def _raw(schema: Schema, end: str) -> Json:
    """A raw text and what ends it. A pattern is kept as it is; a text with low bounds has no "<", which makes its end certain."""
    pattern, least, most = schema.get("pattern"), schema.get("minLength"), schema.get("maxLength")
    if isinstance(pattern, str):
        return _sequence([{"type": "regex", "pattern": pattern}, _text(end)])
    low = least if isinstance(least, int) and least > 0 else 0
    if not isinstance(most, int) or most < 0:
        rest: list[Json] = [{"type": "grammar", "grammar": _RAW_TEXT}]
    elif most <= _LOW_BOUND:
        return _sequence([{"type": "regex", "pattern": f"[^<]{{{low},{max(low, most)}}}"}, _text(end)])
    else:
        rest = [{"type": "any_text", "excludes": [_OPEN, _CLOSE], "max_chars": max(0, most - low)}, _text(end)]
    return _sequence([*([{"type": "regex", "pattern": f"[^<]{{{low}}}"}] if low else []), *rest])


# How tags around JSON write them -------------------------------------------------------------------------------------


def _tagged(tools: Sequence[Tool], is_demanded: bool, several: bool) -> Json:
    tags: list[Json] = []
    for tool in tools:
        arguments_of(tool.parameters, tool.name)  # so that a schema of no object is refused
        strict = is_demanded or tool.is_strict
        schema: Json = dict(tool.parameters) if strict else {"type": "object", "additionalProperties": True}
        if schema == {}:
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        value: Json = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_SPACES}
        begin = f'<tool_call>\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        tags.append({"type": "tag", "begin": begin, "content": value, "end": "}\n</tool_call>"})
    if is_demanded:
        return {
            "type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": not several,
        }  # fmt: skip
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": not several}


_FORMATS: dict[str, Callable[[Sequence[Tool], bool, bool], Json]] = {"dsml": _dsml, "jinja": _tagged, "hermes": _tagged}


def _text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Json]) -> Json:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(elements: list[Json]) -> Json:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _repeated(elements: list[Json], several: bool) -> Json:
    return {"type": "plus", "content": _either(elements)} if several else _either(elements)
