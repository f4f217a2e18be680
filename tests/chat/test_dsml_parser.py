"""DSML answers as they stream: what they mean, what is tolerated, and that splitting the text changes nothing."""

import json
import random
from collections.abc import Sequence

import pytest

from lamina.chat.dsml import DsmlFormat
from lamina.chat.records import ChatOptions, Message, Tool, ToolCall, ToolChoice
from tests.conftest import load_helper

reading = load_helper("chat/reading.py")
Answer = reading.Answer
D = "｜DSML｜"
TOOLS = tuple(
    Tool(name, {"name": name, "parameters": {"type": "object", "properties": {key: {} for key in keys}}})
    for name, keys in (("f", ["a", "b"]), ("g", ["arguments"]), ("h", []))
)
OPTIONS = ChatOptions(tools=TOOLS)


def parameter(key: str, value: str, flag: str | None = "true") -> str:
    return f'<{D}parameter name="{key}"{f" string={chr(34)}{flag}{chr(34)}" if flag else ""}>{value}</{D}parameter>'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D}invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{D}invoke>"


def block(*calls: str) -> str:
    return f"\n\n<{D}tool_calls>\n" + "\n".join(calls) + f"\n</{D}tool_calls>"


def read(
    parts: Sequence[str | tuple[str, bool]], is_thinking: bool = False, reason: str = "stop", options: ChatOptions = OPTIONS,
    has_tokens: bool = False,
) -> Answer:  # fmt: skip
    return reading.read(DsmlFormat(has_think_tokens=has_tokens).parser(options, is_thinking), parts, reason)


def call(name: str, arguments: object) -> list[object]:
    return [name, json.dumps(arguments, ensure_ascii=False), True]


