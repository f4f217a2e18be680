"""Chats as plain Python records, in OpenAI's words: dicts become messages and tools, and what they refer to is checked."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from lamina.base.errors import ConfigError
from lamina.chat.records import ChatOptions, Json, Message, Role, Tool, ToolCall
from lamina.chat.thinking import thinking_options

#: one turn: {"role": ..., "content": a text, or a list of {"type": "text", "text": ...}, ...}
ChatMessage: TypeAlias = Mapping[str, object]
_ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def read_messages(given: Sequence[ChatMessage], place: str = "messages", goes_on: bool = False) -> list[Message]:
    """The turns of one chat.

    place  how errors name it.   goes_on  the answer goes on with the last turn, an assistant's.
    Raises ConfigError naming the turn's field, the value and what is allowed.
    """
    if not given:
        raise ConfigError(place, list(given), "at least one message")
    messages = [_message(one, f"{place}[{number}]") for number, one in enumerate(given)]
    last = messages[-1]
    if goes_on:
        if last.role != "assistant" or last.tool_calls:
            where = f"{place}[{len(messages) - 1}].role"
            raise ConfigError(where, last.role, "assistant, without tool_calls, for a turn to go on")
        messages[-1] = Message("assistant", last.content, last.reasoning, name=last.name, is_open=True)
    check_results(messages, place)
    return messages


def check_results(messages: Sequence[Message], place: str = "messages") -> None:
    """Raises ConfigError for a tool's result that names a call which no assistant's turn before it has made."""
    made: set[str] = set()
    for number, message in enumerate(messages):
        made.update(call.id for call in message.tool_calls)
        wanted = message.tool_call_id
        if message.role == "tool" and wanted and wanted not in made and "" not in made:
            raise ConfigError(f"{place}[{number}].tool_call_id", wanted, "the id of one of the tool_calls before it")


def read_options(
    template_kwargs: Mapping[str, object] | None = None, tools: Sequence[Mapping[str, object]] | None = None,
    begins_answer: bool = True,
) -> ChatOptions:  # fmt: skip
    """How a chat is written: what a template is handed, among it thinking, enable_thinking and reasoning_effort; tools.

    Raises ConfigError naming the field.
    """
    kwargs = cast("dict[str, Json]", dict(template_kwargs or {}))
    thinking, effort = thinking_options({"chat_template_kwargs": kwargs})
    drop = kwargs.get("drop_thinking")
    if drop is not None and not isinstance(drop, bool):
        raise ConfigError("chat_template_kwargs.drop_thinking", drop, "True or False")
    found = tuple(_tool(one, f"tools[{number}]") for number, one in enumerate(tools or ()))
    return ChatOptions(thinking, effort, drop, found, template_kwargs=kwargs, begins_answer=begins_answer)


def _message(given: object, place: str) -> Message:
    if not isinstance(given, Mapping):
        raise ConfigError(place, given, 'a record such as {"role": "user", "content": "Hello"}')
    role = next((role for role in _ROLES if role == given.get("role")), None)
    if role is None:
        raise ConfigError(f"{place}.role", given.get("role"), f"one of {', '.join(_ROLES)}")
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConfigError(f"{place}.tool_calls", calls, "a list of calls")
    return Message(
        role=role,
        content=_content(given.get("content"), f"{place}.content"),
        reasoning=_text(given, "reasoning_content", place) or _text(given, "reasoning", place) or "",
        tool_calls=tuple(_call(one, f"{place}.tool_calls[{number}]") for number, one in enumerate(calls)),
        tool_call_id=_text(given, "tool_call_id", place),
        name=_text(given, "name", place),
    )


def _content(content: object, place: str) -> str:
    """The text of a turn; parts are joined by a line break."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ConfigError(place, content, 'a text or a list of {"type": "text", "text": ...}')
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ConfigError(f"{place}[{number}]", part, '{"type": "text", "text": ...}: chats are text')
        texts.append(part["text"])
    return "\n".join(texts)


def _call(given: object, place: str) -> ToolCall:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(function, Mapping):
        raise ConfigError(place, given, 'a record such as {"id": ..., "function": {"name": ..., "arguments": "{}"}}')
    name, arguments = _text(function, "name", f"{place}.function"), function.get("arguments")
    if not name:
        raise ConfigError(f"{place}.function.name", name, "a text")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(_text(given, "id", place) or "", name, arguments)


def _tool(given: object, place: str) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError(place, given, 'a record such as {"type": "function", "function": {"name": ..., "parameters": ...}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ConfigError(f"{place}.function.name", name, "1 to 128 of A-Z a-z 0-9 _ . : / -")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ConfigError(f"{place}.function.parameters", parameters, "a JSON schema, a record")
    return Tool(name, function)


def _text(given: Mapping[str, object], name: str, place: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{place}.{name}", value, "a text")
    return value
