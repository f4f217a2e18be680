"""Reads DSML tool calls as they stream. Tolerant: what a model gets slightly wrong is read as it was meant.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">raw text</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY2" string="false">JSON value</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

`｜DSML｜` counts both as the vocabulary's token and spelled in plain text. Arguments join to one JSON object in the order of
the parameters: a raw text is escaped and handed on as it comes; a JSON value is handed on when it is whole and valid, and is
a text if it is not valid. Of two parameters with one name the first counts, as it has been handed on already. A lone
parameter `arguments` or `input` that the tool does not have and that holds an object is taken for the arguments themselves.
A value ends at its closing tag, or at any tag that can only follow it. What comes after the block is dropped.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from lamina.chat.answers import Look, Sight
from lamina.chat.records import CallArguments, CallEnd, CallStart, Event, Tool

_DSML = "｜DSML｜"
_LEADS = ("<" + _DSML, "</" + _DSML)
_BLOCKS = ("tool_calls", "toolcalls", "tool", "function_calls")
_NAMES = (*_BLOCKS, "invoke", "parameter")
_WRAPPERS = ("arguments", "input")
_MAX_HEAD_CHARS = 2048  # a tag longer than this is none
_MAX_UNKNOWN_CHARS = 128
_LINE_END = re.compile(r"[>\n]")
_WORD = re.compile(r"\w*")
_INVOKE = re.compile(r'\s+name="(?P<name>.*?)"\s*/?>', re.DOTALL)
_PARAMETER = re.compile(r'\s+name="(?P<name>.*?)"(?:\s+string="(?P<flag>true|false)")?\s*>', re.DOTALL)
_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""")


class _Kind(Enum):
    """How a parameter's value is written."""

    TEXT = "true"
    JSON = "false"
    EITHER = ""


@dataclass(slots=True)
class _Value:
    """A parameter being read. is_shown  its pieces are handed on as they come.   is_dropped  it does not count."""

    key: str
    kind: _Kind
    is_shown: bool = False
    is_dropped: bool = False
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    """A call being read. keys  of the parameters that count.   wrapped  a value that may turn out to be all the arguments."""

    index: int
    own_keys: frozenset[str] | None
    keys: set[str] = field(default_factory=set)
    is_begun: bool = False
    wrapped: _Value | None = None


@dataclass(frozen=True, slots=True)
class _Tag:
    """A tag's name, where the tag starts and where what follows the name begins."""

    name: str
    is_closing: bool
    start: int
    after: int


class DsmlCalls:
    """A `CallReader`. tools  whose parameters are known.   is_parallel  whether calls after the first count."""

    def __init__(self, tools: Sequence[Tool], is_parallel: bool = True) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._is_parallel = is_parallel
        self._text = ""
        self._num_calls = 0
        self._call: _Call | None = None
        self._is_in_call = False  # also true in a call that does not count
        self._value: _Value | None = None
        self._is_done = False

    # Before the block

    def look(self, text: str, at: int) -> Look:
        """The block's opening or a bare call; closing tags, parameters out of place and unknown tags are stray."""
        tag = _tag_at(text, at)
        if not isinstance(tag, _Tag):
            return _unknown_tag(text, at) if tag is Sight.TEXT and text.startswith(_LEADS, at) else Look(tag)
        if not tag.is_closing and tag.name != "parameter":
            return Look(Sight.OPENING)
        end = _head_end(text, tag)
        if end is None:
            return Look(Sight.UNSURE if len(text) - at < _MAX_HEAD_CHARS else Sight.TEXT)
        return Look(Sight.STRAY, end - at)

    def is_markup(self, text: str) -> bool:
        """A held text that has the marker."""
        return text.startswith(_LEADS)

    # In the block

    def push(self, text: str) -> list[Event]:
        """More text, from the opening on."""
        if self._is_done:
            return []
        self._text += text
        events: list[Event] = []
        at = 0
        while not self._is_done and (at := self._text.find("<", at)) >= 0:
            tag = _tag_at(self._text, at)
            is_unsure = tag is Sight.UNSURE
            if isinstance(tag, _Tag) and self._value is not None:
                if not tag.is_closing and tag.name in _BLOCKS:  # may well stand in a text
                    at += 1
                    continue
                events += self._add(self._text[:at])
                events += self._end_value()
                self._text, at = self._text[at:], 0
                continue
            if isinstance(tag, _Tag):
                end = _head_end(self._text, tag)
                if end is not None:
                    events += self._take(tag, self._text[tag.after : end])
                    self._text, at = self._text[end:], 0
                    continue
                is_unsure = len(self._text) - at < _MAX_HEAD_CHARS
            if is_unsure:
                events += self._add(self._text[:at])
                self._text = self._text[at:]
                return events
            at += 1
        events += self._add(self._text)
        self._text = ""
        return events

    def finish(self, reason: str) -> list[Event]:
        """A call whose parameters are all closed is whole if the model stopped by itself; any other one was cut off."""
        if reason != "stop" or self._value is not None or self._is_done:
            return []
        return self._end_call()

    def _take(self, tag: _Tag, head: str) -> list[Event]:
        """A whole tag outside a value."""
        if tag.name == "invoke":
            events = self._end_call()
            return events if tag.is_closing else events + self._begin_call(head)
        if tag.name == "parameter":
            return self._begin_value(head) if self._is_in_call and not tag.is_closing else []
        if not tag.is_closing:
            return []
        self._is_done = True
        return self._end_call()

    def _begin_call(self, head: str) -> list[Event]:
        self._is_in_call = True
        name, _ = _attributes(_INVOKE, head)
        if not name or (self._num_calls and not self._is_parallel):
            return []  # read, but not handed on
        tool = self._tools.get(name)
        properties = None if tool is None else tool.parameters.get("properties")
        keys = frozenset(properties) if isinstance(properties, dict) else frozenset[str]()
        self._call = _Call(self._num_calls, None if tool is None else keys)
        self._num_calls += 1
        return [CallStart(self._call.index, f"call_{secrets.token_hex(12)}", name)]

    def _begin_value(self, head: str) -> list[Event]:
        name, flag = _attributes(_PARAMETER, head)
        kind = _Kind(flag) if flag in ("true", "false") else _Kind.EITHER
        call = self._call
        if call is None or name is None or name in call.keys:
            self._value = _Value("", kind, is_dropped=True)
            return []
        events = self._unwrap_no_more(call)
        may_wrap = not call.keys and name in _WRAPPERS and call.own_keys is not None and name not in call.own_keys
        call.keys.add(name)
        self._value = _Value(name, kind, is_shown=kind is _Kind.TEXT and not may_wrap)
        if may_wrap:
            call.wrapped = self._value
        elif kind is _Kind.TEXT:
            events.append(self._say(call, _key(name) + '"'))
        return events

    def _add(self, text: str) -> list[Event]:
        """A piece of the value, if one is being read; text between tags is nothing."""
        if self._value is None or not text or self._call is None or self._value.is_dropped:
            return []
        if self._value.is_shown:
            return [CallArguments(self._call.index, _escaped(text))]
        self._value.pieces.append(text)
        return []

    def _end_value(self) -> list[Event]:
        value, self._value = self._value, None
        call = self._call
        if value is None or call is None or value.is_dropped or value is call.wrapped:
            return []
        if value.is_shown:
            return [CallArguments(call.index, '"')]
        return [self._say(call, _key(value.key) + _as_json(value))]

    def _unwrap_no_more(self, call: _Call) -> list[Event]:
        """A second parameter shows that the first was no wrapper."""
        wrapped, call.wrapped = call.wrapped, None
        return [] if wrapped is None else [self._say(call, _key(wrapped.key) + _as_json(wrapped))]

    def _end_call(self) -> list[Event]:
        call, self._call = self._call, None
        self._is_in_call = False
        if call is None:
            return []
        if call.wrapped is not None:
            inner = "".join(call.wrapped.pieces)
            if _is_json(inner, dict):
                return [CallArguments(call.index, inner.strip()), CallEnd(call.index)]
        events = self._unwrap_no_more(call)
        return [*events, CallArguments(call.index, "}" if call.is_begun else "{}"), CallEnd(call.index)]

    def _say(self, call: _Call, text: str) -> CallArguments:
        lead = ", " if call.is_begun else "{"
        call.is_begun = True
        return CallArguments(call.index, lead + text)


