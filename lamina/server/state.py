"""What all endpoints share: the engine's client, the tokenizer, the chat format, and what is counted."""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.types import Scope

from lamina.base.log import event, get_logger
from lamina.chat.formats import ChatFormat
from lamina.engine.client import EngineClient
from lamina.engine.default_sampling import SamplingDefaults
from lamina.engine.text import TextCodec
from lamina.engine.wire import Ready
from lamina.server.errors import ApiError
from lamina.server.settings import ServerSettings

_LOG = get_logger(__name__)
#: the header by which a router says whom to ask for a prompt's state; its value while a request is being answered
PEER_HEADER = "x-lamina-prefill"
asked_peer: ContextVar[str] = ContextVar("asked_peer", default="")


class GenerationRecord(msgspec.Struct, frozen=True):
    """A prompt that has ended, all its outputs together. Seconds since it was asked; first_token_s None: there was none.

    finish  reason of each output: stop, length, tool_calls, deadline, abort, error, refused.
    """

    id: str
    owner: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    finish: tuple[str, ...]
    first_token_s: float | None
    total_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    prefix_stop: str
    held_bytes: dict[str, int]


class Observer(Protocol):
    """Is told what happens; what it raises is logged and goes no further."""

    def on_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer has ended. route  the path as it is registered ("/v1/models/{id}"), "" for unknown ones."""

    def on_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Tokens of one output arrived, gap_s after those before them (the first: after the request)."""

    def on_generation(self, record: GenerationRecord) -> None:
        """A prompt has ended, however it did."""


@dataclass(slots=True)
class Counters:
    """Since the start; they only grow."""

    prompts: int = 0
    refused: int = 0
    late_pieces: int = 0
    disconnects: int = 0


@dataclass(slots=True)
class ServerState:
    """One per process; handlers find it at `request.scope["lamina_state"]`. codec None: token ids only; chat None: no chats.

    defaults  what applies where a request does not say how to sample.
    """

    settings: ServerSettings
    client: EngineClient
    codec: TextCodec | None = None
    chat: ChatFormat | None = None
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    counters: Counters = field(default_factory=Counters)
    observers: list[Observer] = field(default_factory=list)
    in_flight: int = 0
    body_bytes: int = 0
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.names[0]

    @property
    def ready(self) -> Ready:
        """What the engine serves. Raises ApiError (503) as long as it does not."""
        if self.client.ready is None or self.client.state != "ready":
            text = f"the engine is {self.client.state}; it will serve again by itself"
            raise ApiError(503, text, code="engine_unavailable", retry_after_s=2.0)
        return self.client.ready

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that a user's text must not bring to life."""
        if self.codec is None or self.settings.raw_special_tokens:
            return ()
        return self.codec.added_tokens

    def need_codec(self, field_name: str) -> TextCodec:
        """The tokenizer. Raises ApiError (400) where the checkpoint has none."""
        if self.codec is None:
            raise ApiError(400, f"{field_name}: this checkpoint has no tokenizer.json, use token ids", field_name)
        return self.codec

    def check_fits(self, text: str) -> None:
        """Raises ApiError (400) for a text that has more tokens than a prompt may have, however it is cut; encodes nothing."""
        if self.codec is not None:
            self.check_length(self.codec.fewest_tokens(text), is_all=False)

    def check_length(self, num_tokens: int, is_all: bool = True) -> None:
        """Raises ApiError (400) for a prompt that is too long. is_all  False: it has so many tokens at least."""
        most = self.ready.max_model_len
        if num_tokens > most:
            count = f"{num_tokens}" if is_all else f"at least {num_tokens}"
            text = f"the prompt has {count} tokens, prompt and answer may have {most}: shorten it"
            raise ApiError(400, text, "prompt", "context_length_exceeded")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served; None is the one that is."""
        if name is not None and name not in self.settings.names:
            names = ", ".join(self.settings.names)
            text = f"model {name[:100]!r} does not exist here (adapters are not supported): {names}"
            raise ApiError(404, text, "model", "model_not_found")

    def enter(self) -> None:
        """One more request in work. Raises ApiError 429 where there are too many, 503 on the way down."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5.0)
        if self.in_flight >= self.settings.max_queue:
            self.counters.refused += 1
            text = f"{self.in_flight} requests are in work, at most --max-queue={self.settings.max_queue} may be"
            raise ApiError(429, text, code="queue_full", retry_after_s=1.0)
        self.in_flight += 1
        self.counters.prompts += 1

    def take_body_bytes(self, scope: Scope, size: int, most: int) -> None:
        """A large body has `size` bytes by now; 0 when its request has been answered. Raises ApiError (429) beyond `most`."""
        self.body_bytes += size - scope.get("lamina_body_bytes", 0)
        scope["lamina_body_bytes"] = size
        if size and self.body_bytes > most:
            self.counters.refused += 1
            raise ApiError(429, "too many large bodies are in work: send it again later", code="queue_full", retry_after_s=1.0)

    def leave(self, record: GenerationRecord) -> None:
        """A request in work has ended."""
        self.in_flight -= 1
        for observer in self.observers:
            try:
                observer.on_generation(record)
            except Exception as error:  # an observer must not take serving down
                complain(error)

    def count_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Tells the observers of tokens that arrived."""
        for observer in self.observers:
            try:
                observer.on_tokens(num_tokens, gap_s)
            except Exception as error:
                complain(error)

    def count_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Tells the observers of an answer."""
        for observer in self.observers:
            try:
                observer.on_response(method, route, status, seconds)
            except Exception as error:
                complain(error)


def complain(error: Exception) -> None:
    """Logs what an observer did wrong."""
    event(_LOG, "observer_failed", logging.WARNING, error=f"{type(error).__name__}: {error}")
