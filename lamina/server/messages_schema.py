"""Records of the messages protocol: what a client may send to /v1/messages and what it gets."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lamina.server.limits import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    CallId,
    Deadline,
    Name,
    Priority,
    Salt,
    TopK,
    TopP,
)
from lamina.server.limits import StopText as StopSequence
from lamina.server.schema import Memory

BlockType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]})]
#: checked where it is read, as `$` would also match before a line break
ToolName = Annotated[str, Meta(max_length=256, extra_json_schema={"pattern": "^[A-Za-z0-9_.:/-]{1,128}$"})]
Blocks = Annotated[list["InputBlock"], Meta(max_length=MAX_PARTS)]
Texts = Annotated[list["InputText"], Meta(max_length=MAX_PARTS)]

# What a client sends ------------------------------------------------------------------------------------------------


class InputText(msgspec.Struct, frozen=True):
    """A block that can only be a text."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class InputBlock(msgspec.Struct, frozen=True):
    """One block of a message; which fields count depends on its type.

    text text.   tool_use id, name, input.   tool_result tool_use_id, content.   thinking thinking.
    redacted_thinking is left out.
    """

    type: BlockType
    text: str | None = None
    id: CallId | None = None
    name: Name | None = None
    input: dict[str, object] | None = None
    tool_use_id: CallId | None = None
    content: str | Texts | None = None
    is_error: bool | None = None
    thinking: str | None = None


class InputMessage(msgspec.Struct, frozen=True):
    """One message. An assistant's at the end is gone on with."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | Blocks


class InputTool(msgspec.Struct, frozen=True):
    """A tool that the client runs. input_schema  JSON schema of its input."""

    name: ToolName
    input_schema: dict[str, object] | None = None
    description: str | None = None
    strict: bool | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})] | None = None


class InputToolChoice(msgspec.Struct, frozen=True):
    """auto: as the model likes; any: at least one tool; tool: the one of that name; none: no tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether to think first. budget_tokens  after so many the thoughts are ended. display  omitted: they are not sent."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The text must match a JSON schema."""

    schema: dict[str, object]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct, frozen=True):
    """How much effort, and the form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct, frozen=True):
    """Who asks. It is not used."""

    user_id: Annotated[str, Meta(max_length=4096)] | None = None


class CountTokensRequest(msgspec.Struct, frozen=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Texts | None = None
    tools: Annotated[list[InputTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: str | None = None
    seed: int | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None


# What it gets -------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """A text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """Thoughts. signature  is empty: they may be sent back as they are."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, object] | msgspec.Raw


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class TokensDetails(msgspec.Struct, frozen=True):
    """How many of the answer's tokens are thoughts."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens read and written. input_tokens  without those that were found in the cache.   memory  Lamina's own, at the end."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: TokensDetails | UnsetType = UNSET
    memory: Memory | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, frozen=True, tag="message"):
    """An answer."""

    id: str
    model: str
    content: list[OutputBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a prompt has."""

    input_tokens: int


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """What went wrong. param  the field, where one is to blame."""

    type: str
    message: str
    param: str | UnsetType = UNSET


class MessagesError(msgspec.Struct, frozen=True, tag="error"):
    """An error."""

    error: MessagesErrorBody


# The stream's events ------------------------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The answer begins."""

    message: AnswerMessage


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Nothing new."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: OutputBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """A piece of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """A piece of thoughts."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The signature of thoughts."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """A piece of a call's input: the pieces join to one JSON object."""

    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block ends."""

    index: int


class StopDelta(msgspec.Struct, frozen=True):
    """Why the answer ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """The answer's end and what it cost."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The stream ends."""


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError


def type_of(event: MessageEvent) -> str:
    """The event's name, which is also the `type` in it."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
