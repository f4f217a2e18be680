"""Workloads as data: who asks what, when, and what is shared. Read from a file or drawn from a documented mix.

A trace names no token; ids are made up so that exactly what a trace says is shared is equal:

    request    | prefix "tools": 0 ........ prefix_tokens | its own ids .............. prompt_tokens | answer |
    next turn  | the same prefix                          | the same ids, prompt and answer of the last turn | new ones |

Two requests share the tokens of their common `prefix` id; two turns of a `session` share all that the earlier one said.
"""

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import BinaryIO

import msgspec
import numpy as np

from lamina.base.errors import ConfigError

FIELDS = ("arrival", "prompt_tokens", "output_tokens", "session", "turn", "prefix", "prefix_tokens", "cache_salt")
#: ids stay below 2**31, and so must the length of a request
MAX_TOKENS = 2**31 - 1
#: lines between two calls of a progress callback
PROGRESS_LINES = 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    number         its place in the trace, from 0.   arrival  seconds; a later turn is never sent before its predecessor's end.
    prompt_tokens  of the whole prompt, what earlier turns said included.   output_tokens  of the answer.
    session, turn  requests of one session extend each other; turns increase.
    prefix         an id shared between sessions: requests with equal ids (and salts) begin with the same tokens, as many as
                   the smaller of their prefix_tokens.
    """

    number: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    turn: int | None = None
    prefix: str | None = None
    prefix_tokens: int = 0
    cache_salt: str = ""

    @property
    def total_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.output_tokens


def shared_tokens(one: TraceRequest, other: TraceRequest) -> int:
    """Leading tokens, prompt and answer, that two requests of a trace have in common."""
    if one.cache_salt != other.cache_salt:
        return 0
    if one.session is not None and one.session == other.session:
        return min(one.total_tokens, other.total_tokens)
    if one.prefix is not None and one.prefix == other.prefix:
        return min(one.prefix_tokens, other.prefix_tokens)
    return 0


class TokenSource:
    """Makes token ids: the id at position p of stream s is (s + p) mod 2**31, so two streams differ at every position.

    A prefix id, a session and a request without a session each have a stream. One source serves one trace.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], int] = {}

    def ids(self, request: TraceRequest, start: int, stop: int) -> "array[int]":
        """Ids of the tokens [start, stop) of prompt and answer. O(stop - start)."""
        # both are named at once, so that the ids depend on the order in which requests first come here and on nothing else
        shared = 0 if request.prefix is None else self._stream("prefix", request.prefix)
        own = 2 * request.number + 1 if request.session is None else self._stream("session", request.session)
        border = min(max(request.prefix_tokens, start), stop)
        found: array[int] = array("i")
        if start < border:
            found.frombytes(_stretch(shared, start, border))
        if border < stop:
            found.frombytes(_stretch(own, border, stop))
        return found

    def _stream(self, kind: str, name: str) -> int:
        """An even number for each name; requests without a session have the odd ones."""
        return self._streams.setdefault((kind, name), 2 * len(self._streams))


def _stretch(stream: int, start: int, stop: int) -> bytes:
    return ((np.arange(start, stop, dtype=np.int64) + stream) & MAX_TOKENS).astype(np.int32).tobytes()


# -- files


def read_trace(path: str | Path, progress: Progress | None = None) -> Iterator[TraceRequest]:
    """The requests of a JSONL file, one object a line, checked line by line and never held together.

    Fields: arrival (seconds, never decreasing), prompt_tokens and output_tokens (at least 1), and optionally session and turn
    (from 0, increasing), prefix and prefix_tokens (together), cache_salt. Empty lines are skipped.
    progress   called now and then with the bytes read and the bytes there are.
    Raises ConfigError naming file, line and field; a file that cannot be read at once, a wrong line when it is reached.
    """
    path = Path(path)
    try:
        total = path.stat().st_size
        handle = path.open("rb")
    except OSError as error:
        raise ConfigError("trace", str(path), f"a file that can be read ({error.strerror})") from error
    return _read(handle, path.name, total, progress)


def _read(handle: BinaryIO, name: str, total: int, progress: Progress | None) -> Iterator[TraceRequest]:
    checker, done = _Checker(name), 0
    with handle:
        for line_number, line in enumerate(handle, 1):
            done += len(line)
            if line.strip():
                yield checker.request(line_number, line)
            if progress is not None and line_number % PROGRESS_LINES == 0:
                progress(done, total)
    if not checker.count:
        raise ConfigError("trace", name, "at least one request")
    if progress is not None:
        progress(total, total)


@dataclass(slots=True)
class _Said:
    """What a session has said: its last request."""

    tokens: int
    turn: int | None
    prefix: str | None
    prefix_tokens: int
    salt: str


