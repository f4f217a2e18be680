"""The responses protocol, read with the client library's own records."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Message, Reasoning, ToolCall
from lamina.server.errors import ApiError
from lamina.server.generation import Totals
from lamina.server.responses_convert import answer_messages, check, namespaces, shown_tools, to_choice, to_messages, to_tools
from lamina.server.responses_events import ResponseWriter, seal, unseal, usage_of
from lamina.server.responses_items import items_of
from lamina.server.responses_schema import FormatEcho, ReasoningEcho, ResponseObject, ResponsesRequest, TextEcho
from lamina.server.responses_store import ResponseStore

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def request_of(**fields: object) -> ResponsesRequest:
    return msgspec.json.decode(json.dumps(fields).encode(), type=ResponsesRequest)


def blank() -> ResponseObject:
    return ResponseObject(
        id="resp_1", created_at=1, model="m", status="in_progress", output=[], tools=[], tool_choice="auto",
        parallel_tool_calls=True, text=TextEcho(FormatEcho("text")), reasoning=ReasoningEcho(None, None), metadata={},
        temperature=1.0, top_p=1.0, store=True,
    )  # fmt: skip


ANSWERS: dict[str, tuple[list[Event], str]] = {
    "text": ([Content("Hel"), Content("lo")], "stop"),
    "empty": ([], "stop"),
    "thoughts": ([Reasoning("I "), Reasoning("think"), Content("so")], "stop"),
    "cut thoughts": ([Reasoning("I thi")], "length"),
    "cut text": ([Content("Hel")], "length"),
    "calls": (
        [Reasoning("r"), Content("c"), CallStart(0, "call_a", "f"), CallArguments(0, '{"x"'), CallArguments(0, ":1}"), CallEnd(0),
         CallStart(1, "call_b", "g"), CallArguments(1, "{}"), CallEnd(1)],
        "tool_calls",
    ),
    "interleaved": (
        [CallStart(0, "call_a", "f"), CallStart(1, "call_b", "g"), CallArguments(1, "{"), CallArguments(0, "{}"), CallEnd(0),
         CallArguments(1, "}"), CallEnd(1)],
        "tool_calls",
    ),
    "custom calls": (
        [CallStart(0, "call_a", "patch"), CallArguments(0, '{"inp'), CallArguments(0, 'ut": "*** \\ud83d'), CallEnd(0),
         CallStart(1, "call_b", "patch"), CallArguments(1, '{"other": 1, "input": "x"}'), CallEnd(1)],
        "tool_calls",
    ),
    "cut custom call": ([CallStart(0, "call_a", "patch"), CallArguments(0, '{"input": "ab\\')], "length"),
    "cut call": ([CallStart(0, "call_a", "f"), CallArguments(0, '{"x"')], "length"),
    "deadline": ([Content("x")], "deadline"),
    "abort": ([Content("x")], "abort"),
}  # fmt: skip


OWN_EVENTS = {
    "message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}  # fmt: skip


@pytest.mark.parametrize("has_summary", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_what_the_client_library_reads(name: str, has_summary: bool) -> None:
    events, finish = ANSWERS[name]
    writer = ResponseWriter(blank(), has_summary=has_summary, has_seal=True, custom={"patch"})
    written = writer.start()
    for event in events:
        written += writer.push(event)
    written += writer.finish(finish, usage_of(Totals(5, 2, 3, 1)))
    records = [json.loads(msgspec.json.encode(event)) for event in written]
    assert [record["sequence_number"] for record in records] == list(range(len(records)))
    assert records[0]["type"] == "response.created" and records[1]["type"] == "response.in_progress"
    state = ResponseStreamState(input_tools=[], text_format=omit)
    for record in records:
        parsed = EVENT.validate_python(record, strict=False)
        assert parsed.type == record["type"]
        state.handle_event(parsed)
    last = records[-1]
    assert last["type"] == {"stop": "response.completed", "tool_calls": "response.completed", "deadline": "response.failed"}.get(
        finish, "response.incomplete"
    )
    final = Response.model_validate(last["response"])
    assert last["response"] == json.loads(msgspec.json.encode(writer.response))
    # deltas join to the items of the end, and each item is added once and done once
    for position, item in enumerate(last["response"]["output"]):
        mine = [record for record in records if record.get("output_index") == position]
        assert [r["type"] for r in mine if "output_item" in r["type"]] == [
            "response.output_item.added",
            "response.output_item.done",
        ]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["type"] == "response.output_item.done"
        assert mine[-1]["item"] == item and mine[0]["item"]["id"] == item["id"]
        own = OWN_EVENTS[item["type"]]
        text = "".join(r["delta"] for r in mine if r["type"] == f"response.{own}.delta")
        whole = item.get("arguments", item.get("input")) or item["content"][0]["text"]
        assert text == whole
        assert [r for r in mine if r["type"] == f"response.{own}.done"]
        if item["type"] == "reasoning":
            assert unseal(item["encrypted_content"]) == whole
            assert [part["text"] for part in item["summary"]] == ([whole] if has_summary else [])
            summary = "".join(r["delta"] for r in mine if r["type"] == "response.reasoning_summary_text.delta")
            assert summary == (whole if has_summary else "")
    assert final.output_text == "".join(event.text for event in events if isinstance(event, Content))
    assert final.usage is not None and final.usage.input_tokens_details.cached_tokens == 2
    assert final.usage.output_tokens_details.reasoning_tokens == 1 and final.usage.total_tokens == 8


def test_what_was_cut_off_is_not_complete() -> None:
    for name, status in (("cut call", "incomplete"), ("cut text", "incomplete"), ("text", "completed")):
        events, finish = ANSWERS[name]
        writer = ResponseWriter(blank())
        for event in events:
            writer.push(event)
        writer.finish(finish, None)
        assert writer.response.output[-1].status == status
        assert (writer.response.incomplete_details is None) == (finish == "stop")


def text_part(kind: str, text: str) -> dict[str, object]:
    return {"type": kind, "text": text}


def test_items_become_turns() -> None:
    request = request_of(
        input=[
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [text_part("input_text", "a"), text_part("input_text", "b")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m", "role": "assistant", "content": [text_part("output_text", "I call")]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
            {"role": "assistant", "content": "done"},
            {"role": "assistant", "content": "again"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": seal("sealed")},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": ""},
        ]
    )  # fmt: skip
    assert to_messages(request) == (
        Message("developer", "be brief"),
        Message("user", "a\nb"),
        Message("assistant", "I call", "hm", (ToolCall("c1", "f", '{"x": 1}'), ToolCall("c2", "g", "{}"))),
        Message("tool", "two", tool_call_id="c2", name="g"),
        Message("tool", "one", tool_call_id="c1", name="f"),
        Message("assistant", "done"),
        Message("assistant", "again"),
        Message("assistant", "", "sealed", (ToolCall("c3", "f", "{}"),)),
    )
    assert to_messages(request_of(input="hi")) == (Message("user", "hi"),)


def test_an_answer_goes_into_the_next_request_as_it_went_into_the_store() -> None:
    events, finish = ANSWERS["calls"]
    writer = ResponseWriter(blank())
    for event in events:
        writer.push(event)
    writer.finish(finish, None)
    stored = answer_messages(writer.response.output)
    items = json.loads(msgspec.json.encode(writer.response.output))
    assert to_messages(request_of(input=items)) == stored
    assert stored[0].tool_calls[0] == ToolCall("call_a", "f", '{"x":1}')
    follow = request_of(input=[{"type": "function_call_output", "call_id": "call_b", "output": "r"}])
    assert to_messages(follow, stored) == (Message("tool", "r", tool_call_id="call_b", name="g"),)


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def test_tools_and_choices() -> None:
    request = request_of(input="x", tools=[FUNCTION, {"type": "function", "name": "g"}])
    first, second = to_tools(request)
    assert list(first.function) == ["name", "description", "parameters"] and first.is_strict and not second.is_strict
    assert to_choice(request_of(input="x")).mode == "auto"
    assert to_choice(request_of(input="x", tools=[FUNCTION], tool_choice="required")).mode == "required"
    named = to_choice(request_of(input="x", tools=[FUNCTION], tool_choice={"type": "function", "name": "f"}))
    assert (named.mode, named.name) == ("named", "f")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    request = request_of(input="x", tools=[FUNCTION, {"type": "function", "name": "g"}], tool_choice=allowed)
    assert to_choice(request).mode == "required" and [tool.name for tool in to_tools(request)] == ["g"]


PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /.+/'}


SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION, {"type": "function", "name": "g"}]}


def test_functions_of_a_namespace_are_named_with_it_and_answered_without() -> None:
    """As agents send them: a namespace, and tools of OpenAI's servers that an answer may do without."""
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation"},
        {"type": "web_search_2025_08_26"},
    ]
    request = request_of(input="x", tools=[FUNCTION, SPACE, *hosted])
    assert [tool.name for tool in to_tools(request)] == ["f", "agents.f", "agents.g"]
    assert [tool.type for tool in shown_tools(request)] == ["function", "namespace"]
    assert to_choice(request_of(input="x", tools=[SPACE], tool_choice="required")).mode == "required"
    writer = ResponseWriter(blank(), namespaces=namespaces(request))
    calls: list[Event] = [CallStart(0, "call_a", "agents.f"), CallArguments(0, "{}"), CallEnd(0), CallStart(1, "call_b", "f")]
    events = writer.start()
    for event in [*calls, CallArguments(1, "{}"), CallEnd(1)]:
        events += writer.push(event)
    events += writer.finish("tool_calls", None)
    for event in events:
        EVENT.validate_json(msgspec.json.encode(event))
    answer = Response.model_validate_json(msgspec.json.encode(writer.response))
    assert [(call.namespace, call.name) for call in answer.output if call.type == "function_call"] == [
        ("agents", "f"),
        (None, "f"),
    ]
    sent = [item.to_dict() for item in answer.output]
    results = [{"type": "function_call_output", "call_id": f"call_{one}", "output": "r"} for one in "ab"]
    turn, first, second = to_messages(request_of(input=[*sent, *results]))
    assert [call.name for call in turn.tool_calls] == ["agents.f", "f"] == [first.name, second.name]
    assert answer_messages(writer.response.output)[0].tool_calls == turn.tool_calls
    listed = msgspec.to_builtins(items_of("resp_1", [turn, first, second]))
    assert [(item.get("namespace"), item["name"]) for item in listed[:2]] == [("agents", "f"), (None, "f")]


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type", "computer_call_output"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing"),
        ({"input": [{"type": "function_call_output", "call_id": "z", "output": "x"}]}, "input[0].call_id", "a call before it"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type", "file_search"),
        ({"input": "x", "tools": [PATCH, {"type": "local_shell"}]}, "tools[1].type", "local_shell"),
        ({"input": "x", "tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format.definition", "missing"),
        ({"input": "x", "tools": [PATCH | {"format": LARK | {"syntax": "ebnf"}}]}, "tools[0].format.syntax", "lark, regex"),
        (
            {"input": "x", "tools": [PATCH], "tool_choice": {"type": "function", "name": "apply_patch"}},
            "tool_choice.name",
            "none",
        ),
        ({"input": "x", "tools": [FUNCTION, FUNCTION]}, "tools[1].name", "once"),
        ({"input": "x", "tools": [SPACE, SPACE]}, "tools[1].tools[0].name", "once"),
        ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "missing"),
        ({"input": "x", "tools": [SPACE | {"tools": [SPACE]}]}, "tools[0].tools[0].type", "function"),
        ({"input": "x", "tools": [SPACE | {"name": f"n{n}"} for n in range(300)]}, "tools[256].tools[0]", "at most 512"),
        ({"input": "x", "tools": [SPACE | {"name": "a b"}]}, "tools[0].tools[0].name", "a b.f"),
        ({"input": "x", "tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice", "no tools"),
        ({"input": "x", "tools": [SPACE], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "agents.f"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "none"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
        ({"input": "x", "truncation": "auto"}, "truncation", "disabled"),
        ({"input": "x", "background": True}, "background", "not supported"),
        ({"input": "x", "conversation": "c"}, "conversation", "not supported"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "JSON schema"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, object], field: str, told: str) -> None:
    request = request_of(**fields)
    with pytest.raises(ApiError) as caught:
        check(request)
        to_messages(request)
        to_tools(request)
        to_choice(request)
    assert caught.value.status == 400 and caught.value.field == field and told in caught.value.message


def test_a_foreign_seal_is_not_read() -> None:
    assert unseal(seal("thoughts ü")) == "thoughts ü"
    assert unseal("gAAAA") is None and unseal("lamina1.???") is None and unseal("lamina1./w==") is None


# The store ----------------------------------------------------------------------------------------------------------


def test_the_store_is_bounded_and_keeps_keys_apart() -> None:
    now = [0.0]
    store = ResponseStore(max_responses=3, max_bytes=100_000, max_age_s=10, clock=lambda: now[0])
    for number in range(4):
        store.put("a", f"r{number}", b"x" * 100, (Message("user", "hi"),), None)
    assert len(store) == 3 and store.get("a", "r0") is None and store.get("a", "r3") is not None
    assert store.get("b", "r3") is None and not store.drop("b", "r3")
    store.get("a", "r1")
    store.put("a", "r4", b"x", (), None)
    assert store.get("a", "r1") is not None and store.get("a", "r2") is None  # the least recently used went
    store.put("a", "big", b"x" * 200_000, (), None)
    assert len(store) == 3 and store.get("a", "big") is None
    now[0] = 11
    assert store.get("a", "r1") is None
    for id in ("r3", "r4"):
        store.drop("a", id)
    assert (len(store), store.num_bytes) == (0, 0)


def test_turns_are_shared_and_counted_once() -> None:
    store = ResponseStore(max_responses=1000, max_bytes=1_000_000)
    before = None
    for number in range(200):
        store.put("", f"r{number}", b"x", (Message("user", "y" * 100),), before)
        found = store.get("", f"r{number}")
        assert found is not None and len(found.turn.history()) == number + 1
        before = found.turn
    assert store.num_bytes < 200 * 2000
    assert store.drop("", "r0") and store.drop("", "r100")
    last = store.get("", "r199")
    assert last is not None and len(last.turn.history()) == 200
    for number in range(200):
        store.drop("", f"r{number}")
    assert (len(store), store.num_bytes) == (0, 0)
    store.put("", "again", b"x", (), last.turn)  # the chain had been dropped while a request was going on from it
    counted = store.num_bytes
    assert counted > 200 * 400
    store.drop("", "again")
    assert store.num_bytes == 0


def test_memory_pressure_drops_the_oldest_first() -> None:
    store = ResponseStore(max_responses=1000, max_bytes=50_000)
    for number in range(100):
        store.put("", f"r{number}", b"x" * 1000, (Message("user", "y" * 100),), None)
        assert store.num_bytes <= 50_000
    assert 10 < len(store) < 50 and store.get("", "r99") is not None and store.get("", "r0") is None


# A real server ------------------------------------------------------------------------------------------------------

PLAIN = {"effort": "none"}
QUICK = {"model": "tiny", "max_output_tokens": 8, "temperature": 0, "reasoning": PLAIN}
WEATHER = {
    "type": "function", "name": "weather", "description": "Weather of a place", "strict": True,
    "parameters": {
        "type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"], "additionalProperties": False
    },
}  # fmt: skip


def test_whole_and_streamed_answers_are_the_same(server) -> None:
    for extra in ({}, {"reasoning": {"effort": "high", "summary": "auto"}}):
        ask = QUICK | {"input": "Tell me a story", "extra_body": {"seed": 3}, "temperature": 1} | extra
        whole = server.openai.responses.create(**ask)
        with server.openai.responses.stream(**ask) as stream:
            events = list(stream)
        last = events[-1].response
        drop = {"id", "created_at", "completed_at"}
        one, other = ({k: v for k, v in answer.to_dict().items() if k not in drop} for answer in (whole, last))
        for answer in (one, other):
            for name in ("input_tokens_details", "memory"):
                assert answer["usage"].pop(name)
            for item in answer["output"]:
                item.pop("id")
        assert one == other
        assert whole.usage.output_tokens == 8 and whole.status == "incomplete"
        assert whole.incomplete_details.reason == "max_output_tokens"
        thoughts = "reasoning" in {item.type for item in whole.output}
        assert thoughts == bool(extra) and whole.usage.output_tokens_details.reasoning_tokens == (8 if extra else 0)
        names = [event.type for event in events]
        assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert ("response.reasoning_summary_text.delta" in names) == bool(extra)


def test_a_response_goes_on_from_another(server) -> None:
    first = server.openai.responses.create(**QUICK, input="My name is Ada.", instructions="be brief", metadata={"k": "v"})
    assert server.openai.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = server.openai.responses.create(**QUICK, input="What is it?", previous_response_id=first.id)
    by_hand = [{"role": "user", "content": "My name is Ada."}, *[item.to_dict() for item in first.output],
               {"role": "user", "content": "What is it?"}]  # fmt: skip
    again = server.openai.responses.create(**QUICK, input=by_hand)
    assert (again.output_text, again.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    assert again.usage.input_tokens_details.cached_tokens > 0
    counted = server.openai.responses.input_tokens.count(
        model="tiny", input="What is it?", previous_response_id=first.id, reasoning=PLAIN
    )
    assert counted.input_tokens == second.usage.input_tokens
    assert second.previous_response_id == first.id and first.metadata == {"k": "v"} and first.instructions == "be brief"
    server.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(**QUICK, input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    unkept = server.openai.responses.create(**QUICK, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(unkept.id)


def test_a_streamed_response_is_kept_before_it_ends(server) -> None:
    for _ in range(3):
        with server.openai.responses.create(**QUICK, input="x", stream=True) as stream:
            last = next(event for event in stream if event.type == "response.incomplete")
            assert server.openai.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_logprobs_belong_to_the_text(server) -> None:
    for stream in (False, True):
        found = server.openai.responses.create(
            **QUICK, input="x", top_logprobs=2, include=["message.output_text.logprobs"], stream=stream
        )
        response = list(found)[-1].response if stream else found
        part = response.output[0].content[0]
        assert bytes(byte for row in part.logprobs for byte in row.bytes).decode(errors="replace") == part.text
        assert all(
            len(row.top_logprobs) == 2 and row.top_logprobs[0].logprob >= row.top_logprobs[1].logprob for row in part.logprobs
        )


def test_the_text_matches_a_schema(server) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    for effort in ("none", "low"):
        ask = QUICK | {"input": "x", "text": form, "max_output_tokens": 60, "reasoning": {"effort": effort}, "temperature": 1}
        answer = server.openai.responses.create(**ask)
        if answer.status == "completed":
            assert json.loads(answer.output_text)["n"] in (1, 22)
        else:  # a model of random weights may think to the end, but what it says is never anything else
            assert effort == "low" and not answer.output_text
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(
            **QUICK, input="x", text={"format": {"type": "json_schema", "name": "n", "schema": {"type": 7}}}
        )
    assert caught.value.param == "text.format" and "text.format=" in caught.value.message


def test_a_forced_call_and_its_result(server) -> None:
    ask = QUICK | {"input": "weather?", "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200}
    ask |= {"parallel_tool_calls": False, "temperature": 1, "extra_body": {"seed": 5}}
    with server.openai.responses.stream(**ask) as stream:
        events = list(stream)
        answer = stream.get_final_response()
    call = next(item for item in answer.output if item.type == "function_call")
    assert call.name == "weather" and json.loads(call.arguments)["days"] in (1, 2, 3) and call.status == "completed"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    follow = QUICK | {"input": [result], "tools": [WEATHER], "previous_response_id": answer.id}
    assert server.openai.responses.create(**follow).usage.input_tokens > answer.usage.input_tokens
    references = [{"type": "item_reference", "id": item.id} for item in answer.output]  # as Vercel's SDK goes on
    counts = []
    for items in (references, [item.to_dict() for item in answer.output]):
        again = QUICK | {"input": [{"role": "user", "content": "weather?"}, *items, result], "tools": [WEATHER]}
        counts.append(server.post("/v1/responses/input_tokens", again).json()["input_tokens"])
    assert counts[0] == counts[1] > answer.usage.input_tokens
    for items, told in ((references + references[:1], "once"), ([{"type": "item_reference", "id": "fc_none_1"}], "kept")):
        error = server.post("/v1/responses", QUICK | {"input": items}).json()["error"]
        assert error["param"] == f"input[{len(items) - 1}].id" and told in error["message"]


def test_one_in_work_can_be_cancelled(server) -> None:
    ask = QUICK | {"input": "x", "max_output_tokens": 100_000, "temperature": 1}
    names, status = [], None
    with server.openai.responses.create(**ask, stream=True) as stream:
        for event in stream:
            if event.type == "response.created":
                assert server.openai.responses.retrieve(event.response.id).status == "in_progress"
                status = server.openai.responses.cancel(event.response.id).status
            names.append(event.type)
    assert status == "cancelled" and names[-1] == "response.incomplete"
    assert server.openai.responses.retrieve(event.response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended"):
        server.openai.responses.cancel(event.response.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.cancel("resp_none")


def test_who_leaves_is_forgotten(server) -> None:
    ask = QUICK | {"input": "x", "max_output_tokens": 100_000, "temperature": 1, "stream": True}
    with server.http.stream("POST", "/v1/responses", json=ask) as stream:
        lines = stream.iter_lines()
        line = next(line for line in lines if line.startswith("data: "))
    id = json.loads(line.removeprefix("data: "))["response"]["id"]
    until = time.monotonic() + 10
    while server.http.get(f"/v1/responses/{id}").status_code != 404:
        assert time.monotonic() < until
        time.sleep(0.05)
    server.idle_pages()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"model": "other"}, "model"),
        ({"input": 5}, "input"),
    ],
)
def test_the_door_names_the_field(server, fields: dict[str, object], field: str) -> None:
    answer = server.post("/v1/responses", QUICK | {"input": "x"} | fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400)
    assert error["param"].startswith(field) and error["message"]


def test_each_key_has_responses_of_its_own_and_both_headers_count(
    start_server: Callable[..., object], tmp_path: Path, serving
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key-1\nsecond-key-2\n")
    served = start_server("--api-key-file", str(keys), "--cache-bytes", "64MiB", key="first-key-1")
    first = served.openai.responses.create(**QUICK, input="x")
    other = openai.OpenAI(base_url=f"{served.url}/v1", api_key="second-key-2", max_retries=0)
    for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.BadRequestError):
        other.responses.create(**QUICK, input="x", previous_response_id=first.id)
    assert served.openai.responses.retrieve(first.id).id == first.id
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(base_url=served.url, trust_env=False) as bare:
        refused = bare.post("/v1/messages", json=body)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["type"] == "error"
        assert bare.post("/v1/messages", json=body, headers={"x-api-key": "second-key-2"}).status_code == 200

    # the engine dies in the middle of answers: each protocol says so in its own words, and goes on afterwards
    long = QUICK | {"input": "x", "max_output_tokens": 100_000, "temperature": 1, "stream": True}
    with served.openai.responses.create(**long) as answer:
        wanted = body | {"max_tokens": 100_000, "stream": True}
        with served.http.stream("POST", "/v1/messages", json=wanted) as other_answer:
            lines = other_answer.iter_lines()
            assert next(lines) == "event: message_start"
            os.kill(served.engine_pid(), signal.SIGKILL)
            last = list(answer)[-1]
            assert last.type == "response.failed" and last.response.error.message
            *_, name, data, _ = lines
            assert name == "event: error" and json.loads(data.removeprefix("data: "))["type"] == "error"
    assert served.openai.responses.retrieve(last.response.id).status == "failed"
    served.wait_ready()
    assert served.openai.responses.create(**QUICK, input="x").output_text


def test_the_input_of_a_response_is_listed_in_pages(server) -> None:
    responses = server.openai.responses
    call = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    given = [
        {"role": "user", "content": "What time is it?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A clock knows."}]},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    ]
    first = responses.create(model="tiny", input=given, max_output_tokens=4, reasoning={"effort": "none"})
    second = responses.create(
        model="tiny", input="And now?", previous_response_id=first.id, max_output_tokens=4, reasoning={"effort": "none"},
        instructions="Be brief.",
    )  # fmt: skip
    items = list(responses.input_items.list(first.id, order="asc"))
    assert [item.type for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
    assert items[0].content[0].text == "What time is it?" and items[3].output == "noon" and items[2].call_id == "call_1"
    whole = list(responses.input_items.list(second.id, limit=2))  # the client asks for page after page
    assert [item.type for item in whole][:2] == ["message", "message"] and len(whole) == 6
    assert whole[0].content[0].text == "And now?"
    assert whole[1].role == "assistant" and whole[1].content[0].text == first.output_text
    assert len({item.id for item in whole}) == 6
    page = server.http.get(f"/v1/responses/{second.id}/input_items?limit=4&order=asc").json()
    assert page["object"] == "list" and page["has_more"] and page["last_id"] == page["data"][-1]["id"] == whole[2].id
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
        refused = server.http.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert server.http.get("/v1/responses/resp_none/input_items").status_code == 404


def test_what_is_not_served_is_named(server) -> None:
    for fields, param in (
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"input": [{"type": "local_shell_call_output", "id": "x", "output": "y"}]}, "input[0].type"),
        ({"include": ["message.output_text.logprobs", "everything"]}, "include[1]"),
        ({"background": True}, "background"),
    ):
        response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 2} | fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
