"""The router in front of instances that only pretend, and of real ones that are killed."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from lamina.base.errors import ConfigError
from lamina.server.route_client import parse_origin
from lamina.server.route_instances import Instances
from lamina.server.route_prefix import Affinity, prefix_chain
from lamina.server.router import Router
from lamina.server.settings import ServerSettings

Work = Callable[["Fake", str, bytes, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(eq=False)
class Fake:
    """An instance that says what it is, and otherwise does what `work` does. seen  (head, body) of what it was asked."""

    role: str = "both"
    work: Work | None = None
    peer: str = ""
    model_id: str = "m"
    server: asyncio.Server | None = None
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    cache: list[str] = field(default_factory=list)
    hits: int = 0
    is_draining: bool = False

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")), 0)
            body = await reader.readexactly(length)
            if head.startswith("GET /v1/instance"):
                about = {
                    "role": self.role, "peer_address": self.peer, "models": ["fake"], "model_id": self.model_id, "layout_id": "l",
                    "block_tokens": 256, "running": 0, "waiting": 0, "is_draining": self.is_draining,
                }  # fmt: skip
                writer.write(reply(json.dumps(about).encode()))
            else:
                self.seen.append((head, body))
                if self.work is None:
                    writer.write(reply(b'{"from": "%s"}' % self.url.encode()))
                else:
                    await self.work(self, head, body, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def routed(*fakes: Fake, **settings: object) -> AsyncIterator[tuple[httpx.AsyncClient, Router]]:
    """A client of a router in front of these."""
    for fake in fakes:
        await fake.start()
    router = Router(ServerSettings(**settings), Instances([fake.url for fake in fakes]))
    await asyncio.gather(*(router.instances.look(one) for one in router.instances.all))
    transport = httpx.ASGITransport(router)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client, router
    for fake in fakes:
        assert fake.server is not None
        fake.server.close()


def chat(*texts: str, **more: object) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], **more}


async def remember(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    """A cache without end: counts the characters of a prompt that some prompt before began with."""
    text = "".join(one["content"] + "\n" for one in json.loads(body)["messages"])
    fake.hits += max((sum(1 for _ in _common(text, other)) for other in fake.cache), default=0)
    fake.cache.append(text)
    writer.write(reply(b"{}"))


def _common(left: str, right: str) -> list[str]:
    found = []
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        found.append(one)
    return found


def test_turns_of_a_chat_find_what_the_ones_before_left() -> None:
    """The hit rate of many chats at once, mixed, equals that of one instance that has everything: the ceiling."""

    async def run(count: int) -> int:
        rng = random.Random(1)
        fakes = [Fake(work=remember) for _ in range(count)]
        async with routed(*fakes) as (client, _):
            chats = [[f"chat {number}: " + "".join(rng.choices("abcdef ", k=600))] for number in range(9)]
            for _ in range(5):
                rng.shuffle(chats)
                for texts in chats:
                    assert (await client.post("/v1/chat/completions", json=chat(*texts))).status_code == 200
                    texts += ["".join(rng.choices("ghij ", k=400)) for _ in range(2)]
        assert all(fake.cache for fake in fakes), "one of them did nothing"
        return sum(fake.hits for fake in fakes)

    ceiling = asyncio.run(run(1))
    found = asyncio.run(run(3))
    assert ceiling > 30_000
    assert found >= ceiling - 9 * 10, "what differs is the first words, which all chats share"


def test_prefill_and_decode_are_chosen_by_what_they_are() -> None:
    async def run() -> None:
        prefill, other = Fake("prefill", peer="127.0.0.1:7"), Fake("prefill", peer="127.0.0.1:8", model_id="other")
        decode, both = Fake("decode"), Fake("both")
        async with routed(prefill, other, decode) as (client, router):
            for number in range(4):
                assert (await client.post("/v1/completions", json={"prompt": f"{number}"})).status_code == 200
            assert not prefill.seen and not other.seen and len(decode.seen) == 4
            assert all("x-lamina-prefill: 127.0.0.1:7\r\n" in head for head, _ in decode.seen)
            assert (await client.get("/peers")).text == "127.0.0.1:7\n127.0.0.1:8\n"
            assert (await client.get("/v1/models", headers={"x-lamina-prefill": "evil:1"})).status_code == 200
            assert "lamina-prefill" not in decode.seen[-1][0], "only the router names a peer"
            decode.is_draining = True
            await router.instances.look(router.instances.all[2])
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            assert prefill.seen or other.seen, "where nobody else is left those who compute for others answer"
        async with routed(both) as (client, _):
            await client.post("/v1/completions", json={"prompt": "x"})
            assert "lamina-prefill" not in both.seen[0][0]

    asyncio.run(run())


async def die(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


async def refuse(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(b'{"error": {}}', "503 Service Unavailable"))


async def stream(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for text in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
        writer.write(b"%x\r\n%s\r\n" % (len(text), text))
        await writer.drain()
        await asyncio.sleep(0.01)
    writer.write(b"0\r\n\r\n")


async def stream_and_die(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()


async def hang(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize("bad", [die, refuse], ids=["dies", "refuses"])
def test_what_has_not_begun_is_asked_elsewhere(bad: Work) -> None:
    async def run() -> None:
        async with routed(Fake(work=bad), Fake(), Fake(work=bad)) as (client, router):
            for number in range(6):
                answer = await client.post("/v1/completions", json={"prompt": f"{number}"})
                assert answer.status_code == 200 and answer.json()["from"] == str(router.instances.all[1].origin)
            assert router.counts["retries"] >= 1 and all(one.in_work == 0 for one in router.instances.all)
        async with routed(Fake(work=bad)) as (client, _):
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503 and "error" in answer.json()
        async with routed(Fake(work=bad)) as (client, router):
            router.instances.lose(router.instances.all[0], "gone")
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503 and answer.json()["error"]["message"] == "no instance serves"
            assert (await client.get("/health")).status_code == 503

    asyncio.run(run())


def test_streams_pass_and_end_with_an_error_where_they_break() -> None:
    async def run() -> None:
        async with routed(Fake(work=stream)) as (client, _):
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            assert answer.text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        async with routed(Fake(work=stream_and_die), Fake(work=stream_and_die)) as (client, router):
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            assert answer.text.startswith("data: 1\n\n") and "[DONE]" not in answer.text
            last = json.loads(answer.text.strip().rpartition("data: ")[2])
            assert last["error"]["code"] == "instance_lost"
            assert router.counts["lost_streams"] == 1 and router.counts["retries"] == 0

    asyncio.run(run())


def test_an_instance_that_is_lost_gives_up_what_it_has() -> None:
    """It accepts a request and never answers, and then not even what it is."""

    async def run() -> None:
        stuck, good = Fake(work=hang), Fake()
        async with routed(stuck, good) as (client, router):
            router.instances.all[1].about, about = None, router.instances.all[1].about
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
            while not stuck.seen:
                await asyncio.sleep(0.01)
            router.instances.all[1].about = about
            router.instances.lose(router.instances.all[0], "silent")
            assert (await asking).json()["from"] == good.url
            assert router.instances.all[0].in_work == 0

    asyncio.run(run())


def test_an_answer_that_is_kept_is_asked_where_it_is() -> None:
    async def keep(fake: Fake, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"id": "resp_%d", "from": "%s"}' % (id(fake) % 1000, fake.url.encode())))

    async def run() -> None:
        fakes = [Fake(work=keep) for _ in range(3)]
        async with routed(*fakes) as (client, _):
            first = (await client.post("/v1/responses", json={"input": "x"})).json()
            for _ in range(4):
                body = {"input": "quite another text", "previous_response_id": first["id"]}
                assert (await client.post("/v1/responses", json=body)).json()["from"] == first["from"]
                assert (await client.get(f"/v1/responses/{first['id']}")).json()["from"] == first["from"]
            assert (await client.get("/v1/cache")).status_code == 404

    asyncio.run(run())


def test_who_may_ask() -> None:
    async def run() -> None:
        async with routed(Fake(), api_keys=("a-long-secret",)) as (client, _):
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 401
            headers = {"authorization": "Bearer a-long-secret"}
            assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
            assert (await client.get("/health")).status_code == 200
        async with routed(Fake(), max_body_bytes=100) as (client, _):
            assert (await client.post("/v1/completions", json={"prompt": "x" * 200})).status_code == 413
            assert (await client.get("/v1/models", headers={"host": "evil.example"})).status_code == 403

    asyncio.run(run())
    for bad in ("ftp://x:1", "http://x:1/other", "http://user@x:1", "http://x:y", "http://"):
        with pytest.raises(ConfigError):
            parse_origin(bad)
    assert str(parse_origin("[::1]:80/v1")) == "http://[::1]:80"


def test_beginnings() -> None:
    """A chain is shared exactly as far as the prompts are, whatever protocol and settings."""

    def shared(left: object, right: object) -> int:
        chains = [prefix_chain(json.dumps(one).encode()) for one in (left, right)]
        return sum(1 for one, other in zip(*chains, strict=False) if one == other)

    long = "x" * 1000
    assert shared(chat(long), chat(long, "answer", "more")) >= 7
    assert shared(chat(long, temperature=1.0), chat(long, "a", temperature=0.5, seed=3)) >= 7
    assert shared(chat(long), chat("y" + long)) == 0
    assert shared(chat(long, tools=[{"a": 1}]), chat(long)) == 0
    assert shared(chat(long, cache_salt="a"), chat(long, cache_salt="b")) == 0
    assert shared({"prompt": long}, {"prompt": long + "more"}) >= 7
    assert shared({"prompt": list(range(1000))}, {"prompt": list(range(1200))}) >= 30
    assert shared({"prompt": [1, 2] * 500}, {"prompt": [1, 3] * 500}) == 0
    assert shared({"input": long, "instructions": "i"}, {"input": long, "instructions": "i"}) >= 7
    for body in (b"", b"{", b"[]", b'{"model": 1}', b'{"prompt": ' + b"[" * 10_000):
        assert prefix_chain(body) == []
    assert len(prefix_chain(b'{"messages": "\xff"}')) == 1, "the instance says what is wrong with it"
    kept: Affinity[str] = Affinity()
    chain = prefix_chain(json.dumps(chat(long)).encode())
    kept.note("a", chain[:3])
    assert [kept.known(who, chain) for who in ("a", "b")] == [3, 0]
    kept.forget("a")
    assert kept.known("a", chain) == 0


@pytest.mark.long
def test_real_instances_that_are_killed(serving: ModuleType, tmp_path: Path) -> None:
    """Over HTTP, with the model in the package: engines and servers die at any moment; every answer is right."""

    def free_port() -> int:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return int(sock.getsockname()[1])

    port, ports = free_port(), [free_port() for _ in range(4)]
    (tmp_path / "key").write_text("a key that these instances share")
    common = ("--peer-key-file", str(tmp_path / "key"), "--cache-bytes", "64MiB", "--no-ui")
    peers = ("--role", "decode", "--peers", f"http://127.0.0.1:{port}/peers", "--handover-tokens", "32")

    def begin(number: int) -> object:
        flags = ("--role", "prefill") if number < 2 else peers
        return serving.start(None, *common, *flags, "--port", str(ports[number]))

    instances = [begin(number) for number in range(4)]
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    router = serving.start(None, *urls, "--port", str(port), program=("-m", "lamina", "route"))
    bodies = [
        {"prompt": f"Story {number}. " + "Once upon a time there was a small model. " * 9, "max_tokens": 12, "temperature": 0.8,
         "seed": number}
        for number in range(12)
    ]  # fmt: skip
    right = [instances[0].post("/v1/completions", body).json()["choices"] for body in bodies]
    rng, wrong, failed, ends = random.Random(5), [], [], time.monotonic() + 60

    def ask(seed: int) -> None:
        own = random.Random(seed)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            while time.monotonic() < ends:
                number = own.randrange(len(bodies))
                answer = client.post("/v1/completions", json=bodies[number] | {"cache_salt": str(own.randrange(9))})
                if answer.status_code != 200:
                    failed.append(answer.text)
                elif answer.json()["choices"] != right[number]:
                    wrong.append(answer.text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    kills = 0
    while time.monotonic() < ends - 5:
        time.sleep(rng.random() * 3)
        number = rng.randrange(4)
        if rng.random() < 0.5:
            instances[number].process.send_signal(signal.SIGKILL)
            instances[number].process.wait()
            instances[number] = begin(number)
        else:
            os.kill(instances[number].engine_pid(), signal.SIGKILL)
        kills += 1
    for thread in threads:
        thread.join()
    assert kills > 5 and not wrong, wrong[:2]
    assert all("no instance" in one or "engine" in one or "lost" in one for one in failed), failed[:3]
    for one in (router, *instances):
        one.stop()
