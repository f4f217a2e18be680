"""Outputs that must match a grammar, with the tiny model: whatever it would rather say, what ends by itself can be used."""

import importlib.util
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina import SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import BusyError, ConfigError
from lamina.chat.dsml import DsmlFormat
from lamina.chat.records import CallArguments, CallEnd, CallStart, ChatOptions, Content, Tool, ToolChoice
from lamina.chat.tool_grammar import tool_grammar
from lamina.engine.engine import Engine, Group
from lamina.engine.wire import Grammar
from lamina.schedule.grammar import allows_any

if importlib.util.find_spec("xgrammar") is None:
    pytest.skip("xgrammar is not installed", allow_module_level=True)

from lamina.engine.grammar import CompiledGrammar, GrammarCompiler, import_library, quoted
from lamina.engine.grammar_vocabulary import Vocabulary, read_vocabulary

EOS = 1
VOCAB = 1024

STRING = {"type": "string", "maxLength": 6}
SCHEMAS: list[dict[str, object]] = [
    {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": STRING, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": STRING, "b": STRING, "c": {"type": "boolean"}}},
    {
        "type": "object",
        "properties": {"ключ": {"const": "значение"}, "鍵": {"enum": ["值", "é", "🙂"]}},
        "required": ["ключ", "鍵"],
    },
    {
        "type": "object",
        "properties": {
            "o": {
                "type": "object",
                "properties": {"p": {"type": "object", "properties": {"q": {"type": "null"}}, "required": ["q"]}},
                "required": ["p"],
            }
        },
        "required": ["o"],
    },
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "properties": {"first": {"type": "boolean"}},
        "required": ["first"],
    },
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": STRING, "maxItems": 2},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {
        "type": "array",
        "items": {"type": "object", "properties": {"k": {"enum": ["u", "v"]}}, "required": ["k"]},
        "minItems": 1,
        "maxItems": 2,
    },
    {"enum": ["red", "green", 3, None, True, {"a": [1]}]},
    {"const": {"deep": [1, {"x": "y"}]}},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "integer", "minimum": -3, "maximum": 3},
    {"type": "number", "minimum": 0, "maximum": 1},
    STRING,
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$"},
    {"type": "string", "pattern": "^(north|south)\\.(east|west)$"},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "none"}]},
    {"type": ["boolean", "null"]},
    {
        "type": "object",
        "properties": {"x": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"const": 0}, "maxItems": 1}]}},
        "required": ["x"],
    },
    {
        "$defs": {"leaf": {"enum": ["l", "m"]}},
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/leaf"}},
        "required": ["one"],
    },
    {
        "definitions": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/node"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/definitions/node",
    },
    {
        "type": "object",
        "properties": {"when": {"type": "string", "format": "date"}, "n": {"type": "number", "minimum": 2, "maximum": 3}},
        "required": ["when"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def engine(tiny_of: Callable[[str, str], Path]) -> Engine:
    return Engine(EngineConfig(str(tiny_of("flash", "official")), cache_bytes=64 << 20))


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(engine.directory, engine.vocab_size, engine.worker.eos_token_ids)
    yield made
    made.close()


@pytest.fixture(scope="module")
def json_check() -> ModuleType:
    """tests/engine/json_check.py"""
    spec = importlib.util.spec_from_file_location("lamina_tests_json_check", Path(__file__).parent / "json_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value, ensure_ascii=False))


def short_answers(engine: Engine, **settings: object) -> SamplingParams:
    """Settings under which random weights come to an end: no spaces, and what closes is likely."""
    assert engine.codec is not None
    texts = {token: engine.codec.token_text(token) for token in range(VOCAB)}
    bias = {token: -100.0 for token, text in texts.items() if text and not text.strip()}
    bias |= {token: 5.0 for token, text in texts.items() if text in ('"', "}", "]", "</")} | {EOS: 6.0}
    return SamplingParams(**({"max_tokens": 120, "temperature": 1.0, "seed": 3, "logit_bias": bias} | settings))


def answer(engine: Engine, grammar: CompiledGrammar, params: SamplingParams, prompt: Sequence[int] = (5, 9, 12)) -> Group:
    group = engine.add(list(prompt), params, grammar=grammar)
    while not group.is_finished:
        assert engine.step()
    return group


def text_of(group: Group, child: int = 0) -> str:
    return group.output.outputs[child].text


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_spaces_between_the_parts_of_json_come_to_an_end(engine: Engine, compiler: GrammarCompiler, kind: str) -> None:
    """An output that goes on with a space wherever one may stand gets to the next part. What a schema says is not touched."""
    assert engine.codec is not None
    odd = {"type": "json_schema", "json_schema": 1}  # a value, though it looks like a part of a tag
    wanted = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": odd}}, "required": ["a", "b"]}
    form = {"type": "json_schema", "json_schema": wanted | {"additionalProperties": False}}
    value = form["json_schema"] if kind == "json_schema" else {"type": kind, "format": {"type": "sequence", "elements": [form]}}
    state = compiler.compile(Grammar(kind, json.dumps(value))).start({EOS})
    space, written = engine.codec.encode(" ")[-1], list[int]()
    while len(written) < 400 and (mask := state.mask()) is not None:
        allowed = [token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1]
        if EOS in allowed:
            break
        written.append(space if space in allowed else allowed[0])
        assert state.accept(written[-1])
    text = engine.codec.decode(written)
    assert json.loads(text) == {"a": 1, "b": odd} and " " * 20 in text and " " * 21 not in text


def test_every_schema_is_kept(engine: Engine, compiler: GrammarCompiler, json_check: ModuleType) -> None:
    """Two outputs of each of 30 schemas, all together in one batch."""
    groups = [
        engine.add([5, 9, 12 + index], short_answers(engine, n=2, seed=index), grammar=compiler.compile(schema(item)))
        for index, item in enumerate(SCHEMAS)
    ]
    while engine.has_work:
        assert engine.step()
    ended = 0
    for item, group in zip(SCHEMAS, groups, strict=True):
        for output in group.output.outputs:
            assert output.finish_reason in ("stop", "length")
            if output.finish_reason == "stop":
                ended += 1
                assert output.token_ids[-1] == EOS
                value = json.loads(output.text)
                assert json_check.complaints(value, item) == [], (item, output.text)
                if importlib.util.find_spec("jsonschema_rs") is not None:
                    import jsonschema_rs  # type: ignore[import-not-found,unused-ignore]

                    assert jsonschema_rs.is_valid(item, value), (item, output.text)
    assert ended >= 2 * len(SCHEMAS) - 4


def test_json_objects(engine: Engine, compiler: GrammarCompiler) -> None:
    for seed in range(3):
        output = answer(engine, compiler.compile(Grammar("json_object", "")), short_answers(engine, seed=seed)).output.outputs[0]
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
        assert output.text.startswith("{")


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", r"[ab]{2,3}(x|y)\d", r"[ab]{2,3}(x|y)\d"),
        ("regex", r"(?:\w{1,4} ){2}\u00e9?", r"(?:\w{1,4} ){2}\u00e9?"),
        ("choice", json.dumps(["yes", "no", 'a "quoted"\n\\ one', "é🙂\x01"]), r'yes|no|a "quoted"\n\\ one|é🙂\x01'),
        ("ebnf", 'root ::= sum\nsum ::= [0-9] (" + " [0-9]){1,2} "."', r"[0-9]( \+ [0-9]){1,2}\."),
        ("choice", '[""]', ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_other_kinds(
    engine: Engine, compiler: GrammarCompiler, kind: str, value: str, pattern: str, temperature: float
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=1)
    output = answer(engine, compiler.compile(Grammar(kind, value)), params).output.outputs[0]
    assert output.finish_reason == "stop" and output.token_ids[-1] == EOS
    assert re.fullmatch(pattern, output.text), output.text


def test_no_control_token_inside_a_text(engine: Engine, compiler: GrammarCompiler) -> None:
    state = compiler.compile(schema({"type": "string"})).start((EOS,))
    assert engine.codec is not None
    assert state.accept(engine.codec.encode('"')[0])
    mask = state.mask()
    assert mask is not None and len(mask) == VOCAB // 8
    allowed = set(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist())
    assert len(allowed) > 850
    assert not any(engine.codec.is_added(token) for token in allowed)


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 37])
def test_a_padded_vocabulary(engine: Engine, vocab_size: int) -> None:
    """Ids that the tokenizer does not know are never allowed; a mask has a bit for each of the model's."""
    compiler = GrammarCompiler(engine.directory, vocab_size, (EOS,))
    mask = compiler.compile(Grammar("regex", "(.|\n)*")).start((EOS,)).mask()
    assert mask is not None and len(mask) == 4 * -(-vocab_size // 32)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert bits[EOS] and not bits[VOCAB:].any()


def test_ends_are_those_of_the_request(engine: Engine, compiler: GrammarCompiler) -> None:
    """A complete grammar allows the request's own ends and nothing else; without any it ends by itself."""
    compiled = compiler.compile(Grammar("choice", '["a"]'))
    assert engine.codec is not None
    a, b = engine.codec.encode("a")[0], engine.codec.encode("b")[0]
    own = answer(
        engine, compiled, SamplingParams(max_tokens=9, temperature=0, stop_token_ids=[b], ignore_eos=True)
    ).output.outputs[0]
    assert own.token_ids == [a, b] and (own.finish_reason, own.stop_reason, own.text) == ("stop", b, "a")
    none = answer(engine, compiled, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)).output.outputs[0]
    assert none.token_ids == [a] and (none.finish_reason, none.stop_reason, none.text) == ("stop", None, "a")


def test_min_tokens_never_leave_an_empty_mask(engine: Engine, compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar("choice", '["a", ""]'))
    output = answer(engine, compiled, SamplingParams(max_tokens=9, min_tokens=5, temperature=0)).output.outputs[0]
    assert (output.finish_reason, output.text) == ("stop", "a")
    nothing = answer(
        engine, compiler.compile(Grammar("choice", '[""]')), SamplingParams(max_tokens=9, min_tokens=5)
    ).output.outputs[0]
    assert (nothing.finish_reason, nothing.text, nothing.token_ids) == ("stop", "", [])
    assert not engine.has_work and engine.scheduler.holders == []


def test_it_begins_after_the_thoughts(engine: Engine, compiler: GrammarCompiler) -> None:
    """Thoughts are free, cannot end the output, and are as they would be without a grammar; what follows matches."""
    assert engine.codec is not None
    end = engine.codec.token_id("</think>")
    assert end is not None
    compiled = compiler.compile(Grammar("choice", '["yes", "no"]', after=end))
    free = SamplingParams(max_tokens=40, temperature=1, seed=5, logit_bias={end: 4.0, EOS: 4.0})
    output = answer(engine, compiled, free).output.outputs[0]
    at = output.token_ids.index(end)
    assert at > 0 and EOS not in output.token_ids[:at]
    assert engine.codec.decode(output.token_ids[at + 1 :]) in ("yes", "no") and output.token_ids[-1] == EOS
    alone = SamplingParams(max_tokens=at + 1, temperature=1, seed=5, logit_bias={end: 4.0, EOS: -100.0})
    group = engine.add([5, 9, 12], alone)
    while not group.is_finished:
        assert engine.step()
    assert group.output.outputs[0].token_ids == output.token_ids[: at + 1]
    never = SamplingParams(max_tokens=20, temperature=1, seed=5, logit_bias={end: -100.0, EOS: 50.0})
    assert answer(engine, compiled, never).output.outputs[0].finish_reason == "length"


def test_the_others_do_not_notice(engine: Engine, compiler: GrammarCompiler, driving: ModuleType) -> None:
    """Bit for bit: tokens and log-probs of requests in a batch with grammars, and of those with a grammar alone."""
    compiled = compiler.compile(schema(SCHEMAS[1]))
    plain = SamplingParams(max_tokens=24, temperature=1, seed=8, logprobs=3, ignore_eos=True)
    own = short_answers(engine, logprobs=3, max_tokens=24)

    def run(*, with_plain: bool, with_grammar: bool) -> list[object]:
        driving.wipe(engine)
        groups = []
        if with_plain:
            groups += [engine.add([7, 7, index], plain) for index in range(3)]
        if with_grammar:
            groups += [engine.add([8, index], own, grammar=compiled) for index in range(3)]
        driving.run_all(engine, groups)
        return [(group.output.outputs[0].token_ids, group.output.outputs[0].logprobs) for group in groups]

    together = run(with_plain=True, with_grammar=True)
    assert together[:3] == run(with_plain=True, with_grammar=False)
    assert together[3:] == run(with_plain=False, with_grammar=True)


def test_preempted_outputs_go_on_where_they_were(engine: Engine, compiler: GrammarCompiler, driving: ModuleType) -> None:
    compiled = compiler.compile(schema(SCHEMAS[12]))
    params = short_answers(engine, n=2)
    driving.wipe(engine)
    calm = answer(engine, compiled, params)
    driving.wipe(engine)
    group = engine.add([5, 9, 12], params, grammar=compiled)
    driving.run_all(engine, [group], driving.preempt_every(5))
    assert any(request.num_preemptions for request in group.requests)
    assert [one.token_ids for one in group.output.outputs] == [one.token_ids for one in calm.output.outputs]
    assert [one.finish_reason for one in group.output.outputs] == [one.finish_reason for one in calm.output.outputs]


def test_scores_that_are_not_finite_end_one_output(
    engine: Engine, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """NaN in a row with a mask, and -inf for all that a mask allows: that request fails, and the others answer."""
    compiled = compiler.compile(Grammar("choice", '["yes", "no"]'))
    logits = engine.worker.runner.model.logits  # type: ignore[attr-defined]
    steps = 0

    def spoilt(hidden: Tensor) -> Tensor:
        nonlocal steps
        scores = logits(hidden)
        if steps == 0:
            scores[0, 100] = torch.nan
            scores[1] = -torch.inf
            scores[1, 3] = 0.0  # not allowed
        steps += 1
        return scores

    monkeypatch.setattr(engine.worker.runner.model, "logits", spoilt)  # type: ignore[attr-defined]
    groups = [engine.add([5, index], SamplingParams(max_tokens=9), grammar=compiled) for index in range(3)]
    while engine.has_work:
        assert engine.step()
    assert [group.output.outputs[0].finish_reason for group in groups] == ["error", "error", "stop"]
    assert text_of(groups[2]) in ("yes", "no")


# Tool calls ----------------------------------------------------------------------------------------------------------

WEATHER = {
    "city": {"type": "string", "maxLength": 8},
    "unit": {"enum": ["c", "f"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    "note": {"type": ["string", "null"], "maxLength": 4},
}
TOOLS = (
    Tool("weather", {"name": "weather", "parameters": {"type": "object", "properties": WEATHER, "required": ["city", "unit"]}}),
    Tool("now", {"name": "now"}),
)


def read_calls(text: str, reason: str) -> list[tuple[str, dict[str, object]]]:
    """Names and arguments of the calls in an answer; nothing else may be in it."""
    parser = DsmlFormat().parser(ChatOptions(tools=TOOLS, thinking=False), False)
    events = [*parser.push(text), *parser.finish(reason)]
    names = {event.index: event.name for event in events if isinstance(event, CallStart)}
    texts = {index: "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == index) for index in names}
    assert not [event for event in events if isinstance(event, Content)]
    assert {event.index for event in events if isinstance(event, CallEnd)} == set(names)
    return [(name, json.loads(texts[index])) for index, name in names.items()]


def test_demanded_calls_can_be_read(engine: Engine, compiler: GrammarCompiler, json_check: ModuleType) -> None:
    """Required and named, of a model that would never call anything."""
    choices = [ToolChoice("required"), ToolChoice("named", "weather"), ToolChoice("named", "now")]
    groups = []
    for choice in choices:
        found = tool_grammar("dsml", TOOLS, choice, choice.mode == "named", None)
        assert found is not None
        compiled = compiler.compile(Grammar(found.kind, found.value))
        groups.append(engine.add([5, 9, 12], short_answers(engine, n=2, max_tokens=260), grammar=compiled))
    while engine.has_work:
        assert engine.step()
    ended = 0
    for choice, group in zip(choices, groups, strict=True):
        for output in group.output.outputs:
            assert output.text.startswith("\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=")
            if output.finish_reason == "stop":
                ended += 1
                calls = read_calls(output.text, "stop")
                assert len(calls) == 1
                name, arguments = calls[0]
                assert name in ("weather", "now") and choice.name in (None, name)
                assert json_check.complaints(arguments, {} | TOOLS[name == "now"].parameters) == []
    assert ended >= 4


def test_states_without_the_engine(compiler: GrammarCompiler) -> None:
    """What is not allowed is refused, breaks the state, and nothing comes after; a fresh one is not affected."""
    compiled = compiler.compile(Grammar("regex", "ab"))
    state, other = compiled.start((EOS,)), compiled.start((EOS,))
    a = next(token for token in range(VOCAB) if _allows(state, token))
    assert not state.accept(a + 1) and state.is_done
    mask = state.mask()
    assert mask is not None and not allows_any(mask)
    assert other.accept(a) and not other.is_done


def _allows(state: object, token: int) -> bool:
    mask = state.mask()  # type: ignore[attr-defined]
    return bool(mask[token >> 3] >> (token & 7) & 1)


# Compiling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "field", "why"),
    [
        ("json_schema", "{", "response_format", "JSON"),
        ("json_schema", "[1]", "response_format", "a JSON object"),
        ("json_schema", '{"type": "strin"}', "response_format", 'Unsupported type "strin"'),
        ("json_schema", '{"$ref": "#/$defs/none"}', "response_format", "compiles"),
        ("json_schema", "false", "response_format", "cannot accept any value"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "response_format", "nested at most 128"),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(501)}}), "response_format", "at most 500"),
        ("json_schema", json.dumps({"description": "x" * 300_000}), "response_format", "at most 262144 B"),
        ("json_schema", '{"type": "string", "pattern": "' + "(" * 70 + ")" * 70 + '"}', "response_format", "nested at most 64"),
        ("regex", "(a", "guided_regex", "parenthesis"),
        ("regex", "(" * 100 + ")" * 100, "guided_regex", "nested at most 64"),
        ("regex", "a" * 20_000, "guided_regex", "at most 16384 B"),
        ("choice", "[]", "guided_choice", "1 to 4096"),
        ("choice", '["a", 1]', "guided_choice", "texts"),
        ("ebnf", "root ::= nothing", "guided_grammar", "not defined"),
        ("ebnf", " ", "guided_grammar", "a rule root"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "new"}}', "response_format", "Format type"),
        ("lark", "start: x", "response_format", "one of choice"),
        ("ebnf", "root ::= \ud800", "guided_grammar", "surrogates"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_bad_grammars_are_refused_in_one_line(compiler: GrammarCompiler, kind: str, value: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        compiler.compile(Grammar(kind, value))
    assert caught.value.field == field and "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_what_takes_too_long_is_given_up(engine: Engine) -> None:
    """The future fails at its limit, whatever the library still does; the next grammar is served."""
    import_library()
    slow = {"type": "object", "properties": {f"p{index}": STRING for index in range(480)}, "additionalProperties": False}
    compiler = GrammarCompiler(engine.directory, VOCAB, (EOS,), limit_s=0.02, num_threads=2)
    with pytest.raises(ConfigError, match=r"longer than 0.02 s"):
        compiler.compile(schema(slow))
    compiler.limit_s = 20
    assert compiler.compile(schema({"type": "null"})).nbytes > 0
    compiler.close()


def test_who_has_to_wait_for_what_takes_too_long_is_told_to_come_again(engine: Engine) -> None:
    """The one thread is busy with a grammar that was given up: nobody else's is blamed. Then it is free again."""
    import_library()
    slow = {"type": "object", "properties": {f"p{index}": STRING for index in range(480)}, "additionalProperties": False}
    compiler = GrammarCompiler(engine.directory, VOCAB, (EOS,), limit_s=0.02, num_threads=1)
    first, second = compiler.submit(schema(slow)), compiler.submit(schema({"type": "null"}))
    with pytest.raises(ConfigError, match=r"longer than 0\.02 s"):
        first.result()
    with pytest.raises(BusyError, match="response_format: no thread was free"):
        second.result()
    with pytest.raises(BusyError):
        compiler.submit(schema({"type": "null"}))
    assert compiler.stats().refused == {"late": 1, "busy": 2}
    compiler.limit_s = 20
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            assert compiler.compile(schema({"type": "null"})).nbytes > 0
            break
        except BusyError:
            time.sleep(0.05)
    found = compiler.stats()
    assert found.kept >= 1 and sum(found.compiled) >= 1 and found.total_s > 0
    compiler.close()


def test_the_loop_does_not_wait_for_the_first_compiler(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a large vocabulary is read for the first grammar, what the engine's loop asks is answered."""
    begun, goes_on = threading.Event(), threading.Event()

    def read(directory: Path, vocab_size: int) -> Vocabulary:
        begun.set()
        assert goes_on.wait(30)
        return read_vocabulary(directory, vocab_size)

    monkeypatch.setattr("lamina.engine.grammar.read_vocabulary", read)
    compiler = GrammarCompiler(engine.directory, VOCAB, (EOS,), limit_s=60, num_threads=2)
    first = compiler.submit(Grammar("regex", "a+"))
    assert begun.wait(30)
    with ThreadPoolExecutor(1) as loop:
        second = loop.submit(lambda: (compiler.stats(), compiler.submit(Grammar("regex", "b+")))[1]).result(20)
        goes_on.set()
    assert first.result(30).start((EOS,)).mask() != second.result(30).start((EOS,)).mask()
    compiler.close()


def test_warnings_that_cite_a_schema_are_not_printed(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    compiler = GrammarCompiler(engine.directory, VOCAB, (EOS,))
    compiler.compile(schema({"type": "string", "pattern": "^sec(?=x)ret$", "minLength": 3}))
    os.write(2, b"ours\n")
    assert capfd.readouterr().err == "ours\n"


def test_equal_grammars_are_compiled_once(engine: Engine) -> None:
    compiler = GrammarCompiler(engine.directory, VOCAB, (EOS,), cache_bytes=1)
    first = compiler.compile(schema({"type": "null"}))
    again = compiler.compile(Grammar("json_schema", '{"type": "null"}', after=7))
    assert again.compiled is first.compiled and (first.after, again.after) == (None, 7)
    compiler.compile(schema({"type": "boolean"}))  # takes its place: the cache holds one byte
    assert compiler.compile(schema({"type": "null"})).compiled is not first.compiled
    stats = compiler.stats()
    assert (stats.hits, stats.kept, stats.evicted, sum(stats.compiled)) == (1, 1, 2, 3)
    with pytest.raises(ConfigError):
        compiler.compile(Grammar("regex", "("))
    assert compiler.stats().refused == {"invalid": 1}


def test_a_checkpoint_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        GrammarCompiler(tmp_path, VOCAB, (EOS,)).compile(Grammar("choice", '["a"]'))


def test_after_is_a_token(compiler: GrammarCompiler) -> None:
    with pytest.raises(ConfigError, match="after=1024"):
        compiler.compile(Grammar("choice", '["a"]', after=VOCAB))


def test_quoted_texts() -> None:
    assert quoted('a"\n') == '"a\\U00000022\\U0000000A"'
