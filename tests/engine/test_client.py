"""The engine's process as its client sees it: a real process with the real tiny model, and one whose steps take no time."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import pytest

from lamina import LLM, RequestOutput, SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import CapacityError, ConfigError
from lamina.engine.client import EngineClient, EngineGone, EngineRefused, RequestStream
from lamina.engine.wire import LogprobRow, Output, Outputs, Refusal, Sampling, Stats, Submit, UsageRow

FAKE = Path(__file__).parent / "fake_engine.py"
VOCAB = 1024
TINY = {"cache_bytes": "24MiB", "max_step_tokens": 64, "max_requests": 8}
_T = TypeVar("_T")
Run = Callable[[Awaitable[_T]], _T]


class Served(NamedTuple):
    """A client and the loop that it lives in."""

    client: EngineClient
    runner: asyncio.Runner

    def run(self, work: Awaitable[_T]) -> _T:
        """Runs something in that loop, not for ever."""
        return self.runner.run(asyncio.wait_for(work, 60))


def config_of(directory: Path, **settings: object) -> EngineConfig:
    return EngineConfig(str(directory), **(TINY | settings))  # type: ignore[arg-type]


def serve(config: EngineConfig, command: list[str] | None = None, **options: object) -> Iterator[Served]:
    client = EngineClient(config, command, **options)  # type: ignore[arg-type]
    with asyncio.Runner() as runner:
        served = Served(client, runner)
        served.run(client.start())
        try:
            yield served
        finally:
            served.run(client.stop())


@pytest.fixture(scope="module")
def tiny(tiny_of: Callable[[str, str], Path]) -> Path:
    return tiny_of("flash", "official")


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    """The tiny model."""
    yield from serve(config_of(tiny))


@pytest.fixture(scope="module")
def instant(tiny: Path) -> Iterator[Served]:
    """A model that takes no time, and readers who may lag 200 outputs behind."""
    yield from serve(config_of(tiny, max_requests=64), [sys.executable, str(FAKE)], queue_limit=200)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), cache_bytes="24MiB")


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(length)]


def submit(client: EngineClient, id: str, prompt: list[int], sampling: Sampling, **options: object) -> RequestStream:
    return client.submit(Submit(id, np.array(prompt, "<i4").tobytes(), sampling, **options))  # type: ignore[arg-type]


class Answer(NamedTuple):
    """One child's outputs, joined."""

    tokens: list[int]
    logprobs: list[LogprobRow]
    finish: str | None
    stop_token: int | None
    usage: UsageRow | None
    prompt_logprobs: tuple[LogprobRow | None, ...] | None


def joined(outputs: list[Output], child: int = 0) -> Answer:
    own = [output for output in outputs if output.child == child]
    last = own[-1]
    assert [output.finish for output in own[:-1]] == [None] * (len(own) - 1) and last.finish is not None
    assert all(output.usage is None and output.prompt_logprobs is None for output in own[:-1])
    tokens = [token for output in own for token in output.tokens]
    rows = [row for output in own for row in output.logprobs or ()]
    return Answer(tokens, rows, last.finish, last.stop_token, last.usage, last.prompt_logprobs)


async def read(stream: RequestStream) -> list[Output]:
    return [output async for output in stream]


async def ask(client: EngineClient, id: str, prompt: list[int], sampling: Sampling, **options: object) -> list[Output]:
    return await read(submit(client, id, prompt, sampling, **options))


async def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it never came to that"
        await asyncio.sleep(0.01)


async def assert_nothing_held(client: EngineClient) -> None:
    state = await client.cache()
    assert client.ready is not None
    assert (state.held_pages, state.free_pages + state.cached_pages + state.pinned_pages) == (0, client.ready.num_pages)
    assert client.in_flight == 0


def as_offline(row: LogprobRow) -> dict[int, tuple[float, int]]:
    """A row in the offline interface's shape."""
    found = {row.token: (row.logprob, row.rank)}
    for rank, (token, value) in enumerate(zip(row.top_tokens, row.top_logprobs, strict=True), start=1):
        found.setdefault(token, (value, rank))
    return found


