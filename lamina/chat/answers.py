"""Reads an answer as it streams: thoughts, then content, then tool calls, which a `CallReader` reads.

Only text whose meaning is certain is handed on; what may be the beginning of a tag is held back, and no more than that. So
the events join to the same answer however the text is split.

Control tokens: a tag of the thoughts that is one token of the vocabulary counts as a tag only when that token was sampled
(`is_control`); the same spelling in plain text is text. Where the vocabulary has no such token, the spelling counts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lamina.chat.records import Content, Event, Reasoning

_HELD_NEWLINES = 2  # the blank line before tool calls belongs to them


class Sight(Enum):
    """What stands at a place of a text."""

    TEXT = "text"
    UNSURE = "unsure"
    OPENING = "opening"
    STRAY = "stray"


@dataclass(frozen=True, slots=True)
class Look:
    """What a reader sees: plain text, a tag that is not whole yet, the beginning of calls, or a stray tag of `length`."""

    sight: Sight
    length: int = 0


class CallReader(Protocol):
    """Reads the tool calls of one answer."""

    def look(self, text: str, at: int) -> Look:
        """What begins at `text[at]`, which is "<"."""
        ...

    def is_markup(self, text: str) -> bool:
        """Whether a held text that never became whole is markup, which is not shown, rather than text."""
        ...

    def push(self, text: str) -> list[Event]:
        """More text, from where the calls begin."""
        ...

    def finish(self, reason: str) -> list[Event]:
        """The answer has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """The tags around thoughts. are_tokens  they are tokens of the vocabulary, so their spelling in plain text is text."""

    start: str
    end: str
    are_tokens: bool


class _Part(Enum):
    THOUGHTS = "thoughts"
    CONTENT = "content"
    CALLS = "calls"


class AnswerParser:
    """An `OutputParser` for thoughts in tags and tool calls of any syntax.

    A second start of the thoughts and an end in the content are dropped. A model that was not asked to think and yet begins
    with the start of the thoughts is taken at its word. Calls inside the thoughts end these.
    """

    def __init__(self, tags: ThoughtTags | None, reader: CallReader | None, is_thinking: bool) -> None:
        self._tags = tags
        self._reader = reader
        self._part = _Part.THOUGHTS if is_thinking and tags is not None else _Part.CONTENT
        self._is_blank = not is_thinking  # nothing but white space yet
        self._held = ""
        self._has_called = False

    @property
    def is_in_content(self) -> bool:
        """Whether the next text would be content."""
        return self._part is _Part.CONTENT

    @property
    def may_turn(self) -> bool:
        """Whether text without a "<" may still end the thoughts or begin them: a tag has begun, or calls without a name yet."""
        return "<" in self._held or (self._part is _Part.CALLS and not self._has_called)

    def push(self, text: str, is_control: bool = False) -> list[Event]:
        """More text. is_control  it is one token of the vocabulary's added tokens."""
        if self._part is _Part.CALLS:
            return self._to_reader(text)
        if is_control and self._tags is not None and text in (self._tags.start, self._tags.end):
            held, self._held = self._held, ""
            events = self._show(held)
            self._take_tag(text)
            return events
        self._held += text
        return self._drain()

    def finish(self, reason: str) -> list[Event]:
        """What was held back, as far as it is no markup. Cut off after newlines and the first character of a call it is none."""
        if self._part is _Part.CALLS:
            return [] if self._reader is None else self._reader.finish(reason)
        held, self._held = self._held, ""
        begun = held.lstrip("\n")
        if self._reader is not None and (self._reader.is_markup(begun) or (reason == "length" and len(held) > len(begun) > 0)):
            return []
        return self._show(held)

    def _to_reader(self, text: str) -> list[Event]:
        events = [] if self._reader is None else self._reader.push(text)
        self._has_called = self._has_called or bool(events)
        return events

    def _show(self, text: str) -> list[Event]:
        if not text:
            return []
        self._is_blank = self._is_blank and text.isspace()
        return [Reasoning(text)] if self._part is _Part.THOUGHTS else [Content(text)]

    def _take_tag(self, tag: str) -> None:
        if self._tags is not None and tag == self._tags.end:
            self._part = _Part.CONTENT
        elif self._is_blank:
            self._part = _Part.THOUGHTS
        self._is_blank = False

    def _drain(self) -> list[Event]:
        """Hands on what is certain of the held text."""
        events: list[Event] = []
        at = 0
        while (at := self._held.find("<", at)) >= 0:
            tag = self._tag_at(at)
            if tag is not None:
                events += self._show(self._held[:at])
                self._held = self._held[at + len(tag) :]
                self._take_tag(tag)
                at = 0
                continue
            seen = self._look(at)
            if seen.sight is Sight.TEXT:
                at += 1
            elif seen.sight is Sight.STRAY:
                events += self._show(self._held[:at])
                self._held, at = self._held[at + seen.length :], 0
            else:
                start = self._without_newlines(at)
                if seen.sight is Sight.OPENING:
                    events += self._show(self._held[:start])
                    rest, self._held = self._held[at:], ""
                    self._part = _Part.CALLS
                    return events + self._to_reader(rest)
                events += self._show(self._held[:start])
                self._held = self._held[start:]
                return events
        start = self._without_newlines(len(self._held))
        events += self._show(self._held[:start])
        self._held = self._held[start:]
        return events

    def _tag_at(self, at: int) -> str | None:
        if self._tags is None or self._tags.are_tokens:
            return None
        return next((tag for tag in (self._tags.start, self._tags.end) if self._held.startswith(tag, at)), None)

    def _look(self, at: int) -> Look:
        seen = Look(Sight.TEXT) if self._reader is None else self._reader.look(self._held, at)
        if seen.sight is Sight.TEXT and self._tags is not None and not self._tags.are_tokens:
            rest = self._held[at:]
            if self._tags.start.startswith(rest) or self._tags.end.startswith(rest):
                return Look(Sight.UNSURE)
        return seen

    def _without_newlines(self, end: int) -> int:
        """Where the newlines before `end` begin that go with calls, should these begin there."""
        start = end
        while self._reader is not None and start > max(0, end - _HELD_NEWLINES) and self._held[start - 1] == "\n":
            start -= 1
        return start
