"""What a user gets back: vLLM's names and shapes."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, its rank (1 = most likely) and its text (None without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One output of a prompt. logprobs has a dict from token id to Logprob for each token, if they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Usage:
    """What a request cost.

    cached_tokens     prompt tokens that were not computed because the memory had them (of the first output).
    held_bytes        per memory (and padding) the bytes held at the peak, all outputs together.
    prefix_stop       why the prefix lookup of the first output stopped where it did.
    accepted_drafts, rejected_drafts  tokens drafted ahead that were drawn then, and the others, all outputs together.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)
    prefix_stop: str = ""
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(slots=True)
class RequestOutput:
    """Everything about one prompt. prompt_logprobs: None first, then for each position a dict from token id to Logprob."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    usage: Usage
    finished: bool = False

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed because the memory had them."""
        return self.usage.cached_tokens


class Delta(NamedTuple):
    """A piece of one output as it streams. `text` may be empty while a character or a stop string is still open."""

    request_id: int
    prompt_index: int
    index: int  # type: ignore[assignment]  # a tuple's method of that name is not missed
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    output: RequestOutput
