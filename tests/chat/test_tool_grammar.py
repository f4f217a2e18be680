"""Grammars of tool calls: what they let through is what the readers read, and nothing else."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.chat.dsml import DsmlFormat
from lamina.chat.records import CallArguments, CallStart, ChatOptions, Json, Tool, ToolChoice
from lamina.chat.tagged_calls import TaggedCalls
from lamina.chat.tool_grammar import tool_grammar
from lamina.chat.tool_schemas import arguments_of, forms_of
from lamina.engine.text import TextCodec
from lamina.engine.wire import Grammar

M = "｜DSML｜"
EOS = 1
VOCAB = 1024

PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f", 1]},
        "days": {"type": "integer"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "note": {"type": ["string", "null"]},
        "any": {},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "few": {"type": "string", "minLength": 2, "maxLength": 4},
        "many": {"type": "string", "minLength": 1, "maxLength": 1000},
    },
    "required": ["city", "unit"],
    "$defs": {"item": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}},
}
WEATHER = Tool("weather", {"name": "weather", "parameters": PARAMETERS})
STRICT = Tool("weather", {"name": "weather", "parameters": PARAMETERS}, True)
NOW = Tool("now", {"name": "now"})
LOOSE = Tool("loose", {"name": "loose", "parameters": {"type": "object", "additionalProperties": True}})
TOOLS = (WEATHER, NOW, LOOSE)

needs_library = pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")


def text(key: str, value: str) -> str:
    return f'<{M}parameter name="{key}" string="true">{value}</{M}parameter>\n'


def data(key: str, value: str) -> str:
    return f'<{M}parameter name="{key}" string="false">{value}</{M}parameter>\n'


def invoke(name: str, *lines: str) -> str:
    return f'<{M}invoke name="{name}">\n{"".join(lines) or chr(10)}</{M}invoke>\n'


def block(*calls: str) -> str:
    return f"\n\n<{M}tool_calls>\n{''.join(calls)}</{M}tool_calls>"


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def accepts(tiny_of: Callable[[str, str], Path]) -> Callable[..., bool]:
    """Whether the grammar of some tools allows a whole answer, token by token, and then its end."""
    from lamina.engine.grammar import GrammarCompiler

    directory = tiny_of("flash", "official")
    compiler = GrammarCompiler(directory, VOCAB, (EOS,))
    codec = TextCodec(directory / "tokenizer.json")

    def check(answer: str, choice: ToolChoice, tools: tuple[Tool, ...] = TOOLS, parallel: bool = True, way: str = "dsml") -> bool:
        found = tool_grammar(way, tools, choice, parallel, None)
        assert found is not None
        state = compiler.compile(Grammar(found.kind, found.value)).start((EOS,))
        for token in [*codec.encode(answer), EOS]:
            mask = state.mask()
            assert mask is not None
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            if token != EOS:
                assert state.accept(token)
        return True

    return check


REQUIRED, NAMED, AUTO = ToolChoice("required"), ToolChoice("named", "weather"), ToolChoice("auto")
HEAD = (text("city", "Rom"), text("unit", "c"))


@needs_library
@pytest.mark.parametrize(
    "calls",
    [
        (invoke("weather", *HEAD),),
        (invoke("weather", text("city", ""), data("unit", "1")),),
        (invoke("weather", text("city", 'a <b> "</c>" < </ é 🙂\n\n\tif x<y: {'), text("unit", "f")),),
        (invoke("weather", *HEAD, data("days", "-3")),),
        (invoke("weather", *HEAD, data("list", '[{"k": "a<b\\n"}, { "k":"" }]')),),
        (invoke("weather", *HEAD, text("note", "x")),),
        (invoke("weather", *HEAD, data("note", "null")),),
        (invoke("weather", *HEAD, text("any", "raw")),),
        (invoke("weather", *HEAD, data("any", '{"a": [1.5e3, true]}')),),
        (invoke("weather", *HEAD, text("code", "XY"), text("few", "abcd"), text("many", "a<b" * 300)),),
        (invoke("now"),),
        (invoke("loose"),),
        (invoke("loose", text("x", "1"), data("y z", "[]")),),
        (invoke("now"), invoke("weather", *HEAD), invoke("now")),
    ],
)
def test_demanded_calls(accepts: Callable[..., bool], calls: tuple[str, ...]) -> None:
    """What is let through, and that the reader finds just that."""
    answer = block(*calls)
    assert accepts(answer, REQUIRED)
    parser = DsmlFormat().parser(ChatOptions(tools=TOOLS, thinking=False), False)
    events = [*parser.push(answer), *parser.finish("stop")]
    assert [event.name for event in events if isinstance(event, CallStart)] == [call.split('"')[1] for call in calls]
    for index in range(len(calls)):
        json.loads("".join(event.text for event in events if isinstance(event, CallArguments) and event.index == index))


@needs_library
@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Hello",
        block(),
        "Hello" + block(invoke("now")),
        block(invoke("now")) + "!",
        block(invoke("other")),
        block(invoke("weather", text("unit", "c"), text("city", "Rom"))),
        block(invoke("weather", text("city", "Rom"))),
        block(invoke("weather", *HEAD, *HEAD)),
        block(invoke("weather", text("city", "Rom"), text("unit", "k"))),
        block(invoke("weather", text("city", "Rom"), data("unit", '"c"'))),
        block(invoke("weather", data("city", '"Rom"'), text("unit", "c"))),
        block(invoke("weather", *HEAD, text("days", "3"))),
        block(invoke("weather", *HEAD, data("days", "3.5"))),
        block(invoke("weather", *HEAD, data("list", '[{"k": 1}]'))),
        block(invoke("weather", *HEAD, data("list", f'[{{"k": "</{M}parameter>"}}]'))),
        block(invoke("weather", *HEAD, text("code", "xy"))),
        block(invoke("weather", *HEAD, text("few", "a"))),
        block(invoke("weather", *HEAD, text("few", "abcde"))),
        block(invoke("weather", *HEAD, text("many", "a" * 1001))),
        block(invoke("weather", text("city", f"<{M}invoke"), text("unit", "c"))),
        block(invoke("weather", *HEAD, text("unknown", "x"))),
        block(invoke("now", text("x", "1"))),
        block(invoke("now")).replace(M, "|DSML|"),
    ],
)
def test_what_is_no_demanded_call(accepts: Callable[..., bool], answer: str) -> None:
    assert not accepts(answer, REQUIRED)


@needs_library
def test_named_and_single_calls(accepts: Callable[..., bool]) -> None:
    one, two = block(invoke("weather", *HEAD)), block(invoke("weather", *HEAD), invoke("weather", *HEAD))
    assert accepts(one, NAMED) and not accepts(two, NAMED) and not accepts(block(invoke("now")), NAMED)
    assert accepts(two, REQUIRED) and not accepts(two, REQUIRED, parallel=False) and accepts(one, REQUIRED, parallel=False)


@needs_library
def test_strict_tools_where_the_model_may_choose(accepts: Callable[..., bool]) -> None:
    """Any text, then calls if it likes: those of strict tools by their schemas, the others as they come."""
    tools = (STRICT, NOW)
    for answer in (
        "",
        "Hello, 1 < 2 and </b> é",
        "Hello" + block(invoke("weather", *HEAD)),
        block(invoke("now", text("x", "1"))),
    ):
        assert accepts(answer, AUTO, tools), answer
    for answer in (
        block(invoke("weather", text("city", "Rom"))),
        "Hello" + block(invoke("other")),
        block(invoke("now")) + "more",
        f'<{M}invoke name="weather">',
        f"<{M}toolcalls>",
    ):
        assert not accepts(answer, AUTO, tools), answer


@needs_library
def test_calls_in_tags(accepts: Callable[..., bool]) -> None:
    good = tagged("weather", '{"city": "Rom", "unit": "c", "days": 3}')
    assert accepts(good, REQUIRED, way="jinja") and accepts(good + "\n" + tagged("now", "{}"), REQUIRED, way="hermes")
    assert accepts(good, NAMED, way="jinja") and not accepts(tagged("now", "{}"), NAMED, way="jinja")
    for bad in (
        "",
        "Hello",
        tagged("weather", '{"city": "Rom"}'),
        tagged("other", "{}"),
        "Hello " + good,
        tagged("now", '{"x": 1}'),
    ):
        assert not accepts(bad, REQUIRED, way="jinja"), bad
    assert not accepts(good + "\n" + good, REQUIRED, parallel=False, way="jinja")
    assert accepts("Hello " + good, AUTO, (STRICT, NOW), way="jinja") and accepts("Hello", AUTO, (STRICT, NOW), way="jinja")
    assert not accepts(tagged("weather", '{"unit": "c"}'), AUTO, (STRICT, NOW), way="jinja")
    events = TaggedCalls().push(good)
    assert [json.loads(event.text) for event in events if isinstance(event, CallArguments)] == [
        {"city": "Rom", "unit": "c", "days": 3}
    ]


def test_where_nothing_is_enforced() -> None:
    assert tool_grammar("dsml", TOOLS, AUTO, True, None) is None
    assert tool_grammar("dsml", (STRICT,), ToolChoice("none"), True, None) is None
    assert tool_grammar("dsml", (), REQUIRED, True, None) is None
    assert tool_grammar("other", TOOLS, REQUIRED, True, None) is None
    found = tool_grammar("dsml", (STRICT,), AUTO, True, 7)
    assert found is not None and found.after == 7 and found.kind == "structural_tag"


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"type": "string"}, "a schema of an object"),
        ({"$ref": "#/$defs/none"}, "references to schemas that are there"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "references that start with #/"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "at most 32 references"),
        ({"properties": {"a": False}, "required": ["a"]}, "a schema that allows a value"),
        ({"properties": {'a"': {}}}, "without quotation marks"),
        ({"properties": [1]}, "properties that are an object"),
        ({"allOf": [{"anyOf": [{"properties": {str(i): {}}} for i in range(9)]}] * 3}, "at most 64 combinations"),
    ],
)
def test_schemas_that_cannot_be_enforced(parameters: dict[str, Json], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        tool_grammar("dsml", (Tool("f", {"name": "f", "parameters": parameters}),), REQUIRED, True, None)
    assert caught.value.field == "tools.f.parameters" and "\n" not in str(caught.value)


MANY: dict[str, Json] = {f"k{i}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for i in range(400)}
LONG_TEXT: dict[str, Json] = {"type": "string", "description": "x" * 10_000}


@pytest.mark.parametrize(
    ("parameters", "num_tools", "why"),
    [
        ({"properties": {f"k{i}": {} for i in range(501)}}, 1, "501 properties' is not valid: at most 500"),
        ({"properties": MANY, "$defs": {"d": LONG_TEXT}}, 1, "at most 1048576 where calls must match them"),
        ({"properties": MANY, "anyOf": [{"required": [f"k{i}"]} for i in range(60)], "$defs": {"d": True}}, 1, "at most 4096"),
        ({"properties": {f"k{i}": {} for i in range(100)}}, 512, "at most 4096"),
    ],
    ids=["properties", "definitions", "shapes", "tools"],
)
def test_tools_that_no_grammar_could_hold_are_refused_at_once(parameters: dict[str, Json], num_tools: int, why: str) -> None:
    tools = [Tool(f"f{i}", {"name": f"f{i}", "parameters": parameters}) for i in range(num_tools)]
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=why) as caught:
        tool_grammar("dsml", tools, REQUIRED, True, None)
    assert caught.value.field.startswith("tools") and time.perf_counter() - began < 1.0
    assert tool_grammar("dsml", tools, AUTO, True, None) is None


def test_definitions_go_only_where_something_refers_to_them() -> None:
    parameters: dict[str, Json] = {"properties": {"a": {"type": "integer"}, **MANY}, "$defs": {"d": {"type": "integer"}}}
    found = tool_grammar("dsml", (Tool("f", {"name": "f", "parameters": parameters}),), REQUIRED, True, None)
    assert found is not None and found.value.count('"$defs"') == len(MANY)


def test_shapes_of_arguments() -> None:
    schema: dict[str, Json] = {
        "properties": {"a": {"type": "string"}},
        "required": ["a", "b"],
        "anyOf": [{"properties": {"c": {"type": "integer"}}, "required": ["c"]}, {"$ref": "#/$defs/other"}],
        "$defs": {"other": {"allOf": [{"properties": {"d": True}}, {"patternProperties": {"^x": {}}}]}},
    }
    first, second = arguments_of(schema, "f")
    assert (list(first.properties), first.required, first.is_open) == (["a", "b", "c"], {"a", "b", "c"}, False)
    assert (list(second.properties), second.required, second.is_open) == (["a", "b", "d"], {"a", "b"}, True)


def test_forms_of_a_value() -> None:
    root: dict[str, Json] = {"$defs": {"s": {"type": "string", "maxLength": 3}}}

    def forms(schema: Json) -> tuple[int, list[str], list[Json]]:
        found = forms_of(schema, root, "f")
        return len(found.texts), found.constants, found.others

    assert forms({"$ref": "#/$defs/s"}) == (1, [], [])
    assert forms({"enum": ["a", 1, None, "b"]}) == (0, ["a", "b"], [{"enum": [1, None]}])
    assert forms({"const": "x"}) == (0, ["x"], [])
    assert forms({"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}]}) == (1, [], [{"type": "null"}])
    assert forms({"minimum": 3}) == (0, [], [{"minimum": 3, "type": "number"}])
    assert forms({"allOf": [{"$ref": "#/$defs/s"}]})[0] == 1
    assert forms(False) == (0, [], [])
    assert forms({}) == forms(True) and forms({})[0] == 1
