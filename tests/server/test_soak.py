"""Many clients at once: impatient, mistaken, there when the engine dies. Every request ends, and nothing is left behind."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import httpx
import pytest

MiB = 1 << 20
_PROMPTS = (
    "The memory of a request is a log and a slot. " * 12, "A checkpoint is a frozen slot. " * 6, "Once upon a time",
    "import asyncio\n" * 20,
)  # fmt: skip
#: (path, body, status) of requests that are wrong; a body that is a text is sent as it is
_WRONG: tuple[tuple[str, object, int], ...] = (
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": [5_000_000]}, 400),
    ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("/v1/completions", "{not json", 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 99, "logprobs": True}, 400),
)


@dataclass
class Soak:
    """What is to happen, and what did. ends  how requests ended; faults  what must not happen."""

    url: str
    count: int
    at_once: int
    rng: random.Random
    kill: Callable[[], None]
    max_tokens: int
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_done: int = 0
    samples: list[tuple[int, int, int]] = field(default_factory=list)

    async def run(self, rss: Callable[[], tuple[int, int]]) -> None:
        """All requests, at_once of them in flight; the engine is killed once, after a third."""
        plan = [self.rng.choices(("good", "cancelled", "wrong"), (88, 10, 2))[0] for _ in range(self.count)]
        slots = asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.at_once)
        async with httpx.AsyncClient(base_url=self.url, timeout=120.0, trust_env=False, limits=limits) as client:

            async def one(number: int, kind: str) -> None:
                async with slots:
                    if number == self.count // 3:
                        self.kill()
                    await self._one(client, kind)
                self.num_done += 1
                if self.num_done % max(1, self.count // 8) == 0:
                    self.samples.append((self.num_done, *rss()))

            await asyncio.gather(*(one(number, kind) for number, kind in enumerate(plan)))

    async def _one(self, client: httpx.AsyncClient, kind: str) -> None:
        if kind == "wrong":
            path, body, status = self.rng.choice(_WRONG)
            content = body if isinstance(body, str) else json.dumps(body)
            response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            self._note_error(response.status_code, response.content, "refused", status)
            return
        if kind == "good":
            await self._ask(client)
            return
        task = asyncio.create_task(self._ask(client))
        await asyncio.sleep(self.rng.random() * 0.6)
        if task.cancel():
            self.ends["cancelled"] += 1
        await asyncio.gather(task, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        """One request, again after a 503 when it says to come again."""
        tokens, is_stream = self.rng.randint(1, self.max_tokens), self.rng.random() < 0.6
        text = self.rng.choice(_PROMPTS) + str(self.rng.randrange(20)) * self.rng.randrange(2)
        count = 1 + (self.rng.random() < 0.1)
        body: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "stream": is_stream, "n": count}
        path = "/v1/chat/completions" if self.rng.random() < 0.5 else "/v1/completions"
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        for _ in range(60):
            async with client.stream("POST", path, json=body) as response:
                content = await response.aread()
            if response.status_code != 503:
                break
            self.ends["asked to come again"] += 1
            if "retry-after" not in response.headers:
                self.faults.append("a 503 without Retry-After")
            await asyncio.sleep(0.5)
        if response.status_code != 200:
            self._note_error(response.status_code, content, "failed", 500)
        elif is_stream:
            self._note_stream(content.decode())
        else:
            answer = json.loads(content)
            has_ended = all(one["finish_reason"] for one in answer["choices"])
            ok = answer["usage"]["completion_tokens"] == tokens * count and has_ended
            self.ends["answered"] += ok
            if not ok:
                self.faults.append(f"an answer that is not whole: {content[:300]!r}")

    def _note_stream(self, text: str) -> None:
        events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
        last = events[-1] if events else ""
        if last == "[DONE]":
            self.ends["answered"] += 1
        elif last.startswith('{"error"') and json.loads(last)["error"]["message"]:
            self.ends["broken off with an error"] += 1
        else:
            self.faults.append(f"a stream without an end: {text[-300:]!r}")

    def _note_error(self, status: int, content: bytes, name: str, expected: int) -> None:
        try:
            message = json.loads(content)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = ""
        if status != expected or not message:
            self.faults.append(f"{status} instead of {expected}: {content[:300]!r}")
        self.ends[name] += 1


def _rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _soak(start_server: Callable[..., object], count: int, at_once: int, max_tokens: int) -> tuple[Soak, object]:
    served = start_server("--cache-bytes", "16MiB", "--max-queue", "256")
    served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})

    def rss() -> tuple[int, int]:
        try:
            return _rss(served.process.pid), _rss(served.engine_pid())
        except OSError:
            return 0, 0

    soak = Soak(served.url, count, at_once, random.Random(7), lambda: os.kill(served.engine_pid(), signal.SIGKILL), max_tokens)
    asyncio.run(soak.run(rss))
    return soak, served


def _check_end(soak: Soak, served: object) -> None:
    """Nothing wrong was seen, every request has ended, and no page is held; without what is kept for reuse all are free."""
    assert not soak.faults, soak.faults[:5]
    ends = soak.ends
    ended = ends["answered"] + ends["cancelled"] + ends["refused"] + ends["failed"] + ends["broken off with an error"]
    assert ended == soak.count, ends
    assert ends["answered"] >= 0.75 * soak.count, ends
    served.wait_ready()
    pages = served.idle_pages()
    assert pages["held"] == 0, pages
    health = served.http.get("/health").json()
    assert (health["status"], health["restarts"], health["running"], health["waiting"]) == ("ok", 1, 0, 0)
    pages = served.post("/v1/cache", {"action": "drop"}).json()["pages"]
    assert pages["held"] == pages["cached"] == 0 and pages["free"] > 0, pages
    state = served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "ignore_eos": True}).json()
    assert state["usage"]["completion_tokens"] == 2


def test_small_soak(start_server: Callable[..., object], serving: ModuleType) -> None:
    soak, served = _soak(start_server, 64, 16, 4)
    _check_end(soak, served)


@pytest.mark.long
def test_soak(start_server: Callable[..., object], serving: ModuleType) -> None:
    """2,000 requests, 64 at once; the memory of both processes is flat over the second half."""
    soak, served = _soak(start_server, 2_000, 64, 12)
    print(dict(soak.ends), [(done, server // MiB, engine // MiB) for done, server, engine in soak.samples])
    _check_end(soak, served)
    (_, server_before, engine_before), (_, server_after, engine_after) = soak.samples[4], soak.samples[-1]
    assert server_after - server_before < 16 * MiB, soak.samples
    assert engine_after - engine_before < 32 * MiB, soak.samples
