"""The DSML prompt encoding: the reference's golden strings and hashes, and prompts recorded from the model's own encoder."""

import hashlib
import json
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.chat import dsml_texts
from lamina.chat.dsml import LATER_EFFORTS, DsmlFormat
from lamina.chat.records import ChatOptions, Message, Tool, ToolCall, ToolChoice

BOS, EOS, USER, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
NAMES = {"dsml_token": "｜DSML｜", "thinking_start_token": "<think>", "thinking_end_token": "</think>"}
TOOL = Tool("f", {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}})
CHAT, THINKING = ChatOptions(thinking=False), ChatOptions(thinking=True, effort="low")


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(messages: list[Message], options: ChatOptions, chat: DsmlFormat | None = None) -> str:
    return (chat or DsmlFormat()).render(messages, options).text


def user(text: str, task: str | None = None) -> Message:
    return Message("user", text, task=task)


def tools_section(*tools: Tool) -> str:
    lines = "\n".join(json.dumps(tool.function, ensure_ascii=False) for tool in tools)
    return dsml_texts.TOOLS.format(tool_schemas=lines, **NAMES)


def test_the_fixed_texts_are_the_published_ones() -> None:
    rendered = tools_section()
    assert (len(dsml_texts.TOOLS), short_hash(dsml_texts.TOOLS)) == (1075, "09b7269daaddbeaf")
    assert (len(rendered), len(rendered.encode()), short_hash(rendered)) == (953, 989, "c7d3159308f7d076")
    assert (len(dsml_texts.EFFORT_ABSOLUTE), short_hash(dsml_texts.EFFORT_ABSOLUTE)) == (476, "f7a24f3b3050d4a8")
    assert (len(dsml_texts.EFFORT_BEYOND), short_hash(dsml_texts.EFFORT_BEYOND)) == (526, "53fb31b8392ec5b4")


HISTORY = [Message("system", "S"), user("q1"), Message("assistant", "a1", reasoning="r1"), user("q2")]
GOLDEN = [
    ("chat", CHAT, [user("Hi")], f"{BOS}{USER}Hi{ANSWER}</think>"),
    ("thinking", THINKING, [user("Hi")], f"{BOS}{USER}Hi{ANSWER}<think>"),
    ("dropped", THINKING, HISTORY, f"{BOS}S{USER}q1{ANSWER}</think>a1{EOS}{USER}q2{ANSWER}<think>"),
    (
        "kept", ChatOptions(thinking=True, effort="low", drop_thinking=False), HISTORY,
        f"{BOS}S{USER}q1{ANSWER}<think>r1</think>a1{EOS}{USER}q2{ANSWER}<think>",
    ),
    ("merged", CHAT, [user("a"), user("b")], f"{BOS}{USER}a\n\nb{ANSWER}</think>"),
    ("developer", CHAT, [Message("developer", "D"), user("b")], f"{BOS}{USER}D{USER}b{ANSWER}</think>"),
    ("developer dropped", THINKING, [Message("developer", "D"), user("b")], f"{BOS}{USER}b{ANSWER}<think>"),
    ("task", CHAT, [user("q", "title")], f"{BOS}{USER}q<｜title｜>"),
    ("action", THINKING, [user("q", "action")], f"{BOS}{USER}q{ANSWER}<think><｜action｜>"),
    (
        "reminder", CHAT, [user("a"), Message("latest_reminder", "L"), Message("assistant", "z")],
        f"{BOS}{USER}a{ANSWER}</think><｜latest_reminder｜>Lz{EOS}",
    ),
    ("open", CHAT, [user("a"), Message("assistant", "z", is_open=True)], f"{BOS}{USER}a{ANSWER}</think>z"),
    ("last system", CHAT, [user("a"), Message("system", "S")], f"{BOS}{USER}aS{ANSWER}</think>"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "messages", "expected"), [row[1:] for row in GOLDEN], ids=[row[0] for row in GOLDEN])
def test_golden(options: ChatOptions, messages: list[Message], expected: str) -> None:
    assert write(messages, options) == expected


