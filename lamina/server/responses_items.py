"""GET /v1/responses/{id}/input_items: what a response answered, page by page."""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from lamina.chat.records import Message
from lamina.server.errors import ApiError, invalid
from lamina.server.responses_custom import input_of
from lamina.server.responses_schema import CallItem, CustomCallItem, OutputText, ReasoningItem, ReasoningText

MAX_LIMIT, LIMIT = 100, 20


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    """A text that was sent."""

    text: str


class InputMessage(msgspec.Struct, frozen=True, tag="message"):
    """A message that was sent, or an earlier answer's."""

    id: str
    role: str
    content: list[InputText | OutputText]
    status: str = "completed"


class CallOutput(msgspec.Struct, frozen=True, tag="function_call_output"):
    """The result of a call."""

    id: str
    call_id: str
    output: str
    status: str = "completed"


class CustomOutput(msgspec.Struct, frozen=True, tag="custom_tool_call_output"):
    """The result of a custom tool's call."""

    id: str
    call_id: str
    output: str
    status: str = "completed"


ListedItem = InputMessage | ReasoningItem | CallItem | CustomCallItem | CallOutput | CustomOutput


class ItemList(msgspec.Struct, frozen=True):
    """A page of items."""

    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def items_of(response_id: str, messages: Sequence[Message]) -> list[ListedItem]:
    """The items that a response's input was made of, oldest first, those before it included. Their ids are always the same."""
    found: list[ListedItem] = []
    custom: set[str] = set()  # calls of custom tools

    def new_id(prefix: str) -> str:
        digest = hashlib.blake2b(f"{response_id} {len(found)}".encode(), digest_size=12)
        return f"{prefix}_{digest.hexdigest()}"

    for message in messages:
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            made = CustomOutput(new_id("ctco"), call_id, message.content)
            found.append(made if call_id in custom else CallOutput(new_id("fco"), call_id, message.content))
            continue
        if message.reasoning:
            found.append(ReasoningItem(new_id("rs"), [], [ReasoningText(message.reasoning)], "completed"))
        if message.role != "assistant":
            found.append(InputMessage(new_id("msg"), message.role, [InputText(message.content)]))
        elif message.content or not (message.reasoning or message.tool_calls):
            found.append(InputMessage(new_id("msg"), message.role, [OutputText(message.content, [], [])]))
        for call in message.tool_calls:
            space = call.namespace
            name = call.name if space is None else call.name.removeprefix(f"{space}.")
            shown = UNSET if space is None else space
            if call.is_custom:
                custom.add(call.id)
                found.append(CustomCallItem(new_id("ctc"), call.id, name, input_of(call.arguments), "completed", shown))
            else:
                found.append(CallItem(new_id("fc"), call.id, name, call.arguments, "completed", shown))
    return found


def page_of(items: Sequence[ListedItem], query: Mapping[str, str]) -> ItemList:
    """The items that a query asks for: limit, order (desc: the newest first), after. Raises ApiError naming the parameter."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", order, "asc or desc")
    text = query.get("limit", str(LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LIMIT):
        raise invalid("limit", text, f"an integer from 1 to {MAX_LIMIT}")
    found = list(items) if order == "asc" else list(items)[::-1]
    after = query.get("after")
    if after is not None:
        place = next((place for place, item in enumerate(found) if item.id == after), None)
        if place is None:
            raise ApiError(400, f"after={after[:100]!r} is not valid: the id of one of the items", "after", "invalid_value")
        found = found[place + 1 :]
    page = found[: int(text)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ItemList(page, first, last, has_more=len(found) > len(page))
