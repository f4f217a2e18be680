"""/v1/chat/completions: OpenAI's chats, whole or as a stream."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.chat.records import CallArguments, CallStart, Content, Event, Reasoning
from lamina.engine.wire import LogprobRow
from lamina.server.asking import extras_of, sampling_params
from lamina.server.body import json_response, off_loop, read, state_of
from lamina.server.chat_messages import chat_options, thinking_budget, to_messages
from lamina.server.chat_request import to_ask
from lamina.server.errors import ApiError
from lamina.server.generation import Ask, Generation, Piece, generate, to_sampling
from lamina.server.replies import chat_logprobs, prompt_logprobs, usage_of
from lamina.server.routing import route
from lamina.server.schema import (
    CHAT_DECODER,
    CallOut,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    Chunk,
    ChunkChoice,
    Delta,
    FunctionOut,
    MessageOut,
    PromptLogprobs,
)
from lamina.server.sse import DONE, EventStream, cancelled_when_gone, data
from lamina.server.state import ServerState


async def create_chat(http: Request) -> ASGIApp:
    """POST /v1/chat/completions."""
    state = state_of(http)
    request = await read(http, CHAT_DECODER)
    request.check_supported()
    state.check_model(request.model)
    reply = _Reply(state, request)
    ask = await off_loop(http, _to_ask, http, state, request)
    generation = generate(state, ask)
    if request.stream:
        return await EventStream(http, [generation]).of(lambda first: reply.stream(generation, first))
    async with cancelled_when_gone(http, [generation]):
        return json_response(await reply.whole(generation))


def _to_ask(http: Request, state: ServerState, request: ChatRequest) -> Ask:
    """The prompt and what is wanted. Raises ApiError and ConfigError naming the field."""
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs is not valid: only with logprobs=true", "top_logprobs", "invalid_value")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if most == 0:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise ApiError(400, f"{name}=0 is not valid: at least 1", name, "invalid_value")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling_params(state, request, most, logprobs, request.prompt_logprobs)
    extras = extras_of(http, request, request.user or request.safety_identifier)
    budget, name = thinking_budget(request)
    extras = structs.replace(
        extras, stop_in_reasoning=bool(request.stop_in_reasoning), thinking_budget=budget, thinking_field=name or "thinking"
    )
    return to_ask(state, to_messages(request), chat_options(request), to_sampling(params), extras)


@dataclass(slots=True)
class _Answer:
    """One whole answer being put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CallStart] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[LogprobRow] = field(default_factory=list)
    finish: str = "stop"
    stop: int | str | None = None

    def take(self, piece: Piece) -> None:
        """The next piece."""
        for one in piece.events:
            match one:
                case Content():
                    self.content.append(one.text)
                case Reasoning():
                    self.reasoning.append(one.text)
                case CallStart():
                    self.calls[one.index], self.arguments[one.index] = one, []
                case CallArguments():
                    self.arguments[one.index].append(one.text)
        self.logprobs += piece.logprobs or ()
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop

    def message(self) -> MessageOut:
        """As clients get it: content is null where there are only calls."""
        content = "".join(self.content)
        message = MessageOut("assistant", None if self.calls and not content else content)
        if self.reasoning:
            message.reasoning_content = message.reasoning = "".join(self.reasoning)
        if self.calls:
            message.tool_calls = [
                CallOut(FunctionOut(one.name, "".join(self.arguments[index])), id=one.id, type="function")
                for index, one in self.calls.items()
            ]
        return message


