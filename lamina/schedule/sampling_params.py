"""What a user asks of one request's sampling: vLLM's names and vLLM's meanings, checked once, where they are made."""

import math
import numbers
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.base.keywords import SAMPLING_ELSEWHERE, known_only

_MAX_N = 16_384
_MAX_INT64 = (1 << 63) - 1
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How the outputs of one request are drawn and when they end. All arguments are keywords.

    n                   outputs drawn for the prompt, each with its own random numbers.
    max_tokens          most tokens of one output; None (stored as 2**63 - 1) and huge values leave it to the model's length.
    min_tokens          end-of-text and stop token ids cannot be drawn, and stop strings are ignored, before this many tokens.
    temperature         divides the logits; 0 takes the most likely token, the lowest id among equals.
    top_p               keeps the fewest most likely tokens whose probabilities reach this sum; 1 keeps all.
    top_k               keeps this many most likely tokens; 0 or -1 keeps all (stored as 0).
    min_p               drops tokens less likely than this share of the most likely one; 0 drops none.
    seed                makes the answer repeatable whatever it is batched with; None or -1 (stored as None) draws a new one.
    stop                strings that end an output when its text contains them; a text, a list or None (stored as a tuple).
    stop_token_ids      token ids that end an output (stored sorted, without repeats).
    ignore_eos          goes on after the model's own end-of-text token.
    logprobs            this many most likely tokens are reported per output token, besides the drawn one; -1 all, None no report.
    prompt_logprobs     the same for every prompt token; the whole prompt is then computed.
    presence_penalty    is subtracted once from the logit of every token already in the output (never looks at the prompt).
    frequency_penalty   is subtracted from a logit once per occurrence in the output (never looks at the prompt).
    repetition_penalty  divides positive and multiplies negative logits of tokens already in the prompt or the output.
    logit_bias          token id (int or digits) -> added to its logit, -100 to 100 (stored as sorted pairs).
    include_stop_str_in_output  keeps the stop string that ended an output in its text instead of cutting before it.
    skip_special_tokens drops special tokens from the text.

    Raises ConfigError naming the field, the value and what is allowed.
    """

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool

    @known_only("SamplingParams", SAMPLING_ELSEWHERE)
    def __init__(
        self,
        *,
        n: int = 1,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | AbstractSet[int] | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        put = object.__setattr__  # the one place that writes a frozen record
        put(self, "n", _integer("n", n, f"an integer from 1 to {_MAX_N}", 1, _MAX_N))
        most = _MAX_INT64 if max_tokens is None else max_tokens
        put(self, "max_tokens", _integer("max_tokens", most, "None or an integer from 1 to 2**63 - 1", 1, _MAX_INT64))
        allowed = f"an integer from 0 to max_tokens ({self.max_tokens})"
        put(self, "min_tokens", _integer("min_tokens", min_tokens, allowed, 0, self.max_tokens))
        put(self, "temperature", _real("temperature", temperature, "a finite number of at least 0", low=0.0))
        put(self, "top_p", _real("top_p", top_p, "a number above 0 and at most 1", above=0.0, high=1.0))
        allowed = "an integer of at least 1, or 0 or -1 for all tokens"
        put(self, "top_k", max(0, _integer("top_k", top_k, allowed, -1, _MAX_INT64)))
        put(self, "min_p", _real("min_p", min_p, "a number from 0 to 1", low=0.0, high=1.0))
        put(self, "seed", _seed(seed))
        put(self, "stop", _stop_strings(stop))
        put(self, "stop_token_ids", _token_ids(stop_token_ids))
        put(self, "ignore_eos", _flag("ignore_eos", ignore_eos))
        put(self, "logprobs", _count_or_all("logprobs", logprobs))
        put(self, "prompt_logprobs", _count_or_all("prompt_logprobs", prompt_logprobs))
        put(self, "presence_penalty", _real("presence_penalty", presence_penalty, "a number from -2 to 2", low=-2.0, high=2.0))
        put(self, "frequency_penalty", _real("frequency_penalty", frequency_penalty, "a number from -2 to 2", low=-2.0, high=2.0))
        put(
            self,
            "repetition_penalty",
            _real("repetition_penalty", repetition_penalty, "a number from 0.000001 to 1000000", low=1e-6, high=1e6),
        )
        put(self, "logit_bias", _logit_bias(logit_bias))
        put(self, "include_stop_str_in_output", _flag("include_stop_str_in_output", include_stop_str_in_output))
        put(self, "skip_special_tokens", _flag("skip_special_tokens", skip_special_tokens))

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, so that no random number is used."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a logit depends on tokens seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def num_logprobs(self, vocab_size: int) -> int | None:
        """Most likely tokens to report per output token, -1 resolved; None if none were asked for."""
        return vocab_size if self.logprobs == -1 else self.logprobs

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        """Most likely tokens to report per prompt token, -1 resolved; None if none were asked for."""
        return vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Checks every token id and log-prob count against the model's vocabulary. Raises ConfigError."""
        ids = f"token ids from 0 to {vocab_size - 1}"
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise ConfigError("stop_token_ids", token_id, ids)
        for token_id, _ in self.logit_bias:
            if token_id >= vocab_size:
                raise ConfigError("logit_bias", token_id, ids)
        for field, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise ConfigError(field, count, f"0 to {vocab_size} (the vocabulary), or -1 for all")


def _integer(field: str, value: object, allowed: str, low: int, high: int | None = None) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ConfigError(field, value, allowed)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ConfigError(field, number, allowed)
    return number


def _real(
    field: str, value: object, allowed: str, *, low: float = -math.inf, above: float = -math.inf, high: float = math.inf
) -> float:
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise ConfigError(field, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(field, value, allowed) from None
    if not math.isfinite(number) or number < low or number <= above or number > high:
        raise ConfigError(field, value, allowed)
    return number


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(field, value, "True or False")
    return value


def _seed(value: object) -> int | None:
    if value is None:
        return None
    number = _integer("seed", value, "None or an integer from -2**63 to 2**64 - 1", _MIN_SEED, _MAX_SEED)
    return None if number == -1 else number


def _count_or_all(field: str, value: object) -> int | None:
    return None if value is None else _integer(field, value, "None, an integer of at least 0, or -1 for the whole vocabulary", -1)


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = "a non-empty text, a list of them, or None"
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise ConfigError("stop", value, allowed)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError("stop", text, allowed)
    return tuple(dict.fromkeys(texts))


def _token_ids(value: object) -> tuple[int, ...]:
    allowed = "a list of token ids (integers of at least 0) or None"
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError("stop_token_ids", value, allowed)
    return tuple(sorted({_integer("stop_token_ids", item, allowed, 0) for item in value}))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    allowed = "a map from token ids (integers of at least 0, or their digits) to numbers from -100 to 100, or None"
    if value is None:
        return ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple):  # as stored, so that a copy of a record is a record
        pairs = [pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None) for pair in value]
    else:
        raise ConfigError("logit_bias", value, allowed)
    biases: dict[int, float] = {}
    for key, bias in pairs:
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _integer("logit_bias", int(key) if is_digits else key, allowed, 0)
        if token_id in biases:
            raise ConfigError("logit_bias", key, "each token id once")
        biases[token_id] = _real("logit_bias", bias, allowed, low=-100.0, high=100.0)
    return tuple(sorted(biases.items()))
