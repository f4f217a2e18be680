"""Writes one answer as a response: the events of the stream and, at any time, the response they add up to."""

import base64
import binascii
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from lamina.server.generation import Totals
from lamina.server.responses_custom import InputReader
from lamina.server.responses_schema import (
    ArgumentsEvent,
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputEvent,
    InputTokensDetails,
    ItemEvent,
    ItemStatus,
    Lifecycle,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    StreamEvent,
    SummaryEvent,
    SummaryPartEvent,
    SummaryText,
    TextEvent,
)
from lamina.server.schema import Memory, TokenLogprob

#: what `encrypted_content` begins with: it holds the thoughts as they are, so that a client that keeps nothing can send them back
SEAL = "lamina1."


def seal(thoughts: str) -> str:
    """The thoughts as one opaque word."""
    return SEAL + base64.urlsafe_b64encode(thoughts.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The thoughts of `seal`; None where it is not ours or not whole."""
    if not sealed.startswith(SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


@dataclass(slots=True)
class _Open:
    """An item that is still written. pieces  of its text, arguments or input."""

    kind: Literal["reasoning", "message", "call", "custom"]
    id: str
    position: int
    call_id: str = ""
    name: str = ""
    namespace: str | UnsetType = UNSET
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reader: InputReader = field(default_factory=InputReader)  # of a custom tool's call


class ResponseWriter:
    """One response while it comes into being.

    blank  the response as it was asked for: no output, in progress.
    has_summary  thoughts also come as summaries.   has_seal  and as `encrypted_content`.   has_logprobs  texts carry them.
    namespaces   namespace and name of functions, by the name that the model writes.   custom  those that are custom tools.
    """

    def __init__(
        self, blank: ResponseObject, *, has_summary: bool = False, has_seal: bool = False, has_logprobs: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None, custom: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.response = blank
        self._has_summary, self._has_seal, self._has_logprobs = has_summary, has_seal, has_logprobs
        self._namespaces, self._custom = namespaces or {}, custom
        self._number = 0
        self._items: list[OutputItem | None] = []
        self._open: dict[int, _Open] = {}  # calls by their index; the open reasoning or message is at -1

    def start(self) -> list[StreamEvent]:
        """The events before any output."""
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def push(self, event: Event, logprobs: list[TokenLogprob] | None = None) -> list[StreamEvent]:
        """The events of one piece of the answer. logprobs  of the tokens of a text's piece."""
        match event:
            case Reasoning(text):
                return self._add_text("reasoning", text, None)
            case Content(text):
                return self._add_text("message", text, logprobs)
            case CallStart(index, call_id, name):
                found = self._close_text("completed")
                item = self._new("custom", "ctc") if name in self._custom else self._new("call", "fc")
                item.call_id = call_id
                item.namespace, item.name = self._namespaces.get(name, (UNSET, name))
                self._open[index] = item
                return [*found, self._item_event("added", item.position, self._finished(item, "in_progress"))]
            case CallArguments(index, text):
                item = self._open[index]
                if item.kind == "custom":
                    return self._add_input(item, item.reader.push(text))
                item.pieces.append(text)
                return [
                    ArgumentsEvent("response.function_call_arguments.delta", self._next(), item.id, item.position, delta=text)
                ]
            case CallEnd(index):
                return self._close(index, "completed")

    def finish(self, finish: str, usage: ResponseUsage | None, message: str = "") -> list[StreamEvent]:
        """Closes what is open and ends the response as `finish` says. message  of an error."""
        is_whole = finish in ("stop", "tool_calls")
        found: list[StreamEvent] = []
        if not self._items and is_whole:  # an empty answer is an empty text, not nothing
            found += self._add_text("message", "", None)
        for index in list(self._open):
            is_cut = not is_whole or index >= 0
            found += self._close(index, "incomplete" if is_cut else "completed")
        output = [item for item in self._items if item is not None]
        status, error, details = _ending(finish, message)
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            output=output,
            error=error,
            incomplete_details=details,
            usage=usage,
            completed_at=int(time.time()) if status == "completed" else None,
        )
        name = {"completed": "response.completed", "failed": "response.failed"}.get(status, "response.incomplete")
        return [*found, self._lifecycle(name)]

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _lifecycle(self, name: str) -> Lifecycle:
        return Lifecycle(name, self._next(), self.response)

    def _item_event(self, name: str, position: int, item: OutputItem) -> ItemEvent:
        return ItemEvent(f"response.output_item.{name}", self._next(), position, item)

    def _add_input(self, item: _Open, text: str) -> list[StreamEvent]:
        """More of the text that a custom tool is given."""
        if not text:
            return []
        item.pieces.append(text)
        return [InputEvent("response.custom_tool_call_input.delta", self._next(), item.id, item.position, delta=text)]

    def _new(self, kind: Literal["reasoning", "message", "call", "custom"], prefix: str) -> _Open:
        """A new item. Its id names the response, where `item_reference` finds it."""
        self._items.append(None)
        return _Open(kind, f"{prefix}_{self.response.id.removeprefix('resp_')}_{len(self._items)}", len(self._items) - 1)

    def _add_text(
        self, kind: Literal["reasoning", "message"], text: str, logprobs: list[TokenLogprob] | None
    ) -> list[StreamEvent]:
        found: list[StreamEvent] = []
        item = self._open.get(-1)
        if item is None or item.kind != kind:
            found += self._close_text("completed")
            item = self._open_text(kind, found)
        if not text:
            return found
        item.pieces.append(text)
        if kind == "message":
            item.logprobs += logprobs or []
            found.append(
                TextEvent(
                    "response.output_text.delta", self._next(), item.id, item.position, 0, delta=text, logprobs=logprobs or []
                )
            )
            return found
        if self._has_summary:
            found.append(
                SummaryEvent("response.reasoning_summary_text.delta", self._next(), item.id, item.position, 0, delta=text)
            )
        found.append(TextEvent("response.reasoning_text.delta", self._next(), item.id, item.position, 0, delta=text))
        return found

    def _open_text(self, kind: Literal["reasoning", "message"], found: list[StreamEvent]) -> _Open:
        item = self._new(kind, "rs" if kind == "reasoning" else "msg")
        self._open[-1] = item
        bare = ReasoningItem(item.id, [], [], "in_progress") if kind == "reasoning" else MessageItem(item.id, "in_progress", [])
        found.append(self._item_event("added", item.position, bare))
        if kind == "reasoning" and self._has_summary:
            name = "response.reasoning_summary_part.added"
            found.append(SummaryPartEvent(name, self._next(), item.id, item.position, 0, SummaryText("")))
        part = ReasoningText("") if kind == "reasoning" else OutputText("", logprobs=[])
        found.append(PartEvent("response.content_part.added", self._next(), item.id, item.position, 0, part))
        return item

    def _close_text(self, status: ItemStatus) -> list[StreamEvent]:
        return self._close(-1, status) if -1 in self._open else []

    def _close(self, index: int, status: ItemStatus) -> list[StreamEvent]:
        item = self._open.pop(index)
        found = self._add_input(item, item.reader.finish()) if item.kind == "custom" else []
        text = "".join(item.pieces)
        place = (item.id, item.position)
        whole = self._finished(item, status)
        match whole:
            case CallItem():
                name = "response.function_call_arguments.done"
                found.append(ArgumentsEvent(name, self._next(), *place, name=item.name, arguments=text))
            case CustomCallItem():
                found.append(InputEvent("response.custom_tool_call_input.done", self._next(), *place, input=text))
            case MessageItem():
                name = "response.output_text.done"
                found.append(TextEvent(name, self._next(), *place, 0, text=text, logprobs=item.logprobs))
                found.append(PartEvent("response.content_part.done", self._next(), *place, 0, whole.content[0]))
            case ReasoningItem():
                if self._has_summary:
                    name = "response.reasoning_summary_text.done"
                    found.append(SummaryEvent(name, self._next(), *place, 0, text=text))
                    name = "response.reasoning_summary_part.done"
                    found.append(SummaryPartEvent(name, self._next(), *place, 0, SummaryText(text)))
                found.append(TextEvent("response.reasoning_text.done", self._next(), *place, 0, text=text))
                found.append(PartEvent("response.content_part.done", self._next(), *place, 0, ReasoningText(text)))
        self._items[item.position] = whole
        found.append(self._item_event("done", item.position, whole))
        return found

    def _finished(self, item: _Open, status: ItemStatus) -> OutputItem:
        """The item as far as it is written."""
        text = "".join(item.pieces)
        if item.kind == "call":
            return CallItem(item.id, item.call_id, item.name, text, status, item.namespace)
        if item.kind == "custom":
            return CustomCallItem(item.id, item.call_id, item.name, text, status, item.namespace)
        if item.kind == "message":
            return MessageItem(item.id, status, [OutputText(text, logprobs=item.logprobs if self._has_logprobs else [])])
        summary = [SummaryText(text)] if self._has_summary else []
        return ReasoningItem(item.id, summary, [ReasoningText(text)], status, seal(text) if self._has_seal else None)


def _ending(
    finish: str, message: str
) -> tuple[Literal["completed", "failed", "cancelled", "incomplete"], ResponseError | None, IncompleteDetails | None]:
    """How a response ends: its status, error and why it is not whole."""
    if finish in ("stop", "tool_calls"):
        return "completed", None, None
    if finish == "length":
        return "incomplete", None, IncompleteDetails("max_output_tokens")
    if finish == "abort":
        return "cancelled", None, None
    told = message or (
        "the request's deadline has passed" if finish == "deadline" else "the engine could not finish this request"
    )
    return "failed", ResponseError("server_error", told), None


def usage_of(totals: Totals) -> ResponseUsage:
    """The usage in this protocol's words."""
    return ResponseUsage(
        totals.prompt_tokens,
        InputTokensDetails(totals.cached_tokens),
        totals.completion_tokens,
        OutputTokensDetails(totals.reasoning_tokens),
        totals.prompt_tokens + totals.completion_tokens,
        Memory(totals.held_bytes, totals.prefix_stop),
    )
