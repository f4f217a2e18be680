"""What a benchmark asks: prompts of chosen lengths from a seed, alone or as conversations that grow."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from lamina.base.errors import ConfigError

DATASETS = ("random", "sharegpt-like", "agents")
_WORDS = (  # the commonest of English
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would other into "
    "has more her two like him see time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know get through back much before go good new write our "
    "used me man too any day same right look think also around another came come work three word must because does part even "
    "place well such here take why things help put years different away again off went old number great tell men say small "
    "every found still between name should home big give air line set own under read last never us left end along while might "
    "next sound below saw something thought both few those always looked show large often together asked house world going want"
)
_FIRST_ID = 100  # below it are control tokens in most vocabularies
#: as measured of conversations that people shared, in tokens: medians and spreads of prompts and answers
_CHAT_INPUT, _CHAT_OUTPUT = (90.0, 1.3), (150.0, 1.0)
_MOST_TIMES = 12.0  # no length is longer than so many medians


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. ids  its token ids, where it is asked as such; else its text.   output_len  tokens of its answer."""

    text: str
    ids: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Job:
    """Turns that follow each other; a conversation has several. system  comes before them."""

    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to make. num_prompts  requests, all turns together.   spread  lengths differ by up to this share of themselves.

    as_ids  prompts are token ids below vocab_size, so that their lengths are exact; else words, tokens_per_word each.
    """

    dataset: str
    num_prompts: int
    input_len: int | None
    output_len: int | None
    seed: int
    spread: float = 0.0
    turns: int = 4
    turn_len: int = 64
    as_ids: bool = False
    vocab_size: int = 1000
    tokens_per_word: float = 1.3


def make_jobs(wanted: Wanted) -> list[Job]:
    """The jobs; the same for the same seed. Raises ConfigError."""
    if wanted.as_ids and wanted.vocab_size <= _FIRST_ID:
        raise ConfigError("vocab_size", wanted.vocab_size, f"more than {_FIRST_ID}")
    make: dict[str, Callable[[Wanted, random.Random], list[Job]]] = {
        "random": _random, "sharegpt-like": _chats, "agents": _agents,
    }  # fmt: skip
    return make[wanted.dataset](wanted, random.Random(wanted.seed))


def _random(wanted: Wanted, rng: random.Random) -> list[Job]:
    """Prompts that share nothing, of about one length."""
    input_len, output_len = wanted.input_len or 512, wanted.output_len or 128
    return [
        Job("", (_turn(wanted, rng, _spread(rng, input_len, wanted.spread), _spread(rng, output_len, wanted.spread)),))
        for _ in range(wanted.num_prompts)
    ]


def _chats(wanted: Wanted, rng: random.Random) -> list[Job]:
    """Prompts and answers as long as people's: most short, a few long. input_len and output_len are the medians."""
    inputs = (wanted.input_len or _CHAT_INPUT[0], _CHAT_INPUT[1])
    outputs = (wanted.output_len or _CHAT_OUTPUT[0], _CHAT_OUTPUT[1])
    return [Job("", (_turn(wanted, rng, _skewed(rng, *inputs), _skewed(rng, *outputs)),)) for _ in range(wanted.num_prompts)]


def _agents(wanted: Wanted, rng: random.Random) -> list[Job]:
    """Conversations that begin with the same long system message (input_len) and grow turn by turn."""
    system = _text(wanted, rng, wanted.input_len or 1024)
    output_len = wanted.output_len or 64
    jobs, left = [], wanted.num_prompts
    while left > 0:
        count = min(left, wanted.turns)
        turns = tuple(_turn(wanted, rng, _spread(rng, wanted.turn_len, wanted.spread), output_len) for _ in range(count))
        jobs.append(Job(system, turns))
        left -= count
    return jobs


def _turn(wanted: Wanted, rng: random.Random, input_len: int, output_len: int) -> Turn:
    if wanted.as_ids:
        return Turn("", tuple(rng.choices(range(_FIRST_ID, wanted.vocab_size), k=input_len)), output_len)
    return Turn(_text(wanted, rng, input_len), (), output_len)


def _text(wanted: Wanted, rng: random.Random, num_tokens: int) -> str:
    return " ".join(rng.choices(_WORDS.split(), k=max(1, round(num_tokens / wanted.tokens_per_word))))


def sample_text(num_words: int = 400) -> str:
    """Words as the prompts have them, to count a tokenizer's tokens with."""
    return " ".join(random.Random(0).choices(_WORDS.split(), k=num_words))


def _spread(rng: random.Random, length: int, share: float) -> int:
    return max(1, round(length * rng.uniform(1 - share, 1 + share))) if share else length


def _skewed(rng: random.Random, median: float, sigma: float) -> int:
    return max(4, round(min(rng.lognormvariate(math.log(median), sigma), median * _MOST_TIMES)))
