"""Custom tools of the responses protocol: what they are given is a text. Read with the client library's own records."""

import json
import re

import msgspec
import pytest

from lamina.chat.records import ToolCall
from lamina.server.responses_convert import custom_names, shown_tools, to_choice, to_messages, to_tools
from lamina.server.responses_custom import InputReader, arguments_of, input_of
from lamina.server.responses_items import items_of
from lamina.server.responses_schema import ResponsesRequest

PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /.+/'}


def request_of(**fields: object) -> ResponsesRequest:
    return msgspec.json.decode(json.dumps(fields).encode(), type=ResponsesRequest)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\" \\ud83d\\ude00 \\ud83d x \\u00e9 \\\\"}', 'a\n"b" 😀 \ufffd x é \\'),
        (' { "input" : "\\ude00\\ud83d", "more": 1}', "\ufffd\ufffd"),
        ('{"more": ["input"], "input": "late"}', "late"),
        ('{"input": ""}', ""),
        ("{}", ""),
        ('{"input": 7}', '{"input": 7}'),
        ('{"inp', '{"inp'),
        ('{"input": "cut \\ud83d', "cut "),
    ],
)
def test_the_text_of_a_custom_call_is_the_same_however_it_streams(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    for size in (1, 2, 5):
        reader = InputReader()
        pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join(pieces) + reader.finish() == text
    assert input_of(arguments_of(text)) == text


def test_custom_tools_are_functions_of_one_text() -> None:
    """As Codex sends apply_patch, and what it sends back."""
    regex = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}
    tools = [PATCH | {"format": LARK}, PATCH | {"name": "r", "format": regex}, PATCH | {"name": "t", "format": {"type": "text"}}]
    request = request_of(input="x", tools=tools, tool_choice={"type": "custom", "name": "r"})
    patch, pattern, text = to_tools(request)
    assert LARK["definition"] in patch.function["description"] and (patch.is_strict, pattern.is_strict) == (False, True)
    assert pattern.parameters["properties"] == {"input": {"type": "string", "pattern": "[ab]{3}"}}
    assert text.function["description"] == "Edits files." and to_choice(request).name == "r"
    assert custom_names(request) == {"apply_patch", "r", "t"} and len(shown_tools(request)) == 3
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** "x"\n', "status": "completed"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done"}]}
    turn, told = to_messages(request_of(input=[call, result]))
    assert turn.tool_calls == (ToolCall("c1", "apply_patch", '{"input": "*** \\"x\\"\\n"}', is_custom=True),)
    assert (told.role, told.content, told.name) == ("tool", "Done", "apply_patch")
    listed = msgspec.to_builtins(items_of("resp_1", [turn, told]))
    assert [item["type"] for item in listed] == ["custom_tool_call", "custom_tool_call_output"]
    assert listed[0]["input"] == call["input"] and listed[1]["call_id"] == "c1"


def test_a_custom_tool_is_given_a_text(server) -> None:
    tool = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{1,9}"}}
    body = {"model": "tiny", "tools": [tool], "reasoning": {"effort": "none"}}
    ask = body | {"input": "edit", "max_output_tokens": 200, "extra_body": {"seed": 5}}
    with server.openai.responses.stream(**ask, tool_choice={"type": "custom", "name": "apply_patch"}) as stream:
        pieces = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
        answer = stream.get_final_response()
    call = next(item for item in answer.output if item.type == "custom_tool_call")
    assert call.name == "apply_patch" and re.fullmatch("[a-c]{1,9}", call.input) and "".join(pieces) == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    counts = []
    for more in (
        {"input": [result], "previous_response_id": answer.id},
        {"input": [{"role": "user", "content": "edit"}, call.to_dict(), result]},
    ):
        counts.append(server.post("/v1/responses/input_tokens", body | more).json()["input_tokens"])
    assert counts[0] == counts[1] > answer.usage.input_tokens
