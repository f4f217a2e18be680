"""Records of the responses protocol: what a client may send to /v1/responses and what it gets."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lamina.server.limits import (
    MAX_GRAMMAR_BYTES,
    MAX_PARTS,
    MAX_TOOLS,
    CallId,
    Deadline,
    Logprobs,
    Name,
    Priority,
    Salt,
    ThinkingBudget,
    TopK,
    TopP,
)
from lamina.server.schema import Memory, TokenLogprob

#: checked where it is read, as `$` would also match before a line break
ToolName = Annotated[str, Meta(max_length=256, extra_json_schema={"pattern": "^[A-Za-z0-9_.:/-]{1,128}$"})]
MAX_ITEMS = 20_000
Parts = Annotated[list["InputPart"], Meta(max_length=MAX_PARTS)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
PartType = Annotated[
    str, Meta(extra_json_schema={"enum": ["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]})
]
ItemType = Annotated[
    str,
    Meta(
        extra_json_schema={
            "enum": [
                "message",
                "function_call",
                "function_call_output",
                "custom_tool_call",
                "custom_tool_call_output",
                "reasoning",
                "item_reference",
            ]
        }
    ),
]
ItemRole = Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system", "developer"]})]
FunctionType = Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom"]})]
ToolType = Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom", "namespace", "web_search", "image_generation"]})]
FormatType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "grammar"]})]
Syntax = Annotated[str, Meta(extra_json_schema={"enum": ["lark", "regex"]})]

# What a client sends ------------------------------------------------------------------------------------------------


class InputPart(msgspec.Struct, frozen=True):
    """A part of a content: a text."""

    type: PartType
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """One item of the input; which fields count depends on its type.

    message role, content.   function_call name, namespace, arguments, call_id.   function_call_output call_id, output.
    custom_tool_call name, namespace, input, call_id.   custom_tool_call_output call_id, output.
    reasoning content, else encrypted_content, else summary.   item_reference id, of an item of a response that is kept.
    """

    type: ItemType = "message"
    id: str | None = None
    role: ItemRole | None = None
    content: str | Parts | None = None
    call_id: CallId | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    status: str | None = None


class CustomFormat(msgspec.Struct, frozen=True):
    """What a custom tool's text must be: any text, or what a grammar describes."""

    type: FormatType = "text"
    syntax: Syntax | None = None
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters  JSON schema of its arguments.   tools  functions of a namespace.

    A custom tool is given a text instead of arguments. format  of that text.
    """

    type: ToolType
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: CustomFormat | UnsetType | None = UNSET
    tools: Annotated[list["FunctionTool"], Meta(max_length=MAX_TOOLS)] | UnsetType | None = UNSET


class ToolPick(msgspec.Struct, frozen=True):
    """A choice of tools: one function or custom tool by name, or those of a list (allowed_tools) with a mode."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom", "allowed_tools"]})]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list["AllowedTool"], Meta(max_length=MAX_TOOLS)] | None = None


class AllowedTool(msgspec.Struct, frozen=True):
    """The name of one allowed function."""

    type: FunctionType
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """What the text must be: text, json_object, or json_schema with a name and a schema."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})] = "text"
    name: str | None = None
    schema: dict[str, object] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """The form of the text. verbosity  is accepted and not used."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    """How much to think. summary  the thoughts also come as summary parts and events."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponsesRequest(msgspec.Struct, frozen=True):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolPick | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_logprobs: Logprobs | None = None
    include: Annotated[list[str], Meta(max_length=32)] | None = None
    store: bool | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
    ) = None
    stream: bool | None = None
    truncation: Annotated[str, Meta(extra_json_schema={"enum": ["disabled"]})] | None = None
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    conversation: Annotated[object, Meta(extra_json_schema={"type": "null"})] = None
    prompt: Annotated[object, Meta(extra_json_schema={"type": "null"})] = None
    service_tier: str | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    seed: int | None = None
    thinking_token_budget: ThinkingBudget | None = None
    top_k: TopK | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None


# What it gets -------------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[dict[str, object]] = []
    logprobs: list[TokenLogprob] | None = None


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    """Thoughts."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    """Thoughts, as clients that show summaries read them."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """The answer's text."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """Thoughts before the answer. encrypted_content  where `include` asks for it: for clients that keep nothing else."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    status: ItemStatus
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, frozen=True, tag="function_call"):
    """A call of a function, of a namespace's where it is named. incomplete: it was cut off, its arguments are no whole JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, frozen=True, tag="custom_tool_call"):
    """A call of a custom tool. input  the text that it is given; incomplete: it was cut off."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens were found in the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """How many of the answer's tokens are thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens read and written. memory  Lamina's own."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    memory: Memory | UnsetType = UNSET


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is not whole."""

    reason: str


class FormatEcho(msgspec.Struct, frozen=True):
    """The form of the text that was asked for."""

    type: str
    name: str | UnsetType = UNSET
    schema: dict[str, object] | UnsetType = UNSET
    description: str | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class TextEcho(msgspec.Struct, frozen=True):
    """The form of the text that was asked for."""

    format: FormatEcho
    verbosity: str = "medium"


class ReasoningEcho(msgspec.Struct, frozen=True):
    """The effort that was asked for."""

    effort: str | None
    summary: str | None


class ResponseObject(msgspec.Struct, frozen=True):
    """A response: what was asked for and what came of it."""

    id: str
    created_at: int
    model: str
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    output: list[OutputItem]
    tools: list[FunctionTool]
    tool_choice: str | ToolPick
    parallel_tool_calls: bool
    text: TextEcho
    reasoning: ReasoningEcho
    metadata: dict[str, str]
    temperature: float
    top_p: float
    store: bool
    object: Literal["response"] = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    top_logprobs: int = 0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(msgspec.Struct, frozen=True):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokenCount(msgspec.Struct, frozen=True):
    """How many tokens a request's prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


# The stream's events ------------------------------------------------------------------------------------------------


class Lifecycle(msgspec.Struct, frozen=True):
    """response.created, .in_progress, .completed, .incomplete or .failed."""

    type: str
    sequence_number: int
    response: ResponseObject


class ItemEvent(msgspec.Struct, frozen=True):
    """response.output_item.added or .done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, frozen=True):
    """response.content_part.added or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class SummaryPartEvent(msgspec.Struct, frozen=True):
    """response.reasoning_summary_part.added or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class TextEvent(msgspec.Struct, frozen=True):
    """A piece (delta) or the whole (text) of a text: response.output_text and response.reasoning_text, .delta and .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class SummaryEvent(msgspec.Struct, frozen=True):
    """response.reasoning_summary_text.delta or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET


class ArgumentsEvent(msgspec.Struct, frozen=True):
    """response.function_call_arguments.delta or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputEvent(msgspec.Struct, frozen=True):
    """response.custom_tool_call_input.delta or .done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ErrorEvent(msgspec.Struct, frozen=True):
    """The stream ends here: something went wrong that the response cannot tell."""

    sequence_number: int
    code: str
    message: str
    param: str | None = None
    type: str = "error"


StreamEvent = (
    Lifecycle | ItemEvent | PartEvent | SummaryPartEvent | TextEvent | SummaryEvent | ArgumentsEvent | InputEvent | ErrorEvent
)
