"""From messages and options to a prompt: shared by chat completions, responses and messages."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from lamina.chat.formats import ChatFormat
from lamina.chat.guard import encode
from lamina.chat.records import ChatOptions, Message, Rendered, ToolChoice
from lamina.chat.tool_grammar import tool_grammar
from lamina.engine.chats import shared_tokens
from lamina.engine.wire import Grammar, Sampling, Thoughts
from lamina.server.errors import ApiError, unsupported
from lamina.server.generation import Ask
from lamina.server.state import ServerState


class Extras(msgspec.Struct, frozen=True):
    """What of a request is neither the chat's nor the sampling's; fields as in `Ask`. grammar  without `after`.
    grammar_field  where it was asked for.   thinking_budget  most tokens of the thoughts, asked for in `thinking_field`."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_in_reasoning: bool = False
    grammar: Grammar | None = None
    grammar_field: str = "response_format"
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    owner: str = ""
    thinking_budget: int | None = None
    thinking_field: str = "thinking_token_budget"


def render_ids(
    state: ServerState, messages: Sequence[Message], options: ChatOptions, is_bounded: bool = False
) -> tuple[Rendered, list[int]]:
    """The prompt of a chat, as text and as token ids. Raises ApiError and ConfigError naming the message.

    is_bounded  whether a prompt that is longer than the model takes is refused, as early as that can be known.
    """
    if state.chat is None:
        raise ApiError(400, "messages: this checkpoint has no chat format; give the server one with --chat-template", "messages")
    codec = state.need_codec("messages")
    rendered = state.chat.render(messages, options, state.special_tokens)
    if not is_bounded:
        return rendered, encode(rendered, codec.encode)
    state.check_fits(rendered.text.replace(rendered.mark, "") if rendered.mark else rendered.text)
    most = state.ready.max_model_len
    ids = encode(rendered, codec.encode, most)
    state.check_length(len(ids), is_all=False)
    return rendered, ids


def to_ask(
    state: ServerState, messages: Sequence[Message], options: ChatOptions, sampling: Sampling, extras: Extras | None = None
) -> Ask:
    """A chat's prompt and how its answers are read. cache_salt must be made by `salt_of`.

    Raises ApiError (400) naming the field: no chat format, a bad message, tools and a grammar that exclude each other.
    """
    extras = extras or Extras()
    rendered, ids = render_ids(state, messages, options, is_bounded=True)
    chat, codec = state.chat, state.need_codec("messages")
    assert chat is not None
    grammar = _grammar(state, options, rendered, extras.grammar)
    return Ask(
        prompt_ids=ids, sampling=sampling, stop=extras.stop, include_stop=extras.include_stop,
        skip_special_tokens=extras.skip_special_tokens, stop_in_reasoning=extras.stop_in_reasoning, grammar=grammar,
        grammar_field="tools" if extras.grammar is None else extras.grammar_field,
        priority=extras.priority, deadline_s=extras.deadline_s, cache_salt=extras.cache_salt, owner=extras.owner,
        parser_of=lambda: chat.parser(options, rendered.is_thinking), keep_at=shared_tokens(codec, rendered, ids),
        thoughts=_thoughts(state, options, rendered, extras),
    )  # fmt: skip


def _grammar(state: ServerState, options: ChatOptions, rendered: Rendered, wanted: Grammar | None) -> Grammar | None:
    """What the answer must match: calls that tool_choice asks for, or what the request says; it begins after the thoughts."""
    chat = state.chat
    assert chat is not None and state.codec is not None
    after = None
    if rendered.is_thinking and chat.end_of_thinking is not None:
        after = state.codec.token_id(chat.end_of_thinking)
    is_forced = options.tool_choice.mode in ("required", "named")
    check_tool_choice(options)
    check_tools_shown(chat, options)
    if is_forced and wanted is not None:
        text = "tool_choice that demands a call and a response format exclude each other: every answer is a call"
        raise ApiError(400, text, "tool_choice", "invalid_value")
    if wanted is not None:
        return replace_after(wanted, after)
    if not options.tools or options.tool_choice.mode == "none":
        return None
    if not is_forced and not any(tool.is_strict for tool in options.tools):
        return None
    found = tool_grammar(chat.name, options.tools, options.tool_choice, options.parallel_tool_calls, after)
    if found is None:
        if is_forced:
            raise unsupported("tool_choice", f"a call that must be made is, in chats of the format {chat.name!r},")
        return None
    return Grammar(found.kind, found.value, after)


