"""The server's life: keys, full queues, bodies, slow clients, clients that go, an engine that is killed, and the end."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import anthropic
import httpx
import openai
import pytest

from lamina.cli import main


class Served(Protocol):
    """See serving.Served."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    url: str
    key: str | None

    def post(self, path: str, body: object) -> httpx.Response: ...
    def new_client(self, **settings: object) -> httpx.Client: ...
    def engine_pid(self) -> int: ...
    def wait_ready(self, status: int = 200, seconds: float = 30.0) -> None: ...
    def idle_pages(self, seconds: float = 10.0) -> dict[str, int]: ...
    def stderr(self) -> str: ...
    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 20.0) -> int: ...


KEY, OTHER = "first-key-0123456789", "second-key-0123456789"
TEXT = "/v1/completions"
LONG = {"prompt": "A long answer", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(start_server: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys and small limits."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"# two users\n{KEY}\n\n{OTHER}\n")
    served = start_server(
        "--api-key-file", str(keys), "--salt-by-api-key", "--max-queue", "7", "--max-body-bytes", "64KiB",
        "--max-requests", "4", "--keep-alive-seconds", "0.25",
        "--client-seconds", "1.5", "--drain-seconds", "20", "--allow-origin", "https://app.example",
        "--cache-bytes", "64MiB", "-v", key=KEY,
    )  # fmt: skip
    yield served


def pages(served: Served) -> tuple[int, int]:
    """(held, free or kept) once nothing runs."""
    found = served.idle_pages()
    held = found.get("held", found.get("held_pages", -1))
    return held, sum(
        value for name, value in found.items() if isinstance(value, int) and "held" not in name and "bytes" not in name
    )


def test_a_key_is_needed(guarded: Served) -> None:
    bare = httpx.Client(base_url=guarded.url, trust_env=False)
    for path in ("/v1/models", "/v1/cache", "/metrics", "/docs", "/openapi.json"):
        assert bare.get(path).status_code == 401, path
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"x-api-key": KEY[:-1]},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
    ):
        response = bare.get("/v1/models", headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text
    for headers in ({"Authorization": f"Bearer {OTHER}"}, {"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}):
        assert bare.get("/v1/models", headers=headers).status_code == 200
    assert bare.get("/health").status_code == bare.get("/ready").status_code == bare.get("/version").status_code == 200
    assert bare.get("/docs", auth=("me", KEY)).status_code != 401 and bare.get("/v1/models", auth=("me", KEY)).status_code == 401
    assert "Basic" in bare.get("/docs").headers["www-authenticate"]


def test_each_key_has_its_own_cache(guarded: Served) -> None:
    body = {"prompt": "shared prefix " * 200, "max_tokens": 1}

    def cached(key: str, salt: str = "") -> int:
        response = guarded.http.post(TEXT, json=body | {"cache_salt": salt}, headers={"Authorization": f"Bearer {key}"})
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0 and cached(KEY) > 100
    assert cached(OTHER) == 0 and cached(OTHER) > 100
    assert cached(KEY, "x") == 0


def test_a_key_sees_and_changes_its_own_prefixes_only(guarded: Served) -> None:
    """The first key is the operator's: it sees all."""

    def ask(key: str, method: str, body: object = None, path: str = "/v1/cache") -> httpx.Response:
        return guarded.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})

    def listed(key: str) -> set[str]:
        state = ask(key, "GET").json()
        assert state["num_prefixes"] == len(state["prefixes"])
        return {row["key"] for row in state["prefixes"]}

    assert ask(KEY, "DELETE").json()["pages"]["cached"] == 0
    for key, words, salt in ((KEY, "of the first", ""), (OTHER, "of the second", ""), (OTHER, "of the second", "more")):
        body = {"prompt": f"a prefix {words} " * 100, "max_tokens": 1, "cache_salt": salt}
        assert ask(key, "POST", body, TEXT).status_code == 200
    guarded.idle_pages()
    everything, second = listed(KEY), listed(OTHER)
    first = everything - second
    assert len(second) == 2 and len(first) == 1 and second < everything
    assert ask(OTHER, "GET").json()["pages"] == ask(KEY, "GET").json()["pages"]
    for action in ("pin", "unpin", "drop"):
        foreign, unknown = (ask(OTHER, "POST", {"action": action, "key": key}) for key in (*first, "0" * 32))
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json()["error"]["message"].replace(*first, "0" * 32) == unknown.json()["error"]["message"]
    assert ask(OTHER, "DELETE", path=f"/v1/cache?key={min(first)}").status_code == 404
    assert ask(KEY, "POST", {"action": "pin", "key": min(second)}).status_code == 200
    left = ask(OTHER, "DELETE").json()
    assert [(row["key"], row["is_pinned"]) for row in left["prefixes"]] == [(min(second), True)]
    assert listed(KEY) == first | {min(second)}
    assert ask(OTHER, "POST", {"action": "unpin", "key": min(second)}).status_code == 200
    assert ask(OTHER, "DELETE", path=f"/v1/cache?key={min(second)}").json()["prefixes"] == []
    assert listed(KEY) == first and ask(KEY, "DELETE").json()["pages"]["cached"] == 0


def test_a_page_that_is_allowed_may_call(guarded: Served) -> None:
    origin = {"Origin": "https://app.example"}
    asked = guarded.http.options(TEXT, headers=origin | {"Access-Control-Request-Method": "POST"})
    assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == "https://app.example"
    assert guarded.http.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://app.example"
    assert guarded.http.get("/v1/models", headers={"Origin": "https://app.example.evil"}).status_code == 403


def test_large_bodies_are_refused_as_they_come(guarded: Served) -> None:
    told = guarded.post(TEXT, {"prompt": "x" * 70_000})
    assert told.status_code == 413 and told.json()["error"]["code"] == "body_too_large"

    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 4096

    with contextlib.suppress(httpx.TransportError):  # it may stop reading before all is sent
        assert guarded.new_client().post(TEXT, content=parts()).status_code == 413  # and cuts this connection, sooner or later
    assert guarded.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_full_queue_is_429(guarded: Served) -> None:
    clients = [guarded.new_client() for _ in range(7)]
    streams = [client.stream("POST", TEXT, json=LONG | {"stream": True}) for client in clients]
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        responses = list(pool.map(lambda stream: stream.__enter__(), streams))
    refused = guarded.post(TEXT, {"prompt": "x", "max_tokens": 1})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.__exit__(None, None, None)
    assert all(response.status_code == 200 for response in responses)
    assert until(lambda: guarded.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200)


#: path, body, what a stream says when it has nothing to say
SILENT = [
    (TEXT, {"prompt": "hi", "max_tokens": 2}, b": keep-alive\n\n"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, b": keep-alive\n\n"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, b": keep-alive\n\n"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        b'event: ping\ndata: {"type":"ping"}\n\n',
    ),
]


def test_a_stream_that_waits_says_so(guarded: Served) -> None:
    """In each protocol, while others run; its clients pass over it."""
    seen = {path: b"" for path, _, _ in SILENT}

    def read(path: str, body: dict[str, object]) -> None:
        with guarded.new_client().stream("POST", path, json=body | {"stream": True}) as response:
            for part in response.iter_raw():
                seen[path] += part

    def ask_openai() -> list[str]:
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
        messages: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
        stream = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, stream=True)  # type: ignore[call-overload]
        return [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]

    def ask_anthropic() -> list[str]:
        client = anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0)
        messages: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
        with client.messages.stream(model="tiny", messages=messages, max_tokens=2) as stream:  # type: ignore[arg-type]
            return [event.type for event in stream]

    running = guarded.new_client().stream("POST", TEXT, json=LONG | {"stream": True, "n": 4})
    assert running.__enter__().status_code == 200
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        others = [pool.submit(read, path, body) for path, body, _ in SILENT]
        by_openai, by_anthropic = pool.submit(ask_openai), pool.submit(ask_anthropic)
        said = until(lambda: all(seen[path].count(sign) >= 3 for path, _, sign in SILENT))
        running.__exit__(None, None, None)
        for other in others:
            other.result(20)
        assert said, seen
        assert by_openai.result(20)[-1] == "length" and by_anthropic.result(20)[-1] == "message_stop"
    for path, _, sign in SILENT:
        assert all(block.startswith((b"data: ", b"event: ", sign.strip())) for block in seen[path].split(b"\n\n") if block)
    assert seen[TEXT].endswith(b"data: [DONE]\n\n") and seen["/v1/messages"].startswith(b"event: message_start")


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_frees_its_pages(guarded: Served, stream: bool) -> None:
    before = pages(guarded)
    for prompt in ("short", "a long prompt " * 400):
        client = guarded.new_client(timeout=0.4)
        with (
            pytest.raises(httpx.ReadTimeout),
            client.stream("POST", TEXT, json=LONG | {"prompt": prompt, "stream": stream}) as response,
        ):
            next(response.iter_bytes())
            time.sleep(0.2)
            raise httpx.ReadTimeout("enough")
        client.close()
    after = pages(guarded)
    assert after[0] == before[0] == 0 and after[1] == before[1]
    assert guarded.http.get("/health").json()["status"] == "ok"


