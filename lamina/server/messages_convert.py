"""Between the messages protocol and a chat: blocks become messages, what was asked for becomes options."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from lamina.chat.records import Json, Message, Tool, ToolCall, ToolChoice
from lamina.server.errors import ApiError, invalid
from lamina.server.messages_schema import CountTokensRequest, InputBlock, InputText, InputTool, MessagesError, MessagesErrorBody

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_of(error: ApiError) -> MessagesError:
    """An error in this protocol's words."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if error.field is None:
        return MessagesError(MessagesErrorBody(kind, error.message))
    return MessagesError(MessagesErrorBody(kind, error.message, error.field))


def to_messages(request: CountTokensRequest) -> list[Message]:
    """The system prompt and the turns. Raises ApiError naming the block."""
    messages: list[Message] = []
    if request.system:
        text = request.system if isinstance(request.system, str) else _joined(request.system, "system")
        messages.append(Message("system", text))
    names: dict[str, str] = {}
    for position, one in enumerate(request.messages):
        at = f"messages[{position}]"
        blocks = [InputBlock("text", text=one.content)] if isinstance(one.content, str) else one.content
        match one.role:
            case "user":
                messages += _user(blocks, names, at)
            case "assistant":
                is_last = position == len(request.messages) - 1
                messages.append(_assistant(blocks, names, at, is_last))
            case "system":
                messages.append(Message("system", _joined(blocks, f"{at}.content")))
            case _:
                raise invalid(f"{at}.role", one.role, "user, assistant, system")
    return messages


def to_tools(request: CountTokensRequest) -> tuple[Tool, ...]:
    """The tools that the model may use. Raises ApiError naming a tool of another type."""
    tools = tuple(_tool(tool, f"tools[{position}]") for position, tool in enumerate(request.tools or ()))
    names = [tool.name for tool in tools]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise invalid(f"tools[{position}].name", name, "each name once")
    return tools


def to_choice(request: CountTokensRequest) -> ToolChoice:
    """Whether and what the model has to call. Raises ApiError naming the field."""
    choice = request.tool_choice
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    names = [tool.name for tool in request.tools or ()]
    if choice.type == "any":
        if not names:
            raise invalid("tool_choice.type", choice.type, "auto or none where there are no tools")
        return ToolChoice("required")
    if choice.name not in names:
        raise invalid("tool_choice.name", choice.name, f"one of the tools: {', '.join(names) or 'there are none'}")
    return ToolChoice("named", choice.name)


def to_thinking(request: CountTokensRequest) -> bool:
    """Whether to think first: as the protocol has it, not unless it was asked for."""
    return request.thinking is not None and request.thinking.type in ("enabled", "adaptive")


def schema_of(request: CountTokensRequest) -> Mapping[str, Json] | None:
    """The JSON schema that the text has to match; None: any text."""
    form = request.output_config.format if request.output_config else None
    return None if form is None else cast(Mapping[str, Json], form.schema)


def _user(blocks: Sequence[InputBlock], names: Mapping[str, str], at: str) -> list[Message]:
    """A user's turn: results of tools are messages of their own, texts between them another."""
    messages: list[Message] = []
    texts: list[str] = []
    for position, block in enumerate(blocks):
        here = f"{at}.content[{position}]"
        if block.type == "text":
            texts.append(_given(block.text, f"{here}.text"))
            continue
        if block.type != "tool_result":
            raise invalid(f"{here}.type", block.type, "text, tool_result (this server reads text only)")
        if texts:
            messages.append(Message("user", "\n\n".join(texts)))
            texts = []
        call_id = _given(block.tool_use_id, f"{here}.tool_use_id")
        if call_id not in names:
            raise invalid(f"{here}.tool_use_id", call_id, "the id of a tool_use block before it")
        content = block.content or ""
        text = content if isinstance(content, str) else _joined(content, f"{here}.content")
        messages.append(Message("tool", text, tool_call_id=call_id, name=names[call_id]))
    if texts or not messages:
        messages.append(Message("user", "\n\n".join(texts)))
    return messages


def _assistant(blocks: Sequence[InputBlock], names: dict[str, str], at: str, is_last: bool) -> Message:
    """An assistant's turn. The last message of all is left open: the answer goes on from it."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for position, block in enumerate(blocks):
        here = f"{at}.content[{position}]"
        match block.type:
            case "text":
                texts.append(_given(block.text, f"{here}.text"))
            case "thinking":
                thoughts.append(_given(block.thinking, f"{here}.thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                id, name = _given(block.id, f"{here}.id"), _given(block.name, f"{here}.name")
                names[id] = name
                calls.append(ToolCall(id, name, msgspec.json.encode(block.input or {}).decode()))
            case _:
                raise invalid(f"{here}.type", block.type, "text, tool_use, thinking, redacted_thinking")
    if is_last and calls:
        raise invalid(at, "tool_use", "followed by a message with the tool_result of each tool_use")
    return Message("assistant", "".join(texts), "\n\n".join(thoughts), tuple(calls), is_open=is_last)


def tool_name(name: str, at: str) -> str:
    """A tool's name as chat formats can write it. Raises ApiError naming the field."""
    if not _TOOL_NAME.fullmatch(name):
        raise invalid(at, name, "1 to 128 of A-Z a-z 0-9 _ . : / -")
    return name


def _tool(tool: InputTool, at: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise invalid(f"{at}.type", tool.type, "custom (tools of the server's own are not supported)")
    if tool.input_schema is None:
        raise ApiError(400, f"{at}.input_schema is missing: a JSON schema", f"{at}.input_schema", "missing_field")
    record: dict[str, Json] = {"name": tool_name(tool.name, f"{at}.name")}
    if tool.description is not None:
        record["description"] = tool.description
    record["parameters"] = cast(Json, tool.input_schema)
    return Tool(tool.name, record, bool(tool.strict))


def _joined(blocks: Sequence[InputBlock | InputText], at: str) -> str:
    """The text of blocks that may only be texts, joined by blank lines."""
    texts = []
    for position, block in enumerate(blocks):
        if block.type != "text":
            raise invalid(f"{at}[{position}].type", block.type, "text (this server reads text only)")
        texts.append(_given(block.text, f"{at}[{position}].text"))
    return "\n\n".join(texts)


def _given(text: str | None, at: str) -> str:
    if text is None:
        raise ApiError(400, f"{at} is missing: a text", at, "missing_field")
    return text
