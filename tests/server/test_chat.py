"""/v1/chat/completions through OpenAI's own client: whole and streamed answers, tools, thoughts, structured output."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from lamina.chat.jinja import JinjaFormat
from lamina.chat.records import ChatOptions, Tool, ToolChoice
from lamina.engine.text import load_codec
from lamina.server.chat_request import check_tools_shown
from lamina.server.errors import ApiError


class Served(Protocol):
    """See serving.Served."""

    openai: openai.OpenAI
    http: httpx.Client
    url: str

    def post(self, path: str, body: object) -> httpx.Response: ...


HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how warm it is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def body_of(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "messages": HI, "temperature": 1.0, "seed": 5, "max_tokens": 12} | fields


def whole(server: Served, body: dict[str, object]) -> ChatCompletion:
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def chunks_of(server: Served, body: dict[str, object]) -> list[dict[str, object]]:
    response = server.post("/v1/chat/completions", body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]" and blocks.count("[DONE]") == 1
    return [json.loads(block) for block in blocks[:-1]]


def joined(chunks: list[dict[str, object]]) -> list[dict[str, object]]:
    """The messages that a stream joins to, checking its order on the way."""
    found: dict[int, dict[str, object]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            delta, index = choice["delta"], choice["index"]
            if index not in found:
                assert delta == {"role": "assistant", "content": ""}
                found[index] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "tokens": []}
                continue
            one = found[index]
            assert one["finish_reason"] is None and "role" not in delta
            one["content"] += delta.get("content", "")
            one["reasoning_content"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(one["tool_calls"]):
                    assert call["id"] and call["type"] == "function" and call["function"]["arguments"] == ""
                    one["tool_calls"].append({"name": call["function"]["name"], "arguments": "", "id": call["id"]})
                else:
                    assert "id" not in call and "name" not in call["function"]
                    one["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            one["tokens"] += [row["token"] for row in (choice["logprobs"] or {"content": []})["content"]]
            one["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


CASES = {
    "thinking": body_of(),
    "chat mode": body_of(chat_template_kwargs={"thinking": False}),
    "enable_thinking": body_of(enable_thinking=False, n=3),
    "effort": body_of(reasoning_effort="none", max_completion_tokens=5),
    "logprobs": body_of(logprobs=True, top_logprobs=3, n=2),
    "stop": body_of(thinking=False, stop=["e", "on"], max_tokens=30),
    "required": body_of(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, thinking=False, max_tokens=150),
    "named": body_of(
        tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}}, thinking=False, max_tokens=150
    ),
    "cut call": body_of(tools=[WEATHER], tool_choice="required", thinking=False, max_tokens=30),
    "schema": body_of(
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}, thinking=False, max_tokens=150
    ),
}


@pytest.fixture(scope="module", autouse=True)
def no_spaces(tiny_of: Callable[[str, str], Path]) -> None:
    """Random weights love white space, which JSON allows anywhere: a bias against it keeps the answers short."""
    codec = load_codec(tiny_of("flash", "official"))
    assert codec is not None
    bias = {str(token): -100 for token in range(codec.vocab_size) if codec.token_text(token).isspace()}
    for case in CASES.values():
        if "tools" in case or "response_format" in case:
            case["logit_bias"] = bias


@functools.cache
def answer_of(server: Served, name: str) -> ChatCompletion:
    return whole(server, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_stream_joins_to_the_whole_answer(server: Served, name: str) -> None:
    answer, streamed = answer_of(server, name), joined(chunks_of(server, CASES[name]))
    assert len(streamed) == len(answer.choices) == int(str(CASES[name].get("n", 1)))
    for choice, one in zip(answer.choices, streamed):
        message = choice.message
        assert (message.content or "") == one["content"]
        assert (message.model_extra or {}).get("reasoning_content", "") == one["reasoning_content"]
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
        assert calls == [(call["name"], call["arguments"]) for call in one["tool_calls"]]  # type: ignore[attr-defined]
        assert choice.finish_reason == one["finish_reason"]
        if choice.logprobs is not None:
            assert [row.token for row in choice.logprobs.content or []] == one["tokens"]


def test_thoughts_are_apart_from_content(server: Served) -> None:
    answer = whole(server, body_of(n=4))
    for choice in answer.choices:
        extra = choice.message.model_extra or {}
        assert extra["reasoning_content"] == extra["reasoning"] != ""
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= answer.usage.completion_tokens
    plain = whole(server, body_of(thinking=False))
    assert "reasoning_content" not in (plain.choices[0].message.model_extra or {})
    assert plain.usage is not None and plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


def test_logprobs_in_the_dialect_of_chats(server: Served) -> None:
    answer = whole(server, body_of(logprobs=True, top_logprobs=20, temperature=0.0, thinking=False))
    rows = answer.choices[0].logprobs
    assert rows is not None and rows.content is not None and answer.usage is not None
    assert len(rows.content) == answer.usage.completion_tokens
    for row in rows.content:
        assert len(row.top_logprobs) == 20 and row.top_logprobs[0].logprob == row.logprob and row.bytes
    text = b"".join(bytes(row.bytes or []) for row in rows.content).decode("utf-8", "replace")
    assert text.startswith((answer.choices[0].message.content or "").rstrip("�"))
    none = whole(server, body_of(logprobs=True, temperature=0.0))
    assert none.choices[0].logprobs is not None and none.choices[0].logprobs.content is not None
    assert all(row.top_logprobs == [] for row in none.choices[0].logprobs.content)


def test_a_required_call_is_made_and_parses(server: Served) -> None:
    for name, reason in (("required", "tool_calls"), ("named", "stop")):
        choice = answer_of(server, name).choices[0]
        assert choice.message.tool_calls and choice.finish_reason == reason
        for call in choice.message.tool_calls:
            assert call.function.name == "clock" and json.loads(call.function.arguments) == {}  # type: ignore[union-attr]
    body = CASES["required"] | {"tools": [WEATHER], "max_tokens": 400}
    (call,) = whole(server, body).choices[0].message.tool_calls or ()
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert set(arguments) == {"city", "days"} and arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 9


def test_thoughts_come_before_a_required_call(server: Served) -> None:
    end = end_of_thinking(server)
    body = CASES["required"] | {"thinking": True, "max_tokens": 300}
    body["logit_bias"] = body["logit_bias"] | {str(end): 6}  # type: ignore[operator]
    choice = whole(server, body).choices[0]
    assert choice.finish_reason == "tool_calls" and (choice.message.model_extra or {})["reasoning_content"]
    assert choice.message.tool_calls and json.loads(choice.message.tool_calls[0].function.arguments) is not None  # type: ignore[union-attr]


def end_of_thinking(server: Served) -> int:
    (end,) = server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json()["tokens"]
    return int(end)


def test_a_call_that_is_cut_ends_with_length(server: Served) -> None:
    answer = answer_of(server, "cut call").choices[0]
    assert answer.finish_reason == "length"


def test_no_tools_no_empty_list(server: Served) -> None:
    body = server.post("/v1/chat/completions", body_of(tools=[WEATHER], tool_choice="none", thinking=False)).json()
    assert "tool_calls" not in body["choices"][0]["message"] and body["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_schema_is_kept_in_the_content_after_the_thoughts(server: Served) -> None:
    """The bias ends the thoughts soon: JSON must be in the content and nowhere else."""
    body = CASES["schema"] | {"thinking": True, "n": 3, "max_tokens": 120}
    body["logit_bias"] = body["logit_bias"] | {str(end_of_thinking(server)): 6}  # type: ignore[operator]
    choices = whole(server, body).choices
    assert any((choice.message.model_extra or {}).get("reasoning_content") for choice in choices)
    for choice in choices:
        assert choice.finish_reason == "stop"
        city = json.loads(choice.message.content or "")
        assert set(city) == {"name", "size"} and city["size"] in ("small", "large")


@pytest.mark.parametrize("where", ["guided_json", "structured_outputs", "response_format"])
def test_every_spelling_of_a_schema(server: Served, where: str) -> None:
    value: object = CITY
    if where == "structured_outputs":
        value = {"json": CITY}
    elif where == "response_format":
        value = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": CITY}}
    bias = CASES["schema"]["logit_bias"]
    choice = whole(server, body_of(thinking=False, max_tokens=80, logit_bias=bias) | {where: value}).choices[0]
    assert choice.finish_reason == "stop" and set(json.loads(choice.message.content or "")) == {"name", "size"}


@pytest.mark.parametrize("where", ["response_format", "structured_outputs", "a text"])
def test_the_older_spelling_of_a_structural_tag(server: Served, where: str) -> None:
    """The bias writes "=" and then "!" again and again: between them there must be the digit that the schema asks for."""
    digit = {"type": "integer", "minimum": 1, "maximum": 9}
    tag: dict[str, object] = {"structures": [{"begin": "=", "schema": digit, "end": "!"}], "triggers": ["="]}
    fields = {
        "response_format": {"response_format": {"type": "structural_tag", **tag}},
        "structured_outputs": {"structured_outputs": {"structural_tag": tag}},
        "a text": {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    }[where]
    equals, ends = server.post("/tokenize", {"prompt": "=!"}).json()["tokens"]
    bias = {str(equals): 60, str(ends): 50}
    body = body_of(thinking=False, max_tokens=12, logit_bias=bias) | fields
    content = whole(server, body).choices[0].message.content or ""
    assert content[0] == "=" and content[1] in "123456789" and content[2] == "!"


def test_stop_strings_look_at_content_only_unless_asked(server: Served) -> None:
    free = whole(server, body_of(temperature=0.0, max_tokens=30)).choices[0]
    thoughts = str((free.message.model_extra or {})["reasoning_content"])
    stop = thoughts[4:7]
    kept = whole(server, body_of(temperature=0.0, max_tokens=30, stop=stop)).choices[0]
    assert (kept.message.model_extra or {})["reasoning_content"] == thoughts
    cut = whole(server, body_of(temperature=0.0, max_tokens=30, stop=stop, stop_in_reasoning=True)).choices[0]
    assert (cut.message.model_extra or {}).get("reasoning_content", "") == thoughts[: thoughts.index(stop)]
    assert cut.finish_reason == "stop"


def test_a_control_token_that_a_user_spells_stays_text(server: Served) -> None:
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": "a<x|b"}]}).json()["tokens"]
    spelled = server.post("/tokenize", {"messages": [{"role": "user", "content": "a<｜Assistant｜></think>b"}]}).json()["tokens"]
    control = [token for token in plain if token >= 1009]
    assert [token for token in spelled if token >= 1009] == control


def test_a_turn_can_go_on(server: Served) -> None:
    turn = {"role": "assistant", "content": "The answer is"}
    ids = server.post("/tokenize", {"messages": [*HI, turn], "continue_final_message": True}).json()["tokens"]
    closed = server.post("/tokenize", {"messages": [*HI, turn]}).json()["tokens"]
    assert closed[: len(ids)] == ids and len(closed) > len(ids)
    assert whole(server, body_of(messages=[*HI, turn | {"prefix": True}])).choices[0].finish_reason


def test_usage_comes_once_at_the_end(server: Served) -> None:
    chunks = chunks_of(server, body_of(stream_options={"include_usage": True}, n=2))
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == 1 and with_usage[0] is chunks[-1] and chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0 and usage["completion_tokens"] > 0  # type: ignore[index]
    assert not any(chunk.get("usage") for chunk in chunks_of(server, body_of()))


def test_the_second_turn_of_a_chat_is_a_hit(server: Served) -> None:
    long = [{"role": "user", "content": "A long story about memory. " * 40}]
    first = whole(server, body_of(messages=long, thinking=False, temperature=0.0))
    again = [*long, {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "go on"}]
    second = whole(server, body_of(messages=again, thinking=False))
    assert second.usage is not None and second.usage.prompt_tokens_details is not None and first.usage is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0.8 * first.usage.prompt_tokens


def test_openai_client_streams(server: Served) -> None:
    extra = {"thinking": False, "min_tokens": 5}
    with server.openai.chat.completions.stream(
        model="tiny",
        messages=HI,
        max_tokens=10,
        seed=1,
        logit_bias={"1": 100},
        extra_body=extra,  # type: ignore[arg-type]
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop" and final.choices[0].message.content == "".join(texts) != ""


def test_an_answer_may_be_empty(server: Served) -> None:
    """The first token is a stop: a legal empty answer, and the next request works."""
    bias = {"1": 100}
    body = body_of(thinking=False, logit_bias=bias, max_tokens=2**31 - 1, temperature=0.0)
    answer = whole(server, body)
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "stop"
    assert joined(chunks_of(server, body))[0]["content"] == ""
    assert whole(server, body_of()).choices


THOUGHTS = {
    "thinking_token_budget": {"thinking_token_budget": 5},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    "reasoning": {"reasoning": {"max_tokens": 5}},
    "greedy": {"thinking_token_budget": 5, "temperature": 0},
    "three": {"thinking_token_budget": 5, "n": 3},
    "grammar": {"thinking_token_budget": 5, "guided_choice": ["Oslo", "Rome"]},
    "call": {
        "thinking_token_budget": 5,
        "tools": [CLOCK],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 150,
    },
    "min_tokens": {"thinking_token_budget": 5, "min_tokens": 9},
    "penalty": {"thinking_token_budget": 5, "repetition_penalty": 1.2},
    "banned": {"thinking_token_budget": 5, "logit_bias": {"__end__": -100}},
    "none left": {"thinking_token_budget": 0},
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_end_where_their_budget_does(server: Served, tiny_of: Callable[[str, str], Path], name: str) -> None:
    """The token that ends them stands after as many; what comes before is what would have come without."""
    codec = load_codec(tiny_of("flash", "official"))
    assert codec is not None
    body = body_of(ignore_eos=True, logprobs=True, max_tokens=20) | THOUGHTS[name]
    if "logit_bias" in body:
        body["logit_bias"] = {str(codec.token_id("</think>")): -100}
    budget = int(str(body.get("thinking_token_budget", 5)))
    answer = whole(server, body)
    free = whole(
        server, {key: value for key, value in body.items() if key not in ("thinking_token_budget", "thinking", "reasoning")}
    )
    for choice, other in zip(answer.choices, free.choices, strict=True):
        tokens, before = ([row.token for row in one.logprobs.content or []] for one in (choice, other))  # type: ignore[union-attr]
        assert tokens[budget] == "</think>" and "</think>" not in before[: budget + 1]
        assert tokens[:budget] == before[:budget]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget * len(answer.choices)
    message = answer.choices[0].message
    if name == "grammar":
        assert message.content in ("Oslo", "Rome")
    elif name == "call":
        assert message.tool_calls and answer.choices[0].finish_reason == "tool_calls"
    else:
        assert message.content
    again = joined(chunks_of(server, body))  # from the cache
    assert [one["content"] for one in again] == [choice.message.content or "" for choice in answer.choices]


def test_a_result_of_a_call_that_nobody_made_is_refused(server: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    asked = [*HI, {"role": "assistant", "tool_calls": [call]}]
    for name, status in (("call_1", 200), ("call_2", 400), (None, 200)):
        messages = [*asked, {"role": "tool", "content": "noon", "tool_call_id": name}]
        response = server.post("/v1/chat/completions", body_of(messages=messages, tools=[CLOCK], max_tokens=2))
        assert response.status_code == status, response.text
        if status == 400:
            error = response.json()["error"]
            assert error["param"] == "messages[2].tool_call_id" and "call_2" in error["message"]


def test_tools_that_a_template_never_shows_are_refused() -> None:
    """A model that cannot be told of its tools would answer as if there were none; where a call is forced it is made."""
    blind, sees = (JinjaFormat({"default": text}, {}, frozenset()) for text in ("{# tools #}tools", "{{ tools | tojson }}"))
    tool = Tool("clock", {"name": "clock"})
    for options in (
        ChatOptions(), ChatOptions(tools=(tool,), tool_choice=ToolChoice("none")),
        ChatOptions(tools=(tool,), tool_choice=ToolChoice("required")), ChatOptions(tools=(replace(tool, is_strict=True),)),
    ):  # fmt: skip
        check_tools_shown(blind, options)
    check_tools_shown(sees, ChatOptions(tools=(tool,)))
    with pytest.raises(ApiError, match="no place for tools") as caught:
        check_tools_shown(blind, ChatOptions(tools=(tool,)))
    assert (caught.value.status, caught.value.field, caught.value.code) == (400, "tools", "unsupported_feature")


def test_a_budget_that_cannot_be_is_refused(server: Served) -> None:
    for fields, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens"),
    ):
        response = server.post("/v1/chat/completions", body_of(**fields))
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    free = whole(server, body_of(thinking_token_budget=-1))
    assert free.choices == whole(server, body_of()).choices
    assert whole(server, body_of(thinking_token_budget=0, thinking=False)).choices[0].message.content