class _Checker:
    """Turns lines into requests. Keeps one short record for each session."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._line = 0
        self._last_arrival = 0.0
        self._sessions: dict[str, _Said] = {}
        self._decoder = msgspec.json.Decoder()

    def request(self, line_number: int, line: bytes) -> TraceRequest:
        """The request of a line that is not empty."""
        self._line = line_number
        try:
            values = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error("line", _excerpt(line), f"one JSON object ({error})") from error
        if not isinstance(values, dict):
            raise self._error("line", _excerpt(line), "one JSON object")
        unknown = [key for key in values if key not in FIELDS]
        if unknown:
            raise self._error("field", unknown[0], f"one of {', '.join(FIELDS)}")
        arrival = self._arrival(values.get("arrival"))
        prompt = self._count(values, "prompt_tokens", 1)
        output = self._count(values, "output_tokens", 1)
        if prompt + output > MAX_TOKENS:
            raise self._error("prompt_tokens", prompt, f"with output_tokens at most {MAX_TOKENS} together")
        session, turn = self._name(values, "session"), None
        if values.get("turn") is not None:
            turn = self._count(values, "turn", 0)
            if session is None:
                raise self._error("turn", turn, "a turn of a session: give session as well")
        prefix, prefix_tokens = self._name(values, "prefix"), 0
        if (prefix is None) != (values.get("prefix_tokens") is None):
            raise self._error("prefix", prefix, "given together with prefix_tokens")
        if prefix is not None:
            prefix_tokens = self._count(values, "prefix_tokens", 0)
            if prefix_tokens > prompt:
                raise self._error("prefix_tokens", prefix_tokens, f"at most prompt_tokens, {prompt}")
        salt = values.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise self._error("cache_salt", salt, "a text")
        if session is not None:
            prefix, prefix_tokens = self._extended(session, turn, prompt, output, prefix, prefix_tokens, salt)
        self._last_arrival = arrival
        self.count += 1
        return TraceRequest(self.count - 1, arrival, prompt, output, session, turn, prefix, prefix_tokens, salt)

    def _extended(
        self, session: str, turn: int | None, prompt: int, output: int, prefix: str | None, prefix_tokens: int, salt: str
    ) -> tuple[str | None, int]:
        """Checks a turn against the last one of its session, and returns the session's prefix."""
        said = self._sessions.get(session)
        if said is not None:
            if turn is not None and said.turn is not None and turn <= said.turn:
                raise self._error("turn", turn, f"more than {said.turn}, the last turn of session {session!r}")
            if prompt < said.tokens:
                raise self._error(
                    "prompt_tokens", prompt,
                    f"at least {said.tokens}, what session {session!r} has said; a history that was rewritten is a new session",
                )  # fmt: skip
            if salt != said.salt:
                raise self._error("cache_salt", salt, f"{said.salt!r}, as before in session {session!r}")
            if prefix is not None and (prefix, prefix_tokens) != (said.prefix, said.prefix_tokens):
                raise self._error("prefix", prefix, f"left out or as at the start of session {session!r}")
            prefix, prefix_tokens = said.prefix, said.prefix_tokens
            turn = said.turn if turn is None else turn
        self._sessions[session] = _Said(prompt + output, turn, prefix, prefix_tokens, salt)
        return prefix, prefix_tokens

    def _error(self, field: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.name} line {self._line}: {field}", value, allowed)

    def _arrival(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e12:
            raise self._error("arrival", _excerpt(str(value).encode()), "seconds, a number from 0 to 1e12")
        if value < self._last_arrival:
            raise self._error("arrival", value, f"at least {self._last_arrival:g}, the arrival of the line before")
        return float(value)

    def _count(self, values: dict[str, object], field: str, least: int) -> int:
        value = values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKENS:
            raise self._error(field, value, f"a whole number from {least} to {MAX_TOKENS}")
        return value

    def _name(self, values: dict[str, object], field: str) -> str | None:
        value = values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise self._error(field, value, "a text or a whole number")
        return str(value)


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 60 else text[:57] + "..."


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Writes requests as a file that `read_trace` reads; returns how many."""
    count = 0
    with Path(path).open("wb") as handle:
        for request in requests:
            count += 1
            values: dict[str, object] = {
                "arrival": request.arrival, "prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens,
            }  # fmt: skip
            if request.session is not None:
                values["session"] = request.session
            if request.turn is not None:
                values["turn"] = request.turn
            if request.prefix is not None:
                values.update(prefix=request.prefix, prefix_tokens=request.prefix_tokens)
            if request.cache_salt:
                values["cache_salt"] = request.cache_salt
            handle.write(msgspec.json.encode(values) + b"\n")
    return count


# -- mixes


@dataclass(frozen=True, slots=True)
class Mix:
    """How sessions of a workload are drawn. Lengths in tokens, times in seconds; "median ~ m (s)" is lognormal.

    users          sessions alive at once; when one ends, the next begins after a pause.
    shared         tokens at the start of every session (system prompt, tools): prefix "system".
    documents      if given, each session is about a document of its own, its prefix: length log-uniform in this range.
    first          tokens of the first message after what is shared, uniform in this range.
    turns          turns of a session: geometric with this mean, at most max_turns.
    added          tokens that each later turn adds (a message, a tool's output): median and sigma.
    answer         tokens of an answer: median and sigma.
    limit          a session ends before a prompt and its answer would be longer than a length drawn uniformly from this range.
    pause          seconds between an answer and the next message: exponential with this mean.
    is_chat        turns extend each other; otherwise each asks anew about the same document.
    """

    users: int
    shared: int
    documents: tuple[int, int] | None
    first: tuple[int, int]
    turns: float
    max_turns: int
    added: tuple[float, float]
    answer: tuple[float, float]
    limit: tuple[int, int]
    pause: float
    is_chat: bool = True


#: chat    people: a system prompt of 1,000 tokens for all, about 5 turns each, messages ~ 60 tokens (1.2), answers ~ 250 (0.8).
#: agents  loops that call tools: 8,000 tokens of tools for all, 55K-70K at the first call, then ~ 3,500 tokens (0.8) of tool
#:         output and ~ 250 (0.6) of answer a turn until 200K-280K; about 96 % of all prompt tokens were said before.
#: long    few documents of 128K-1M tokens, about 6 questions of 20-200 tokens on each, answers ~ 400 (0.6).
MIXES = {
    "chat": Mix(64, 1000, None, (8, 400), 5, 40, (60, 1.2), (250, 0.8), (32_000, 32_000), 20),
    "agents": Mix(8, 8000, None, (47_000, 62_000), 1000, 1000, (3500, 0.8), (250, 0.6), (200_000, 280_000), 4),
    "long": Mix(3, 0, (1 << 17, 1 << 20), (20, 200), 6, 40, (1, 0), (400, 0.6), (1 << 21, 1 << 21), 30, is_chat=False),
}  # fmt: skip

#: tokens/s by which a mix guesses how long an answer takes; the simulator's own speeds may differ
_PREFILL_RATE, _DECODE_RATE = 20_000.0, 50.0


def make_mix(name: str, seed: int = 0, num_requests: int = 1000, users: int | None = None) -> Iterator[TraceRequest]:
    """The first requests of a workload of that name, by arrival. Equal arguments give equal requests.

    users   sessions alive at once, instead of the mix's own number.
    Raises ConfigError for an unknown name and for numbers below 1.
    """
    if name not in MIXES:
        raise ConfigError("mix", name, f"one of {', '.join(sorted(MIXES))}")
    if num_requests < 1:
        raise ConfigError("num_requests", num_requests, "at least 1")
    if users is not None and users < 1:
        raise ConfigError("users", users, "at least 1")
    return draw(MIXES[name], seed, num_requests, users)


def draw(mix: Mix, seed: int, num_requests: int, users: int | None = None) -> Iterator[TraceRequest]:
    """Requests of any mix, by arrival."""
    random = Random(seed)
    alive = [_Session(index, mix, Random(random.getrandbits(64)), None) for index in range(users or mix.users)]
    heap = [(session.arrival, session.index, session) for session in alive]
    heapq.heapify(heap)
    next_index = len(heap)
    for number in range(num_requests):
        _, _, session = heap[0]
        request = session.take(number)
        if session.is_over:
            session = _Session(next_index, mix, Random(random.getrandbits(64)), session.arrival)
            next_index += 1
        heapq.heapreplace(heap, (session.arrival, session.index, session))
        yield request


class _Session:
    """One user: draws its requests one after the other."""

    def __init__(self, index: int, mix: Mix, random: Random, after: float | None) -> None:
        self.index = index
        self.mix = mix
        self.random = random
        # the first sessions begin spread over a few pauses, later ones a pause after the one whose place they take
        self.arrival = random.uniform(0, 4 * mix.pause) if after is None else after + random.expovariate(1 / mix.pause)
        self.turn = 0
        self.is_over = False
        self.prefix: str | None = "system" if mix.shared else None
        self.prefix_tokens = mix.shared
        if mix.documents is not None:
            low, high = (math.log(size) for size in mix.documents)
            self.prefix, self.prefix_tokens = f"document {index}", round(math.exp(random.uniform(low, high)))
        self.limit = random.randint(*mix.limit)
        self.num_turns = 1
        while self.num_turns < mix.max_turns and random.random() < 1 - 1 / mix.turns:
            self.num_turns += 1
        self.prompt, self.output = self.prefix_tokens + random.randint(*mix.first), self._length(*mix.answer)

    def take(self, number: int) -> TraceRequest:
        """The next request; draws the one after it."""
        taken = TraceRequest(
            number, round(self.arrival, 3), self.prompt, self.output, f"{self.index}" if self.mix.is_chat else None,
            self.turn if self.mix.is_chat else None, self.prefix, self.prefix_tokens,
        )  # fmt: skip
        new = self.prompt if self.turn == 0 else self.prompt // 20
        self.arrival += new / _PREFILL_RATE + self.output / _DECODE_RATE + self.random.expovariate(1 / self.mix.pause)
        self.turn += 1
        if self.mix.is_chat:
            self.prompt += self.output + self._length(*self.mix.added)
        else:
            self.prompt = self.prefix_tokens + self.random.randint(*self.mix.first)
        self.output = self._length(*self.mix.answer)
        self.is_over = self.turn >= self.num_turns or self.prompt + self.output > self.limit
        return taken

    def _length(self, median: float, sigma: float) -> int:
        """A lognormal length, at least 1."""
        return max(1, round(self.random.lognormvariate(math.log(median), sigma)))
