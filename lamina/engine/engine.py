"""The engine: a loaded model, its memory, and the loop that turns requests into answers."""

import logging
import numbers
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from lamina.base.config import EngineConfig, for_gpus_only
from lamina.base.errors import CapacityError, ConfigError
from lamina.base.log import event, get_logger
from lamina.base.sizes import format_bytes
from lamina.engine.grammar import CompiledGrammar
from lamina.engine.interrupts import deferred_interrupts
from lamina.engine.locate import locate
from lamina.engine.outputs import Delta, RequestOutput, Usage
from lamina.engine.text import load_codec
from lamina.engine.text_output import GrowingOutput, to_logprobs
from lamina.memory.kept import drop_path
from lamina.memory.layout import Layout
from lamina.memory.ledger import Ledger
from lamina.memory.plan import Held, predict
from lamina.models.files import model_name
from lamina.runtime.worker import Worker
from lamina.schedule.drafting import draft_rule
from lamina.schedule.request import Request, RequestState, ThoughtLimit
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Drawn, Scheduler
from lamina.schedule.step import LaunchedStep, Step, TokenLogprobs

_LOG = get_logger(__name__)
_MOST_LENGTHS = 4096  # lengths whose bytes are remembered


@dataclass(slots=True)
class Group:
    """One prompt with all its outputs. growing, deltas  empty in an engine without texts."""

    id: int
    prompt_index: int
    output: RequestOutput
    requests: list[Request]
    growing: list[GrowingOutput]
    deltas: list[Delta] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether every output has ended."""
        return all(request.state is RequestState.FINISHED for request in self.requests)


class News(NamedTuple):
    """What a step, or an end, brought one output. token  None where no token ended it.   finish  None while it goes on."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None
    finish: str | None