def test_tools_and_results_out_of_order() -> None:
    calls = (ToolCall("1", "f", '{"x": "a\\nb", "n": [1, {"k": "ü"}], "t": true}'), ToolCall("2", "g", "{}"))
    messages = [
        Message("system", "S"), user("q"), Message("assistant", reasoning="r", tool_calls=calls),
        Message("tool", "R2", tool_call_id="2"), Message("tool", "R1", tool_call_id="1"),
    ]  # fmt: skip
    options = ChatOptions(thinking=True, effort="low", tools=(TOOL,))
    block = (
        "\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">a\nb</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">[1, {"k": "ü"}]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="t" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    )
    results = "<tool_result>R1</tool_result>\n\n<tool_result>R2</tool_result>"
    expected = f"{BOS}S\n\n{tools_section(TOOL)}{USER}q{ANSWER}<think>r</think>{block}{EOS}{USER}{results}{ANSWER}<think>"
    assert write(messages, options) == expected


def test_recorded_prompts() -> None:
    cases = json.loads((Path(__file__).parent / "dsml_cases.json").read_text(encoding="utf-8"))
    for case in cases:
        messages = [_message(record) for record in case["messages"]]
        options = ChatOptions(
            thinking=case["thinking"], effort=case["effort"], drop_thinking=case["drop"],
            tools=tuple(Tool(tool["name"], tool) for tool in case["tools"]), response_schema=case["schema"],
        )  # fmt: skip
        text = write(messages, options)
        assert (len(text), short_hash(text)) == (case["chars"], case["sha256"]), case


def _message(record: dict[str, object]) -> Message:
    calls = [ToolCall(call["id"], **call["function"]) for call in record.get("tool_calls", ())]
    return Message(
        record["role"], record["content"], reasoning=record.get("reasoning_content", ""), tool_calls=tuple(calls),
        tool_call_id=record.get("tool_call_id"), task=record.get("task"), is_open=record.get("wo_eos", False),
    )  # fmt: skip


def test_tools_need_a_system_message() -> None:
    options = ChatOptions(thinking=False, tools=(TOOL,))
    assert write([user("q")], options) == f"{BOS}\n\n{tools_section(TOOL)}{USER}q{ANSWER}</think>"
    late = [user("q"), Message("assistant", "a"), Message("system", "S"), user("r")]
    expected = f"{BOS}{USER}q{ANSWER}</think>a{EOS}S\n\n{tools_section(TOOL)}{USER}r{ANSWER}</think>"
    assert write(late, options) == expected
    assert write([user("q")], ChatOptions(thinking=False, tools=(TOOL,), tool_choice=ToolChoice("none"))) == (
        f"{BOS}{USER}q{ANSWER}</think>"
    )


def test_tools_keep_old_thoughts_and_developers() -> None:
    options = ChatOptions(thinking=True, effort="low", drop_thinking=True, tools=(TOOL,))
    text = write([Message("developer", "D"), *HISTORY[1:]], options)
    assert "<think>r1</think>a1" in text and f"{USER}D{USER}q1" in text


def test_the_schema_of_the_answer_is_shown() -> None:
    text = write([Message("system", "S"), user("q")], ChatOptions(thinking=False, response_schema={"type": "object"}))
    shown = 'You MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
    assert text == f"{BOS}S\n\n## Response Format:\n\n{shown}{USER}q{ANSWER}</think>"


@pytest.mark.parametrize(
    ("effort", "april", "later"),
    [
        ("minimal", "", ""), ("low", "", ""), ("medium", "", ""), ("high", "", dsml_texts.EFFORT_ABSOLUTE),
        ("xhigh", "", dsml_texts.EFFORT_ABSOLUTE), ("max", dsml_texts.EFFORT_ABSOLUTE, dsml_texts.EFFORT_BEYOND),
        (None, "", dsml_texts.EFFORT_ABSOLUTE),
    ],
)  # fmt: skip
def test_efforts(effort: str | None, april: str, later: str) -> None:
    options = ChatOptions(effort=effort)
    assert write([user("q")], options) == f"{BOS}{april}{USER}q{ANSWER}<think>"
    assert write([user("q")], options, DsmlFormat(LATER_EFFORTS)) == f"{BOS}{later}{USER}q{ANSWER}<think>"
    chat = ChatOptions(thinking=False, effort=effort)
    assert write([user("q")], chat, DsmlFormat(LATER_EFFORTS)) == f"{BOS}{USER}q{ANSWER}</think>"


def test_no_effort_is_no_thinking() -> None:
    assert write([user("q")], ChatOptions(thinking=True, effort="none")) == f"{BOS}{USER}q{ANSWER}</think>"


def test_a_context_goes_on() -> None:
    chat, whole = DsmlFormat(LATER_EFFORTS), [*HISTORY, Message("assistant", "a2"), user("q3")]
    options = ChatOptions(thinking=True, drop_thinking=False)
    rest = chat.render(whole[4:], options, context=whole[:4]).text
    assert rest == f"</think>a2{EOS}{USER}q3{ANSWER}<think>"
    assert chat.render(whole[:4], options).text + rest == chat.render(whole, options).text


@pytest.mark.parametrize(
    ("messages", "options", "is_thinking"),
    [
        ([user("q")], THINKING, True),
        ([user("q")], CHAT, False),
        ([user("q", "action")], THINKING, False),
        ([user("q", "title")], THINKING, False),
        ([user("q"), Message("latest_reminder", "L")], THINKING, True),
        ([user("q"), Message("assistant", "a", reasoning="r", is_open=True)], THINKING, False),
        ([user("q"), Message("assistant", "", tool_calls=(ToolCall("1", "f", ""),)), Message("tool", "R")], THINKING, True),
    ],
)
def test_where_the_answer_begins(messages: list[Message], options: ChatOptions, is_thinking: bool) -> None:
    assert DsmlFormat().render(messages, options).is_thinking is is_thinking


def test_arguments_that_are_no_object() -> None:
    text = write([user("q"), Message("assistant", "", tool_calls=(ToolCall("1", "f", "oops"),))], CHAT)
    assert '<｜DSML｜parameter name="arguments" string="true">oops</｜DSML｜parameter>' in text
    deep = "[" * 100_000
    for arguments, allowed in (("[1]", "a JSON object"), (deep, "less deeply")):
        with pytest.raises(ConfigError, match=allowed) as caught:
            write([user("q"), Message("assistant", "", tool_calls=(ToolCall("1", "f", arguments),))], CHAT)
        assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([], CHAT, "messages"),
        ([user("q"), Message("developer", "")], CHAT, "messages[1].content"),
        ([user("q", "sing")], CHAT, "messages[0].task"),
        ([Message("god", "x")], CHAT, "messages[0].role"),  # type: ignore[arg-type]
        ([user("q")], ChatOptions(effort="extreme"), "reasoning_effort"),
    ],
)
def test_refusals_name_the_field(messages: list[Message], options: ChatOptions, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(messages, options)
    assert caught.value.field == field
