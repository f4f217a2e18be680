"""One conversation with a server: its messages, how it is to think, and what its answers cost."""

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import Struct

from lamina.cli.http_client import Client, FunctionPart, Usage

EFFORTS = ("low", "high", "max")

Piece: TypeAlias = tuple[Literal["thought", "answer", "call"], str]


class Message(Struct, omit_defaults=True):
    """One message as the protocol has it."""

    role: str
    content: str
    reasoning_content: str | None = None


@dataclass(slots=True)
class Answer:
    """What one answer cost.

    usage             None where it was stopped before the server said.
    first_s, total_s  until its first text and its end.
    """

    usage: Usage | None = None
    finish: str = ""
    first_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second after the first."""
        if self.first_s is None or self.usage is None or self.usage.completion_tokens < 2 or self.total_s <= self.first_s:
            return None
        return (self.usage.completion_tokens - 1) / (self.total_s - self.first_s)


@dataclass(slots=True)
class Totals:
    """Of all answers."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Settings:
    """How answers are asked for; None leaves it to the server."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    thinking: bool | None = None
    effort: str | None = None


class Talk:
    """A conversation."""

    def __init__(self, client: Client, settings: Settings, system: str = "") -> None:
        self.client = client
        self.settings = settings
        self.system = system
        self.messages: list[Message] = []
        self.last: Answer | None = None
        self.totals = Totals()

    def forget(self) -> None:
        """A new conversation; the system message stays."""
        self.messages.clear()

    def all_messages(self) -> list[Message]:
        """The messages with the system's."""
        return [Message("system", self.system)] * bool(self.system) + self.messages

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """The answer to a message as it comes. Left early, or broken off after some text, the part that came stays.

        Raises ServerError; where no answer had begun the message is taken back.
        """
        self.messages.append(Message("user", text))
        answer = Answer()
        content: list[str] = []
        thoughts: list[str] = []
        start = time.perf_counter()
        try:
            for chunk in self.client.stream("/v1/chat/completions", self._request()):
                if chunk.usage is not None:
                    answer.usage = chunk.usage
                for choice in chunk.choices:
                    answer.finish = choice.finish_reason or answer.finish
                    delta = choice.delta
                    if delta is None:
                        continue
                    thought = delta.reasoning_content or delta.reasoning
                    call = "".join(_call_text(part.function) for part in delta.tool_calls or ())
                    pieces: tuple[Piece, ...] = (("thought", thought or ""), ("answer", delta.content or ""), ("call", call))
                    for piece in pieces:
                        if not piece[1]:
                            continue
                        if answer.first_s is None:
                            answer.first_s = time.perf_counter() - start
                        (thoughts if piece[0] == "thought" else content).append(piece[1])
                        yield piece
        finally:
            answer.total_s = time.perf_counter() - start
            self._keep(answer, "".join(content), "".join(thoughts))

    def _keep(self, answer: Answer, content: str, thoughts: str) -> None:
        if answer.first_s is None and not answer.finish:
            self.messages.pop()  # no answer had begun
            return
        self.messages.append(Message("assistant", content, thoughts or None))
        self.last = answer
        usage, totals = answer.usage or Usage(), self.totals
        totals.answers += 1
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.completion_tokens += usage.completion_tokens
        totals.reasoning_tokens += usage.reasoning_tokens
        totals.seconds += answer.total_s

    def _request(self) -> dict[str, object]:
        settings = self.settings
        request: dict[str, object] = {
            "model": settings.model, "messages": self.all_messages(), "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        wanted = {
            "max_tokens": settings.max_tokens, "temperature": settings.temperature, "top_p": settings.top_p,
            "seed": settings.seed, "reasoning_effort": settings.effort,
        }  # fmt: skip
        if settings.thinking is not None:
            request["chat_template_kwargs"] = {"thinking": settings.thinking, "enable_thinking": settings.thinking}
        return request | {name: value for name, value in wanted.items() if value is not None}


def _call_text(part: FunctionPart | None) -> str:
    if part is None:
        return ""
    return (f"\n[call {part.name}] " if part.name else "") + (part.arguments or "")
