"""The messages protocol, read with the client library's own records."""

import json

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Message, Reasoning, ToolCall
from lamina.server.batches import joined
from lamina.server.errors import ApiError
from lamina.server.messages_convert import error_of, schema_of, to_choice, to_messages, to_thinking, to_tools
from lamina.server.messages_events import MessageWriter
from lamina.server.messages_schema import AnswerMessage, MessagesRequest, MessageUsage, Ping, TokensDetails, type_of

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def request_of(**fields: object) -> MessagesRequest:
    record = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]} | fields
    return msgspec.json.decode(json.dumps(record).encode(), type=MessagesRequest)


CALLS: list[Event] = [
    Reasoning("r"), Content("c"), CallStart(0, "call_a", "f"), CallArguments(0, '{"x"'), CallArguments(0, ":1}"), CallEnd(0),
    CallStart(1, "call_b", "g"), CallEnd(1),
]  # fmt: skip
ANSWERS: dict[str, tuple[list[Event], str, int | str | None, str]] = {
    "text": ([Content("Hel"), Content("lo")], "stop", None, "end_turn"),
    "stop token": ([Content("Hel")], "stop", 7, "end_turn"),
    "stop sequence": ([Content("Hel")], "stop", "END", "stop_sequence"),
    "empty": ([], "stop", None, "end_turn"),
    "thoughts": ([Reasoning("I "), Reasoning("think"), Content("so")], "stop", None, "end_turn"),
    "cut thoughts": ([Reasoning("I thi")], "length", None, "max_tokens"),
    "calls": (CALLS, "tool_calls", None, "tool_use"),
    "late": ([Content("Hel")], "deadline", None, "pause_turn"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_what_the_client_library_reads(name: str) -> None:
    events, finish, stop, reason = ANSWERS[name]
    writer = MessageWriter(AnswerMessage("msg_1", "m", [], MessageUsage(7, 0)))
    written = writer.start()
    for event in events:
        written += writer.push(event)
    written += writer.finish(finish, stop, MessageUsage(5, 3, 2, 0, TokensDetails(1)))
    snapshot = None
    buffers: dict[int, bytes] = {}
    open_blocks: list[int] = []
    for one in written:
        if isinstance(one, Ping):
            continue
        record = json.loads(msgspec.json.encode(one))
        assert record["type"] == type_of(one)
        if record["type"] == "content_block_start":
            assert not open_blocks
            open_blocks.append(record["index"])
        elif record["type"] == "content_block_stop":
            assert open_blocks.pop() == record["index"]
        parsed = EVENT.validate_python(record)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None and not open_blocks
    whole = json.loads(msgspec.json.encode(writer.message))
    SdkMessage.model_validate(whole)
    assert snapshot.stop_reason == reason == whole["stop_reason"]
    assert snapshot.stop_sequence == whole["stop_sequence"] == (stop if isinstance(stop, str) else None)
    assert [block.to_dict() for block in snapshot.content] == whole["content"]
    assert (snapshot.usage.input_tokens, snapshot.usage.output_tokens, snapshot.usage.cache_read_input_tokens) == (5, 3, 2)
    assert whole["usage"]["cache_read_input_tokens"] == 2


def test_a_call_that_was_cut_off_is_not_in_the_message() -> None:
    writer = MessageWriter(AnswerMessage("msg_1", "m", [], MessageUsage(7, 0)))
    for event in CALLS[:4]:
        writer.push(event)
    types = [type_of(event) for event in writer.finish("length", None, MessageUsage(1, 1))]
    assert types == ["content_block_stop", "message_delta", "message_stop"]
    kinds = [block["type"] for block in json.loads(msgspec.json.encode(writer.message))["content"]]
    assert kinds == ["thinking", "text"] and writer.message.stop_reason == "max_tokens"


def test_a_call_that_is_no_object_does_not_break_the_message() -> None:
    for text in ("{", "[]", '{"x": 1} y', "{" * 100_000):
        writer = MessageWriter(AnswerMessage("msg_1", "m", [], MessageUsage(7, 0)))
        for event in (CallStart(0, "call_a", "f"), CallArguments(0, text), CallEnd(0)):
            writer.push(event)
        writer.finish("tool_calls", None, MessageUsage(1, 1))
        assert json.loads(msgspec.json.encode(writer.message))["content"] == []


def test_neighbours_are_joined_and_others_are_not() -> None:
    pieces: list[Event] = [
        Reasoning("a"), Reasoning("b"), Content("c"), Content("d"), CallStart(0, "i", "f"), CallArguments(0, "{"),
        CallArguments(0, "}"), CallArguments(1, "x"), CallEnd(0), Content("e"),
    ]  # fmt: skip
    assert joined(pieces) == [
        Reasoning("ab"), Content("cd"), CallStart(0, "i", "f"), CallArguments(0, "{}"), CallArguments(1, "x"), CallEnd(0),
        Content("e"),
    ]  # fmt: skip


def test_hidden_thoughts_come_empty() -> None:
    writer = MessageWriter(AnswerMessage("msg_1", "m", [], MessageUsage(7, 0)), hides_thoughts=True)
    types = [type_of(event) for event in writer.push(Reasoning("secret")) + writer.push(Content("x"))]
    assert types == [
        "content_block_start", "content_block_delta", "content_block_stop", "content_block_start", "content_block_delta"
    ]  # fmt: skip
    assert b"secret" not in msgspec.json.encode(writer.finish("stop", None, MessageUsage(1, 1)))


def test_blocks_become_turns() -> None:
    request = request_of(
        system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "text", "text": "I call"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": [1, "é"]}},
                    {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "go"},
                    {"type": "text", "text": "on"},
                ],
            },
            {"role": "assistant", "content": "So"},
        ],
    )
    assert to_messages(request) == [
        Message("system", "S\n\nT"),
        Message("user", "q"),
        Message("assistant", "I call", "hm", (ToolCall("t1", "f", '{"x":[1,"é"]}'), ToolCall("t2", "g", "{}"))),
        Message("tool", "one", tool_call_id="t1", name="f"),
        Message("tool", "", tool_call_id="t2", name="g"),
        Message("user", "go\n\non"),
        Message("assistant", "So", is_open=True),
    ]


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def test_tools_choices_and_thinking() -> None:
    request = request_of(tools=[TOOL, {"type": "custom", "name": "g", "input_schema": {}, "strict": True}])
    first, second = to_tools(request)
    assert list(first.function) == ["name", "description", "parameters"] and not first.is_strict and second.is_strict
    modes = {"auto": "auto", "any": "required", "none": "none", "tool": "named"}
    for kind, mode in modes.items():
        choice = to_choice(request_of(tools=[TOOL], tool_choice={"type": kind, "name": "f"}))
        assert choice.mode == mode and choice.name == ("f" if kind == "tool" else None)
    assert not to_thinking(request) and not to_thinking(request_of(thinking={"type": "disabled"}))
    assert to_thinking(request_of(thinking={"type": "adaptive"}))
    assert to_thinking(request_of(thinking={"type": "enabled", "budget_tokens": 1024}))
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    assert schema_of(request_of(output_config=form)) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].tool_use_id", "tool_use",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
            "messages[0]", "tool_result",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "bash"}]}]}, "messages[0].content[0].type", "bash"),
        ({"system": [{"type": "image"}]}, "system[0].type", "image"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "once"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "z"}}, "tool_choice.name", "one of the tools: f"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, object], field: str, told: str) -> None:
    request = request_of(**fields)
    with pytest.raises(ApiError) as caught:
        to_messages(request)
        to_tools(request)
        to_choice(request)
    assert caught.value.status == 400 and caught.value.field == field and told in caught.value.message


