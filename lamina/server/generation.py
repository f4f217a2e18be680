"""From a prompt to pieces of its answers: what every protocol is built on.

Per output: token ids -> text (Detokeniser) -> events (OutputParser: thoughts, content, calls) -> stop strings, which look at
content only unless asked otherwise. Nothing that may still become part of a stop string leaves before it is known to be harmless.
"""

import os
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from lamina import SamplingParams
from lamina.base.log import event, get_logger
from lamina.chat.formats import OutputParser
from lamina.chat.records import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from lamina.engine.client import EngineGone, EngineRefused
from lamina.engine.grammar_checks import FIELDS
from lamina.engine.text import Detokeniser, TextCodec
from lamina.engine.text_stops import StopChecker
from lamina.engine.wire import Grammar, LogprobRow, Output, Sampling, Submit, Thoughts, UsageRow
from lamina.server.errors import ApiError, invalid
from lamina.server.state import GenerationRecord, ServerState, asked_peer

_LOG = get_logger(__name__)
#: what the engine calls a grammar's field, whichever of a protocol's it came from
_GRAMMAR_FIELDS = frozenset(FIELDS.values())


class Ask(msgspec.Struct, frozen=True):  # a frozen dataclass takes eight times as long to make
    """A prompt and what is wanted. parser_of  a fresh reader for each output; None: all of the text is content.

    grammar_field  the request's field that the grammar came from.   stop_in_reasoning  stop strings also look at thoughts.
    is_drawn  False: max_tokens was 0, what is drawn is thrown away.   keep_at, thoughts  see wire.Submit.
    """

    prompt_ids: list[int]
    sampling: Sampling
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
    parser_of: Callable[[], OutputParser] | None = None
    is_drawn: bool = True
    keep_at: int | None = None
    thoughts: Thoughts | None = None