X = parameter("a", "x")
READINGS = [
    ("plain", "Hello\n\n", Answer(content="Hello\n\n")),
    ("call", "Hi" + block(invoke("f", X)), Answer(content="Hi", calls=[call("f", {"a": "x"})])),
    (
        "parallel",
        block(invoke("f", X, parameter("b", "[1, 2.50]", "false")), invoke("h"), invoke("f", parameter("b", "null", "false"))),
        Answer(calls=[["f", '{"a": "x", "b": [1, 2.50]}', True], call("h", {}), call("f", {"b": None})]),
    ),
    (
        "raw text",
        block(invoke("f", parameter("a", 'l1\n"q" \\ <b> </i> & 日😀\t\x07 <｜ <'))),
        Answer(calls=[call("f", {"a": 'l1\n"q" \\ <b> </i> & 日😀\t\x07 <｜ <'})]),
    ),
    ("newlines before", "a\n\n\n" + f"<{D}tool_calls>{invoke('f', X)}", Answer(content="a\n", calls=[call("f", {"a": "x"})])),
    ("after the block", block(invoke("h")) + "\n\nDone" + block(invoke("f", X)), Answer(calls=[call("h", {})])),
    ("other openers", f"<{D}toolcalls>" + invoke("h") + f"</{D}toolcalls>.", Answer(calls=[call("h", {})])),
    ("bare tool", f"<{D}tool>" + invoke("h") + f"</{D}tool>.", Answer(calls=[call("h", {})])),
    ("bare invoke", "ok\n" + invoke("h") + invoke("f", X), Answer(content="ok", calls=[call("h", {}), call("f", {"a": "x"})])),
    (
        "no end of a value",
        block(invoke("f", f'<{D}parameter name="a" string="true">1', X.replace('"a"', '"b"'))),
        Answer(calls=[call("f", {"a": "1\n", "b": "x"})]),
    ),
    ("no end of a call", f'<{D}tool_calls><{D}invoke name="f">{X}</{D}tool_calls>', Answer(calls=[call("f", {"a": "x"})])),
    ("next call", f'<{D}tool_calls><{D}invoke name="f">{X}{invoke("h")}', Answer(calls=[call("f", {"a": "x"}), call("h", {})])),
    ("stopped early", f'<{D}tool_calls><{D}invoke name="f">{X}\n', Answer(calls=[call("f", {"a": "x"})])),
    (
        "stopped in a value",
        f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="a" string="true">x',
        Answer(calls=[["f", '{"a": "x', False]]),
    ),
    (
        "guessed JSON",
        block(invoke("f", parameter("a", "[1]", None), parameter("b", "[1", None))),
        Answer(calls=[["f", '{"a": [1], "b": "[1"}', True]]),
    ),
    (
        "broken JSON",
        block(invoke("f", parameter("a", "True", "false"), parameter("b", "NaN", "false"))),
        Answer(calls=[call("f", {"a": "True", "b": "NaN"})]),
    ),
    (
        "first of two",
        block(invoke("f", X, parameter("a", "y"), parameter("a", "1", "false"))),
        Answer(calls=[call("f", {"a": "x"})]),
    ),
    ("wrapped", block(invoke("f", parameter("arguments", '{"a": [1]}', "false"))), Answer(calls=[["f", '{"a": [1]}', True]])),
    ("wrapped as text", block(invoke("f", parameter("input", '{"a": "</x>"}'))), Answer(calls=[call("f", {"a": "</x>"})])),
    ("not alone", block(invoke("f", parameter("input", "{}"), X)), Answer(calls=[call("f", {"input": "{}", "a": "x"})])),
    ("no object", block(invoke("f", parameter("input", "[]", "false"))), Answer(calls=[call("f", {"input": []})])),
    ("its own key", block(invoke("g", parameter("arguments", "{}", "false"))), Answer(calls=[call("g", {"arguments": {}})])),
    ("unknown tool", block(invoke("zz", parameter("input", "{}"))), Answer(calls=[call("zz", {"input": "{}"})])),
    ("no name", block(f"<{D}invoke>{X}</{D}invoke>", invoke("h")), Answer(calls=[call("h", {})])),
    (
        "loose tags",
        f'<{D}tool_calls >< x <{D}invoke  name = \'f\' ><{D}parameter string="true" name="a">x</{D}parameter >',
        Answer(calls=[call("f", {"a": "x"})]),
    ),
    (
        "names with marks",
        block(invoke("f", parameter('q"o', "v"), parameter("u>o", "w"))),
        Answer(calls=[call("f", {'q"o': "v", "u>o": "w"})]),
    ),
    ("stray tags", f'a</{D}tool_calls>b<{D}parameter name="a">c<{D}foo>d', Answer(content="abcd")),
    ("talk of the marker", f"The {D} and <{D}\n>", Answer(content=f"The {D} and <{D}\n>")),
    (
        "a block's opening in a value",
        block(invoke("f", parameter("a", f"<{D}tool_calls> {D}"))),
        Answer(calls=[call("f", {"a": f"<{D}tool_calls> {D}"})]),
    ),
    ("half an opening", "a < b\n\n<", Answer(content="a < b\n\n<")),
    ("cut opening", f"a\n\n<{D}tool_ca", Answer(content="a")),
]


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in READINGS], ids=[row[0] for row in READINGS])
def test_reading(text: str, expected: Answer) -> None:
    assert read([text]) == expected
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]]) == expected, split
    assert read(list(text)) == expected


THOUGHTS = [
    ("thoughts", "r\n\n</think>\n\na", Answer("r\n\n", "\n\na")),
    ("calls at once", "r</think>" + block(invoke("h")), Answer("r", calls=[call("h", {})])),
    ("calls in the thoughts", "r" + block(invoke("h")), Answer("r", calls=[call("h", {})])),
    ("second start", "r<think>s</think>a", Answer("rs", "a")),
    ("second end", "r</think>a</think>b<think>c", Answer("r", "abc")),
    ("never ends", "r </thin", Answer("r </thin")),
    ("nothing", "", Answer()),
]


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in THOUGHTS], ids=[row[0] for row in THOUGHTS])
def test_reading_thoughts(text: str, expected: Answer) -> None:
    for split in range(len(text) + 1):
        assert read([text[:split], text[split:]], is_thinking=True) == expected, split