# The same answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 0, "prompt_logprobs": 0},
        {"temperature": 0.8, "seed": 11, "n": 2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 5},
        {"temperature": 0.0, "logit_bias": ((77, 100.0),), "stop_token_ids": (77,)},
    ],
)
def test_answers_are_those_of_the_offline_interface(served: Served, llm: LLM, settings: dict[str, object]) -> None:
    """Bit for bit, however the prompt is cut here and there."""
    prompt = ids(150, 1)
    sampling = Sampling(max_tokens=12, ignore_eos="stop_token_ids" not in settings, **settings)  # type: ignore[arg-type]
    outputs = served.run(ask(served.client, "one", prompt, sampling))
    params = SamplingParams(max_tokens=12, ignore_eos=sampling.ignore_eos, **settings)  # type: ignore[arg-type]
    (expected,) = llm.generate([prompt], params)
    for child in range(sampling.n):
        found, wanted = joined(outputs, child), expected.outputs[child]
        assert (found.tokens, found.finish) == (wanted.token_ids, wanted.finish_reason)
        assert found.stop_token == wanted.stop_reason
        rows = [{token: (one.logprob, one.rank) for token, one in row.items()} for row in wanted.logprobs or []]
        assert [as_offline(row) for row in found.logprobs] == rows
        assert found.usage is not None and found.usage.completion_tokens == len(found.tokens)
        assert found.usage.prompt_tokens == len(prompt) and min(found.usage.queued_s, found.usage.prefill_s) >= 0
    assert_prompt_logprobs(joined(outputs).prompt_logprobs, expected)
    served.run(assert_nothing_held(served.client))


def assert_prompt_logprobs(found: tuple[LogprobRow | None, ...] | None, expected: RequestOutput) -> None:
    if expected.prompt_logprobs is None:
        assert found is None
        return
    wanted = [row and {token: (one.logprob, one.rank) for token, one in row.items()} for row in expected.prompt_logprobs]
    assert found is not None and [row and as_offline(row) for row in found] == wanted


def test_an_end_of_text_token_is_named(served: Served) -> None:
    assert served.client.ready is not None
    (eos,) = served.client.ready.eos_token_ids
    found = joined(served.run(ask(served.client, "eos", ids(9, 3), Sampling(max_tokens=5, logit_bias=((eos, 100.0),)))))
    assert (found.tokens, found.finish, found.stop_token) == ([eos], "stop", eos)


