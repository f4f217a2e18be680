"""/v1/completions: a prompt's continuation, whole or as a stream."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

from msgspec import UNSET
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.chat.records import Content
from lamina.engine.wire import LogprobRow
from lamina.server import limits
from lamina.server.asking import extras_of, sampling_params
from lamina.server.body import json_response, off_loop, read, state_of
from lamina.server.errors import invalid
from lamina.server.generation import Ask, Generation, Piece, generate, to_sampling
from lamina.server.replies import CompletionRows, merged, prompt_logprobs, usage_of
from lamina.server.routing import route
from lamina.server.schema import (
    COMPLETION_DECODER,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from lamina.server.sse import DONE, EventStream, cancelled_when_gone, data
from lamina.server.state import ServerState

_DEFAULT_TOKENS = 16  # OpenAI's


async def create_completion(http: Request) -> ASGIApp:
    """POST /v1/completions."""
    state = state_of(http)
    request = await read(http, COMPLETION_DECODER)
    request.check_supported()
    state.check_model(request.model)
    prompts = await off_loop(http, _prompts, state, request)
    asks = _asks(http, state, request, [ids for _, ids in prompts])
    with ExitStack() as undo:
        generations = []
        for ask in asks:
            generations.append(generate(state, ask))
            undo.callback(generations[-1].cancel)
        reply = _Reply(state, request, [text for text, _ in prompts], generations)
        undo.pop_all()
    if request.stream:
        return await EventStream(http, generations).of(reply.stream)
    async with cancelled_when_gone(http, generations):
        return json_response(await reply.whole())


def _prompts(state: ServerState, request: CompletionRequest) -> list[tuple[str, list[int]]]:
    """Text (for echo; "" otherwise) and token ids of each prompt. Raises ApiError and ConfigError naming the prompt."""
    given = request.prompt
    if isinstance(given, str):
        return [_prompt(state, request, given, "prompt")]
    if not given:
        raise invalid("prompt", [], "a text, a list of token ids, or a list of either")
    ids = [one for one in given if isinstance(one, int)]
    if len(ids) == len(given):
        return [_prompt(state, request, ids, "prompt")]
    if ids:
        raise invalid("prompt", "a mixed list", "a text, a list of token ids, or a list of either")
    most = min(limits.MAX_PROMPTS, state.settings.max_queue)  # more than the queue holds could wait for ever
    if len(given) > most:
        raise invalid("prompt", f"{len(given)} prompts", f"at most {most}")
    if len(given) * (request.n or 1) > limits.MAX_OUTPUTS:
        raise invalid("n", request.n, f"at most {limits.MAX_OUTPUTS} outputs in one request, all prompts together")
    return [_prompt(state, request, one, f"prompt[{index}]") for index, one in enumerate(given) if not isinstance(one, int)]


def _prompt(state: ServerState, request: CompletionRequest, given: str | list[int], field: str) -> tuple[str, list[int]]:
    if isinstance(given, str):
        state.check_fits(given)
        ids = state.need_codec(field).encode_prompt(given)
        text = given
    else:
        ids, text = given, ""
        if request.echo:
            bad = next((token for token in ids if token >= state.ready.vocab_size), None)
            if bad is not None:
                raise invalid(field, bad, f"token ids from 0 to {state.ready.vocab_size - 1}")
            text = state.need_codec(field).decode(ids, request.skip_special_tokens is not False)
    if not ids:
        raise invalid(field, given, "at least one token")
    return text, ids


def _asks(http: Request, state: ServerState, request: CompletionRequest, prompts: Sequence[list[int]]) -> list[Ask]:
    most = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    if not most and request.min_tokens:
        raise invalid("min_tokens", request.min_tokens, "at most max_tokens (0)")
    wanted = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        wanted = max(request.logprobs, wanted or 0)
    params = sampling_params(state, request, most or 1, request.logprobs, wanted)
    extras = extras_of(http, request, request.user)
    return [
        Ask(
            prompt_ids=ids, sampling=to_sampling(params), stop=extras.stop, include_stop=extras.include_stop,
            skip_special_tokens=extras.skip_special_tokens, grammar=extras.grammar,
            grammar_field=extras.grammar_field, priority=extras.priority,
            deadline_s=extras.deadline_s, cache_salt=extras.cache_salt, owner=extras.owner, is_drawn=most > 0,
        )
        for ids in prompts
    ]  # fmt: skip


class _Choice:
    """One output as it grows."""

    def __init__(self, reply: "_Reply", prompt: int) -> None:
        self._prompt = prompt
        self._reply = reply
        request = reply.request
        self._echo = bool(request.echo)
        self._waits_for_prompt = self._echo and request.logprobs is not None
        self._held: list[Piece] = []
        self._rows: CompletionRows | None = None
        if request.logprobs is not None:
            skips = request.skip_special_tokens is not False
            self._rows = CompletionRows(reply.state.codec, request.logprobs, 0, skips)
        self._pending = CompletionLogprobs([], [], [], [])
        self.finish: str | None = None
        self.stop: int | str | None = None

    def take(self, piece: Piece, prompt_rows: Sequence[LogprobRow | None] | None) -> tuple[str, CompletionLogprobs | None]:
        """New text and its log-probabilities; the prompt's come first if it is to be echoed."""
        text = "".join(one.text for one in piece.events if isinstance(one, Content))
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
        if self._waits_for_prompt and self._rows is not None:
            if prompt_rows is None and piece.finish is None:
                self._held.append(piece)
                return "", None
            self._waits_for_prompt = False
            ids = self._reply.generations[self._prompt].prompt_ids
            self._join(self._rows.take(prompt_rows or [None] * len(ids), ids))
            for held in self._held:
                text = "".join(one.text for one in held.events if isinstance(one, Content)) + text
        if self._echo:
            self._echo = False
            text = self._reply.texts[self._prompt] + text
        if self._rows is not None:
            for one in (*self._held, piece):
                self._join(self._rows.take(one.logprobs or (), one.tokens if one.logprobs else ()))
            self._held.clear()
        if self._rows is None or not (text or piece.finish is not None):
            return text, None
        rows, self._pending = self._pending, CompletionLogprobs([], [], [], [])
        return text, rows

    def _join(self, more: CompletionLogprobs) -> None:
        rows = self._pending
        rows.tokens += more.tokens
        rows.token_logprobs += more.token_logprobs
        rows.top_logprobs += more.top_logprobs
        rows.text_offset += more.text_offset


