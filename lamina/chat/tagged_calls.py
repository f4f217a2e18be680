"""Reads tool calls in tags: `<tool_call>{"name": "...", "arguments": {...}}</tool_call>`, one after another.

Where the name comes first, as models are shown it, the arguments are handed on as they come, just as they are written. A call
that is written another way (arguments first, or as a text that holds JSON) is handed on when it is whole.
"""

import json
import re
import secrets

from lamina.chat.answers import Look, Sight
from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_HEAD_CHARS = 512
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_MEANS_IN_TEXT = re.compile(r'["\\]')
_MEANS_ELSEWHERE = re.compile(r'["{}\[\]<]')


class _JsonObject:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_text = False
        self._is_escaped = False

    def take(self, text: str) -> tuple[int, bool]:
        """(how much of `text` belongs to the object, whether it has ended); a "<" outside its texts ends it."""
        at = 0
        if self._is_escaped and text:
            at, self._is_escaped = 1, False
        while (match := (_MEANS_IN_TEXT if self._is_in_text else _MEANS_ELSEWHERE).search(text, at)) is not None:
            at = match.end()
            match match.group():
                case '"':
                    self._is_in_text = not self._is_in_text
                case "\\":
                    self._is_escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if not self._depth:
                        return at, True
                case _:
                    return match.start(), True
        return len(text), False


class TaggedCalls:
    """A `CallReader`. What stands between calls, and after them, is dropped.

    A closing tag inside one of the call's texts does not end it: the call ends where its JSON is whole. A call whose arguments
    turn out to be no valid JSON has no end. What never becomes a call is content if the model stopped by itself.
    """

    def __init__(self, is_parallel: bool = True) -> None:
        self._is_parallel = is_parallel
        self._text = ""
        self._is_open = False
        self._searched = 0  # the opened text holds no untried closing tag before
        self._num_calls = 0
        self._object: _JsonObject | None = None  # the arguments being handed on
        self._pieces: list[str] = []

    def look(self, text: str, at: int) -> Look:
        """The opening tag, or what may become one; a closing tag alone is stray."""
        for tag, sight in ((_OPEN, Sight.OPENING), (_CLOSE, Sight.STRAY)):
            if text.startswith(tag, at):
                return Look(sight, len(tag))
        rest = text[at : at + len(_CLOSE)]
        return Look(Sight.UNSURE if _OPEN.startswith(rest) or _CLOSE.startswith(rest) else Sight.TEXT)

    def is_markup(self, text: str) -> bool:
        """Never: a part of a tag may as well be text."""
        return False

    def push(self, text: str) -> list[Event]:
        """More text, from the first opening tag on."""
        self._text += text
        events: list[Event] = []
        while True:
            if self._object is not None:
                events += self._stream(self._object)
                if self._object is not None:
                    return events
            if not self._is_open:
                start = self._text.find(_OPEN)
                if start < 0:
                    self._text = self._text[-(len(_OPEN) - 1) :]
                    return events
                self._text, self._is_open, self._searched = self._text[start + len(_OPEN) :], True, 0
            head = _HEAD.match(self._text[: _MAX_HEAD_CHARS + 1])
            name = None if head is None else _text_of(head["name"])
            if head is not None and name is not None:
                events += self._begin(name)
                self._text, self._is_open = self._text[head.end() :], False
                self._object, self._pieces = _JsonObject(), []
                continue
            end = self._text.find(_CLOSE, self._searched)
            if end < 0:
                self._searched = max(self._searched, len(self._text) - len(_CLOSE) + 1)
                return events
            call = _parse(self._text[:end])
            if call is None:
                self._searched = end + len(_CLOSE)
                continue
            events += self._whole(*call)
            self._text, self._is_open = self._text[end + len(_CLOSE) :], False

    def finish(self, reason: str) -> list[Event]:
        """A whole call whose closing tag alone is missing counts; other text of a model that stopped is content."""
        if not self._is_open or reason != "stop":
            return []
        call = _parse(self._text)
        return self._whole(*call) if call is not None else [Content(_OPEN + self._text)]

    @property
    def _counts(self) -> bool:
        """Whether the call last begun is handed on."""
        return self._is_parallel or self._num_calls == 1

    def _begin(self, name: str) -> list[Event]:
        self._num_calls += 1
        return [CallStart(self._num_calls - 1, f"call_{secrets.token_hex(12)}", name)] if self._counts else []

    def _stream(self, arguments: _JsonObject) -> list[Event]:
        """The next piece of the arguments."""
        length, has_ended = arguments.take(self._text)
        piece, self._text = self._text[:length], self._text[length:]
        self._pieces.append(piece)
        events: list[Event] = [CallArguments(self._num_calls - 1, piece)] if piece and self._counts else []
        if has_ended:
            self._object = None
            if self._counts and _object_of("".join(self._pieces)) is not None:
                events.append(CallEnd(self._num_calls - 1))
        return events

    def _whole(self, name: str, arguments: str) -> list[Event]:
        events = self._begin(name)
        index = self._num_calls - 1
        return [*events, CallArguments(index, arguments), CallEnd(index)] if events else []


def _parse(text: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call, or None where the text is none."""
    call = _object_of(text)
    if call is None or not isinstance(call.get("name"), str):
        return None
    given = call.get("arguments", call.get("parameters", {}))
    arguments = _object_of(given or "{}") if isinstance(given, str) else given  # some models write a text that holds JSON
    return (str(call["name"]), json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _object_of(text: str) -> dict[str, object] | None:
    """The JSON object that a text is, or None."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _text_of(text: str) -> str | None:
    """The text that a JSON string is, or None where its escapes are wrong."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return None


def _refuse(name: str) -> object:
    raise ValueError(name)