@pytest.mark.parametrize("missing", ["max_tokens", "messages"])
def test_what_is_required(missing: str) -> None:
    record = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    del record[missing]
    with pytest.raises(msgspec.ValidationError, match=missing):
        msgspec.json.decode(json.dumps(record).encode(), type=MessagesRequest)


def test_errors_have_the_protocols_names() -> None:
    names = {status: error_of(ApiError(status, "m", "f")).error.type for status in (400, 401, 404, 413, 418, 429, 500, 503, 504)}
    assert names == {
        400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
        418: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
    }  # fmt: skip
    whole = json.loads(msgspec.json.encode(error_of(ApiError(400, "m", "f"))))
    assert whole == {"type": "error", "error": {"type": "invalid_request_error", "message": "m", "param": "f"}}


# A real server ------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"extra_body": {"temperature": 0}}
QUICK = {"model": "tiny", "max_tokens": 8, "messages": HI} | GREEDY
WEATHER = {
    "name": "weather",
    "description": "Weather of a place",
    "input_schema": {
        "type": "object", "properties": {"days": {"enum": [1, 2, 3]}}, "required": ["days"], "additionalProperties": False
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_whole_and_streamed_answers_are_the_same(client: anthropic.Anthropic, thinking: dict[str, object] | None) -> None:
    ask = QUICK | {"extra_body": {"seed": 4}} | ({"thinking": thinking} if thinking else {})
    whole = client.messages.create(**ask)
    assert whole._request_id
    with client.messages.stream(**ask) as stream:
        names = [event.type for event in stream]
        last = stream.get_final_message()
    assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in last.content]
    assert (whole.stop_reason, whole.usage.output_tokens) == (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 8)
    assert [block.type for block in whole.content] == (["thinking"] if thinking else ["text"])
    assert whole.usage.output_tokens_details.thinking_tokens == (8 if thinking else 0)
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]