def _thoughts(state: ServerState, options: ChatOptions, rendered: Rendered, extras: Extras) -> Thoughts | None:
    """The bound of the thoughts. Raises ApiError (400) where the vocabulary has no token that ends them."""
    chat, codec, budget = state.chat, state.codec, extras.thinking_budget
    if budget is None or not rendered.is_thinking:
        return None
    assert chat is not None and codec is not None
    end = None if chat.end_of_thinking is None else codec.token_id(chat.end_of_thinking)
    if end is None:
        raise unsupported(extras.thinking_field, "a budget of thoughts whose end is no token of the vocabulary is")
    has_calls = bool(options.tools) and options.tool_choice.mode != "none"
    found = [codec.token_id(text) for text in chat.starts_of_calls if has_calls]
    return Thoughts(budget, end, tuple(token for token in found if token is not None))


def replace_after(grammar: Grammar, after: int | None) -> Grammar:
    """The same grammar, beginning after a token."""
    return msgspec.structs.replace(grammar, after=after)


def check_tool_choice(options: ChatOptions) -> None:
    """Raises ApiError (400) for a choice among tools that are not there."""
    choice = options.tool_choice
    names = [tool.name for tool in options.tools]
    if choice.mode in ("required", "named") and not names:
        raise ApiError(400, f"tool_choice={choice.mode!r} is not valid: tools are needed for it", "tool_choice", "invalid_value")
    if choice.mode == "named" and choice.name not in names:
        raise ApiError(400, f"tool_choice={choice.name!r} is not valid: one of tools", "tool_choice", "invalid_value")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ApiError(400, f"tools: {twice!r} is there twice", "tools", "invalid_value")


def check_tools_shown(chat: ChatFormat, options: ChatOptions) -> None:
    """Raises ApiError (400) for tools that the model would never hear of, and is not made to call either."""
    is_free = options.tool_choice.mode == "auto" and not any(tool.is_strict for tool in options.tools)
    if options.tools and is_free and not chat.shows_tools:
        text = (
            "tools: the chat template of this model has no place for tools, so it cannot be told of them: leave them out, demand "
            'a call (tool_choice "required", or "strict" in a tool), or serve with a --chat-template that shows tools'
        )
        raise ApiError(400, text, "tools", "unsupported_feature")


def without_tools(options: ChatOptions) -> ChatOptions:
    """The same chat in which no call may be made."""
    return replace(options, tool_choice=ToolChoice("none"))


def salt_of(state: ServerState, given: str | None, api_key: str | None) -> str:
    """The cache's salt of a request: what it gives, and its key's where the server is told to keep keys apart.

    With keys apart nobody can name another's salt: the salt is a keyed hash, and its key is new for every start.
    """
    if not state.settings.salt_by_api_key:
        return given or ""
    realm = realm_of(state, api_key)
    return realm + _hashed(state, f"{realm}\0{given or ''}")


def realm_of(state: ServerState, api_key: str | None) -> str:
    """What the salts of an API key's requests begin with, and no other's; "" where keys are not kept apart."""
    return _hashed(state, api_key or "") if state.settings.salt_by_api_key else ""


def _hashed(state: ServerState, text: str) -> str:
    return hmac.new(state.settings.salt_secret, text.encode(), hashlib.blake2b).hexdigest()[:32]
