"""What is refused at the door: every limit answers 400 with the field, and nothing behind it is touched."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import httpx
import openai
import pytest


class Served(Protocol):
    """See serving.Served."""

    openai: openai.OpenAI
    http: httpx.Client
    url: str

    def post(self, path: str, body: object) -> httpx.Response: ...


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BIG = 2**63

#: (path, fields, the field that the answer names)
REFUSED: list[tuple[str, dict[str, object], str]] = [
    (TEXT, {"n": 0}, "n"),
    (TEXT, {"n": 129}, "n"),
    (TEXT, {"n": 1.5}, "n"),
    (TEXT, {"n": True}, "n"),
    (TEXT, {"n": "2"}, "n"),
    (TEXT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"max_tokens": BIG}, "max_tokens"),
    (TEXT, {"min_tokens": 17}, "min_tokens"),
    (TEXT, {"temperature": -0.1}, "temperature"),
    (TEXT, {"temperature": "hot"}, "temperature"),
    (TEXT, {"top_p": 0}, "top_p"),
    (TEXT, {"top_p": 1.01}, "top_p"),
    (TEXT, {"top_k": -2}, "top_k"),
    (TEXT, {"min_p": 2}, "min_p"),
    (TEXT, {"presence_penalty": 2.5}, "presence_penalty"),
    (TEXT, {"frequency_penalty": -2.5}, "frequency_penalty"),
    (TEXT, {"repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"seed": 2**65}, "seed"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"logprobs": -1}, "logprobs"),
    (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (TEXT, {"stop": ""}, "stop"),
    (TEXT, {"stop": ["x"] * 65}, "stop"),
    (TEXT, {"stop": ["x" * 1025]}, "stop[0]"),
    (TEXT, {"stop": [1]}, "stop[0]"),
    (TEXT, {"stop_token_ids": [1024]}, "stop_token_ids"),
    (TEXT, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (TEXT, {"logit_bias": {"1024": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"1": 101}}, "logit_bias"),
    (TEXT, {"logit_bias": {str(token): 0 for token in range(4097)}}, "logit_bias"),
    (TEXT, {"guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
    (TEXT, {"structured_outputs": {"choice": ["x" * 300_000]}}, "structured_outputs.choice"),
    (TEXT, {"deadline_s": 0}, "deadline_s"),
    (TEXT, {"priority": 2**40}, "priority"),
    (TEXT, {"cache_salt": "x" * 257}, "cache_salt"),
    (TEXT, {"user": "x" * 257}, "user"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": [1024]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt[0]"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 257}, "prompt"),
    (TEXT, {"prompt": ["a"] * 200, "n": 100}, "n"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"use_beam_search": True}, "use_beam_search"),
    (TEXT, {"logits_processors": ["x"]}, "logits_processors"),
    (TEXT, {"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
    (TEXT, {"bad_words": ["x"]}, "bad_words"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    (TEXT, {"guided_choice": []}, "guided_choice"),
    (TEXT, {"guided_grammar": "x" * 262145}, "guided_grammar"),
    (TEXT, {"guided_regex": "(unclosed"}, "guided_regex"),
    (TEXT, {"guided_json": {"type": "no such type"}}, "guided_json"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": HI * 10_001}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1001}]}, "messages[0].content"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": HI, "tools": [{"type": "retrieval"}]}, "tools[0].type"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 513}, "tools"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HI, "tool_choice": "always"}, "tool_choice"),
    (CHAT, {"messages": HI, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"messages": HI, "response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "r"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": HI, "echo": True}, "echo"),
    (CHAT, {"messages": HI, "chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"messages": HI, "continue_final_message": True}, "messages[0].role"),
    (CHAT, {"messages": HI, "thinking": {"type": "maybe"}}, "thinking.type"),
    (CHAT, {"messages": HI, "reasoning_effort": "ultra"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "reasoning_effort": "High"}, "reasoning_effort"),
    (CHAT, {"messages": HI, "reasoning_effort": 3}, "reasoning_effort"),
    (CHAT, {"messages": HI, "reasoning": {"effort": "ultra"}}, "reasoning.effort"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"reasoning_effort": "ultra"}}, "chat_template_kwargs.reasoning_effort"),
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": "ultra"}}, "reasoning.effort"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
    ("/detokenize", {"tokens": [1024]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_limit_names_its_field(server: Served, path: str, fields: dict[str, object], field: str, stream: bool) -> None:
    if stream and (path not in (CHAT, TEXT) or "stream_options" in fields):
        pytest.skip("does not stream")
    body = ({"prompt": "x"} if path == TEXT and "prompt" not in fields else {}) | fields | ({"stream": True} if stream else {})
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"].startswith(field) or field.startswith(error["param"]), error
    assert len(error["message"]) < 700 and "\n" not in error["message"].strip()
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xef\xbb\xbf{}",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b'{"prompt": "x"} {}',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 1e999}',
        b'{"x":' * 50_000,
        b"NaN",
    ],
    ids=lambda body: str(body[:20]),
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_what_is_not_json_is_400(server: Served, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_lone_surrogate_in_a_key_is_400(server: Served) -> None:
    assert server.http.post(TEXT, content=b'{"\\udfff": 1, "prompt": "x"}').status_code in (200, 400)


def test_unknown_fields_are_ignored(server: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1, "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "no_such_field": [1]}
    assert server.post(TEXT, body).status_code == 200


def test_other_models_and_paths_are_404(server: Served) -> None:
    for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": HI})):
        response = server.post(path, body | {"model": "my-lora"})
        assert response.status_code == 404 and response.json()["error"]["param"] == "model"
    assert server.http.get("/v1/models/none").status_code == 404
    assert server.http.get("/v1/models/tiny").json()["id"] == "tiny"
    missing = server.http.get("/v1/nothing/here")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    for path, method, allowed in (
        (CHAT, "GET", "POST"),
        ("/v1/cache", "PUT", "DELETE, GET, HEAD, POST"),
        ("/version", "POST", "GET, HEAD"),
    ):
        wrong = server.http.request(method, path)
        assert wrong.status_code == 405 and wrong.headers["allow"] == allowed and allowed in wrong.json()["error"]["message"]
        asked = server.http.options(path)
        assert asked.status_code == 204 and asked.headers["allow"] == allowed and not asked.content
    assert server.http.options("/v1/nothing").status_code == 404
    embeddings = server.post("/v1/embeddings", {"input": "x"})
    assert embeddings.status_code == 400 and "embeddings" in embeddings.json()["error"]["message"]


def test_the_root_says_what_there_is(server: Served) -> None:
    told = server.http.get("/")
    assert told.status_code == 200 and told.json()["endpoints"]["/v1/cache"] == ["DELETE", "GET", "POST"]
    head = server.http.head("/")
    assert head.status_code == 200 and head.headers["content-length"] == told.headers["content-length"] and not head.content
    page = server.http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (page.status_code, page.headers.get("location")) in ((307, "ui/"), (200, None))
    assert server.http.head("/v1/models").status_code == 200


def test_openai_client_sees_its_own_errors(server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.completions.create(model="tiny", prompt="x", n=1000)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        server.openai.chat.completions.create(model="other", messages=HI)  # type: ignore[arg-type]


def test_a_prompt_beyond_the_models_length(server: Served) -> None:
    length = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    response = server.post(TEXT, {"prompt": [5] * (length + 1)})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    full = server.post(TEXT, {"prompt": [5] * 30, "min_tokens": length, "max_tokens": length})
    assert full.status_code == 400 and full.json()["error"]["param"] == "min_tokens"


def test_request_ids_are_checked_and_echoed(server: Served) -> None:
    assert server.http.get("/version", headers={"X-Request-Id": "a-B_1.2"}).headers["x-request-id"] == "a-B_1.2"
    for bad in ("a b", "x" * 129, "é".encode().decode("latin-1"), "a/b"):
        response = server.http.get("/version", headers={"X-Request-Id": bad.encode("latin-1")})  # type: ignore[dict-item]
        assert response.status_code == 400 and response.headers["x-request-id"] != bad
    first, second = (server.http.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_pages_of_others_may_not_call(server: Served) -> None:
    own = {"Origin": server.url}
    assert server.http.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=own).status_code == 200
    other = server.http.post(TEXT, json={"prompt": "x"}, headers={"Origin": "https://evil.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    named = server.http.get("/health", headers={"Host": "evil.example"})
    assert named.status_code == 403
    assert server.http.get("/health", headers={"Host": "localhost:1"}).status_code == 200


LONG = b"ab " * 700_000
MANY = b'ab, \\"c\\": [1] \\n' * 800_000  # 14 MB of a text that looks like anything but one
HUGE: list[tuple[str, bytes, int, str | None]] = [
    (TEXT, b'{"prompt": "x", "n": [' + b'{"a": [1]},' * 40_000 + b"0]}", 400, "n"),
    (TEXT, b'{"prompt": "x", "n": [' + b'{"a": [1]},' * 600_000 + b"0]}", 413, None),
    (TEXT, b'{"prompt": [' + b"7," * 1_249_000 + b"7]}", 400, "prompt"),
    (TEXT, b'{"prompt": [' + b"7," * 3_000_000 + b"7]}", 413, None),
    (TEXT, b'{"prompt": [' + b'"x",' * 600_000 + b"7]}", 413, None),
    (TEXT, b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % one for one in range(45_000)) + b"}}", 400, "logit_bias"),
    (TEXT, b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % one for one in range(2_000_000)) + b"}}", 413, None),
    (TEXT, b'{"prompt": "' + MANY + b'", "n": 0}', 400, "n"),
    (CHAT, b'{"messages": [{"role": "' + b"- at `$" * 400_000 + b'"}]}', 400, "messages[0].role"),
    ("/tokenize", b'{"prompt": "' + b"ab " * 400_000 + b'"}', 200, None),
    ("/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "' + b"ab " * 400_000 + b'"}]}', 200, None),
    ("/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "user", "content": "' + LONG + b'"}]}', 400, "prompt"),
    ("/v1/responses", b'{"input": "' + LONG + b'"}', 400, "prompt"),
]
HUGE_NAMES = [
    "wrong value", "too many lists", "token ids", "too many ids", "too many texts", "biases", "too many names", "like JSON",
    "role", "text", "count", "messages", "responses",
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "field"), HUGE, ids=HUGE_NAMES)
def test_a_huge_body_holds_up_nobody_else(server: Served, path: str, body: bytes, status: int, field: str | None) -> None:
    waits = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, server.url + path, content=body, timeout=60.0, trust_env=False)
        while not running.done():
            began = time.perf_counter()
            assert server.http.get("/version").status_code == 200
            waits.append(time.perf_counter() - began)
            time.sleep(0.005)
    answer = running.result()
    assert answer.status_code == status, answer.text[:300]
    assert field is None or (answer.json()["error"]["param"] == field and len(answer.content) < 1000)
    assert max(waits) < 0.6, max(waits)


def test_a_client_that_does_not_wait_may_still_go(server: Served) -> None:
    """Others that it has sent behind the one in work do not hide that it has gone."""
    body = b'{"prompt": "x", "max_tokens": 100000, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    host, _, port = server.url.removeprefix("http://").partition(":")

    def running(count: int) -> bool:
        until = time.monotonic() + 20
        while server.http.get("/health").json()["running"] != count and time.monotonic() < until:
            time.sleep(0.02)
        return time.monotonic() < until

    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        assert running(1)
    assert running(0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_what_is_nested_too_deeply_is_400(server: Served, path: str) -> None:
    for depth in (985, 2_000, 10_000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        body = (
            b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 1, "metadata": %b, "tools": [{"type": '
        )
        body += b'"function", "name": "f", "input_schema": %b, "parameters": %b, "function": {"name": "f", "parameters": %b}}]}'
        assert server.http.post(path, content=body % (deep, deep, deep, deep)).status_code == 400


def test_a_schema_that_does_not_compile_is_named_as_it_was_asked_for(server: Served) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "nope"}}
    answer = server.post("/v1/messages", {"max_tokens": 1, "messages": HI, "output_config": {"format": form}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "output_config.format"


def talk(server: Served, data: bytes, seconds: float = 5.0) -> bytes:
    """Raw bytes to the server; what it answers until it closes or is silent."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except (TimeoutError, ConnectionResetError):
            pass
        return found


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"431"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(5000)) + b"\r\n", b"431"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"400"),
        (
            b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            b"404",
        ),
        (
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n"
            b"Connection: close\r\n\r\n{}",
            b"415",
        ),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n", b"413"),
    ],
    ids=[
        "nonsense",
        "long header",
        "long target",
        "many headers",
        "two hosts",
        "web socket",
        "gzip",
        "negative length",
        "two lengths",
        "too long",
    ],
)
def test_bad_http_is_refused(server: Served, data: bytes, status: bytes) -> None:
    answer = talk(server, data)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert b"\r\nx-request-id: " in answer.partition(b"\r\n\r\n")[0]
    assert server.http.get("/health").status_code == 200


def test_documented_limits_are_those_of_the_code(server: Served) -> None:
    """The largest of everything is taken."""
    body = {
        "prompt": "x", "max_tokens": 1, "stop": [f"{index:04}" * 256 for index in range(64)], "stop_token_ids": [5] * 1024,
        "logit_bias": {str(token): 0.5 for token in range(1024)}, "logprobs": 20, "user": "u" * 256, "cache_salt": "s" * 256,
    }  # fmt: skip
    response = server.post(TEXT, body)
    assert response.status_code == 200, response.text
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 2**63 - 1, "stop": [" ", "e", "a", "t", "n"]}).status_code == 200