class Engine:
    """Loads a checkpoint and serves requests; safe to use from several threads, one step at a time.

    on_tensor    called with (done, total) while weights load.   on_warmup  then while steps of each kind are tried.
    has_text     False: prompts are token ids, nothing is decoded, and what comes is found in `news`, not in `Group.deltas`.
    make_worker  what runs the model.
    Raises ConfigError, CapacityError or WeightError, each one line.
    """

    def __init__(
        self, config: EngineConfig, on_tensor: Callable[[int, int], None] | None = None,
        on_warmup: Callable[[int, int], None] | None = None, has_text: bool = True,
        make_worker: Callable[[Path, EngineConfig], Worker] = Worker,
    ) -> None:  # fmt: skip
        self.directory = locate(config.model)
        self.worker = make_worker(self.directory, config)
        self.config = config = self.worker.config
        if not self.worker.is_gpu and (idle := for_gpus_only(config)):
            event(_LOG, "ignored_on_a_cpu", logging.WARNING, settings=", ".join(idle))
        self.layout, self.num_pages = self.worker.layout, self.worker.num_pages
        self.vocab_size = self.worker.vocab_size
        self.max_model_len = _max_model_len(config, self.layout, self.num_pages, self.worker.max_positions)
        self.codec = load_codec(self.directory) if has_text else None
        self.has_text = has_text
        #: of an engine without texts: what came since somebody took it, in order
        self.news: list[News] = []
        if self.codec is not None and self.codec.vocab_size > self.vocab_size:
            raise ConfigError(
                "tokenizer", f"{self.codec.vocab_size} tokens", f"at most vocab_size ({self.vocab_size}) of config.json"
            )
        self.worker.load(on_tensor, self.max_model_len)
        if config.warmup:
            self.worker.warmup(on_warmup)
        self._model_id = self.worker.model_id()
        self._overlaps = self.worker.runner.overlaps
        self._flying: deque[tuple[Step, LaunchedStep]] = deque()  # launched and not booked, oldest first
        self._start_books()
        self.groups: dict[int, Group] = {}
        self._requests: dict[int, Request] = {}
        self._held_bytes: dict[int, dict[str, int]] = {}
        self._next_id = 0
        self._seeds = random.Random(config.seed)
        self._lock = threading.RLock()
        #: called with a step that has been computed, before its results are booked: nobody of it has ended yet
        self.on_computed: Callable[[Step], None] | None = None
        event(
            _LOG, "ready", model=model_name(self.directory), page_bytes=self.layout.page_bytes, pages=self.num_pages,
            block_tokens=self.layout.block_tokens, slot_pages=self.layout.slot_pages, max_model_len=self.max_model_len,
            draft=config.draft, draft_tokens=self.layout.draft_tokens,
        )  # fmt: skip

    def _start_books(self) -> None:
        """An empty ledger and a scheduler over it."""
        config = self.config
        self.ledger = Ledger(self.layout, self.num_pages, self._model_id, adopt_twins=self.worker.has_equal_twins)
        self.scheduler = Scheduler(
            self.ledger, config.step_tokens, config.max_requests, self.vocab_size, config.checkpoint_interval, self._overlaps,
            draft_rule(self.worker.drafts.tokens, self.worker.drafts.by_model, self.worker.is_gpu),
        )  # fmt: skip
        self._flying.clear()

    # -- requests

    def check(self, prompt: str | Sequence[int], params: SamplingParams, field_name: str = "prompt") -> list[int]:
        """The token ids of a prompt, after every check that can be made before it is queued."""
        params.validate_for_vocab(self.vocab_size)
        if params.stop and self.codec is None:
            why = "this checkpoint has no tokenizer.json" if self.has_text else "this engine has no texts"
            raise ConfigError("stop", list(params.stop), f"empty: {why}, use stop_token_ids")
        if params.min_tokens and len(self._stop_ids(params)) >= self.vocab_size:
            raise ConfigError("min_tokens", params.min_tokens, "0 where every token ends the output: none could be drawn")
        ids = self._token_ids(prompt, field_name)
        if len(ids) > self.max_model_len:
            limit = self.worker.max_positions
            way = "shorten it" if self.max_model_len >= limit else "shorten it or raise cache_bytes or max_model_len"
            raise CapacityError(
                f"{field_name} has {len(ids)} tokens, but a request can have at most max_model_len={self.max_model_len} "
                f"(the model: {limit}; cache_bytes={self.config.pool_bytes}: {self.num_pages} pages of "
                f"{format_bytes(self.layout.page_bytes)}): {way}"
            )
        return ids

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.worker.eos_token_ids)

    def _limit(self, thoughts: ThoughtLimit, params: SamplingParams, stop_ids: frozenset[int]) -> ThoughtLimit:
        """Checked; an end that may not come before min_tokens comes then."""
        if thoughts.tokens < 0:
            raise ConfigError("thinking_token_budget", thoughts.tokens, "at least 0")
        if not 0 <= thoughts.end < self.vocab_size:
            raise ConfigError("thinking_token_budget", f"an end of {thoughts.end}", f"an id from 0 to {self.vocab_size - 1}")
        if thoughts.end in stop_ids and thoughts.tokens < params.min_tokens:
            return replace(thoughts, tokens=params.min_tokens)
        return thoughts

    def _token_ids(self, prompt: str | Sequence[int], name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.codec is None:
                raise ConfigError(name, "a text", "a list of token ids: this checkpoint has no tokenizer.json")
            try:
                ids = self.codec.encode_prompt(prompt)
            except ConfigError as error:
                raise ConfigError(name, error.value, error.allowed) from None
        else:
            ids = _integers(prompt, name)
        if not ids:
            raise ConfigError(name, prompt, "at least one token")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ConfigError(name, bad, f"token ids from 0 to {self.vocab_size - 1}")
        return ids

    def add(
        self, prompt: str | Sequence[int], params: SamplingParams, prompt_index: int = 0, cache_salt: str = "",
        priority: int = 0, owner: str = "", grammar: CompiledGrammar | None = None, keep_at: int | None = None,
        thoughts: ThoughtLimit | None = None,
    ) -> Group:  # fmt: skip
        """Queues a prompt; `step` then makes progress on it. Raises as `check`.

        priority  lower comes first.   owner  shown with what it leaves in the cache.   grammar  what each output must match.
        keep_at   tokens of the prompt that the next turn of a chat will share: also kept as a point to resume from.
        thoughts  how many tokens the thoughts that each output begins with may have.
        """
        ids = self.check(prompt, params)
        with self._lock, deferred_interrupts():
            self._next_id += 1
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
            stop_ids = self._stop_ids(params)
            if thoughts is not None:
                thoughts = self._limit(thoughts, params, stop_ids)
            max_new = min(params.max_tokens, self.max_model_len - len(ids))
            wants_prompt = params.prompt_logprobs is not None
            output = RequestOutput(
                self._next_id,
                prompt if isinstance(prompt, str) else None,
                ids,
                [None] if wants_prompt else None,
                [],
                Usage(len(ids)),
            )
            group = Group(self._next_id, prompt_index, output, [], [])
            shared = tuple(ids)
            for child in range(params.n):
                request = Request(
                    id=self._next_id, name=f"{group.id}.{child}", prompt=shared, params=params, seed=seed, max_new=max_new,
                    stop_ids=stop_ids, salt=cache_salt, child=child, parent=group.requests[0] if child else None,
                    priority=priority, owner=owner, grammar=None if grammar is None else grammar.start(stop_ids),
                    keep_at=keep_at, thoughts=thoughts,
                )  # fmt: skip
                self._next_id += 1
                group.requests.append(request)
                if self.has_text:
                    growing = GrowingOutput(child, params, self.codec)
                    group.growing.append(growing)
                    output.outputs.append(growing.output)
            for request in group.requests:
                self._requests[request.id] = request
                self.groups[request.id] = group
                self.scheduler.add(request)
            if max_new == 0:
                self._end_without_room(group)
            for request in group.requests:
                if request.state is not RequestState.FINISHED and not request.has_next():
                    self.scheduler.cancel(request, "stop")
                    self._close(request, group, "stop")
            return group

    def _end_without_room(self, group: Group) -> None:
        """A prompt that already has the greatest length: nothing can be drawn, though its log-probs may be wanted."""
        for request in group.requests:
            if request.wants_prompt_logprobs:
                request.max_new = 1  # drawn to end it, needs no memory, and is thrown away
            else:
                self.scheduler.cancel(request, "length")
                self._close(request, group, "length")

    def cancel(self, group: Group, reason: str = "abort") -> None:
        """Ends a prompt in any state; everything that is not in the prefix index is freed."""
        with self._lock, deferred_interrupts():
            for request in group.requests:
                if request.state is not RequestState.FINISHED:
                    self.scheduler.cancel(request, reason)
                    self._close(request, group, reason)

    def finish(self, group: Group, child: int) -> None:
        """One output has its answer: it ends with "stop", and what it remembers stays for reuse. Ended ones are left alone."""
        with self._lock, deferred_interrupts():
            request = group.requests[child]
            if request.state is not RequestState.FINISHED:
                self.scheduler.finish(request, "stop")
                self._close(request, group, "stop")

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work

    # -- the loop

    def step(self) -> bool:
        """Plans and launches what can run, then books the oldest step. False if there was nothing to do. Ctrl-C waits for that.

        Where the runtime overlaps, the next step is on its way before this one is waited for; nothing is once all work is done.
        If a step cannot be finished, what ran ends with "error", the memory starts empty, and the exception goes on.
        """
        with self._lock, deferred_interrupts():
            try:
                self._launch()
                if not self._flying:
                    return False
                self._finish_oldest()
                while self._flying and not self.scheduler.has_work:
                    self._finish_oldest()  # it drew for requests that have just ended
            except BaseException:
                self._start_again()
                raise
            return True

    def _launch(self) -> None:
        """Keeps one step on its way, or two where they overlap."""
        while len(self._flying) < 1 + self._overlaps:
            step = self.scheduler.plan()
            if step is None:
                return
            self._flying.append((step, self.worker.execute(step)))

    def _finish_oldest(self) -> None:
        """Waits for the oldest launched step and books it."""
        step, launched = self._flying.popleft()
        result = launched.result()
        if self.on_computed is not None:
            self.on_computed(step)
        self.scheduler.apply(step, result, self._requests, self._book)

    def _start_again(self) -> None:
        """After a step that broke off: nothing that it left behind is trusted. Requests that wait stay queued."""
        self._start_books()
        for request in list(self._requests.values()):
            if request.state is RequestState.WAITING:
                request.lease, request.num_pending = None, 0
                self.scheduler.add(request)
            else:
                request.state, request.lease, request.finish_reason = RequestState.FINISHED, None, "error"
                request.error = "its step failed"
                self._close(request, self.groups[request.id], "error")

    def run_orders(self) -> None:
        """Carries out the copies that the ledger has ordered so far, so that pages can be read and written between two steps."""
        with self._lock, deferred_interrupts():
            orders = self.ledger.take_orders()
            if orders:
                self.worker.arena.run(orders)

    def take(self, group: Group) -> list[Delta]:
        """What is new for a prompt, without making a step."""
        with self._lock:
            deltas, group.deltas = group.deltas, []
            return deltas

    def step_for(self, groups: Sequence[Group]) -> None:
        """One step, unless something new is there for one of the groups or all have finished (another thread's step)."""
        with self._lock:
            if not any(group.deltas for group in groups) and not all(group.is_finished for group in groups):
                moved = self.step()
                assert moved, "requests wait although nothing runs"

    def advance(self, group: Group) -> list[Delta]:
        """What is new for a prompt, making steps until there is something; empty once it has finished and all was taken."""
        while True:
            deltas = self.take(group)
            if deltas or group.is_finished:
                return deltas + self.take(group)
            self.step_for([group])

    def _book(self, drawn: Drawn) -> None:
        request, token, logprobs = drawn
        reason = request.finish_reason
        if not self.has_text and reason is None:
            self.news.append(News(request, token, logprobs, None))
            return
        group = self.groups[request.id]
        if reason is not None and len(request.prompt) >= self.max_model_len:
            self._close(request, group, "length")
            return
        if token is None:
            request.error = "the model's scores were not finite (NaN or infinite)"
            drop_path(self.ledger, request.tokens, request.salt)
            self._close(request, group, "error")
            return
        if not self.has_text:
            self._forget(request)
            self.news.append(News(request, token, logprobs, reason))
            return
        growing = group.growing[request.child]
        text, matched = growing.push(token, logprobs, reason == "stop" and token in request.stop_ids)
        if reason == "stop" and token in request.params.stop_token_ids:
            growing.output.stop_reason = token
        if matched is not None:
            self.scheduler.finish(request, "stop")
            reason, growing.output.stop_reason = "stop", matched
        if reason is not None:
            self._close(request, group, reason, text, (token,))
        else:
            group.deltas.append(Delta(group.id, group.prompt_index, request.child, text, (token,), None, group.output))

    def _close(self, request: Request, group: Group, reason: str, text: str = "", tokens: tuple[int, ...] = ()) -> None:
        """Finishes the text and the figures of one output."""
        if not self.has_text:
            self._forget(request)
            self.news.append(News(request, None, None, reason))
            return
        growing = group.growing[request.child]
        rest, matched = growing.finish(reason)
        if matched is not None:
            reason = growing.output.finish_reason = "stop"
            growing.output.stop_reason = matched
        self._forget(request)
        usage = group.output.usage
        usage.completion_tokens += len(growing.output.token_ids)
        usage.accepted_drafts += request.accepted_drafts
        usage.rejected_drafts += request.rejected_drafts
        for name, nbytes in self.held_bytes(request).items():
            usage.held_bytes[name] = usage.held_bytes.get(name, 0) + nbytes
        if request.child == 0:
            usage.cached_tokens = request.cached_tokens
            usage.prefix_stop = request.first_hit.why if request.first_hit is not None else "not looked up"
            if group.output.prompt_logprobs is not None:
                group.output.prompt_logprobs.extend(to_logprobs(item, self.codec) for item in request.prompt_logprobs)
            event(
                _LOG, "finished", logging.DEBUG, request=request.name, reason=reason, cached_tokens=request.cached_tokens,
                why=usage.prefix_stop,
            )  # fmt: skip
        group.output.finished = group.is_finished
        group.deltas.append(Delta(group.id, group.prompt_index, request.child, text + rest, tokens, reason, group.output))

    def _forget(self, request: Request) -> None:
        """Lets go of an output that has ended."""
        del self._requests[request.id]
        del self.groups[request.id]

    def held_bytes(self, request: Request) -> dict[str, int]:
        """By memory (and padding) the bytes that an output held at its longest; empty if it never ran."""
        position = request.peak_position
        if not position:
            return {}
        found = self._held_bytes.get(position)
        if found is None:
            if len(self._held_bytes) >= _MOST_LENGTHS:
                self._held_bytes.clear()
            found = {row.name: row.nbytes for row in predict(self.layout, [Held(position)]).rows}
            self._held_bytes[position] = found
        return dict(found)


def _integers(prompt: Sequence[int], name: str) -> list[int]:
    if set(map(type, prompt)) == {int}:
        return list(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ConfigError(name, token, "a text or a list of integer token ids")
    return [int(token) for token in prompt]


def _max_model_len(config: EngineConfig, layout: Layout, num_pages: int, max_positions: int) -> int:
    """Most tokens of a request: the model's limit, or what the memory holds for one request alone (the last one needs none)."""
    least = layout.pages_for(1)
    if num_pages < least:
        raise CapacityError(
            f"cache_bytes={config.pool_bytes} holds {num_pages} pages of {layout.page_bytes} B, one request needs {least}: "
            f"at least {least * layout.page_bytes} B"
        )
    fits = layout.most_tokens(num_pages, max_positions) + 1
    if config.max_model_len is None:
        if fits < max_positions:
            event(_LOG, "max_model_len_cut", tokens=fits, model_limit=max_positions, cache_bytes=config.pool_bytes)
        return min(fits, max_positions)
    if config.max_model_len > max_positions:
        raise ConfigError("max_model_len", config.max_model_len, f"at most {max_positions}, the model's max_position_embeddings")
    if config.max_model_len > fits:
        need = layout.peak_pages(config.max_model_len - 1) * layout.page_bytes
        raise CapacityError(
            f"max_model_len={config.max_model_len} needs {need} B ({format_bytes(need)}) for one request, cache_bytes="
            f"{config.pool_bytes} holds {fits} tokens: raise cache_bytes or lower max_model_len"
        )
    return config.max_model_len
