"""OpenAI's messages, tools and options as the chat formats take them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec

from lamina.chat.records import ChatOptions, Json, Message, Tool, ToolCall, ToolChoice
from lamina.chat.thinking import thinking_options
from lamina.chat.turns import check_results
from lamina.server.asking import response_grammar
from lamina.server.errors import ApiError, invalid, unsupported
from lamina.server.schema import CallIn, ChatRequest, JsonObject, MessageIn, NamedChoice, TextPart, ToolIn, refuse

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def to_messages(request: ChatRequest) -> list[Message]:
    """The turns of a request. Raises ApiError (400), ConfigError naming the message."""
    messages = [_message(one, f"messages[{index}]") for index, one in enumerate(request.messages)]
    last = request.messages[-1]
    goes_on = bool(request.continue_final_message) or bool(last.prefix)
    if request.continue_final_message and request.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other: a turn goes on or a new one begins"
        raise ApiError(400, text, "continue_final_message", "invalid_value")
    if goes_on:
        if last.role != "assistant" or last.tool_calls:
            raise invalid(f"messages[{len(messages) - 1}].role", last.role, "assistant, without tool_calls, for a turn to go on")
        messages[-1] = replace(messages[-1], is_open=True)
    elif request.add_generation_prompt is False:
        raise unsupported("add_generation_prompt", "a prompt without the start of an answer (but see continue_final_message) is")
    check_results(messages)
    return messages


def _message(given: MessageIn, field: str) -> Message:
    refuse(f"{field}.function_call", given.function_call, "the old form of tool_calls is")
    refuse(f"{field}.audio", given.audio, "audio is")
    if given.role == "function":
        raise unsupported(f"{field}.role", "the old role function (use tool) is")
    return Message(
        role=given.role,
        content=content_text(given.content, f"{field}.content"),
        reasoning=given.reasoning_content or given.reasoning or "",
        tool_calls=tuple(_call(one, f"{field}.tool_calls[{index}]") for index, one in enumerate(given.tool_calls or ())),
        tool_call_id=given.tool_call_id,
        name=given.name,
        task=given.task,
    )


def content_text(content: str | Sequence[TextPart] | None, field: str) -> str:
    """The text of a message; parts are joined by a line break. Raises ApiError (400) for images, audio and files."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            known = next((name for name in ("image", "audio", "video", "file") if name in part.type), "")
            raise unsupported(f"{field}[{index}].type", f"{known or 'this kind of content'} (type {part.type[:40]!r}) is")
        if part.text is None:
            raise ApiError(400, f"{field}[{index}].text is required", f"{field}[{index}].text", "missing_field")
        texts.append(part.text)
    return "\n".join(texts)


def _call(given: CallIn, field: str) -> ToolCall:
    arguments = given.function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    return ToolCall(given.id or "", given.function.name, arguments)


def chat_options(request: ChatRequest) -> ChatOptions:
    """How the chat is written. Raises ApiError and ConfigError naming the field."""
    kwargs = request.chat_template_kwargs or {}
    thinking, effort = thinking_options(
        cast(
            "dict[str, Json]",
            {
                "thinking": request.thinking, "enable_thinking": request.enable_thinking, "reasoning": request.reasoning,
                "reasoning_effort": request.reasoning_effort, "chat_template_kwargs": kwargs,
            },
        )
    )  # fmt: skip
    drop = kwargs.get("drop_thinking")
    if drop is not None and not isinstance(drop, bool):
        raise invalid("chat_template_kwargs.drop_thinking", drop, "true or false")
    schema: JsonObject | None = None
    if request.response_format is not None:
        response_grammar(request.response_format)
        if request.response_format.json_schema is not None:
            found = request.response_format.json_schema.schema
            schema = found if isinstance(found, dict) else None
    return ChatOptions(
        thinking=thinking,
        effort=effort,
        drop_thinking=drop,
        tools=tuple(to_tool(one, f"tools[{index}]") for index, one in enumerate(request.tools or ())),
        tool_choice=to_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_schema=cast("dict[str, Json] | None", schema),
        template_kwargs=cast("dict[str, Json]", kwargs),
    )


def thinking_budget(request: ChatRequest) -> tuple[int | None, str]:
    """(most tokens of the thoughts, the field that says so): thinking_token_budget, thinking.budget_tokens, reasoning.max_tokens.

    -1 is no bound. Raises ApiError (400) for anything but an integer.
    """
    thinking = request.thinking if isinstance(request.thinking, dict) else {}
    given: tuple[tuple[str, object], ...] = (
        ("thinking_token_budget", request.thinking_token_budget),
        ("thinking.budget_tokens", thinking.get("budget_tokens")),
        ("reasoning.max_tokens", (request.reasoning or {}).get("max_tokens")),
    )
    for name, value in given:
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**63:
            raise invalid(name, value, "an integer of at least 0, or -1 for no bound")
        return (None if value == -1 else value), name
    return None, ""


def to_tool(given: ToolIn, field: str) -> Tool:
    """A tool. Raises ApiError (400) for anything but a function with a name and an object of parameters."""
    if given.type != "function":
        raise unsupported(f"{field}.type", f"a tool of type {given.type[:40]!r} (only function) is")
    if given.function is None:
        raise ApiError(400, f"{field}.function is required", f"{field}.function", "missing_field")
    name = given.function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise invalid(f"{field}.function.name", name, "1 to 128 of A-Z a-z 0-9 _ . : / -")
    parameters = given.function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{field}.function.parameters", parameters, "a JSON schema, an object")
    strict = given.function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{field}.function.strict", strict, "true or false")
    description = given.function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{field}.function.description", description, "a text")
    return Tool(name, cast("dict[str, Json]", given.function), bool(strict))


def to_choice(given: str | NamedChoice | None) -> ToolChoice:
    """tool_choice. Raises ApiError (400) for a record of another kind."""
    match given:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required")
        case NamedChoice(type="function") if given.function is not None:
            return ToolChoice("named", given.function.name)
        case NamedChoice(type="function"):
            raise ApiError(400, "tool_choice.function is required", "tool_choice.function", "missing_field")
        case NamedChoice():
            raise unsupported("tool_choice.type", f"a choice of type {given.type[:40]!r} (only function) is")
    raise invalid("tool_choice", given, "none, auto, required or a function")