class Piece(msgspec.Struct, frozen=True):
    """What is new of one output. Its last piece has `finish`: stop, length, tool_calls, deadline.

    stop   what ended it: a stop string, a stop token id, or None.   usage  comes with the prompt's last piece.
    """

    child: int
    events: tuple[Event, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[LogprobRow, ...] | None = None
    finish: str | None = None
    stop: int | str | None = None
    usage: UsageRow | None = None
    prompt_logprobs: tuple[LogprobRow | None, ...] | None = None


class Totals(msgspec.Struct, frozen=True):
    """What a prompt cost, all outputs together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    held_bytes: dict[str, int] = {}
    prefix_stop: str = ""
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class _Child:
    """One output: text, events and stop strings."""

    def __init__(self, ask: Ask, codec: TextCodec | None) -> None:
        self._codec = codec
        self._parser = None if ask.parser_of is None else ask.parser_of()
        self._text = None if codec is None else Detokeniser(codec, ask.skip_special_tokens and self._parser is None)
        self._hides_special = ask.skip_special_tokens
        self._include_stop = ask.include_stop
        self._stops = _checker(ask) if ask.stop else None
        self._thought_stops = _checker(ask) if ask.stop and ask.stop_in_reasoning else None
        self._thinks = self._parser is not None and not self._parser.is_in_content
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_calls = 0
        self.matched: str | None = None
        self.finish: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether more of it counts."""
        return self.finish is None and self.matched is None

    def push(self, tokens: Sequence[int], has_stop_token: bool) -> tuple[list[Event], int]:
        """More tokens: (what they show, how many of them count, as what follows a stop string does not).

        has_stop_token  the last one ended the output: it shows only if stops are to be shown.
        """
        events: list[Event] = []
        at, last = 0, len(tokens) - has_stop_token
        while at < len(tokens) and self.matched is None:
            end = self._end_of_run(tokens, at, last)
            if end > at + 1:
                events += self._push_run(tokens[at:end])
                at = end
            else:
                events += self._push_one(tokens[at], at == last)
                at += 1
        return events, at

    def _end_of_run(self, tokens: Sequence[int], start: int, stop: int) -> int:
        """Up to where tokens together are the same as one by one: no stop strings, and none can end or begin the thoughts."""
        if self._stops is not None or self._codec is None or (self._parser is not None and self._parser.may_turn):
            return start
        return self._codec.end_of_plain(tokens, start, stop)

    def _push_run(self, tokens: Sequence[int]) -> list[Event]:
        assert self._text is not None
        self.num_tokens += len(tokens)
        self.num_reasoning += len(tokens) if self._thinks else 0
        text = self._text.push(*tokens)
        if not text:
            return []
        return self._check((Content(text),) if self._parser is None else self._parser.push(text))

    def _push_one(self, token: int, is_stop_token: bool) -> list[Event]:
        self.num_tokens += 1
        for checker in (self._stops, self._thought_stops):
            if checker is not None:
                checker.push("")
        if self._text is None or self._codec is None or (is_stop_token and not self._include_stop):
            self._count_thought((), False)
            return []
        text = self._text.push(token)
        if self._parser is None:
            return self._check((Content(text),) if text else ())
        is_control = self._codec.is_added(token)
        if not is_control:
            events = self._parser.push(text) if text else []
        else:
            events = self._push_control(self._parser, token, text)
        self._count_thought(events, is_control)
        return self._check(events)

    def _push_control(self, parser: OutputParser, token: int, text: str) -> list[Event]:
        """A control token; an open character before it (a text of its own) is broken off."""
        assert self._codec is not None
        own = self._codec.token_text(token)
        before = text.removesuffix(own)
        events = parser.push(before) if before else []
        found = parser.push(own, is_control=True)
        if self._hides_special and self._codec.is_special(token):
            found = [_without(one, own) for one in found]
        return [one for one in events + found if not isinstance(one, Content | Reasoning) or one.text]

    def end(self, reason: str) -> list[Event]:
        """The rest, once the engine has ended it with `reason`; sets `finish`."""
        if self.matched is not None:
            self.finish = "tool_calls" if self.num_calls else "stop"
            return []
        rest = "" if self._text is None else self._text.finish()
        if self._parser is None:
            events = self._check((Content(rest),) if rest else ())
        else:
            found = self._parser.push(rest) if rest else []
            events = self._check(found + self._parser.finish(reason))
        if self.matched is None:
            events += self._flush()
        else:
            reason = "stop"
        self.finish = "tool_calls" if reason == "stop" and self.num_calls else reason
        return events

    def _check(self, events: "tuple[Event, ...] | list[Event]") -> list[Event]:
        """Events up to the first stop string; text that may become part of one is held back."""
        if self._stops is None:
            for one in events:
                if isinstance(one, CallEnd):
                    self.num_calls += 1
            return list(events)
        shown: list[Event] = []
        for one in events:
            if isinstance(one, CallEnd):
                self.num_calls += 1
            checker = self._stops if isinstance(one, Content) else self._thought_stops if isinstance(one, Reasoning) else None
            if not isinstance(one, Content):
                shown += _rest(self._stops, Content)
            if not isinstance(one, Reasoning):
                shown += _rest(self._thought_stops, Reasoning)
            if checker is None or isinstance(one, CallStart | CallArguments | CallEnd):
                shown.append(one)
                continue
            text, is_stopped = checker.push(one.text, 0)
            if text:
                shown.append(Content(text) if isinstance(one, Content) else Reasoning(text))
            if is_stopped:
                self.matched = checker.matched
                break
        return shown

    def _flush(self) -> list[Event]:
        return _rest(self._thought_stops, Reasoning) + _rest(self._stops, Content)

    def _count_thought(self, events: "tuple[Event, ...] | list[Event]", is_control: bool) -> None:
        """Counts a token as a thought if it was drawn inside of them and is not the one that ends them."""
        if self._parser is None:
            return
        thinks, has_call = self._thinks, False
        for one in events:
            if isinstance(one, Reasoning):
                thinks = True
            elif isinstance(one, CallStart):
                has_call = True
        if thinks:
            self._thinks = not self._parser.is_in_content and not has_call
            self.num_reasoning += self._thinks or not is_control


def _checker(ask: Ask) -> StopChecker:
    """Looks for the stop strings of one text."""
    return StopChecker(ask.stop, ask.include_stop, ask.sampling.min_tokens)


def _without(one: Event, token: str) -> Event:
    """An event without a hidden token at its end."""
    if isinstance(one, Content):
        return Content(one.text.removesuffix(token))
    return Reasoning(one.text.removesuffix(token)) if isinstance(one, Reasoning) else one


def _rest(checker: StopChecker | None, kind: type[Content] | type[Reasoning]) -> list[Event]:
    """What a checker holds back of a text that has ended."""
    text = "" if checker is None else checker.finish()
    return [kind(text)] if text else []


def _joined(outputs: Sequence[Output]) -> Sequence[Output]:
    """Outputs that came together, as their reader was late for them: plain tokens of a child and what follows them are one."""
    if len(outputs) == 1:
        return outputs
    found: list[Output] = []
    waiting: dict[int, list[int]] = {}
    for one in outputs:
        if one.logprobs is None and one.finish is None and one.prompt_logprobs is None:
            waiting.setdefault(one.child, []).extend(one.tokens)
            continue
        before = tuple(waiting.pop(one.child, ()))
        if before and one.logprobs is None:
            one = msgspec.structs.replace(one, tokens=before + one.tokens)
        elif before:
            found.append(Output(one.id, one.child, before))
        found.append(one)
    return found + [Output(outputs[0].id, child, tuple(tokens)) for child, tokens in waiting.items()]


class Generation:
    """Pieces of all outputs of one prompt as they come. Close it, whatever happens; closing early cancels.

    Raises ApiError (400, 500, 503) where the engine refuses, fails or has gone.
    """

    def __init__(self, server: ServerState, ask: Ask) -> None:
        self._server = server
        self._ask = ask
        self.id = os.urandom(12).hex()
        self.children = [_Child(ask, server.codec) for _ in range(ask.sampling.n)]
        self._start = self._last = time.perf_counter()
        self._first_token_s: float | None = None
        self._usage: UsageRow | None = None
        self._accepted_drafts = self._rejected_drafts = 0
        self._is_closed = False
        self._failure = "abort"
        server.enter()
        try:
            prompt = array("i", ask.prompt_ids)
            if sys.byteorder == "big":
                prompt.byteswap()
            self._stream = server.client.submit(
                Submit(
                    self.id,
                    prompt.tobytes(),
                    ask.sampling,
                    ask.cache_salt,
                    ask.priority,
                    ask.deadline_s,
                    ask.grammar,
                    ask.owner,
                    ask.keep_at,
                    ask.thoughts,
                    asked_peer.get(),
                )
            )
        except BaseException:
            self._failure = "refused"
            self._leave()
            raise
        if server.settings.log_prompts:
            shown = ask.prompt_ids if server.codec is None else server.codec.decode(ask.prompt_ids, skip_special_tokens=False)
            event(_LOG, "prompt", request=self.id, text=repr(shown))

    @property
    def totals(self) -> Totals:
        """What it cost so far; complete after the last piece."""
        usage = self._usage
        drawn = sum(child.num_tokens for child in self.children) if self._ask.is_drawn else 0
        return Totals(
            len(self._ask.prompt_ids),
            0 if usage is None else usage.cached_tokens,
            drawn,
            sum(child.num_reasoning for child in self.children),
            {} if usage is None else usage.held_bytes,
            "" if usage is None else usage.prefix_stop,
            self._accepted_drafts,
            self._rejected_drafts,
        )

    @property
    def prompt_ids(self) -> list[int]:
        """Its prompt."""
        return self._ask.prompt_ids

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended, or it was closed."""
        return self._is_closed or all(child.finish is not None for child in self.children)

    async def get_pieces(self) -> list[Piece]:
        """All that is new, waiting for at least one; [] at the end."""
        while True:
            try:
                outputs = await self._stream.get_batch()
            except (EngineGone, EngineRefused) as error:
                self._failure = "refused" if isinstance(error, EngineRefused) else "error"
                if isinstance(error, EngineRefused) and self._ask.grammar is not None and error.field in _GRAMMAR_FIELDS:
                    text = error.message.replace(error.field, self._ask.grammar_field, 1)
                    raise ApiError(400, text, self._ask.grammar_field, "invalid_value") from None
                raise
            if not outputs:
                return []
            pieces = [piece for output in _joined(outputs) if (piece := self._read(output)) is not None]
            if pieces:
                return pieces

    async def begin(self, seconds: float) -> list[Piece] | None:
        """The first pieces, if they come within so long: what refuses a prompt at once can still be an answer with its status."""
        return await self.get_pieces() if await self._stream.has_news(seconds) else None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while pieces := await self.get_pieces():
            for piece in pieces:
                yield piece

    def _read(self, output: Output) -> Piece | None:
        """The piece that an engine's output makes; None where it says nothing new."""
        child = self.children[output.child]
        if output.usage is not None:
            self._usage = output.usage
            self._accepted_drafts += output.usage.accepted_drafts
            self._rejected_drafts += output.usage.rejected_drafts
        if child.finish is not None:
            self._server.counters.late_pieces += 1
            return None
        tokens = output.tokens if child.is_open else ()
        events: list[Event] = []
        count = 0
        stop_token = output.stop_token if output.finish == "stop" else None
        if tokens and self._ask.is_drawn:
            events, count = child.push(tokens, stop_token is not None)
            if child.matched is not None:
                self._server.client.finish(self.id, output.child)
        if count and self._server.observers:
            self._note(count)
        elif count and self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._start
        stop: int | str | None = child.matched
        if output.finish is not None:
            if output.finish in ("error", "abort") and child.matched is None:
                self._fail(output.finish, output.error)
            events += child.end(output.finish if self._ask.is_drawn else "length")
            stop = child.matched
            if stop is None and stop_token in self._ask.sampling.stop_token_ids:
                stop = stop_token
        if not (events or count or child.finish is not None or output.prompt_logprobs is not None):
            return None
        if self._server.settings.log_prompts and events:
            event(_LOG, "answer", request=self.id, child=output.child, events=repr(events))
        logprobs = None if output.logprobs is None else output.logprobs[:count]
        return Piece(
            output.child, tuple(events), tokens[:count], logprobs, child.finish, stop, output.usage, output.prompt_logprobs
        )

    def _fail(self, finish: str, why: str) -> None:
        """An output that the engine gave up."""
        self._failure = finish
        if finish == "error":
            raise ApiError(500, f"the engine could not finish this answer: {why or 'its step failed'}", code="engine_error")
        raise ApiError(503, "the answer was cancelled by the server", code="cancelled", retry_after_s=1.0)

    def _note(self, count: int) -> None:
        now = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = now - self._start
        self._server.count_tokens(count, now - self._last)
        self._last = now

    def cancel(self) -> None:
        """Ends it now, from anywhere in the event loop; what has not finished is given up."""
        if not self._is_closed:
            if any(child.finish is None for child in self.children):
                self._server.client.cancel(self.id)
            self._leave()

    async def close(self) -> None:
        """Cancels what has not finished. May be called twice."""
        self.cancel()

    def _leave(self) -> None:
        """Counts the end, once."""
        if self._is_closed:
            return
        self._is_closed = True
        usage, totals = self._usage, self.totals
        record = GenerationRecord(
            id=self.id, owner=self._ask.owner, prompt_tokens=totals.prompt_tokens, cached_tokens=totals.cached_tokens,
            completion_tokens=totals.completion_tokens, reasoning_tokens=totals.reasoning_tokens,
            finish=tuple(child.finish or self._failure for child in self.children), first_token_s=self._first_token_s,
            total_s=time.perf_counter() - self._start, queued_s=0.0 if usage is None else usage.queued_s,
            prefill_s=0.0 if usage is None else usage.prefill_s, decode_s=0.0 if usage is None else usage.decode_s,
            prefix_stop=totals.prefix_stop, held_bytes=totals.held_bytes,
        )  # fmt: skip
        event(
            _LOG, "answered", request=self.id, finish=",".join(record.finish), prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens, completion_tokens=record.completion_tokens, total_s=round(record.total_s, 4),
        )  # fmt: skip
        self._server.leave(record)


def generate(server: ServerState, ask: Ask) -> Generation:
    """Starts on a prompt, after every check that the server can make. Raises ApiError and ConfigError naming the field."""
    ready = server.ready
    if not ask.prompt_ids:
        raise invalid("prompt", [], "at least one token")
    room = ready.max_model_len - len(ask.prompt_ids)
    if room < (1 if ask.is_drawn else 0):
        text = f"the prompt has {len(ask.prompt_ids)} tokens, prompt and answer may have {ready.max_model_len}: shorten it"
        raise ApiError(400, text, "prompt", "context_length_exceeded")
    if max(ask.prompt_ids) >= ready.vocab_size or min(ask.prompt_ids) < 0:
        bad = next(token for token in ask.prompt_ids if not 0 <= token < ready.vocab_size)
        raise invalid("prompt", bad, f"token ids from 0 to {ready.vocab_size - 1}")
    if ask.sampling.min_tokens > room:
        raise invalid("min_tokens", ask.sampling.min_tokens, f"at most {room}, which the prompt leaves of {ready.max_model_len}")
    if server.codec is None and ask.stop:
        raise invalid("stop", list(ask.stop), "empty: this checkpoint has no tokenizer.json, use stop_token_ids")
    return Generation(server, ask)


@asynccontextmanager
async def generating(server: ServerState, *asks: Ask) -> AsyncIterator[list[Generation]]:
    """Generations of several prompts, all closed at the end. Raises as `generate`, and then none is left running."""
    running: list[Generation] = []
    try:
        for ask in asks:
            running.append(generate(server, ask))
        yield running
    finally:
        for generation in running:
            generation.cancel()


def to_sampling(params: SamplingParams) -> Sampling:
    """The engine's record of checked parameters."""
    return Sampling(
        n=params.n, max_tokens=params.max_tokens, min_tokens=params.min_tokens, temperature=params.temperature, 
        top_p=params.top_p, top_k=params.top_k, min_p=params.min_p, seed=params.seed,
        stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos,
        logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs, presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty, repetition_penalty=params.repetition_penalty, logit_bias=params.logit_bias,
    )  # fmt: skip
