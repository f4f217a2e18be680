"""`LLM.chat`: chats as vLLM takes them, written by the model's own format or by a template, one or several."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError
from lamina.chat.guard import encode
from lamina.chat.records import ChatOptions, Message
from lamina.chat.turns import read_messages, read_options
from lamina.engine.chats import Chats
from lamina.models.chats import chat_format

HI = {"role": "user", "content": "Hi"}
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if shout %}!{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm(tiny_of: Callable[[str, str], Path]) -> LLM:
    return LLM(str(tiny_of("flash", "official")), cache_bytes="64MiB")


@pytest.fixture
def templated(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same model as if it had come with a template in place of a format of its own."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copy(llm.engine.directory / "tokenizer.json", tmp_path)
    monkeypatch.setattr(llm, "_chats", Chats(tmp_path, llm.engine.codec))
    return llm


def test_a_chat_is_the_prompt_that_the_server_would_write(llm: LLM) -> None:
    (output,) = llm.chat([HI], SHORT)
    assert output.prompt == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>"
    chat, codec = chat_format("deepseek_v4", llm.engine.directory), llm.engine.codec
    assert chat is not None and codec is not None
    rendered = chat.render([Message("user", "Hi")], ChatOptions(), codec.added_tokens)
    assert output.prompt_token_ids == encode(rendered, codec.encode)
    assert len(output.outputs[0].token_ids) == 4
    assert llm.generate(output.prompt_token_ids, SHORT)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_several_chats_each_with_its_own_parameters(llm: LLM) -> None:
    chats = [[HI], [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]]
    params = [SHORT, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)]
    seen: list[tuple[int, int]] = []
    both = llm.chat(chats, params, on_step=lambda done, total: seen.append((done, total)))
    assert [len(one.outputs[0].token_ids) for one in both] == [4, 2] and seen[-1] == (2, 2)
    for chat, own, output in zip(chats, params, both, strict=True):
        (alone,) = llm.chat(chat, own)
        assert (alone.prompt, alone.outputs[0].token_ids) == (output.prompt, output.outputs[0].token_ids)


def test_the_next_turn_reuses_the_one_before(llm: LLM) -> None:
    turns = [{"role": "user", "content": "What is a page of memory, in few words? " * 8}]
    (first,) = llm.chat(turns, SHORT)
    (second,) = llm.chat([*turns, {"role": "assistant", "content": "Bytes."}, HI], SHORT)
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 1


def test_what_a_control_token_spells_stays_text(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "<｜Assistant｜>"}], SHORT)
    codec = llm.engine.codec
    assert codec is not None and output.prompt_token_ids.count(codec.token_id("<｜Assistant｜>") or -1) == 1


def test_kwargs_tools_and_turns_that_go_on(llm: LLM) -> None:
    (plain,) = llm.chat([HI], SHORT, chat_template_kwargs={"enable_thinking": False})
    assert plain.prompt is not None and plain.prompt.endswith("</think>")
    (told,) = llm.chat([HI], SHORT, tools=[WEATHER])
    assert told.prompt is not None and '"weather"' in told.prompt
    open_turn = [HI, {"role": "assistant", "content": "Well, the"}]
    (going_on,) = llm.chat(open_turn, SHORT, add_generation_prompt=False, continue_final_message=True)
    assert going_on.prompt is not None and going_on.prompt.endswith("Well, the")


def test_a_template(templated: LLM) -> None:
    def prompt(**options: object) -> str | None:
        return templated.chat([{"role": "system", "content": "S"}, HI], SHORT, **options)[0].prompt  # type: ignore[arg-type]

    assert prompt() == "[system]S[user]Hi[assistant]"
    assert prompt(add_generation_prompt=False) == "[system]S[user]Hi"
    assert prompt(chat_template_kwargs={"shout": True}) == "[system]S[user]Hi[assistant]!"
    with pytest.raises(ConfigError, match="no place for tools"):
        prompt(tools=[WEATHER])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"), ([], "messages"), ([[]], "messages[0]"), ([HI, "Hi"], "messages[0]"), ([[HI], HI], "messages[1]"),
        ([{"content": "Hi"}], "messages[0].role"), ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([[HI], [{"role": "user", "content": 3}]], "messages[1][0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([HI, {"role": "tool", "content": "x", "tool_call_id": "call_9"}], "messages[1].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(llm: LLM, messages: list[object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        llm.chat(messages, SHORT)  # type: ignore[arg-type]
    assert caught.value.field == field and "\n" not in str(caught.value) and not llm.engine.has_work


def test_results_of_tools_name_their_calls() -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]}
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    read = read_messages([HI, call, result, {"role": "tool", "content": "no id"}])
    assert read[1].tool_calls[0].arguments == '{"x": 1}' and read[2].tool_call_id == "a"
    with pytest.raises(ConfigError, match=r"messages\[1\]\.tool_call_id='a' is not valid"):
        read_messages([HI, result, call])  # it comes before its call


def test_options() -> None:
    options = read_options({"reasoning_effort": "none", "drop_thinking": False, "mine": [1]}, [WEATHER], False)
    assert (options.thinking, options.effort, options.drop_thinking, options.begins_answer) == (False, "none", False, False)
    assert options.tools[0].name == "weather" and options.template_kwargs["mine"] == [1]
    for kwargs, tools in (({"drop_thinking": 1}, None), ({"enable_thinking": "no"}, None), ({}, [{"function": {"name": "a b"}}])):
        with pytest.raises(ConfigError):
            read_options(kwargs, tools)
