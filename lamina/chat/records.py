"""What a chat is made of, whatever protocol it came in: messages, tools and what is wanted of the answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant made. arguments  JSON text, as the client or the model wrote it.

    namespace  what the name begins with, before a dot, where the function is in one.   is_custom  it was given a text, not JSON.
    """

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    reasoning     what an assistant thought before its content.   tool_calls  that an assistant made.
    tool_call_id  of a tool's result, the call it answers.   name  of the tool or the speaker.
    task          an instruction token after a user's turn (action, query, authority, domain, title, read_url).
    is_open       an assistant's last turn that the model is to go on with: no end of turn is written.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    task: str | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. function  the protocol's record: name, description, parameters, its keys in order."""

    name: str
    function: Mapping[str, Json]
    is_strict: bool = False

    @property
    def parameters(self) -> Mapping[str, Json]:
        """The JSON schema of its arguments; {} where none was given."""
        found = self.function.get("parameters")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """auto: as the model likes; none: no call; required: at least one; named: exactly the function `name`."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat is written for the model.

    thinking        whether it thinks first; None: the format's default.
    effort          "none", "minimal", "low", "medium", "high", "xhigh", "max" or None: the format's default.
    drop_thinking   thoughts of earlier turns are left out; None: the format's default.
    response_schema shown to the model where the format has a place for it; None: none.
    parallel_tool_calls  whether one answer may hold several calls.
    template_kwargs handed to a template as they are (chat_template_kwargs).
    begins_answer   whether the prompt ends where an answer begins; False: after the last turn (add_generation_prompt).
    """

    thinking: bool | None = None
    effort: str | None = None
    drop_thinking: bool | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_schema: Mapping[str, Json] | None = None
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    begins_answer: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, ready for the tokenizer.

    text         with its control tokens; special tokens in what users wrote are broken up by marks (see `guard.py`).
    mark         the mark that stands inside them, "" where there is none; it is cut out when the text is encoded.
    is_thinking  whether the answer begins inside the thoughts.
    """

    text: str
    mark: str
    is_thinking: bool


# What an answer is made of, as it streams ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: the pieces join to one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete. A call without it was cut off: its arguments are no complete JSON."""

    index: int


Event: TypeAlias = Reasoning | Content | CallStart | CallArguments | CallEnd
