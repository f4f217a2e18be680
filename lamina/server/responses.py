"""/v1/responses: the responses protocol. Answers are kept in memory, so that a client can ask for them and go on from them."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lamina import SamplingParams
from lamina.base.errors import LaminaError
from lamina.chat.records import ChatOptions, Content, Message
from lamina.engine.wire import Grammar, LogprobRow
from lamina.server.batches import batches, joined
from lamina.server.body import P, R, json_response, off_loop, read, state_of, to_json
from lamina.server.chat_request import Extras, render_ids, salt_of, to_ask
from lamina.server.errors import ApiError, invalid, to_api_error
from lamina.server.generation import Ask, Generation, Piece, generate, to_sampling
from lamina.server.limits import MAX_GRAMMAR_BYTES
from lamina.server.replies import chat_logprobs
from lamina.server.responses_convert import (
    answer_messages,
    check,
    custom_names,
    format_echo,
    namespaces,
    schema_of,
    shown_tools,
    to_choice,
    to_messages,
    to_tools,
    without_references,
)
from lamina.server.responses_events import ResponseWriter, usage_of
from lamina.server.responses_items import items_of, page_of
from lamina.server.responses_schema import (
    DeletedResponse,
    InputTokenCount,
    ReasoningEcho,
    ResponseObject,
    ResponsesRequest,
    StreamEvent,
    TextEcho,
)
from lamina.server.responses_store import ResponseStore, Turn
from lamina.server.routing import route
from lamina.server.schema import TokenLogprob
from lamina.server.sse import EventStream, cancelled_when_gone
from lamina.server.state import ServerState

_DECODER = msgspec.json.Decoder(ResponsesRequest)
_LOGPROBS, _SEAL = "message.output_text.logprobs", "reasoning.encrypted_content"


def routes(state: ServerState) -> Sequence[BaseRoute]:
    """The protocol's endpoints."""
    book = _Book()
    return [
        route("/v1/responses", book.create, ["POST"]),
        route("/v1/responses/input_tokens", book.count_tokens, ["POST"]),
        route("/v1/responses/{response_id}", book.retrieve),
        route("/v1/responses/{response_id}", book.delete, ["DELETE"]),
        route("/v1/responses/{response_id}/cancel", book.cancel, ["POST"]),
        route("/v1/responses/{response_id}/input_items", book.list_input),
    ]


class _Work:
    """One response in work: what is written, what draws it, and how it is kept."""

    def __init__(self, owner: str, writer: ResponseWriter, generation: Generation, ask: "_Asked") -> None:
        self.owner, self.writer, self.generation, self.asked = owner, writer, generation, ask
        self.is_cancelled = False
        self.is_kept = False
        self._is_in_text = True
        self._rows: list[LogprobRow] = []  # of tokens whose text is still to come
        self._tail: list[StreamEvent] = []

    def push(self, pieces: Sequence[Piece]) -> list[StreamEvent]:
        """The events of some pieces."""
        found: list[StreamEvent] = []
        for piece in () if self.is_over else pieces:
            if self.asked.has_logprobs and self._is_in_text:
                self._rows += piece.logprobs or ()
            for event in joined(piece.events):
                self._is_in_text = isinstance(event, Content)
                found += self.writer.push(event, self._logprobs() if self._is_in_text else None)
                self._rows.clear()
            if piece.finish is not None:
                found += self.end(piece.finish)
        return found

    def end(self, finish: str, message: str = "") -> list[StreamEvent]:
        """The last events."""
        return self.writer.finish(finish, usage_of(self.generation.totals), message)

    def cancel(self) -> None:
        """Ends it now; a stream gets the last events from `tail`."""
        self.is_cancelled = True
        self.generation.cancel()
        if not self.is_over:
            self._tail = self.end("abort")

    def tail(self) -> list[StreamEvent]:
        """The last events of what did not end by itself."""
        return self._tail if self.is_over else self.end("abort")

    @property
    def is_over(self) -> bool:
        """Whether the response has its last status."""
        return self.writer.response.status != "in_progress"

    def _logprobs(self) -> list[TokenLogprob]:
        return chat_logprobs(self.asked.state.codec, self._rows, self.asked.body.top_logprobs or 0)