def _tag_at(text: str, at: int) -> "_Tag | Sight":
    """The tag that begins at `text[at]`; TEXT where none does, UNSURE where more text must tell."""
    lead = next((lead for lead in _LEADS if text.startswith(lead, at)), None)
    if lead is None:
        rest = text[at : at + len(_LEADS[1])]
        return Sight.UNSURE if any(lead.startswith(rest) for lead in _LEADS) else Sight.TEXT
    start = at + len(lead)
    match = _WORD.match(text, start)
    after = start if match is None else match.end()
    name = text[start:after]
    if after == len(text):
        return Sight.UNSURE if any(known.startswith(name) for known in _NAMES) else Sight.TEXT
    is_known = name in _NAMES and (text[after] in ">/" or text[after].isspace())
    return _Tag(name, lead == _LEADS[1], at, after) if is_known else Sight.TEXT


def _unknown_tag(text: str, at: int) -> Look:
    """A tag that nobody knows, on one line; anything longer is text that speaks of the marker."""
    window = text[at : at + _MAX_UNKNOWN_CHARS]
    match = _LINE_END.search(window)
    if match is None:
        return Look(Sight.UNSURE if len(window) < _MAX_UNKNOWN_CHARS else Sight.TEXT)
    return Look(Sight.STRAY, match.end()) if match.group() == ">" else Look(Sight.TEXT)


def _head_end(text: str, tag: _Tag) -> int | None:
    """Where the tag ends, or None where it is not whole (or too long). Quoted names may hold ">"."""
    pattern = {"invoke": _INVOKE, "parameter": _PARAMETER}.get("" if tag.is_closing else tag.name)
    end = tag.after
    while (end := text.find(">", end, tag.start + _MAX_HEAD_CHARS) + 1) > 0:
        if pattern is None or pattern.fullmatch(text, tag.after, end) or text.count('"', tag.after, end) % 2 == 0:
            return end
    return None


def _attributes(pattern: re.Pattern[str], head: str) -> tuple[str | None, str | None]:
    """(name, string) of a tag."""
    match = pattern.fullmatch(head)
    if match is not None:
        groups = match.groupdict()
        return groups["name"], groups.get("flag")
    found = {key.lower(): a or b or c for key, a, b, c in _ATTRIBUTE.findall(head)}
    flag = found.get("string")
    return found.get("name"), None if flag is None else flag.lower()


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def _escaped(text: str) -> str:
    """A piece of a text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(value: _Value) -> str:
    """The whole value as JSON: as it was written if it is valid JSON and no raw text, else a JSON string."""
    text = "".join(value.pieces)
    return text if value.kind is not _Kind.TEXT and _is_json(text, object) else json.dumps(text, ensure_ascii=False)


def _is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), kind)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> object:
    raise ValueError(name)