class _Reply:
    """Answers to one request."""

    def __init__(
        self, state: ServerState, request: CompletionRequest, texts: Sequence[str], generations: Sequence[Generation]
    ) -> None:
        self.state = state
        self.request = request
        self.texts = texts
        self.generations = generations
        self._id = f"cmpl-{generations[0].id}"
        self._created = int(time.time())
        self._model = request.model or state.model_name
        self._n = request.n or 1
        self._choices = [_Choice(self, prompt) for prompt in range(len(generations)) for _ in range(self._n)]
        self._prompt_rows: dict[int, Sequence[LogprobRow | None]] = {}

    async def whole(self) -> Completion:
        """The answer when all of it is there."""
        texts: list[list[str]] = [[] for _ in self._choices]
        rows: list[list[CompletionLogprobs]] = [[] for _ in self._choices]
        async for batch in merged(self.generations):
            for prompt, piece in batch:
                place, text, logprobs = self._take(prompt, piece)
                texts[place].append(text)
                if logprobs is not None:
                    rows[place].append(logprobs)
        choices = []
        for place, choice in enumerate(self._choices):
            logprobs = _joined(rows[place]) if self.request.logprobs is not None else None
            one = CompletionChoice(place, "".join(texts[place]), logprobs, choice.finish, choice.stop)
            self._add_prompt_rows(one, place // self._n)
            choices.append(one)
        return self._completion(choices, with_usage=True)

    async def stream(self, first: list[Piece] | None) -> AsyncIterator[bytes]:
        """Server-sent events: pieces of each output, then the usage if it is wanted."""
        options = self.request.stream_options
        at_end = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        if first is not None:
            yield self._events([(0, piece) for piece in first], at_end, always)
        async for batch in merged(self.generations):
            yield self._events(batch, at_end, always)
        if at_end:
            yield data(self._completion([], with_usage=True))
        yield DONE

    def _events(self, batch: Sequence[tuple[int, Piece]], at_end: bool, always: bool) -> bytes:
        out = b""
        for prompt, piece in batch:
            place, text, logprobs = self._take(prompt, piece)
            if not text and piece.finish is None:
                continue
            choice = CompletionChoice(place, text, logprobs, piece.finish, UNSET if piece.finish is None else piece.stop)
            if piece.finish is not None:
                self._add_prompt_rows(choice, prompt)
            answer = self._completion([choice], with_usage=always)
            if at_end and not always:
                answer.usage = None
            out += data(answer)
        return out

    def _take(self, prompt: int, piece: Piece) -> tuple[int, str, CompletionLogprobs | None]:
        """(index of the output, new text, its log-probabilities)."""
        if piece.prompt_logprobs is not None:
            self._prompt_rows[prompt] = piece.prompt_logprobs
        place = prompt * self._n + piece.child
        text, logprobs = self._choices[place].take(piece, self._prompt_rows.get(prompt))
        return place, text, logprobs

    def _add_prompt_rows(self, choice: CompletionChoice, prompt: int) -> None:
        if self.request.prompt_logprobs is not None and prompt in self._prompt_rows:
            choice.prompt_logprobs = prompt_logprobs(self.state.codec, self._prompt_rows[prompt])

    def _completion(self, choices: list[CompletionChoice], with_usage: bool) -> Completion:
        usage = usage_of([one.totals for one in self.generations]) if with_usage else UNSET
        return Completion(self._id, self._created, self._model, choices, usage=usage)


def _joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    return [route("/v1/completions", create_completion, ("POST",))]
