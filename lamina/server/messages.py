"""POST /v1/messages and /v1/messages/count_tokens: the messages protocol."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lamina import SamplingParams
from lamina.chat.records import ChatOptions
from lamina.engine.wire import Grammar
from lamina.server.batches import batches, joined
from lamina.server.body import json_response, off_loop, read, state_of, to_json
from lamina.server.chat_request import Extras, render_ids, salt_of, to_ask
from lamina.server.errors import STYLES, ApiError, invalid, to_api_error
from lamina.server.generation import Ask, Generation, Piece, Totals, generate, to_sampling
from lamina.server.limits import MAX_GRAMMAR_BYTES
from lamina.server.messages_convert import error_of, schema_of, to_choice, to_messages, to_thinking, to_tools
from lamina.server.messages_events import MessageWriter
from lamina.server.messages_schema import (
    AnswerMessage,
    CountTokensRequest,
    MessageEvent,
    MessagesRequest,
    MessageUsage,
    Ping,
    TokenCount,
    TokensDetails,
    type_of,
)
from lamina.server.routing import route
from lamina.server.schema import Memory
from lamina.server.sse import EventStream, cancelled_when_gone
from lamina.server.state import ServerState

_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountTokensRequest)


def routes(state: ServerState) -> Sequence[BaseRoute]:
    """The protocol's endpoints."""
    STYLES["/v1/messages"] = _error_style
    return [
        route("/v1/messages", create, ["POST"]),
        route("/v1/messages/count_tokens", count_tokens, ["POST"]),
    ]


def _error_style(error: ApiError) -> Mapping[str, object]:
    return {"type": "error", "error": error_of(error).error}


async def create(request: Request) -> Response | EventStream:
    """An answer, whole or as a stream of events."""
    state = state_of(request)
    body = await read(request, _DECODER)
    state.check_model(body.model)
    ask = await off_loop(request, _ask, state, body, request.scope["lamina_key"])
    generation = generate(state, ask)
    hides = body.thinking is not None and body.thinking.display == "omitted"
    blank = AnswerMessage(
        f"msg_{secrets.token_hex(12)}", body.model or state.model_name, [], MessageUsage(len(ask.prompt_ids), 0)
    )
    writer = MessageWriter(blank, hides)
    if body.stream:
        return await _stream(request, generation, writer)
    async with cancelled_when_gone(request, [generation]):
        async for piece in generation:
            for event in piece.events:
                writer.push(event)
            if piece.finish is not None:
                _finish(writer, piece.finish, piece.stop, generation.totals)
    return json_response(writer.message)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    state = state_of(request)
    body = await read(request, _COUNT_DECODER)
    state.check_model(body.model)
    return json_response(TokenCount(await off_loop(request, _count, state, body)))


def _count(state: ServerState, body: CountTokensRequest) -> int:
    return len(render_ids(state, to_messages(body), _options(body))[1])


def _options(body: CountTokensRequest) -> ChatOptions:
    choice = body.tool_choice
    return ChatOptions(
        thinking=to_thinking(body),
        effort=body.output_config.effort if body.output_config else None,
        tools=to_tools(body),
        tool_choice=to_choice(body),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_schema=schema_of(body),
    )


def _ask(state: ServerState, body: MessagesRequest, key: str | None) -> Ask:
    """The prompt and how its answer is drawn."""
    defaults = state.defaults
    params = SamplingParams(
        max_tokens=defaults.most_tokens(body.max_tokens),
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        seed=body.seed,
    )
    params.validate_for_vocab(state.ready.vocab_size)
    extras = Extras(
        stop=tuple(body.stop_sequences or ()),
        grammar=_grammar(body),
        grammar_field="output_config.format",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        cache_salt=salt_of(state, body.cache_salt, key),
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        thinking_field="thinking.budget_tokens",
    )
    return to_ask(state, to_messages(body), _options(body), to_sampling(params), extras)


def _grammar(body: MessagesRequest) -> Grammar | None:
    schema = schema_of(body)
    if schema is None:
        return None
    text = to_json(schema).decode()
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid("output_config.format.schema", f"{len(text)} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
    return Grammar("json_schema", text)


def _finish(writer: MessageWriter, finish: str, stop: int | str | None, totals: Totals) -> list[MessageEvent]:
    """The last events."""
    details = TokensDetails(totals.reasoning_tokens)
    read_tokens = totals.prompt_tokens - totals.cached_tokens
    usage = MessageUsage(
        read_tokens, totals.completion_tokens, totals.cached_tokens, output_tokens_details=details,
        memory=Memory(totals.held_bytes, totals.prefix_stop),
    )  # fmt: skip
    return writer.finish(finish, stop, usage)


async def _stream(request: Request, generation: Generation, writer: MessageWriter) -> EventStream:
    async def parts(first: list[Piece] | None) -> AsyncIterator[bytes]:
        yield b"".join(map(_sse, writer.start()))
        async for pieces in batches(generation, first):
            events: list[MessageEvent] = []
            for piece in pieces:
                for event in joined(piece.events):
                    events += writer.push(event)
                if piece.finish is not None:
                    events += _finish(writer, piece.finish, piece.stop, generation.totals)
            if events:
                yield b"".join(map(_sse, events))

    stream = EventStream(request, [generation], lambda error: _sse(error_of(to_api_error(error))), _sse(Ping()))
    return await stream.of(parts)


def _sse(event: MessageEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type_of(event).encode(), to_json(event))
