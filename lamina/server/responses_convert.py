"""Between the responses protocol and a chat: items become messages, what was asked for becomes options."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
from msgspec import UnsetType

from lamina.chat.records import Json, Message, Role, Tool, ToolCall, ToolChoice
from lamina.server.errors import ApiError, invalid, unsupported
from lamina.server.limits import MAX_TOOLS
from lamina.server.messages_convert import tool_name
from lamina.server.responses_custom import arguments_of, to_function
from lamina.server.responses_events import unseal
from lamina.server.responses_schema import (
    CallItem,
    CustomCallItem,
    FormatEcho,
    FunctionTool,
    InputItem,
    InputPart,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    ToolPick,
)

_ROLES: Mapping[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "developer"}
_CALLABLE = ("function", "custom")
#: tools that OpenAI's servers run and agents always offer: an answer does without them, as it may do there
_LEFT_OUT = ("web_search", "image_generation")
#: what `include` may name; the first two change an answer, the others belong to tools and inputs that no answer has
INCLUDABLE = (
    "reasoning.encrypted_content", "message.output_text.logprobs", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url",
    "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
_ASSISTANTS = ("reasoning", "function_call", "custom_tool_call")
_ITEMS = ("message", *_ASSISTANTS, "function_call_output", "custom_tool_call_output", "item_reference")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


@dataclass(slots=True)
class _Turn:
    """An assistant's turn while its items are gathered."""

    content: str | None = None
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def close(self) -> list[Message]:
        if self.content is None and not self.reasoning and not self.calls:
            return []
        return [Message("assistant", self.content or "", "\n\n".join(self.reasoning), tuple(self.calls))]


def to_messages(request: ResponsesRequest, history: Sequence[Message] = ()) -> tuple[Message, ...]:
    """The messages of this request's input, without its instructions and without `history`, the turns before it.

    An assistant's thoughts, text and calls that follow each other are one turn. Raises ApiError naming the item.
    """
    if request.input is None:
        raise ApiError(400, "input is missing: a text or a list of items", "input", "missing_field")
    if isinstance(request.input, str):
        return (Message("user", request.input),)
    messages: list[Message] = []
    turn = _Turn()
    names = {call.id: call.name for message in history for call in message.tool_calls}
    for position, item in enumerate(request.input):
        at = f"input[{position}]"
        is_assistants = item.type in _ASSISTANTS or (item.type == "message" and item.role == "assistant")
        if not is_assistants:
            messages += turn.close()
            turn = _Turn()
        match item.type:
            case "message" if is_assistants:
                if turn.content is not None or turn.calls:
                    messages += turn.close()
                    turn = _Turn()
                turn.content = _text(item.content, f"{at}.content")
            case "message":
                role = _ROLES.get(item.role or "")
                if role is None:
                    raise invalid(f"{at}.role", item.role, ", ".join(_ROLES))
                messages.append(Message(role, _text(item.content, f"{at}.content")))
            case "reasoning":
                if turn.content is not None or turn.calls:
                    messages += turn.close()
                    turn = _Turn()
                turn.reasoning += _thoughts(item, at)
            case "function_call" | "custom_tool_call":
                name = _whole_name(item.namespace, _given(item.name, f"{at}.name"))
                is_custom = item.type == "custom_tool_call"
                arguments = arguments_of(item.input or "") if is_custom else item.arguments or "{}"
                call = ToolCall(_given(item.call_id, f"{at}.call_id"), name, arguments, item.namespace, is_custom)
                names[call.id] = call.name
                turn.calls.append(call)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _given(item.call_id, f"{at}.call_id")
                if call_id not in names:
                    raise invalid(f"{at}.call_id", call_id, "the call_id of a call before it")
                text = _text(item.output, f"{at}.output")
                messages.append(Message("tool", text, tool_call_id=call_id, name=names[call_id]))
            case _:
                raise invalid(f"{at}.type", item.type, ", ".join(_ITEMS))
    messages += turn.close()
    if not messages and not history:
        raise invalid("input", [], "at least one item")
    return tuple(messages)