def test_the_raw_stream_pings_and_ends(server) -> None:
    text = server.post("/v1/messages", {"max_tokens": 8, "messages": HI, "stream": True}).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    for block in text.strip().split("\n\n"):
        event, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == event.removeprefix("event: ")


def test_tokens_are_counted_and_what_was_cached_is_told(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "a prompt that comes twice " * 40}]
    count = client.messages.count_tokens(model="tiny", messages=messages, system="S").input_tokens
    ask = QUICK | {"messages": messages, "system": "S"}
    cold, warm = client.messages.create(**ask).usage, client.messages.create(**ask).usage
    assert cold.input_tokens == count and cold.cache_read_input_tokens == 0
    assert warm.input_tokens + warm.cache_read_input_tokens == count and warm.cache_read_input_tokens > 0
    with client.messages.stream(**ask) as stream:
        usage = stream.get_final_message().usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (warm.input_tokens, warm.cache_read_input_tokens)


def test_the_client_librarys_list_of_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert model == client.models.retrieve("tiny")
    assert model.id == model.display_name == "tiny" and model.type == "model" and model.created_at.tzinfo is not None


def test_a_stop_sequence_is_named_and_does_not_show(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**QUICK | {"max_tokens": 40}).content[0].text
    stop = next(text[i : i + 2] for i in range(8, len(text)) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    ask = QUICK | {"max_tokens": 40, "stop_sequences": ["never this", stop]}
    answer = client.messages.create(**ask)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    with client.messages.stream(**ask) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.stop_sequence, last.content[0].text) == ("stop_sequence", stop, answer.content[0].text)


def test_an_assistants_last_turn_is_gone_on_with(client: anthropic.Anthropic) -> None:
    plain = client.messages.count_tokens(model="tiny", messages=HI).input_tokens
    messages = [*HI, {"role": "assistant", "content": "So"}]
    assert client.messages.count_tokens(model="tiny", messages=messages).input_tokens > plain
    assert client.messages.create(**QUICK | {"messages": messages}).content


def test_a_forced_call_and_its_result(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    ask = QUICK | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200, "extra_body": {"seed": 5}}
    with client.messages.stream(**ask) as stream:
        answer = stream.get_final_message()
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.name == "weather" and call.input["days"] in (1, 2, 3)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    follow = [*HI, {"role": "assistant", "content": answer.content}, result]
    assert client.messages.create(**QUICK | {"messages": follow, "tools": [WEATHER]}).usage.output_tokens


def test_refusals_are_the_client_librarys_errors(client: anthropic.Anthropic, server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**QUICK | {"model": "other"})
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**QUICK | {"messages": image})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**QUICK | {"max_tokens": 0})
    with pytest.raises(anthropic.BadRequestError, match="bash_20250124"):
        client.messages.create(**QUICK | {"tools": [{"type": "bash_20250124", "name": "bash"}]})
    broken = server.http.post("/v1/messages", content=b"{")
    assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
    assert server.http.get("/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_thoughts_end_where_their_budget_does(server, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 6}
    body = {"max_tokens": 24, "messages": HI, "thinking": thinking, "temperature": 0.5, "seed": 3}
    if stream:
        text = server.post("/v1/messages", body | {"stream": True}).text
        last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
        kinds = [one["content_block"]["type"] for one in last if one["type"] == "content_block_start"]
        usage = next(one["usage"] for one in last if one["type"] == "message_delta")
    else:
        answer = server.post("/v1/messages", body).json()
        kinds, usage = [block["type"] for block in answer["content"]], answer["usage"]
    assert kinds == ["thinking", "text"] and usage["output_tokens_details"]["thinking_tokens"] == 6
