"""/tokenize and /detokenize."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.server import limits
from lamina.server.body import json_response, off_loop, read, state_of
from lamina.server.chat_messages import chat_options, to_messages
from lamina.server.chat_request import render_ids
from lamina.server.errors import ApiError, invalid
from lamina.server.routing import route
from lamina.server.schema import ChatRequest, JsonObject, MessageIn, ToolIn
from lamina.server.state import ServerState


class TokenizeRequest(Struct):
    """A prompt or a chat. add_special_tokens  the tokenizer's own (prompts only; default: as for completions)."""

    prompt: str | None = None
    messages: Annotated[list[MessageIn], Meta(min_length=1, max_length=limits.MAX_MESSAGES)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[ToolIn], Meta(max_length=limits.MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    continue_final_message: bool | None = None


class Tokenized(Struct):
    """Token ids. token_strs  each as the vocabulary writes it."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(Struct):
    """Token ids."""

    tokens: limits.TokenIds
    model: str | None = None


class Detokenized(Struct):
    """Their text."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(http: Request) -> ASGIApp:
    """POST /tokenize."""
    state = state_of(http)
    request = await read(http, _TOKENIZE)
    state.check_model(request.model)
    return json_response(await off_loop(http, _tokenized, state, request))


def _tokenized(state: ServerState, request: TokenizeRequest) -> Tokenized:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt or messages is required, and one of them only", "prompt", "missing_field")
    codec = state.need_codec("prompt")
    if request.messages is not None:
        chat = ChatRequest(
            messages=request.messages, tools=request.tools, chat_template_kwargs=request.chat_template_kwargs,
            continue_final_message=request.continue_final_message,
        )  # fmt: skip
        _, ids = render_ids(state, to_messages(chat), chat_options(chat))
    elif request.add_special_tokens is None:
        ids = codec.encode_prompt(request.prompt or "")
    else:
        ids = codec.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)
    texts = [codec.token_piece(token) or "" for token in ids] if request.return_token_strs else UNSET
    return Tokenized(ids, len(ids), state.ready.max_model_len, texts)


async def detokenize(http: Request) -> ASGIApp:
    """POST /detokenize."""
    state = state_of(http)
    request = await read(http, _DETOKENIZE)
    state.check_model(request.model)
    codec = state.need_codec("tokens")
    bad = next((token for token in request.tokens if token >= state.ready.vocab_size), None)
    if bad is not None:
        raise invalid("tokens", bad, f"token ids from 0 to {state.ready.vocab_size - 1}")
    return json_response(Detokenized(await off_loop(http, codec.decode, request.tokens, skip_special_tokens=False)))


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    return [route("/tokenize", tokenize, ("POST",)), route("/detokenize", detokenize, ("POST",))]
