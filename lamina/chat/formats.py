"""How chats are written for a model and how its answers are read: one `ChatFormat` for each way."""

from collections.abc import Sequence
from typing import Protocol

from lamina.chat.records import ChatOptions, Event, Message, Rendered


class OutputParser(Protocol):
    """Reads one answer as it streams. However the text is split, the events join to the same answer."""

    def push(self, text: str, is_control: bool = False) -> list[Event]:
        """More text. is_control  it is one token of the vocabulary's added tokens (not text that merely spells one)."""
        ...

    def finish(self, reason: str) -> list[Event]:
        """The answer has ended ("stop", "length", "abort", "error"): what was held back, as far as it counts."""
        ...

    @property
    def is_in_content(self) -> bool:
        """Whether the next text would be content, so that stop strings apply to it."""
        ...

    @property
    def may_turn(self) -> bool:
        """Whether text without a "<" may still end the thoughts or begin them, as a tag or a call has begun."""
        ...


class ChatFormat(Protocol):
    """One way of writing chats."""

    @property
    def name(self) -> str:
        """As `--chat-format` names it."""
        ...

    @property
    def end_of_thinking(self) -> str | None:
        """The token that ends the thoughts; a grammar starts after it. None where the format has no thoughts."""
        ...

    @property
    def starts_of_calls(self) -> tuple[str, ...]:
        """Tokens that calls begin with, in the vocabularies that have them: after one there are no more thoughts."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether prompts have a place for tools: without one the model would never hear of them."""
        ...

    def render(self, messages: Sequence[Message], options: ChatOptions, special_tokens: Sequence[str] = ()) -> Rendered:
        """The prompt up to where the answer begins.

        special_tokens  tokens that must not come to life where a user's text spells them; () leaves such texts as they are.
        Raises ConfigError naming the message (messages[3].content), the value and what is allowed.
        """
        ...

    def parser(self, options: ChatOptions, is_thinking: bool) -> OutputParser:
        """Reads one answer to such a prompt."""
        ...