class _Reply:
    """Answers to one request."""

    def __init__(self, state: ServerState, request: ChatRequest) -> None:
        self._state = state
        self._request = request
        self._created = int(time.time())
        self._model = request.model or state.model_name
        options = request.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        choice = request.tool_choice
        self._is_named = choice is not None and not isinstance(choice, str)

    async def whole(self, generation: Generation) -> ChatAnswer:
        """The answer when all of it is there."""
        answers = [_Answer() for _ in generation.children]
        prompt: PromptLogprobs | UnsetType = UNSET
        async for piece in generation:
            answers[piece.child].take(piece)
            if piece.prompt_logprobs is not None:
                prompt = prompt_logprobs(self._state.codec, piece.prompt_logprobs)
        choices = [
            ChatChoice(index, one.message(), self._finish(one.finish), self._logprobs(one.logprobs), one.stop)
            for index, one in enumerate(answers)
        ]
        usage = usage_of([generation.totals])
        return ChatAnswer(self._id(generation), self._created, self._model, choices, usage, prompt_logprobs=prompt)

    async def stream(self, generation: Generation, first: list[Piece] | None) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk with the role for each answer, its pieces, its finish; then the usage if it is wanted."""
        waiting = [_Waiting() for _ in generation.children]
        head = b"".join(self._chunk(generation, child, Delta(role="assistant", content="")) for child in range(len(waiting)))
        if first is None:
            yield head
            head = b""
        pieces = await generation.get_pieces() if first is None else first
        while pieces and not generation.is_finished:
            yield head + b"".join(self._chunks(generation, piece, waiting[piece.child]) for piece in pieces)
            head = b""
            pieces = await generation.get_pieces()
        last = head + b"".join(self._chunks(generation, piece, waiting[piece.child]) for piece in pieces)
        if self._usage_at_end:
            usage = usage_of([generation.totals])
            last += data(Chunk(self._id(generation), self._created, self._model, [], usage=usage))
        yield last + DONE

    def _chunks(self, generation: Generation, piece: Piece, waiting: "_Waiting") -> bytes:
        """The chunks of a piece. Log-probabilities of tokens whose text is still held back wait for the next chunk."""
        waiting.rows += piece.logprobs or ()
        out = b""
        for delta in _deltas(piece.events):
            out += self._chunk(generation, piece.child, delta, waiting.take())
        if piece.finish is not None:
            out += self._chunk(generation, piece.child, Delta(), waiting.take(), self._finish(piece.finish), piece.stop)
        return out

    def _chunk(
        self, generation: Generation, child: int, delta: Delta, rows: Sequence[LogprobRow] = (), finish: str | None = None,
        stop: int | str | None = None,
    ) -> bytes:  # fmt: skip
        logprobs = self._logprobs(rows) if rows else None
        choice = ChunkChoice(child, delta, logprobs, finish, UNSET if finish is None else stop)
        chunk = Chunk(self._id(generation), self._created, self._model, [choice])
        if self._usage_always:
            chunk.usage = usage_of([generation.totals])
        elif self._usage_at_end:
            chunk.usage = None
        return data(chunk)

    def _id(self, generation: Generation) -> str:
        return f"chatcmpl-{generation.id}"

    def _finish(self, finish: str) -> str:
        """A forced function ends with "stop", as OpenAI's does."""
        return "stop" if finish == "tool_calls" and self._is_named else finish

    def _logprobs(self, rows: Sequence[LogprobRow]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(self._state.codec, rows, self._request.top_logprobs or 0))


class _Waiting:
    """Log-probabilities that wait for a chunk to go with."""

    def __init__(self) -> None:
        self.rows: list[LogprobRow] = []

    def take(self) -> list[LogprobRow]:
        """All that wait."""
        rows, self.rows = self.rows, []
        return rows


def _deltas(events: Sequence[Event]) -> list[Delta]:
    """As few deltas as there can be: neighbours of one kind join."""
    deltas: list[Delta] = []
    kind: type[Event] | None = None
    for one in events:
        match one:
            case Content():
                if kind is Content and deltas[-1].content is not None:
                    deltas[-1].content += one.text
                else:
                    deltas.append(Delta(content=one.text))
            case Reasoning():
                if kind is Reasoning and deltas[-1].reasoning_content is not None:
                    deltas[-1].reasoning_content += one.text
                    deltas[-1].reasoning = deltas[-1].reasoning_content
                else:
                    deltas.append(Delta(reasoning_content=one.text, reasoning=one.text))
            case CallStart():
                deltas.append(Delta(tool_calls=[CallOut(FunctionOut(one.name, ""), one.index, one.id, "function")]))
            case CallArguments():
                deltas.append(Delta(tool_calls=[CallOut(FunctionOut(arguments=one.text), one.index)]))
            case _:
                continue
        kind = type(one)
    return deltas


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    return [route("/v1/chat/completions", create_chat, ("POST",))]