class _Asked:
    """A checked request: the messages it adds, those before them, and how the answer is drawn."""

    def __init__(self, state: ServerState, body: ResponsesRequest, before: Turn | None, refers: bool) -> None:
        check(body)
        self.state, self.body, self.before, self.refers = state, body, before, refers
        history = [] if before is None else before.history()
        self.added = to_messages(body, history)
        first = [Message("system", body.instructions)] if body.instructions else []
        self.messages = [*first, *history, *self.added]
        include = body.include or ()
        self.has_logprobs = _LOGPROBS in include or bool(body.top_logprobs)
        self.has_seal = _SEAL in include
        self.temperature = state.defaults.temperature if body.temperature is None else body.temperature
        self.top_p = state.defaults.top_p if body.top_p is None else body.top_p
        reasoning = body.reasoning
        self.effort = reasoning.effort if reasoning else None
        self.summary = (reasoning.summary or reasoning.generate_summary) if reasoning else None
        self.options = ChatOptions(
            thinking=None if self.effort is None else self.effort != "none",
            effort=self.effort,
            tools=to_tools(body),
            tool_choice=to_choice(body),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            response_schema=schema_of(body.text.format if body.text else None),
        )

    def ask(self, key: str | None) -> Ask:
        """The prompt and how its answer is drawn. Raises ApiError and ConfigError naming the field."""
        body, defaults = self.body, self.state.defaults
        params = SamplingParams(
            max_tokens=defaults.most_tokens(body.max_output_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=defaults.top_k if body.top_k is None else body.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            seed=body.seed,
            logprobs=(body.top_logprobs or 0) if self.has_logprobs else None,
        )
        params.validate_for_vocab(self.state.ready.vocab_size)
        extras = Extras(
            grammar=self._grammar(),
            grammar_field="text.format",
            priority=body.priority or 0,
            deadline_s=body.deadline_s,
            cache_salt=salt_of(self.state, body.cache_salt, key),
            owner=(body.user or "")[:256],
            thinking_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
        )
        return to_ask(self.state, self.messages, self.options, to_sampling(params), extras)

    def blank(self) -> ResponseObject:
        """The response before there is any of it."""
        body = self.body
        return ResponseObject(
            id=f"resp_{secrets.token_hex(16)}", created_at=int(time.time()), model=body.model or self.state.model_name,
            status="in_progress", output=[], tools=shown_tools(body), tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text=TextEcho(format_echo(body.text.format if body.text else None), (body.text and body.text.verbosity) or "medium"),
            reasoning=ReasoningEcho(self.effort, self.summary), metadata=body.metadata or {},
            temperature=self.temperature, top_p=self.top_p, store=body.store is not False,
            instructions=body.instructions, max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls, previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key, safety_identifier=body.safety_identifier, top_logprobs=body.top_logprobs or 0,
            user=body.user,
        )  # fmt: skip

    def _grammar(self) -> Grammar | None:
        form = self.body.text.format if self.body.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Grammar("json_object", "")
        text = to_json(form.schema).decode()
        if len(text) > MAX_GRAMMAR_BYTES:
            raise invalid("text.format.schema", f"{len(text)} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        return Grammar("json_schema", text)


async def _off_loop(request: Request, asked: _Asked, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As body.off_loop; what was said before, or is referred to, may be long, whatever this body is."""
    if asked.before is None and not asked.refers:
        return await off_loop(request, function, *args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class _Book:
    """The endpoints, the responses in work and those that are kept."""

    def __init__(self) -> None:
        self._store = ResponseStore()
        self._running: dict[tuple[str, str], _Work] = {}

    async def create(self, request: Request) -> Response | EventStream:
        """A response, whole or as a stream of events."""
        body = await read(request, _DECODER)
        asked = self._read(request, body)
        generation = generate(asked.state, await _off_loop(request, asked, asked.ask, request.scope["lamina_key"]))
        writer = ResponseWriter(
            asked.blank(), has_summary=asked.summary is not None, has_seal=asked.has_seal, has_logprobs=asked.has_logprobs,
            namespaces=namespaces(body), custom=custom_names(body),
        )  # fmt: skip
        work = _Work(_owner(request), writer, generation, asked)
        if body.stream:
            return await self._stream(request, work)
        place = (work.owner, writer.response.id)
        self._running[place] = work
        try:
            async with cancelled_when_gone(request, [generation]):
                try:
                    async for piece in generation:
                        work.push((piece,))
                except LaminaError:
                    if not work.is_cancelled:
                        raise
            work.tail()
            self._keep(work)
        finally:
            del self._running[place]
        return json_response(writer.response)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of such a request has."""
        asked = self._read(request, await read(request, _DECODER))
        _, ids = await _off_loop(request, asked, render_ids, asked.state, asked.messages, asked.options)
        return json_response(InputTokenCount(len(ids)))

    async def retrieve(self, request: Request) -> Response:
        """A response that is kept, or what there is of one in work."""
        owner, id = _owner(request), request.path_params["response_id"]
        if request.query_params.get("stream", "").lower() in ("1", "true"):
            raise invalid("stream", "true", "false: a response that is kept is answered whole")
        work = self._running.get((owner, id))
        if work is not None:
            return json_response(work.writer.response)
        kept = self._store.get(owner, id)
        if kept is None:
            raise _unknown(id)
        return Response(kept.body, media_type="application/json")

    async def list_input(self, request: Request) -> Response:
        """What a response answers, page by page."""
        owner, id = _owner(request), request.path_params["response_id"]
        work = self._running.get((owner, id))
        if work is not None:
            messages = [*(work.asked.before.history() if work.asked.before else ()), *work.asked.added]
        elif (kept := self._store.get(owner, id)) is not None:
            messages = kept.input()
        else:
            raise _unknown(id)
        items = await asyncio.to_thread(items_of, id, messages)
        return json_response(page_of(items, request.query_params))

    async def delete(self, request: Request) -> Response:
        """Forgets a response."""
        id = request.path_params["response_id"]
        if not self._store.drop(_owner(request), id):
            raise _unknown(id)
        return json_response(DeletedResponse(id))

    async def cancel(self, request: Request) -> Response:
        """Ends a response that is in work."""
        owner, id = _owner(request), request.path_params["response_id"]
        work = self._running.get((owner, id))
        if work is None:
            if self._store.get(owner, id) is None:
                raise _unknown(id)
            raise ApiError(400, f"response {id!r} has ended: only one in work can be cancelled", "response_id", "invalid_value")
        work.cancel()
        return json_response(work.writer.response)

    def _read(self, request: Request, body: ResponsesRequest) -> _Asked:
        """The request with what it goes on from. Raises ApiError naming the field."""
        state = state_of(request)
        state.check_model(body.model)
        refers = isinstance(body.input, list) and any(item.type == "item_reference" for item in body.input)
        if refers and isinstance(body.input, list):
            body = msgspec.structs.replace(body, input=without_references(body.input, partial(self._body, _owner(request))))
        before = None
        if body.previous_response_id is not None:
            kept = self._store.get(_owner(request), body.previous_response_id)
            if kept is None:
                text = f"previous response {body.previous_response_id[:100]!r} is not here: kept no longer, or another key's"
                raise ApiError(400, text, "previous_response_id", "previous_response_not_found")
            before = kept.turn
        return _Asked(state, body, before, refers)

    def _body(self, owner: str, id: str) -> bytes | None:
        """A response that is kept, as JSON."""
        kept = self._store.get(owner, id)
        return None if kept is None else kept.body

    def _keep(self, work: _Work) -> None:
        response = work.writer.response
        if response.store and not work.is_kept:
            work.is_kept = True
            messages = (*work.asked.added, *answer_messages(response.output))
            self._store.put(work.owner, response.id, to_json(response), messages, work.asked.before, len(work.asked.added))

    async def _stream(self, request: Request, work: _Work) -> EventStream:
        place = (work.owner, work.writer.response.id)

        def told(events: Sequence[StreamEvent]) -> bytes:
            if work.is_over:  # kept before the client knows that it has ended, and may go on from it
                self._keep(work)
            return b"".join(map(_sse, events))

        async def parts(first: list[Piece] | None) -> AsyncIterator[bytes]:
            self._running[place] = work
            try:
                yield told(work.writer.start())
                try:
                    async for pieces in batches(work.generation, first):
                        if part := told(work.push(pieces)):
                            yield part
                except LaminaError as error:
                    if not work.is_over:
                        work.is_kept = isinstance(error, ApiError) and error.code == "cancelled"  # nobody waits for it
                        yield told(work.end("error", to_api_error(error).message))
                if part := told(work.tail()):
                    yield part
            finally:
                del self._running[place]

        return await EventStream(request, [work.generation]).of(parts)


def _owner(request: Request) -> str:
    """Whose responses a request may see: those of its own API key."""
    return request.scope["lamina_key"] or ""


def _unknown(id: str) -> ApiError:
    return ApiError(404, f"response {id[:100]!r} is not here: kept no longer, or another key's", "response_id", "not_found")


def _sse(event: StreamEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), to_json(event))
