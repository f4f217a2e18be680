"""Sends a benchmark's jobs: when each begins, how many requests are in flight, and how conversations grow."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from lamina.cli.bench_client import LoadClient, Result
from lamina.cli.bench_data import Job, Turn
from lamina.cli.http_client import Address

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Load:
    """How jobs are sent.

    rate      jobs a second, in a Poisson process; inf: all at once.   concurrency  most requests in flight; None: any number.
    endpoint  chat or completions.   temperature None: the server's.   extra  fields that every request has besides.
    """

    address: Address
    key: str | None
    endpoint: str
    model: str
    rate: float = math.inf
    concurrency: int | None = None
    seed: int = 0
    temperature: float | None = 0.0
    is_streamed: bool = True
    timeout_s: float = 3600.0
    extra: tuple[tuple[str, object], ...] = ()


async def drive(
    load: Load, jobs: Sequence[Job], on_done: Callable[[Result], None] = lambda _: None
) -> tuple[list[Result], float]:
    """Runs all jobs; (results, seconds from the first request to the end of the last). A conversation ends at its first error."""
    client = LoadClient(load.address, load.key, any(len(job.turns) > 1 for job in jobs), load.timeout_s)
    slots = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    results: list[Result] = []

    async def run(job: Job, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        messages = [{"role": "system", "content": job.system}] if job.system else []
        for turn in job.turns:
            messages.append({"role": "user", "content": turn.text})
            async with slots:
                result = await client.post(PATHS[load.endpoint], request_of(load, turn, messages))
            results.append(result)
            on_done(result)
            if not result.is_good:
                return
            messages.append({"role": "assistant", "content": result.text})

    start = time.perf_counter()
    try:
        await asyncio.gather(*(run(job, wait_s) for job, wait_s in zip(jobs, arrivals(load, len(jobs)), strict=True)))
    finally:
        client.close()
    return results, time.perf_counter() - start


def arrivals(load: Load, count: int) -> list[float]:
    """When each job begins, in seconds from the start: gaps are exponential, as of visitors who know nothing of each other."""
    if math.isinf(load.rate):
        return [0.0] * count
    rng = random.Random(load.seed)
    found, now = [], 0.0
    for _ in range(count):
        found.append(now)
        now += rng.expovariate(load.rate)
    return found


def request_of(load: Load, turn: Turn, messages: Sequence[dict[str, str]]) -> dict[str, object]:
    """The body of a request, whose answer has exactly turn.output_len tokens."""
    request: dict[str, object] = {"model": load.model, "max_tokens": turn.output_len, "ignore_eos": True}
    if load.endpoint == "chat":
        request["messages"] = messages
    else:
        request["prompt"] = list(turn.ids) if turn.ids else turn.text
    if load.temperature is not None:
        request["temperature"] = load.temperature
    if load.is_streamed:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
    return request | dict(load.extra)