def without_references(items: Sequence[InputItem], find: Callable[[str], bytes | None]) -> list[InputItem]:
    """The items, with those that are referred to in place of the references. find  a kept response's JSON by its id.

    Raises ApiError naming the reference whose item is not here.
    """
    kept: dict[str, Mapping[str | None, InputItem]] = {}
    found: list[InputItem] = []
    seen: set[str] = set()  # an item counts once: what is kept bounds what references can make of a short body
    for position, item in enumerate(items):
        if item.type != "item_reference":
            found.append(item)
            continue
        at = f"input[{position}].id"
        item_id = _given(item.id, at)
        if item_id in seen:
            raise invalid(at, item_id, "each item once")
        seen.add(item_id)
        id = f"resp_{item_id.partition('_')[2].partition('_')[0]}"
        if id not in kept:
            body = find(id)
            output = [] if body is None else msgspec.json.decode(body, type=_Kept).output
            kept[id] = {one.id: one for one in output}
        if item_id not in kept[id]:
            raise invalid(at, item_id, "the id of an item of a response that is kept")
        found.append(kept[id][item_id])
    return found


class _Kept(msgspec.Struct):
    """What is read of a response that is kept."""

    output: list[InputItem]


def answer_messages(output: Sequence[OutputItem]) -> tuple[Message, ...]:
    """A response's output as the assistant's turn that a next response goes on from. Calls that were cut off are left out."""
    turn = _Turn()
    for item in output:
        match item:
            case ReasoningItem():
                turn.reasoning += [part.text for part in item.content]
            case MessageItem():
                turn.content = (turn.content or "") + "".join(part.text for part in item.content)
            case CallItem() if item.status == "completed":
                namespace = None if isinstance(item.namespace, UnsetType) else item.namespace
                turn.calls.append(ToolCall(item.call_id, _whole_name(namespace, item.name), item.arguments, namespace))
            case CustomCallItem() if item.status == "completed":
                namespace = None if isinstance(item.namespace, UnsetType) else item.namespace
                name = _whole_name(namespace, item.name)
                turn.calls.append(ToolCall(item.call_id, name, arguments_of(item.input), namespace, is_custom=True))
            case _:
                pass
    return tuple(turn.close())


def to_tools(request: ResponsesRequest) -> tuple[Tool, ...]:
    """The functions that the model may call. Raises ApiError naming a tool of another type."""
    tools: dict[str, Tool] = {}
    for one in _functions(request):
        if one.whole_name in tools:
            raise invalid(f"{one.at}.name", one.whole_name, "each name once")
        if len(tools) == MAX_TOOLS:
            raise invalid(one.at, f"function {MAX_TOOLS + 1}", f"at most {MAX_TOOLS} functions, those of namespaces included")
        tools[one.whole_name] = _tool(one)
    picked = request.tool_choice
    if isinstance(picked, ToolPick) and picked.type == "allowed_tools":
        allowed = _allowed(picked, list(tools))
        return tuple(tool for tool in tools.values() if tool.name in allowed)
    return tuple(tools.values())


def shown_tools(request: ResponsesRequest) -> list[FunctionTool]:
    """The tools as the response tells them: without those that are left out."""
    return [tool for tool in request.tools or () if not tool.type.startswith(_LEFT_OUT)]


def namespaces(request: ResponsesRequest) -> Mapping[str, tuple[str, str]]:
    """Namespace and name of each function that is in a namespace, by the name that the model writes."""
    return {one.whole_name: (one.namespace, one.name) for one in _functions(request) if one.namespace is not None}


def custom_names(request: ResponsesRequest) -> frozenset[str]:
    """The custom tools among the functions, by the name that the model writes."""
    return frozenset(one.whole_name for one in _functions(request) if one.tool.type == "custom")


def to_choice(request: ResponsesRequest) -> ToolChoice:
    """Whether and what the model has to call. Raises ApiError naming the field."""
    picked = request.tool_choice
    if isinstance(picked, ToolPick):
        if picked.type == "allowed_tools":
            return ToolChoice("required" if picked.mode == "required" else "auto")
        if picked.type not in _CALLABLE:
            raise invalid("tool_choice.type", picked.type, "function, custom or allowed_tools")
        name = _given(picked.name, "tool_choice.name")
        names = [one.whole_name for one in _functions(request) if one.tool.type == picked.type]
        if name not in names:
            raise invalid("tool_choice.name", name, f"one of the tools: {', '.join(names) or 'there are none'}")
        return ToolChoice("named", name)
    if picked == "required" and not any(_functions(request)):
        raise invalid("tool_choice", picked, "auto or none where there are no tools")
    return ToolChoice(picked or "auto")


def check(request: ResponsesRequest) -> None:
    """Raises ApiError (400) naming the first field that asks for what is not served."""
    if request.truncation not in (None, "disabled"):
        raise invalid("truncation", request.truncation, "disabled")
    if request.background:
        raise unsupported("background", "responses in the background are")
    if request.conversation is not None:
        raise unsupported("conversation", "conversations are")
    if request.prompt is not None:
        raise unsupported("prompt", "stored prompts are")
    for position, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise invalid(f"include[{position}]", name, ", ".join(INCLUDABLE))
    form = request.text.format if request.text else None
    if form is not None:
        if form.type not in ("text", "json_object", "json_schema"):
            raise invalid("text.format.type", form.type, "text, json_object, json_schema")
        if form.type == "json_schema" and form.schema is None:
            raise invalid("text.format.schema", None, "a JSON schema")