def test_slow_clients_are_cut_off(guarded: Served) -> None:
    host, _, port = guarded.url.removeprefix("http://").partition(":")
    half_head = socket.create_connection((host, int(port)))
    half_head.sendall(b"GET /version HT")
    half_body = socket.create_connection((host, int(port)))
    half_body.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\nContent-Length: 50\r\n\r\n{{".encode())
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    body = json.dumps(LONG | {"stream": True, "logprobs": 20, "max_tokens": 4000, "n": 4}).encode()
    deaf.sendall(
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    half_head.settimeout(8)
    half_body.settimeout(8)
    assert half_head.recv(100) == b""
    assert half_body.recv(12) == b"HTTP/1.1 408"
    assert until(lambda: guarded.http.get("/health").json()["running"] == 0, 90), "a client that does not read holds a request"
    for one in (half_head, half_body, deaf):
        one.close()
    assert pages(guarded)[0] == 0


def test_a_log_holds_no_prompt(guarded: Served) -> None:
    secret = "xyzzy-plugh-prompt"
    guarded.post(TEXT, {"prompt": secret, "max_tokens": 2, "user": "somebody"})
    guarded.post(TEXT, {"prompt": secret, "n": 0})
    log = guarded.stderr()
    assert secret not in log and KEY not in log and OTHER not in log and "answered" in log


def test_a_killed_engine_is_told_and_comes_back(
    guarded: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lamina bench serve` waits for it."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        whole = pool.submit(guarded.new_client().post, TEXT, json=LONG)
        client = guarded.new_client()
        with client.stream("POST", TEXT, json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(guarded.engine_pid(), signal.SIGKILL)
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable" and "[DONE]" not in rest[-1]
        answer = whole.result(20)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert "engine" in answer.json()["error"]["message"]
    assert guarded.http.get("/ready").status_code == 503
    assert guarded.http.get("/health").status_code == 503
    assert guarded.post(TEXT, {"prompt": "x"}).status_code == 503
    monkeypatch.setenv("LAMINA_API_KEY", KEY)
    bench = ("bench", "serve", guarded.url, "--num-prompts", "1", "--input-len", "2", "--output-len", "1")
    assert main([*bench, "--wait", "0"]) == 1 and "503" in capsys.readouterr().err
    assert main([*bench, "--wait", "60"]) == 0
    told = capsys.readouterr()
    assert f"waiting for {guarded.url}" in told.err and "Successful requests" in told.out
    assert guarded.post(TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200
    health = guarded.http.get("/health").json()
    assert health["status"] == "ok" and health["restarts"] == 1


def test_the_end_waits_for_running_answers(guarded: Served) -> None:
    """Last here: it ends the server."""
    body = {"prompt": "bye", "max_tokens": 40, "ignore_eos": True}
    client = guarded.new_client()
    with client.stream("POST", TEXT, json=body | {"stream": True, "stream_options": {"include_usage": True}}) as response:
        lines = response.iter_lines()
        next(lines)
        guarded.process.send_signal(signal.SIGTERM)
        assert until(lambda: guarded.http.get("/ready").status_code == 503, 5)
        refused = guarded.post(TEXT, {"prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 40
    assert guarded.process.wait(10) == 0
    assert "Traceback" not in guarded.stderr()


def test_many_clients_at_once(server: Served) -> None:
    """64 at once, some of which go: each has an answer or is gone, and every page comes back."""

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {"prompt": f"number {number} " * (1 + number % 9), "max_tokens": 4, "seed": number, "stream": number % 2 == 0}
        if number % 8 == 3:
            try:
                await client.post(TEXT, json=body | {"max_tokens": 1000, "ignore_eos": True}, timeout=0.2)
            except httpx.TimeoutException:
                return 0
        if number % 16 == 5:
            body["n"] = 0
        return (await client.post(TEXT, json=body)).status_code

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    found = asyncio.run(all_of_them())
    assert set(found) <= {0, 200, 400} and found.count(400) == 4 and found.count(200) >= 48
    assert pages(server)[0] == 0


def test_what_cannot_be_served_is_one_line(
    tiny_of: Callable[[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_of("flash", "official"))
    (tmp_path / "short").write_text("abc\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            ((model, "--host", "0.0.0.0", "--port", "0"), "api-key-file"),
            ((model, "--port", port), "one that is free on 127.0.0.1"),
            ((model, "--port", "0", "--api-key-file", str(tmp_path / "short")), "at least 8"),
            ((model, "--port", "0", "--max-queue", "0"), "max_queue"),
            ((str(tmp_path), "--port", "0"), "config.json"),
            ((model, "--port", "0", "--cache-bytes", "40KiB"), "cache_bytes"),
        ):
            assert main(["serve", *arguments, "--quiet"]) == 1
            error = capsys.readouterr().err
            assert words in error and error.startswith("error: ") and error.count("\n") == 1, error
