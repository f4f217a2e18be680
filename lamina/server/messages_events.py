"""Writes one answer as a message: the events of the stream and the message they add up to."""

from dataclasses import dataclass, field

import msgspec

from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from lamina.server.messages_schema import (
    AnswerMessage,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


@dataclass(slots=True)
class _Open:
    """A block that is still written."""

    position: int
    bare: OutputBlock
    pieces: list[str] = field(default_factory=list)


class MessageWriter:
    """One message while it comes into being.

    blank  without content.   hides_thoughts  thinking blocks come empty (display: omitted).
    """

    def __init__(self, blank: AnswerMessage, hides_thoughts: bool = False) -> None:
        self.message = blank
        self._hides_thoughts = hides_thoughts
        self._blocks: list[OutputBlock | None] = []
        self._open: dict[int, _Open] = {}  # calls by their index; the open text or thoughts are at -1

    def start(self) -> list[MessageEvent]:
        """The events before any output."""
        return [MessageStart(self.message), Ping()]

    def push(self, event: Event) -> list[MessageEvent]:
        """The events of one piece of the answer."""
        match event:
            case Reasoning(text):
                found, block = self._text_block(ThinkingBlock(""))
                if not self._hides_thoughts and text:
                    block.pieces.append(text)
                    found.append(BlockDelta(block.position, ThinkingDelta(text)))
                return found
            case Content(text):
                if not text:
                    return []
                found, block = self._text_block(TextBlock(""))
                block.pieces.append(text)
                return [*found, BlockDelta(block.position, TextDelta(text))]
            case CallStart(index, call_id, name):
                found = self._close_text()
                self._open[index] = block = self._new(ToolUseBlock(f"toolu_{call_id.removeprefix('call_')}", name, {}))
                return [*found, BlockStart(block.position, block.bare)]
            case CallArguments(index, text):
                block = self._open[index]
                block.pieces.append(text)
                return [BlockDelta(block.position, InputJsonDelta(text))]
            case CallEnd(index):
                return self._close(index, is_whole=True)

    def finish(self, finish: str, stop: int | str | None, usage: MessageUsage) -> list[MessageEvent]:
        """Closes what is open and ends the message as `finish` says. A call that was cut off is not in the message."""
        found = self._close_text()
        for index in list(self._open):
            found += self._close(index, is_whole=False)
        reason: StopReason = "end_turn"
        if finish == "length":
            reason = "max_tokens"
        elif finish == "tool_calls":
            reason = "tool_use"
        elif finish == "deadline":
            reason = "pause_turn"  # sent back as it is, it is gone on with
        elif isinstance(stop, str):
            reason = "stop_sequence"
        sequence = stop if isinstance(stop, str) and reason == "stop_sequence" else None
        content = [block for block in self._blocks if block is not None]
        self.message = msgspec.structs.replace(
            self.message, content=content, stop_reason=reason, stop_sequence=sequence, usage=usage
        )
        return [*found, MessageDelta(StopDelta(reason, sequence), usage), MessageStop()]

    def _new(self, bare: OutputBlock) -> _Open:
        self._blocks.append(None)
        return _Open(len(self._blocks) - 1, bare)

    def _text_block(self, bare: TextBlock | ThinkingBlock) -> tuple[list[MessageEvent], _Open]:
        """The open block of that kind, opened if need be."""
        block = self._open.get(-1)
        if block is not None and type(block.bare) is type(bare):
            return [], block
        found = self._close_text()
        self._open[-1] = block = self._new(bare)
        return [*found, BlockStart(block.position, bare)], block

    def _close_text(self) -> list[MessageEvent]:
        return self._close(-1, is_whole=True) if -1 in self._open else []

    def _close(self, index: int, is_whole: bool) -> list[MessageEvent]:
        block = self._open.pop(index)
        text = "".join(block.pieces)
        found: list[MessageEvent] = []
        match block.bare:
            case TextBlock():
                self._blocks[block.position] = TextBlock(text)
            case ThinkingBlock():
                self._blocks[block.position] = ThinkingBlock(text)
                found.append(BlockDelta(block.position, SignatureDelta("")))
            case ToolUseBlock(id, name):
                if is_whole and _is_object(text or "{}"):
                    self._blocks[block.position] = ToolUseBlock(id, name, msgspec.Raw((text or "{}").encode()))
        return [*found, BlockStop(block.position)]


def _is_object(text: str) -> bool:
    """Whether a call's input can stand in an answer as it is."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