def schema_of(form: TextFormat | None) -> Mapping[str, Json] | None:
    """The JSON schema that is shown to the model; None: there is none."""
    return cast(Mapping[str, Json], form.schema) if form is not None and form.type == "json_schema" else None


def format_echo(form: TextFormat | None) -> FormatEcho:
    """The form of the text as the response tells it."""
    if form is None or form.type != "json_schema":
        return FormatEcho(form.type if form else "text")
    echo = FormatEcho(form.type, form.name or "schema", form.schema or {}, strict=bool(form.strict))
    return echo if form.description is None else FormatEcho(echo.type, echo.name, echo.schema, form.description, echo.strict)


@dataclass(frozen=True, slots=True)
class _Function:
    """A function where it stands in a request. whole_name  as the model reads and writes it."""

    at: str
    tool: FunctionTool
    namespace: str | None
    name: str

    @property
    def whole_name(self) -> str:
        return _whole_name(self.namespace, self.name)


def _whole_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _functions(request: ResponsesRequest) -> Iterator[_Function]:
    """All functions, those of namespaces too. Raises ApiError naming a tool of another type."""
    for position, tool in enumerate(request.tools or ()):
        at = f"tools[{position}]"
        if tool.type in _CALLABLE:
            yield _Function(at, tool, None, _given(tool.name, f"{at}.name"))
        elif tool.type == "namespace":
            namespace = _given(tool.name, f"{at}.name")
            for place, inner in enumerate(tool.tools or ()):
                here = f"{at}.tools[{place}]"
                if inner.type not in _CALLABLE:
                    raise invalid(f"{here}.type", inner.type, "function, custom")
                yield _Function(here, inner, namespace, _given(inner.name, f"{here}.name"))
        elif not tool.type.startswith(_LEFT_OUT):
            raise invalid(f"{at}.type", tool.type, f"function, custom, namespace; {' and '.join(_LEFT_OUT)} are left out")


def _tool(one: _Function) -> Tool:
    tool, name = one.tool, tool_name(one.whole_name, f"{one.at}.name")
    if tool.type == "custom":
        form = None if isinstance(tool.format, UnsetType) else tool.format
        return to_function(name, tool.description, form, f"{one.at}.format")
    record: dict[str, Json] = {"name": name}
    if tool.description is not None:
        record["description"] = tool.description
    if tool.parameters is not None:
        record["parameters"] = cast(Json, tool.parameters)
    return Tool(name, record, bool(tool.strict))


def _allowed(picked: ToolPick, names: Sequence[str]) -> set[str]:
    found = set()
    for position, one in enumerate(picked.tools or ()):
        if one.type not in _CALLABLE:
            raise invalid(f"tool_choice.tools[{position}].type", one.type, "function, custom")
        if one.name not in names:
            raise invalid(f"tool_choice.tools[{position}].name", one.name, "the name of one of the tools")
        found.add(one.name)
    if not found:
        raise invalid("tool_choice.tools", [], "at least one tool")
    return {str(name) for name in found}


def _text(content: str | Sequence[InputPart] | None, at: str) -> str:
    """A content's text; parts are joined by a line break."""
    if content is None:
        raise ApiError(400, f"{at} is missing: a text or a list of parts", at, "missing_field")
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or part.text or "")
        elif part.type in _TEXT_PARTS:
            texts.append(_given(part.text, f"{at}[{position}].text", may_be_empty=True))
        else:
            raise invalid(f"{at}[{position}].type", part.type, "input_text, output_text, refusal (this server reads text only)")
    return "\n".join(texts)


def _thoughts(item: InputItem, at: str) -> list[str]:
    """The thoughts of a reasoning item: its content, else what we sealed, else its summary."""
    if item.content:
        return [_text(item.content, f"{at}.content")]
    if item.encrypted_content is not None:
        sealed = unseal(item.encrypted_content)
        if sealed is not None:
            return [sealed]
    return [_text(item.summary, f"{at}.summary")] if item.summary else []


def _given(text: str | None, at: str, *, may_be_empty: bool = False) -> str:
    if text is None or not (text or may_be_empty):
        raise ApiError(400, f"{at} is missing: a text", at, "missing_field")
    return text
