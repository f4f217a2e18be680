"""Answers whose text is known, through real HTTP, whole and streamed: stop strings, cuts, calls, schemas, markup.

The model writes scripts (see scripted_server.py), token by token or byte by byte; all else is real.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol

import anthropic
import httpx
import openai
import pytest

from lamina.chat.dsml import DsmlFormat
from lamina.chat.records import CallStart, ChatOptions, Tool
from lamina.engine.text import TextCodec, load_codec
from lamina.engine.wire import Sampling
from lamina.server.batches import joined
from lamina.server.generation import Ask, _Child


class Served(Protocol):
    """See serving.Served."""

    http: httpx.Client
    url: str

    def post(self, path: str, body: object) -> httpx.Response: ...
    def stop(self) -> int: ...
    def stderr(self) -> str: ...


D = "｜DSML｜"
WORDS = {"city": 'São "Paulo" <b>\n日', "days": 3, "tags": ["<｜x｜>", {"a": None}]}
CALL = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">{WORDS["city"]}</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">{WORDS["days"]}</{D}parameter>\n'
    f'<{D}parameter name="tags" string="false">{json.dumps(WORDS["tags"], ensure_ascii=False)}</{D}parameter>\n'
    f"</{D}invoke>\n"
)
CLOCK_CALL = f'<{D}invoke name="clock">\n</{D}invoke>\n'
END = f"</{D}tool_calls>"
ONE_CLOCK = f"\n\n<{D}tool_calls>\n{CLOCK_CALL}{END}"
#: what the model writes; the end of the text follows
SCRIPTS = {
    "two calls": f"Let me look.\n\n{CALL}{CLOCK_CALL}{END}",
    "thoughts and a call": f"I should END it; <{D} is a tag.</think>Well.\n\n{CALL}{END}",
    "clock": ONE_CLOCK,
    "no call": "Nothing to call: 1 < 2.",
    "empty block": f"Well.\n\n<{D}tool_calls>\n{END}",
    "held newlines": "one\n\nEND two",
    "held tag": f"if a <{D[:3]}END two",
    "held bracket": "if a <END two",
    "half a stop": f"so E\n\n{CALL}{END}",
    "stop in thoughts": "First END, then EN and END again.</think>It is 4. END of it.",
    "stop in arguments": f"ok\n\n{CALL.replace('São', 'END')}{END}",
    "json in thoughts": '{"name": "Rome"}? No.</think>{"name": "Oslo"}',
    "unicode": "naïve 日本語 👩‍👩‍👧 é",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
NAME = {"type": "object", "properties": {"name": {"enum": ["Oslo", "Rome"]}}, "required": ["name"], "additionalProperties": False}


@dataclass(frozen=True)
class Script:
    """One answer. place  in the file.   ids  of its tokens."""

    place: int
    ids: list[int]


@dataclass
class Answer:
    """What a client has put together."""

    content: str = ""
    thoughts: str = ""
    finish: str | None = None
    stop: object = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    has_list: bool = False


@pytest.fixture(scope="module")
def codec(tiny_of: Callable[[str, str], Path]) -> TextCodec:
    found = load_codec(tiny_of("flash", "official"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def scripts(codec: TextCodec) -> dict[tuple[str, bool], Script]:
    """By name, and whether each byte is a token of its own."""
    single = {raw[0]: token for token in range(codec.vocab_size) if len(raw := codec.token_bytes(token)) == 1}
    made: dict[tuple[str, bool], Script] = {}
    for name, text in SCRIPTS.items():
        whole = codec.encode(text)
        split = [part for token in whole for part in _split(codec, single, token)]
        for is_split, ids in ((False, whole), (True, split)):
            made[name, is_split] = Script(len(made), [*ids, *codec.encode("<｜end▁of▁sentence｜>")])
    return made


def _split(codec: TextCodec, single: dict[int, int], token: int) -> list[int]:
    return [token] if codec.is_added(token) else [single[byte] for byte in codec.token_bytes(token)]


@pytest.fixture(scope="module")
def scripted(
    scripts: dict[tuple[str, bool], Script], tiny_of: Callable[[str, str], Path], serving: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:  # fmt: skip
    """A server whose model writes the scripts."""
    file = tmp_path_factory.mktemp("scripts") / "scripts.json"
    file.write_text(json.dumps([one.ids for one in scripts.values()]))
    program = (str(Path(__file__).parent / "scripted_server.py"),)
    path = {"PYTHONPATH": str(serving.ROOT)}
    served = serving.start(tiny_of("flash", "official"), "--script", str(file), program=program, environment=path)
    yield served
    assert served.stop() == 0, served.stderr()[-3000:]


@pytest.fixture
def ask(scripted: Served, scripts: dict[tuple[str, bool], Script]) -> Callable[..., Answer]:
    """ask(name, is_split=False, thinking=False, **fields): the answer of a chat, which must be the same whole and streamed."""

    def ask(name: str, is_split: bool = False, thinking: bool = False, **fields: object) -> Answer:
        body = {"messages": [{"role": "user", "content": "hi"}], "seed": scripts[name, is_split].place, "thinking": thinking}
        whole, streamed = _whole(scripted, body | fields), _streamed(scripted, body | fields)
        assert whole == streamed
        return whole

    return ask


def _whole(server: Served, body: dict[str, object]) -> Answer:
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return Answer(
        message["content"] or "", message.get("reasoning_content", ""), choice["finish_reason"], choice["stop_reason"], calls,
        "tool_calls" in message,
    )  # fmt: skip


def _streamed(server: Served, body: dict[str, object]) -> Answer:
    response = server.post("/v1/chat/completions", body | {"stream": True})
    assert response.status_code == 200, response.text
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert blocks.pop() == "[DONE]"
    answer = Answer()
    for block in blocks:
        for choice in json.loads(block)["choices"]:
            assert answer.finish is None
            delta = choice["delta"]
            answer.content += delta.get("content") or ""
            answer.thoughts += delta.get("reasoning_content") or ""
            answer.has_list = answer.has_list or "tool_calls" in delta
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(answer.calls):
                    answer.calls.append((call["function"]["name"], ""))
                name, before = answer.calls[call["index"]]
                answer.calls[call["index"]] = (name, before + call["function"]["arguments"])
            if choice["finish_reason"] is not None:
                answer.finish, answer.stop = choice["finish_reason"], choice["stop_reason"]
    return answer


# A stop string -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("name", "content"), [("held newlines", "one\n\n"), ("held tag", f"if a <{D[:3]}"), ("held bracket", "if a <")]
)
def test_what_the_reader_of_calls_held_comes_before_a_stop(ask, name: str, content: str, is_split: bool) -> None:
    answer = ask(name, is_split, tools=TOOLS, stop="END")
    assert (answer.content, answer.finish, answer.stop) == (content, "stop", "END")
    answer = ask(name, is_split, tools=TOOLS, stop="END", include_stop_str_in_output=True)
    assert (answer.content, answer.finish, answer.stop) == (content + "END", "stop", "END")


@pytest.mark.parametrize("is_split", [False, True])
def test_the_beginning_of_a_stop_comes_before_the_call_that_follows(ask, is_split: bool) -> None:
    answer = ask("half a stop", is_split, tools=TOOLS, stop=["END", "E\n\nX"])
    assert answer.content.rstrip("\n") == "so E" and answer.finish == "tool_calls"
    assert [(name, json.loads(text)) for name, text in answer.calls] == [("weather", WORDS)]


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stop_in_the_thoughts_cuts_nothing(ask, is_split: bool) -> None:
    answer = ask("stop in thoughts", is_split, True, stop="END")
    assert answer.thoughts == "First END, then EN and END again."
    assert (answer.content, answer.finish, answer.stop) == ("It is 4. ", "stop", "END")
    asked = ask("stop in thoughts", is_split, True, stop="END", stop_in_reasoning=True)
    assert (asked.thoughts, asked.content, asked.finish, asked.stop) == ("First ", "", "stop", "END")
    call = ask("thoughts and a call", is_split, True, stop="END", tools=TOOLS)
    assert call.finish == "tool_calls" and call.content == "Well." and len(call.calls) == 1


def test_a_stop_in_arguments_cuts_nothing(ask) -> None:
    answer = ask("stop in arguments", True, tools=TOOLS, stop="END")
    assert answer.finish == "tool_calls" and json.loads(answer.calls[0][1])["city"].startswith("END")


@pytest.mark.parametrize("is_split", [False, True])
def test_a_stop_of_any_characters_across_tokens(ask, is_split: bool) -> None:
    text = SCRIPTS["unicode"]
    for stop in ("語", "👧 é", "\u200d👧", "日本語 👩"):
        answer = ask("unicode", is_split, stop=[stop, "never"])
        assert (answer.content, answer.stop) == (text[: text.index(stop)], stop)
    assert ask("unicode", is_split).content == text


@pytest.mark.parametrize("stop", [(), ("END",)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_tokens_that_come_together_are_as_one_by_one(codec: TextCodec, scripts, name: str, stop: tuple[str, ...]) -> None:
    """What is shown, and how many tokens were thoughts, whether control tokens end these or plain text does."""
    rng = random.Random(name)
    options = ChatOptions(tools=tuple(Tool(one["function"]["name"], one["function"]) for one in TOOLS))
    for is_split, is_token in ((False, True), (True, True), (True, False)):
        ids = scripts[name, is_split].ids
        thinks = "</think>" in SCRIPTS[name]
        make = partial(DsmlFormat(has_think_tokens=is_token).parser, options, thinks)
        found = []
        for most in (1, 4, 40):
            child = _Child(Ask([1], Sampling(), stop, parser_of=make), codec)
            events, at = [], 0
            while at < len(ids) and child.is_open:
                count = rng.randrange(1, most + 1)
                group = ids[at : at + count]
                events += child.push(group, at + count >= len(ids))[0]
                at += count
            events += child.end("stop")
            calls = [one for one in joined(events) if not isinstance(one, CallStart)]  # their ids are random
            found.append((calls, child.num_reasoning, child.num_tokens, child.num_calls, child.finish, child.matched))
        assert found[0] == found[1] == found[2] and (found[0][1] > 0) == thinks


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
def test_calls_are_read_and_no_markup_is_seen(ask, is_split: bool) -> None:
    answer = ask("two calls", is_split, tools=TOOLS)
    assert answer.content == "Let me look." and answer.finish == "tool_calls"
    assert [(name, json.loads(text)) for name, text in answer.calls] == [("weather", WORDS), ("clock", {})]
    alone = ask("two calls", is_split, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in alone.calls] == ["weather"] and D not in str(alone)


@pytest.mark.parametrize(
    ("name", "choice", "finish", "names"),
    [
        ("clock", "auto", "tool_calls", ["clock"]),
        ("clock", "required", "tool_calls", ["clock"]),
        ("clock", NAMED, "stop", ["clock"]),
        ("no call", "auto", "stop", []),
        ("no call", "none", "stop", []),
        ("empty block", "auto", "stop", []),
    ],
)
def test_how_an_answer_ends_by_the_choice_of_tools(ask, name: str, choice: object, finish: str, names: list[str]) -> None:
    answer = ask(name, tools=TOOLS, tool_choice=choice)
    assert answer.finish == finish and [call for call, _ in answer.calls] == names
    assert answer.has_list == bool(names)  # never an empty list


def test_an_answer_may_be_cut_anywhere(ask, scripts) -> None:
    """At each token of two calls: "length", no markup, and what is not whole does not parse."""
    is_seen = set[int]()
    for most in range(1, len(scripts["two calls", False].ids), 3):
        answer = ask("two calls", tools=TOOLS, max_tokens=most)
        assert answer.finish == "length" and answer.has_list == bool(answer.calls)
        assert "Let me look.\n\n".startswith(answer.content) and D not in str(answer)
        is_seen.add(len(answer.calls))
        whole = [json.dumps(WORDS), "{}"]
        for (_, text), wanted in zip(answer.calls, whole):
            if _parses(text):
                assert json.loads(text) == json.loads(wanted)
    assert is_seen == {0, 1, 2}


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("stream", [False, True])
def test_other_protocols_say_that_a_call_was_cut(scripted: Served, scripts, stream: bool) -> None:
    """A response's item is incomplete, a message ends with max_tokens; a whole call before the cut stays whole."""
    tools = [tool["function"] | {"type": "function"} for tool in TOOLS]
    messages_tools = [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}]  # type: ignore[index]
    seed = scripts["two calls", False].place
    body = {"input": "hi", "seed": seed, "reasoning": {"effort": "none"}, "tools": tools, "stream": stream}
    response = scripted.post("/v1/responses", body | {"max_output_tokens": 40})
    answer = _last(response.text)["response"] if stream else response.json()
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert answer["status"] == "incomplete" and call["status"] == "incomplete" and not _parses(call["arguments"])
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "seed": seed, "tools": messages_tools, "stream": stream}
    message = scripted.post("/v1/messages", chat | {"max_tokens": 40})
    assert message.status_code == 200 and D not in message.text and '"stop_reason":"max_tokens"' in message.text


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", ["two calls", "thoughts and a call"])
def test_clients_of_other_protocols_read_the_same_calls(scripted: Served, scripts, name: str, is_split: bool) -> None:
    """Whole and streamed, by the protocols' own clients; what the model thought is told apart."""
    seed, thinks = scripts[name, is_split].place, "thoughts" in name
    wanted = [("weather", WORDS), ("clock", {})][: 1 if thinks else 2]
    text = "Well." if thinks else "Let me look."
    tools = [tool["function"] | {"type": "function"} for tool in TOOLS]  # type: ignore[operator]
    asked = {
        "model": "tiny", "input": "hi", "tools": tools, "reasoning": {"effort": "high" if thinks else "none"},
        "extra_body": {"seed": seed},
    }  # fmt: skip
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    with client.responses.stream(**asked) as stream:  # type: ignore[call-overload]
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    for answer in (client.responses.create(**asked), streamed):  # type: ignore[call-overload]
        calls = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
        assert calls == wanted and answer.output_text == text and answer.status == "completed"
        assert [item.type for item in answer.output].count("reasoning") == thinks
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "extra_body": {"seed": seed},
        "tools": [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS],  # type: ignore[index]
        "thinking": {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"},
    }  # fmt: skip
    other = anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)
    with other.messages.stream(**chat) as events:  # type: ignore[arg-type]
        final = events.get_final_message()
    for message in (other.messages.create(**chat), final):  # type: ignore[call-overload]
        assert [(block.name, block.input) for block in message.content if block.type == "tool_use"] == wanted
        assert [block.text for block in message.content if block.type == "text"] == [text]
        assert [block.type for block in message.content].count("thinking") == thinks and message.stop_reason == "tool_use"


def _last(text: str) -> dict[str, dict[str, object]]:
    return json.loads(text.strip().split("\n\n")[-1].partition("data: ")[2])


# Schemas -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json_after_thoughts_is_the_content(ask, kind: str, is_split: bool) -> None:
    wanted = {"type": kind} | ({"json_schema": {"name": "x", "schema": NAME}} if kind == "json_schema" else {})
    answer = ask("json in thoughts", is_split, True, response_format=wanted)
    assert json.loads(answer.content) == {"name": "Oslo"} and answer.thoughts == '{"name": "Rome"}? No.'
    assert answer.finish == "stop"