def test_thoughts_of_a_model_that_was_not_asked_to_think() -> None:
    assert read(list("\n<think>r</think>a")) == Answer("r", "\na")


def test_control_tokens_and_their_spellings() -> None:
    parts = [("r </think> s", False), ("</think>", True), ("a <think> </think>", False), ("\n\n<", False), (D, True)]
    parts += [("tool_calls>" + invoke("f", parameter("a", "</think>")), False)]
    expected = Answer("r </think> s", "a <think> </think>", [call("f", {"a": "</think>"})])
    assert read(parts, is_thinking=True, has_tokens=True) == expected
    single = [(char, False) for text, is_control in parts if not is_control for char in text]
    assert read(single, is_thinking=True, has_tokens=True).reasoning.startswith("r </think> sa <think>")  # no token, no end
    in_value = [(f'<{D}invoke name="f"><{D}parameter name="a" string="true">x', False), ("</think>", True), ("y", False)]
    assert read([*in_value, (f"</{D}parameter>", False)], has_tokens=True) == Answer(calls=[call("f", {"a": "x</think>y"})])


def test_is_in_content() -> None:
    parser = DsmlFormat().parser(OPTIONS, True)
    seen = [parser.is_in_content]
    for text, is_control in (
        ("r", False),
        ("</think>", True),
        ("a", False),
        (f"<{D}tool_calls>", False),
        (f"</{D}tool_calls>", False),
    ):
        parser.push(text, is_control)
        seen.append(parser.is_in_content)
    assert seen == [False, False, True, True, False, False]


@pytest.mark.parametrize("options", [ChatOptions(), ChatOptions(tools=TOOLS, tool_choice=ToolChoice("none"))])
def test_without_tools_a_block_is_content(options: ChatOptions) -> None:
    text = "r</think>a" + block(invoke("h")) + "b"
    expected = Answer("r", text[9:])
    assert read([text], True, options=options) == read(list(text), True, options=options) == expected


def test_one_call_where_no_more_are_wanted() -> None:
    text = block(invoke("f", X), invoke("h"), invoke("f", X))
    assert read(list(text), options=ChatOptions(tools=TOOLS, parallel_tool_calls=False)).calls == [call("f", {"a": "x"})]


def test_ids() -> None:
    ids = read([block(*[invoke("h")] * 5)]).ids
    assert len(set(ids)) == 5 and all(len(id) == 29 and id.startswith("call_") and int(id[5:], 16) >= 0 for id in ids)


def test_a_call_that_is_cut_off_has_no_end() -> None:
    text = "r</think>answer" + block(invoke("f", X, parameter("b", '{"k": [1]}', "false")), invoke("h")) + "."
    whole = read([text], True)
    ends = [text.index(f"</{D}invoke>"), text.rindex(f"</{D}invoke>")]
    for cut in range(len(text)):
        answer = read(list(text[:cut]), True, "length")
        assert answer == read([text[:cut]], True, "length")
        assert D not in answer.content + answer.reasoning + "".join(str(one[1]) for one in answer.calls)
        assert "answer".startswith(answer.content.rstrip("\n"))  # no "<" of a call that was about to begin
        assert [one[2] for one in answer.calls] == [cut >= end + len(f"</{D}invoke>") for end in ends][: len(answer.calls)]
        assert all(str(full[1]).startswith(str(part[1])) for full, part in zip(whole.calls, answer.calls))


def test_a_bracket_after_newlines_is_text_where_the_model_stopped_by_itself() -> None:
    for reason, shown in (("stop", "a\n\n<"), ("length", "a")):
        assert read(["a\n\n<"], reason=reason).content == shown
    assert read(["a <"], reason="length").content == "a <"


