"""Chats as prompts: a checkpoint's chat format and its tokenizer, as the server has them, for the offline interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.chat.formats import ChatFormat
from lamina.chat.guard import encode
from lamina.chat.records import ChatOptions, Rendered
from lamina.chat.turns import ChatMessage, read_messages
from lamina.engine.text import TextCodec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt. text  with its control tokens.   keep_at  tokens that the chat's next turn will share, see Engine.add."""

    text: str
    ids: list[int]
    keep_at: int | None


class Chats:
    """Writes chats for one checkpoint. Raises ConfigError where it has no tokenizer or no chat format."""

    def __init__(self, directory: Path, codec: TextCodec | None) -> None:
        if codec is None:
            raise ConfigError("messages", "a chat", "token ids with generate: this checkpoint has no tokenizer.json")
        found = _format_of(directory)
        if found is None:
            raise ConfigError("messages", "a chat", "prompts with generate: this checkpoint has no chat template")
        self._codec = codec
        self._format: ChatFormat = found

    def prompt(self, messages: Sequence[ChatMessage], options: ChatOptions, place: str, goes_on: bool) -> ChatPrompt:
        """The prompt of one chat. Raises ConfigError naming the turn and its field.

        place  how errors name the chat.   goes_on  the answer goes on with the last turn.
        """
        read = read_messages(messages, place, goes_on)
        if options.tools and not self._format.shows_tools:
            raise ConfigError("tools", [tool.name for tool in options.tools], "absent: the chat template has no place for tools")
        try:
            rendered = self._format.render(read, options, self._codec.added_tokens)
        except ConfigError as error:
            field = error.field.removeprefix("messages")
            raise ConfigError(field if field == error.field else place + field, error.value, error.allowed) from None
        ids = encode(rendered, self._codec.encode)
        text = rendered.text.replace(rendered.mark, "") if rendered.mark else rendered.text
        return ChatPrompt(text, ids, shared_tokens(self._codec, rendered, ids))


def conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
) -> list[tuple[Sequence[ChatMessage], str]]:
    """The chats of a call, each with the name that errors give it: one, or several in a list. Raises ConfigError."""
    allowed = "a list of messages, or a list of such lists"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ConfigError("messages", messages, allowed)
    chats = [one for one in messages if not isinstance(one, Mapping)]
    if not chats:
        return [([one for one in messages if isinstance(one, Mapping)], "messages")]
    for number, one in enumerate(messages):
        if isinstance(one, str | bytes | Mapping) or not isinstance(one, Sequence):
            raise ConfigError(f"messages[{number}]", one, allowed)
    return [(one, f"messages[{number}]") for number, one in enumerate(chats)]


def shared_tokens(codec: TextCodec, rendered: Rendered, ids: Sequence[int]) -> int | None:
    """Tokens of the prompt that the chat's next turn will have too: all before the last control token, which opens the thoughts.

    None where the answer does not begin with thoughts: then the next turn has the whole prompt.
    """
    if not rendered.is_thinking:
        return None
    return next((place for place in reversed(range(1, len(ids))) if codec.is_added(ids[place])), None)


def _format_of(directory: Path) -> ChatFormat | None:
    try:
        from lamina.models.chats import find_chat_format
    except ImportError as error:
        raise ConfigError("chat", f"without {error.name}", "pip install 'lamina[serve]'") from None
    return find_chat_format(directory)