def test_many_at_once(served: Served, llm: LLM) -> None:
    prompts = [ids(1 + number % 40, number) for number in range(64)]
    sampling = Sampling(max_tokens=6, seed=3, ignore_eos=True)

    async def all_of_them() -> list[list[Output]]:
        return await asyncio.gather(*(ask(served.client, f"m{i}", prompt, sampling) for i, prompt in enumerate(prompts)))

    found = [joined(outputs).tokens for outputs in served.run(all_of_them())]
    expected = llm.generate(prompts, SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    assert found == [output.outputs[0].token_ids for output in expected]
    served.run(assert_nothing_held(served.client))


def test_what_was_computed_is_reused_within_a_salt(served: Served) -> None:
    prompt, sampling = ids(200, 5), Sampling(max_tokens=2, ignore_eos=True)

    def cached(id: str, salt: str) -> tuple[int, str]:
        usage = joined(served.run(ask(served.client, id, prompt, sampling, cache_salt=salt))).usage
        assert usage is not None
        return usage.cached_tokens, usage.prefix_stop

    assert cached("s1", "a")[0] == 0
    assert cached("s2", "a") == (200, "200 tokens reused: full hit")
    assert cached("s3", "b")[0] == 0


# Ends ----------------------------------------------------------------------------------------------------------------------

LONG = Sampling(max_tokens=5000, ignore_eos=True, temperature=0.0)


@pytest.mark.parametrize("moment", ["at once", "waiting", "prefilling", "decoding", "finished"])
@pytest.mark.parametrize("n", [1, 3])
def test_cancelling(served: Served, moment: str, n: int) -> None:
    client = served.client
    states = {"at once": "", "waiting": "waiting", "prefilling": "prefilling", "decoding": "decoding", "finished": ""}

    def is_there() -> bool:
        rows = client.stats.requests if client.stats is not None else ()
        return not states[moment] or any(row.id == "target" and row.state == states[moment] for row in rows)

    async def scene() -> tuple[list[Output], list[list[Output]]]:
        others = [submit(client, f"o{i}", ids(20, i), LONG) for i in range(8 if moment == "waiting" else 1)]
        for other in others:
            await other.get_batch()
        length, tokens = (4000, 5000) if moment == "prefilling" else (30, 2 if moment == "finished" else 5000)
        sampling = Sampling(n=n, max_tokens=tokens, ignore_eos=True)
        stream = submit(client, "target", ids(length, 9), sampling)
        await until(is_there)
        early = await read(stream) if moment == "finished" else []
        client.cancel("target")
        client.cancel("target")
        outputs = early or await read(stream)
        for number in range(len(others)):
            client.cancel(f"o{number}")
        return outputs, [await read(other) for other in others]

    outputs, others = served.run(scene())
    for child in range(n):
        found = joined(outputs, child)
        assert found.finish == ("length" if moment == "finished" else "abort") and found.usage is not None
        if moment in ("waiting", "prefilling"):
            assert found.tokens == [] and found.usage.completion_tokens == 0
    assert all(joined(other).finish == "abort" for other in others)
    served.run(assert_nothing_held(client))


def test_finishing_one_output_leaves_its_sibling_and_its_memory(served: Served) -> None:
    client, prompt = served.client, ids(60, 20)

    async def scene() -> list[Output]:
        stream = submit(client, "two", prompt, Sampling(n=2, max_tokens=40, ignore_eos=True, seed=1))
        outputs: list[Output] = []
        while sum(output.child == 1 for output in outputs) < 5:
            outputs += await stream.get_batch()
        client.finish("two", 1)
        client.finish("two", 1)
        client.finish("two", 9)
        client.finish("nobody", 0)
        return outputs + await read(stream)

    outputs = served.run(scene())
    one, other = joined(outputs, 0), joined(outputs, 1)
    assert (one.finish, len(one.tokens)) == ("length", 40)
    assert (other.finish, other.stop_token) == ("stop", None) and 5 <= len(other.tokens) < 40
    again = served.run(ask(client, "more", prompt + other.tokens[:-1], Sampling(max_tokens=1)))
    usage = joined(again).usage
    assert usage is not None and usage.cached_tokens >= 60 + len(other.tokens) - 2
    served.run(assert_nothing_held(client))


def test_deadlines_waiting_and_running(served: Served) -> None:
    client = served.client

    async def scene() -> list[list[Output]]:
        running = [submit(client, f"d{i}", ids(20, i), LONG, deadline_s=1.0) for i in range(8)]
        for stream in running:
            await stream.get_batch()
        waiting = submit(client, "late", ids(20, 9), LONG, deadline_s=0.1)
        gone = submit(client, "gone", ids(20, 9), LONG, deadline_s=-1.0)
        return [await read(stream) for stream in (waiting, gone, *running)]

    waiting, gone, *running = [joined(outputs) for outputs in served.run(scene())]
    assert {found.finish for found in (waiting, gone, *running)} == {"deadline"}
    assert waiting.tokens == gone.tokens == [] and all(found.tokens for found in running)
    served.run(assert_nothing_held(client))


@pytest.mark.parametrize(
    "prompt, sampling, options, kind, field",
    [
        ([], Sampling(), {}, "config", "prompt"),
        ([5, VOCAB], Sampling(), {}, "config", "prompt"),
        ([5, -1], Sampling(), {}, "config", "prompt"),
        ([5], Sampling(temperature=-1.0), {}, "config", "temperature"),
        ([5], Sampling(stop_token_ids=(VOCAB,)), {}, "config", "stop_token_ids"),
        ([5], Sampling(n=0), {}, "config", "n"),
        ([5], Sampling(logit_bias=((4, 1.0), (4, 2.0))), {}, "config", "logit_bias"),
        ([5], Sampling(max_tokens=0), {}, "config", "max_tokens"),
        ([5] * 200_000, Sampling(), {}, "capacity", ""),
        ([5], Sampling(), {"deadline_s": float("nan")}, "config", "deadline_s"),
    ],
)
def test_what_cannot_be_served_is_refused(
    served: Served, prompt: list[int], sampling: Sampling, options: dict[str, object], kind: str, field: str
) -> None:
    with pytest.raises(EngineRefused) as caught:
        served.run(ask(served.client, "bad", prompt, sampling, **options))
    assert (caught.value.kind, caught.value.field) == (kind, field)
    assert "\n" not in caught.value.message and len(caught.value.message) < 500
    assert joined(served.run(ask(served.client, "bad", [5], Sampling(max_tokens=1)))).finish is not None
    served.run(assert_nothing_held(served.client))


def test_an_id_is_one_requests(served: Served) -> None:
    async def scene() -> list[Output]:
        stream = submit(served.client, "same", [5], Sampling(max_tokens=3, ignore_eos=True))
        with pytest.raises(ConfigError, match="id="):
            submit(served.client, "same", [5], Sampling(max_tokens=3))
        return await read(stream)

    assert len(joined(served.run(scene())).tokens) == 3


# Readers -------------------------------------------------------------------------------------------------------------------


def test_a_slow_reader_is_cut_off_and_others_are_not(instant: Served) -> None:
    client = instant.client

    async def scene() -> tuple[EngineRefused, int]:
        slow = submit(client, "slow", [5], Sampling(max_tokens=100_000, ignore_eos=True))
        others = await asyncio.gather(*(ask(client, f"f{i}", [5], Sampling(max_tokens=500)) for i in range(4)))
        await until(lambda: not client.in_flight)
        with pytest.raises(EngineRefused) as caught:
            while await slow.get_batch():
                pass
        return caught.value, sum(len(joined(outputs).tokens) for outputs in others)

    error, count = instant.run(scene())
    assert error.kind == "capacity" and "200 outputs" in str(error) and count == 2000
    instant.run(assert_nothing_held(client))


def test_batches_and_single_outputs_are_the_same(instant: Served) -> None:
    async def batches() -> list[Output]:
        stream, found = submit(instant.client, "b", [5], Sampling(n=2, max_tokens=90)), []
        while batch := await stream.get_batch():
            found += batch
        assert await stream.get_batch() == []
        return found

    one, other = instant.run(batches()), instant.run(ask(instant.client, "b", [5], Sampling(n=2, max_tokens=90)))
    assert [joined(one, child).tokens for child in (0, 1)] == [joined(other, child).tokens for child in (0, 1)]


def test_listeners_hear_counters_and_can_leave(instant: Served) -> None:
    heard: list[Stats] = []
    leave = instant.client.add_listener(heard.append)
    instant.run(ask(instant.client, "l", ids(70, 1), Sampling(max_tokens=50)))
    instant.run(until(lambda: bool(heard) and heard[-1].running == 0))
    leave()
    count = len(heard)
    instant.run(asyncio.sleep(0.6))
    assert len(heard) == count and instant.client.stats is not None
    assert instant.client.stats.time_s > heard[-1].time_s  # it is told at rest too
    assert heard[-1].drawn_tokens - heard[0].drawn_tokens <= 50 <= heard[-1].drawn_tokens
    assert heard[-1].finished["length"] >= 1 and heard[-1].held_pages == 0
    rows = {row.name: row for row in heard[-1].memories}
    assert sum(row.cached_bytes for row in rows.values()) == heard[-1].cached_pages * instant.client.ready.page_bytes  # type: ignore[union-attr]


# Deaths --------------------------------------------------------------------------------------------------------------------


def test_a_killed_engine_fails_its_requests_and_comes_back(served: Served) -> None:
    client, prompt = served.client, ids(40, 2)
    expected = joined(served.run(ask(client, "before", prompt, Sampling(max_tokens=8, seed=4, ignore_eos=True)))).tokens
    served.run(until(lambda: client.stats is not None and client.stats.running == 0))
    before, restarts = client.stats, client.num_restarts

    async def scene() -> tuple[list[EngineGone], EngineGone]:
        streams = [submit(client, f"k{i}", ids(20, i), LONG) for i in range(3)]
        for stream in streams:
            await stream.get_batch()
        assert client.ready is not None
        os.kill(client.ready.pid, signal.SIGKILL)
        errors = []
        for stream in streams:
            with pytest.raises(EngineGone) as caught:
                await read(stream)
            errors.append(caught.value)
        assert client.state == "restarting"
        with pytest.raises(EngineGone) as refused:
            submit(client, "no", [5], Sampling())
        with pytest.raises(EngineGone):
            await client.cache()
        await until(lambda: client.state == "ready", 40)
        return errors, refused.value

    errors, refused = served.run(scene())
    assert all("SIGKILL" in str(error) and error.retry_after_s >= 1 for error in errors) and refused.retry_after_s >= 1
    assert joined(served.run(ask(client, "after", prompt, Sampling(max_tokens=8, seed=4, ignore_eos=True)))).tokens == expected
    assert client.num_restarts == restarts + 1
    served.run(until(lambda: client.stats is not None and client.stats.running == 0))
    after = client.stats
    assert before is not None and after is not None
    assert after.drawn_tokens >= before.drawn_tokens + 8 and after.time_s > before.time_s and after.steps > before.steps
    assert all(after.finished[reason] >= count for reason, count in before.finished.items())
    served.run(assert_nothing_held(client))


#: starts the process, but fails at the second time.   $0  a file, $1  python, $2  the process's script, $3  the address
FLAKY = 'echo >> "$0"; [ "$(wc -l < "$0")" -eq 2 ] && exit 3; exec "$1" "$2" "$3"'


def test_a_silent_engine_is_ended_and_started_until_it_serves(tiny: Path, tmp_path: Path) -> None:
    command = ["sh", "-c", FLAKY, str(tmp_path / "starts"), sys.executable, str(FAKE)]
    for served in serve(config_of(tiny), command, silence_s=1.0):
        client = served.client

        async def scene(client: EngineClient = client) -> str:
            assert client.ready is not None
            stream = submit(client, "stuck", [5], Sampling(max_tokens=400_000))
            await stream.get_batch()
            os.kill(client.ready.pid, signal.SIGSTOP)
            with pytest.raises(EngineGone) as caught:
                await read(stream)
            await until(lambda: client.state == "ready", 40)
            return str(caught.value)

        assert "no sign of life" in served.run(scene())
        assert client.num_restarts == 2 and (tmp_path / "starts").read_text() == "\n" * 3
        assert joined(served.run(ask(client, "again", [5], Sampling(max_tokens=3)))).finish == "length"
    with pytest.raises(EngineGone, match="stopped"):
        submit(client, "no", [5], Sampling())


def test_what_comes_late_or_is_no_report_is_dropped(instant: Served) -> None:
    client, before = instant.client, instant.client.num_late
    for data in (b"", b"\xff", msgspec.msgpack.encode({"type": "Outputs", "items": 5}), msgspec.msgpack.encode({"type": "?"})):
        client._on_message(data)
    assert client.num_late == before
    client._on_message(msgspec.msgpack.encode(Outputs((Output("nobody", 0, (1,)), Output("nobody", 0, (), finish="stop")))))
    client._on_message(msgspec.msgpack.encode(Refusal("nobody", "config", "no")))
    assert client.num_late == before + 3
    client.cancel("nobody"), client.finish("nobody", 0)
    assert joined(instant.run(ask(client, "still", [5], Sampling(max_tokens=3)))).finish == "length"


@pytest.mark.parametrize(
    "settings, error, text",
    [
        ({"model": "/nowhere/at/all"}, ConfigError, "model='/nowhere/at/all' is not valid"),
        ({"cache_bytes": 1000}, CapacityError, "cache_bytes=1000 holds 0 pages"),
    ],
)
def test_what_keeps_an_engine_from_starting_is_raised(
    tiny: Path, settings: dict[str, object], error: type[Exception], text: str
) -> None:
    given = {"model": str(tiny)} | TINY | settings
    client = EngineClient(EngineConfig(**given))  # type: ignore[arg-type]
    with pytest.raises(error, match=text):
        asyncio.run(client.start())
    assert client.state == "stopped"


def test_a_process_that_ends_at_once_is_told_of(tiny: Path) -> None:
    client = EngineClient(config_of(tiny), [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(EngineGone, match="exit code 7"):
        asyncio.run(client.start())


def test_stopping_drains(tiny: Path) -> None:
    async def scene(drain_s: float, max_tokens: int) -> tuple[str | None, float]:
        client = EngineClient(config_of(tiny), [sys.executable, str(FAKE), "--step-ms", "10"])
        await client.start()
        stream = submit(client, "last", [5], Sampling(max_tokens=max_tokens))
        reading = asyncio.create_task(read(stream))
        await until(lambda: bool(client.stats and client.stats.running))
        begin = time.monotonic()
        await client.stop(drain_s)
        assert client.state == "stopped"
        await client.stop()
        return joined(await reading).finish, time.monotonic() - begin

    async def both() -> list[tuple[str | None, float]]:
        return await asyncio.gather(scene(30.0, 50), scene(0.2, 50_000))

    (drained, _), (cut, seconds) = asyncio.run(both())
    assert (drained, cut) == ("length", "abort") and seconds < 20


PARENT = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests were started in the background
from lamina.base.config import EngineConfig
from lamina.engine.client import EngineClient

async def main():
    client = EngineClient(EngineConfig(sys.argv[1], cache_bytes="24MiB"), sys.argv[3:])
    starting = asyncio.create_task(client.start())
    while client._process is None:
        await asyncio.sleep(0)
    print(client._process.pid, flush=True)
    if sys.argv[2] == "ready":
        await starting
    print("there", flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind_when_the_parent_ends(tiny: Path, tmp_path: Path, how: signal.Signals) -> None:
    moment = "ready" if how is signal.SIGKILL else "loading"
    environment = dict(os.environ) | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(tiny), moment, sys.executable, str(FAKE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "there\n"
        parent.send_signal(how)
        parent.wait(20)
    end = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pid)
    assert list(tmp_path.iterdir()) == []


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_a_long_life(tiny: Path) -> None:
    """3,000 requests, 64 at once, some cancelled, finished, bad or late, the engine killed once: each ends in one clear way."""
    rng = random.Random(11)
    ends: dict[str, int] = {}

    async def one(client: EngineClient, number: int) -> str:
        temperature = -1.0 if number % 50 == 0 else 1.0
        sampling = Sampling(n=rng.choice((1, 1, 2)), max_tokens=rng.choice((1, 20, 200)), temperature=temperature)
        prompt, deadline_s = ids(rng.randrange(1, 600), number % 100), rng.choice((None, None, 5, 0.01))
        try:
            stream = submit(client, f"r{number}", prompt, sampling, deadline_s=deadline_s)
            outputs: list[Output] = []
            while batch := await stream.get_batch():
                outputs += batch
                if rng.random() < 0.05:
                    client.cancel(stream.id)
                if rng.random() < 0.02:
                    client.finish(stream.id, 0)
        except (EngineGone, EngineRefused) as error:
            return type(error).__name__
        finishes = [joined(outputs, child).finish for child in range(sampling.n)]
        return str(finishes[-1])

    async def scene(client: EngineClient) -> None:
        numbers = iter(range(3000))

        async def worker() -> None:
            for number in numbers:
                await until(lambda: client.state == "ready", 60)
                if number == 1500 and client.ready is not None:
                    os.kill(client.ready.pid, signal.SIGKILL)
                end = await one(client, number)
                ends[end] = ends.get(end, 0) + 1

        await asyncio.gather(*(worker() for _ in range(64)))

    for served in serve(config_of(tiny, max_requests=32), [sys.executable, str(FAKE)]):
        served.runner.run(asyncio.wait_for(scene(served.client), 300))
        served.run(assert_nothing_held(served.client))
        assert served.client.num_restarts == 1 and sum(ends.values()) == 3000
        assert set(ends) == {"length", "abort", "stop", "deadline", "EngineGone", "EngineRefused"}, ends
        assert ends["EngineGone"] <= 64 and ends["length"] > 300, ends