def test_arguments_stream() -> None:
    parser = DsmlFormat().parser(OPTIONS, False)
    parser.push(f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="a" string="true">')
    for char in 'x"\n<y':
        assert len(parser.push(char)) == (0 if char == "<" else 1)


def test_what_the_prompt_writes_is_read_back() -> None:
    rng, chat = random.Random(3), DsmlFormat()
    texts = [
        "",
        "a",
        "l1\nl2\n",
        '"quoted"',
        "<b>&amp;</b>",
        "日本語",
        "\\n",
        "{}",
        " x ",
        "</parameter>",
        "｜",
        "</｜DSML",
        "\u2028\x00",
    ]
    for _ in range(300):
        calls = []
        for _ in range(rng.randint(1, 3)):
            values = [*texts, 1, -2.5, True, None, [1, "ü", {"k": []}], {"x": {"y": "</b>"}}]
            arguments = {rng.choice(texts[1:]): rng.choice(values) for _ in range(rng.randint(0, 4))}
            calls.append(ToolCall("", rng.choice(["f", "g", "n.a-me", "日"]), json.dumps(arguments, ensure_ascii=False)))
        content, reasoning = rng.choice(texts).rstrip("\n"), rng.choice(texts)
        message = Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls), is_open=True)
        options = ChatOptions(thinking=True, effort="low", drop_thinking=False, tools=TOOLS)
        text = chat.render([Message("user", "q"), message], options).text
        start = text.index("<think>", text.index("<｜Assistant｜>")) + len("<think>")
        answer = read(_random_parts(rng, text[start:]), True)
        assert answer == Answer(reasoning, content, [[one.name, one.arguments, True] for one in calls])


PIECES = [
    "text", "\n", "\n\n", "<", "</", "｜", D, "<think>", "</think>", " a<b>c ", "日本語😀", f"<{D}tool_calls>",
    f"</{D}tool_calls>",
    f"<{D}tool_calls>\n" + invoke("f", X), invoke("h"), X, f'<{D}invoke name="f">', f"</{D}invoke>", f"</{D}parameter>",
    parameter("b", '{"k": "v"}', "false"), parameter("arguments", '{"a": 1}'), f'<{D}parameter name="b">', f"<{D}foo>",
    f"<{D}tool",
    '"', ">", 'name="x"', block(invoke("f", X, parameter("b", "1", "false")), invoke("g", parameter("z", '"<>"', None))), "\\",
]  # fmt: skip


def _random_parts(rng: random.Random, text: str) -> list[str]:
    """`text` cut at a few places, or everywhere."""
    if rng.random() < 0.1:
        return list(text)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.choice([1, 2, 4, 10, 30])))
    return [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)])]


def test_ten_thousand_random_splits() -> None:
    rng = random.Random(11)
    num_calls = 0
    for _ in range(500):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        is_thinking, has_tokens, reason = rng.random() < 0.5, rng.random() < 0.3, rng.choice(["stop", "length"])
        expected = read([text], is_thinking, reason, has_tokens=has_tokens)
        num_calls += len(expected.calls)
        for one in expected.calls:
            assert not one[2] or isinstance(json.loads(str(one[1])), dict)
        assert f"<{D}tool_calls>" not in expected.content + expected.reasoning
        for _ in range(20):
            parts = _random_parts(rng, text)
            assert read(parts, is_thinking, reason, has_tokens=has_tokens) == expected, parts
    assert num_calls > 200


def test_a_long_value_is_read_in_linear_time() -> None:
    parser = DsmlFormat().parser(OPTIONS, False)
    events = parser.push(f'<{D}tool_calls><{D}invoke name="f"><{D}parameter name="a" string="true">')
    for _ in range(30_000):
        events += parser.push("< ab")
    assert len(reading.join(events).calls[0][1]) == 120_000 + len('{"a": "')
