"""`lamina serve` on a GPU: the process as users start it, over HTTP, against the engine without a server.

What is promised is equality: the same tokens and the same log-probabilities whether an answer comes through a server or not,
streamed or whole, alone or among 32. LAMINA_TEST_DEVICE=cpu runs all of it on a CPU.
"""

import concurrent.futures
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from lamina import LLM, SamplingParams

if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "httptools", "zmq", "jinja2", "httpx")):
    pytest.skip("needs lamina[serve] and httpx", allow_module_level=True)

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lamina.engine.text import TextCodec, load_codec
from lamina.server.replies import finite, token_name

Words = Callable[[int, int], list[int]]
Fields = dict[str, object]

DEVICE = os.environ.get("LAMINA_TEST_DEVICE", "cuda")
START_S = 300.0  # kernels may have to be compiled
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
FLAGS = (
    "--device", DEVICE, "--cache-bytes", "256MiB", "--max-step-tokens", "1024", "--max-requests", "64", "--max-model-len", "4096",
    "--served-model-name", "tiny", "--drain-seconds", "30",
)  # fmt: skip
GREEDY: Fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["window", "log", "fold"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
needs_grammars = pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")


class Served(Protocol):
    """See tests/server/serving.py."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    url: str

    def post(self, path: str, body: object) -> httpx.Response: ...
    def new_client(self, **settings: object) -> httpx.Client: ...
    def engine_pid(self) -> int: ...
    def wait_ready(self, status: int = 200, seconds: float = 30.0) -> None: ...
    def idle_pages(self, seconds: float = 10.0) -> dict[str, int]: ...
    def stderr(self) -> str: ...
    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 20.0) -> int: ...


@pytest.fixture(scope="module")
def directory(tiny_of: Callable[[str, str], Path]) -> Path:
    return tiny_of("flash", "official")


@pytest.fixture(scope="module")
def codec(directory: Path) -> TextCodec:
    found = load_codec(directory)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def served(directory: Path, serving: ModuleType) -> Iterator[Served]:
    """One server for all tests; the last ones kill its engine and end it."""
    found = serving.start(directory, *FLAGS, seconds=START_S)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    """The engine with the server's settings, in this process."""
    return LLM(
        str(directory), device=DEVICE, cache_bytes="256MiB", max_step_tokens=1024, max_requests=64, max_model_len=4096,
        warmup=False,
    )  # fmt: skip


def ask(served: Served, path: str = TEXT, **fields: object) -> dict[str, object]:
    """The body of a whole answer."""
    response = served.post(path, fields)
    assert response.status_code == 200, response.text
    found: dict[str, object] = response.json()
    return found


def choices(served: Served, path: str = TEXT, **fields: object) -> list[dict[str, object]]:
    """Its choices."""
    found = ask(served, path, **fields)["choices"]
    assert isinstance(found, list)
    return found


def streamed(served: Served, path: str = TEXT, **fields: object) -> list[dict[str, object]]:
    """What a stream's chunks join to, as `choices` has it: text, log-probabilities and finish reason by index."""
    response = served.post(path, fields | {"stream": True})
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert response.status_code == 200 and blocks[-1] == "[DONE]", response.text
    found: dict[int, dict[str, object]] = {}
    for chunk in map(json.loads, blocks[:-1]):
        for choice in chunk["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "tokens": [], "token_logprobs": [], "finish_reason": None})
            own["text"] += choice["text"] if path == TEXT else choice["delta"].get("content") or ""
            for name in ("tokens", "token_logprobs"):
                own[name] += (choice.get("logprobs") or {}).get(name) or []  # type: ignore[operator]
            own["finish_reason"] = choice.get("finish_reason") or own["finish_reason"]
    return [found[index] for index in sorted(found)]


def of_engine(llm: LLM, codec: TextCodec, prompt: list[int], **settings: object) -> list[tuple[list[str], list[float]]]:
    """Names and log-probabilities of each output's tokens, from the engine without a server."""
    params = SamplingParams(logprobs=0, **settings)  # type: ignore[arg-type]
    found = []
    for one in llm.generate(prompt, params)[0].outputs:
        assert one.logprobs is not None
        values = [finite(row[token].logprob) for row, token in zip(one.logprobs, one.token_ids, strict=True)]
        found.append(([token_name(codec, token) for token in one.token_ids], values))
    return found


def rows_of(choice: dict[str, object]) -> tuple[list[str], list[float]]:
    """The same of a whole answer's choice."""
    rows = choice["logprobs"]
    assert isinstance(rows, dict)
    return rows["tokens"], rows["token_logprobs"]


def until(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


LENGTHS = (1, 5, 64, 128, 129, 300, 1024, 1500)


def test_it_runs_where_it_was_told_to(served: Served) -> None:
    if DEVICE == "cuda":
        assert "cuda" in served.stderr(), served.stderr()
    assert served.http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_answers_are_the_engines_own(served: Served, llm: LLM, codec: TextCodec, words: Words, length: int) -> None:
    """Token for token, and with the same bits of every log-probability; asking for them changes nothing."""
    prompt = words(length, length)
    (expected,) = of_engine(llm, codec, prompt, temperature=0, max_tokens=24, ignore_eos=True)
    (found,) = choices(served, prompt=prompt, logprobs=0, **GREEDY)
    assert rows_of(found) == expected
    (plain,) = choices(served, prompt=prompt, cache_salt="another", **GREEDY)
    assert plain["text"] == found["text"] and plain["finish_reason"] == "length"


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "n": 2},
        {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 0, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_seeded_answers_are_the_engines_own(served: Served, llm: LLM, codec: TextCodec, words: Words, settings: Fields) -> None:
    fields = {"max_tokens": 20, "seed": 5, "ignore_eos": True} | settings
    expected = of_engine(llm, codec, words(77, 3), **fields)
    assert [rows_of(one) for one in choices(served, prompt=words(77, 3), logprobs=0, **fields)] == expected


@pytest.mark.parametrize(
    "fields",
    [
        GREEDY,
        {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 17, "logprobs": 4},
        {"temperature": 1.3, "seed": 9, "max_tokens": 40, "stop": ["e", " the"]},
        {"temperature": 0, "max_tokens": 12, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
def test_a_stream_joins_to_the_whole_answer(served: Served, words: Words, fields: Fields) -> None:
    whole = choices(served, prompt=words(90, 4), **fields)
    found = streamed(served, prompt=words(90, 4), **fields)
    assert [(one["text"], one["finish_reason"]) for one in found] == [(one["text"], one["finish_reason"]) for one in whole]
    if "logprobs" in fields:
        assert [(one["tokens"], one["token_logprobs"]) for one in found] == [rows_of(one) for one in whole]


def test_a_second_time_it_is_the_cache_that_answers(served: Served, words: Words) -> None:
    for length in (40, 700):
        asked = {"prompt": words(length, 50 + length), "logprobs": 2} | GREEDY
        first, second = ask(served, **asked), ask(served, **asked)
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]  # type: ignore[index]
        assert cached[0] == 0 < cached[1] <= length
        assert second["choices"] == first["choices"]


def test_32_at_once_answer_as_each_alone(served: Served, llm: LLM, codec: TextCodec, words: Words) -> None:
    """Greedy, drawn, streamed and whole ones among each other; every prompt is new to the server."""
    prompts = [words(1 + 41 * number % 350, 700 + number) for number in range(32)]
    kinds: list[Fields] = [GREEDY, {"temperature": 1.0, "seed": 4, "max_tokens": 30, "ignore_eos": True}]
    expected = [of_engine(llm, codec, prompt, **kinds[number % 2]) for number, prompt in enumerate(prompts)]

    def one(number: int) -> list[tuple[list[str], list[float]]]:
        fields = kinds[number % 2] | {"prompt": prompts[number], "logprobs": 0}
        if number % 3 == 0:
            return [(one["tokens"], one["token_logprobs"]) for one in streamed(served, **fields)]  # type: ignore[misc]
        return [rows_of(one) for one in choices(served, **fields)]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(one, range(32))) == expected
    assert served.idle_pages()["held"] == 0


@needs_grammars
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_match_a_schema(served: Served, temperature: float, logprobs: int | None) -> None:
    """Masks of two outputs of a request; the same again with the same seed."""
    asked: Fields = {
        "messages": [{"role": "user", "content": "Describe a memory."}], "chat_template_kwargs": {"thinking": False}, "n": 2,
        "temperature": temperature, "seed": 11, "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"name": "memory", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    if logprobs is not None:
        asked |= {"logprobs": True, "top_logprobs": logprobs}
    found = choices(served, CHAT, **asked)
    for one in found:
        value = json.loads(one["message"]["content"])  # type: ignore[index]
        assert one["finish_reason"] == "stop" and set(value) == {"name", "size", "kind", "tags"}
        assert len(value["name"]) <= 12 and 0 <= value["size"] <= 999 and value["kind"] in ("window", "log", "fold")
        assert len(value["tags"]) <= 3 and all(isinstance(tag, bool) for tag in value["tags"])
        if logprobs is not None:
            rows = one["logprobs"]["content"]  # type: ignore[index]
            assert rows and all(row["logprob"] <= 0 and len(row["top_logprobs"]) == logprobs for row in rows)
    texts = [one["message"]["content"] for one in found]  # type: ignore[index]
    assert (texts[0] == texts[1]) == (temperature == 0)
    assert [one["message"]["content"] for one in choices(served, CHAT, **asked)] == texts  # type: ignore[index]
    assert [one["text"] for one in streamed(served, CHAT, **{k: v for k, v in asked.items() if "logprobs" not in k})] == texts


@needs_grammars
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_match_a_pattern_and_a_choice(served: Served, words: Words, temperature: float) -> None:
    asked: Fields = {"prompt": words(30, 8), "temperature": temperature, "seed": 2, "n": 2, "max_tokens": 60, "logprobs": 3}
    pattern = "[0-9]{3}-[a-f]{2,4}(x|yz)"
    for one in choices(served, **asked, structured_outputs={"regex": pattern}):
        assert re.fullmatch(pattern, str(one["text"])) and one["finish_reason"] == "stop"
        assert all(value <= 0 for value in rows_of(one)[1])
    for one in choices(served, **asked, guided_choice=["yes", "no", "maybe"]):
        assert one["text"] in ("yes", "no", "maybe") and one["finish_reason"] == "stop"


@needs_grammars
def test_a_grammar_begins_after_the_thoughts(served: Served, codec: TextCodec) -> None:
    """The end of the thoughts is made likely: no mask before it, one from the token after it on."""
    end = codec.token_id("</think>")
    asked: Fields = {
        "messages": [{"role": "user", "content": "Think."}], "chat_template_kwargs": {"thinking": True}, "temperature": 1.0,
        "seed": 6, "max_tokens": 400, "logit_bias": {str(end): 12}, "n": 2, "response_format": {
            "type": "json_schema", "json_schema": {"name": "memory", "schema": SCHEMA},
        },
    }  # fmt: skip
    found = choices(served, CHAT, **asked)
    for one in found:
        assert set(json.loads(one["message"]["content"])) == {"name", "size", "kind", "tags"}, one  # type: ignore[index]
        assert one["finish_reason"] == "stop"
    assert choices(served, CHAT, **asked) == found


@needs_grammars
def test_masks_touch_nobody_else(served: Served, llm: LLM, codec: TextCodec, words: Words) -> None:
    """Answers with and without masks in the same steps, greedy and drawn."""
    prompts = [words(3 + 29 * number % 200, 900 + number) for number in range(16)]
    free: list[Fields] = [GREEDY, {"temperature": 1.0, "seed": 4, "max_tokens": 30, "ignore_eos": True}]
    expected = [of_engine(llm, codec, prompt, **free[number % 2]) for number, prompt in enumerate(prompts)]

    def masked(number: int) -> str:
        fields = {"prompt": prompts[number], "temperature": number % 2, "seed": number, "max_tokens": 400, "cache_salt": "masked"}
        return str(choices(served, **fields, guided_json=SCHEMA)[0]["text"])

    def plain(number: int) -> list[tuple[list[str], list[float]]]:
        return [rows_of(one) for one in choices(served, prompt=prompts[number], logprobs=0, **free[number % 2])]

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        texts, answers = pool.map(masked, range(16)), pool.map(plain, range(16))
        assert list(answers) == expected
        assert all(set(json.loads(text)) == {"name", "size", "kind", "tags"} for text in texts)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_frees_its_pages(served: Served, words: Words, stream: bool) -> None:
    before = sum(served.idle_pages().values())
    asked: Fields = {"prompt": words(900, 77), "max_tokens": 3000, "temperature": 1.0, "ignore_eos": True, "n": 2}
    client = served.new_client(timeout=httpx.Timeout(30, read=0.3))
    with pytest.raises(httpx.ReadTimeout), client.stream("POST", TEXT, json=asked | {"stream": stream}) as response:
        next(response.iter_bytes())
        raise httpx.ReadTimeout("enough")
    client.close()
    pages = served.idle_pages(30)
    assert pages["held"] == 0 and sum(pages.values()) == before
    assert until(lambda: served.http.get("/health").json()["running"] == 0)


def test_figures_and_the_cache_can_be_read(served: Served) -> None:
    def read() -> dict[str, float]:
        page = served.http.get("/metrics").text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return {sample.name: sample.value for sample in samples if sample.name.startswith("lamina_")}

    ask(served, prompt=[8, 6, 7], **GREEDY)  # tokens in flight when a request was cancelled are counted with the next step
    name, seen = "lamina_generation_tokens_total", -1.0
    while (now := read()[name]) != seen:
        seen = now
        time.sleep(0.6)
    before = read()
    ask(served, prompt=[5, 6, 7], **GREEDY)
    until(lambda: read()["lamina_generation_tokens_total"] >= before["lamina_generation_tokens_total"] + 24)
    after = read()
    assert after["lamina_generation_tokens_total"] == before["lamina_generation_tokens_total"] + 24
    assert after["lamina_engine_steps_total"] >= before["lamina_engine_steps_total"] + 24
    assert after["lamina_engine_decode_seconds_total"] > before["lamina_engine_decode_seconds_total"]
    assert after["lamina_num_requests_running"] == after["lamina_metrics_errors_total"] == 0
    assert all(value >= 0 for value in after.values())
    cache = served.http.get("/v1/cache").json()
    assert cache["pages"]["held"] == 0 < cache["pages"]["cached"] and cache["prefixes"]
    assert served.http.delete("/v1/cache").status_code == 200
    assert served.http.get("/v1/cache").json()["pages"]["cached"] == 0


def test_a_killed_engine_comes_back_and_answers_the_same(served: Served, words: Words) -> None:
    asked = {"prompt": words(200, 31)} | GREEDY
    expected = choices(served, **asked)
    client = served.new_client(timeout=START_S)
    with client.stream("POST", TEXT, json=asked | {"max_tokens": 3000, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(served.engine_pid(), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    refused = served.post(TEXT, asked)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    served.wait_ready(200, START_S)
    assert choices(served, **asked) == expected
    assert choices(served, **asked, guided_choice=["one", "two"])[0]["text"] in ("one", "two")
    health = served.http.get("/health").json()
    assert health["status"] == "ok" and health["restarts"] == 1


def test_the_end_waits_for_running_answers(served: Served, words: Words) -> None:
    """Last here: it ends the server."""
    length = 2000 if DEVICE == "cuda" else 60  # long enough to be running when it is told
    asked = GREEDY | {"prompt": words(50, 5), "max_tokens": length, "stream": True, "stream_options": {"include_usage": True}}
    client = served.new_client()
    with client.stream("POST", TEXT, json=asked) as response:
        lines = response.iter_lines()
        next(lines)
        engine = served.engine_pid()
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == length
    assert served.process.wait(30) == 0
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in served.stderr(), served.stderr()
