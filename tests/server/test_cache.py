"""/v1/cache on a real server: what is kept after an answer, pins and drops, and requests that are wrong."""

import os
import re
import signal
from collections.abc import Callable

import openai
import pytest

PROMPT = list(range(100, 400))  # 300 tokens: a whole block and some


@pytest.fixture
def kept(server) -> dict:
    """The cache's state after one answer to PROMPT, nothing running."""
    server.http.request("DELETE", "/v1/cache")
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "user": "alice"})
    assert answer.status_code == 200, answer.text
    server.idle_pages()
    return server.http.get("/v1/cache").json()


def longest(state: dict) -> dict:
    return max(state["prefixes"], key=lambda prefix: prefix["tokens"])


def test_what_an_answer_leaves(kept: dict) -> None:
    pages = kept["pages"]
    assert pages["held"] == 0 and pages["cached"] > 0
    assert pages["free"] + pages["held"] + pages["cached"] + pages["pinned"] == pages["total"]
    counts = dict.fromkeys("fhcp", 0)
    for state, count in kept["page_states"]:
        counts[state] += count
    assert counts == {"f": pages["free"], "h": 0, "c": pages["cached"], "p": pages["pinned"]}
    prefix = longest(kept)
    assert prefix["tokens"] == len(PROMPT)  # the answer's one token has no entries yet
    assert prefix["checkpoints"] == [len(PROMPT)] and prefix["owner"] == "alice"
    assert prefix["bytes"] == prefix["pages"] * pages["page_bytes"]
    assert not prefix["is_pinned"] and not prefix["is_running"]
    assert 0 <= prefix["age_s"] < 60
    assert kept["num_prefixes"] == len(kept["prefixes"])
    assert sum(row["cached_bytes"] for row in kept["memories"]) > 0
    assert sum(row["held_bytes"] for row in kept["memories"]) == 0


def test_a_hit_is_counted(server, kept: dict) -> None:
    before = longest(kept)["hits"]
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    assert longest(server.http.get("/v1/cache").json())["hits"] > before


def test_a_list_can_be_shorter(server, kept: dict) -> None:
    server.post("/v1/completions", {"prompt": list(range(500, 900)), "max_tokens": 1})
    whole = server.http.get("/v1/cache").json()
    assert whole["num_prefixes"] >= 2
    one = server.http.get("/v1/cache", params={"limit": 1}).json()
    assert len(one["prefixes"]) == 1 and one["num_prefixes"] == whole["num_prefixes"]
    assert server.http.get("/v1/cache", params={"limit": 0}).json()["prefixes"] == []


def test_a_pinned_prefix_stays(server, kept: dict) -> None:
    key = longest(kept)["key"]
    pinned = server.post("/v1/cache", {"action": "pin", "key": key}).json()
    assert [prefix["is_pinned"] for prefix in pinned["prefixes"] if prefix["key"] == key] == [True]
    assert pinned["pages"]["pinned"] > 0
    left = server.http.request("DELETE", "/v1/cache").json()
    assert key in [prefix["key"] for prefix in left["prefixes"]]
    answer = server.post("/v1/completions", {"prompt": [*PROMPT, 5, 6], "max_tokens": 1, "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
    server.idle_pages()
    free = server.post("/v1/cache", {"action": "unpin", "key": key}).json()
    assert free["pages"]["pinned"] == 0
    assert server.http.request("DELETE", "/v1/cache").json()["pages"]["cached"] == 0


def test_a_dropped_prefix_is_gone(server, kept: dict) -> None:
    key = longest(kept)["key"]
    after = server.http.request("DELETE", "/v1/cache", params={"key": key}).json()
    assert key not in [prefix["key"] for prefix in after["prefixes"]]
    assert after["pages"]["free"] > kept["pages"]["free"]
    server.post("/v1/cache", {"action": "drop"})
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"action": "burn"}, "action"), ({}, "action"), ({"action": "pin"}, "key"), ({"action": "pin", "key": "../.."}, "key"),
        ({"action": "pin", "key": "0" * 31}, "key"),
        ({"action": "drop", "key": 3}, "key"), ({"action": "pin", "key": "0" * 500}, "key"),
    ],
)  # fmt: skip
def test_a_change_that_cannot_be_names_its_field(server, body: dict, field: str) -> None:
    answer = server.post("/v1/cache", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("action", ["pin", "unpin", "drop"])
def test_a_prefix_that_is_not_there_is_404(server, action: str) -> None:
    answer = server.post("/v1/cache", {"action": action, "key": "f" * 32})
    assert answer.status_code == 404, answer.text
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("not_found", "key")


@pytest.mark.parametrize("query", ["limit=-1", "limit=x", "limit=10001", "limit=1e9", "other=1", "limit="])
def test_a_wrong_query_is_refused(server, query: str) -> None:
    answer = server.http.get(f"/v1/cache?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("limit", "other")


def test_the_cache_is_documented(server) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"get", "post", "delete"} <= set(paths["/v1/cache"])


def metrics_of(server) -> dict[str, float]:
    """Each series and its value."""
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_counters_go_on_when_the_engine_is_killed(start_server: Callable[..., object]) -> None:
    server = start_server("--cache-bytes", "16MiB")
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
    server.idle_pages()
    before = metrics_of(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_ready(503)
    server.wait_ready()
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
    server.idle_pages()
    after = metrics_of(server)
    name = '{model_name="tiny"}'
    assert after["lamina_engine_restarts_total" + name] == 1
    assert after["lamina_prompt_tokens_total" + name] == 2 * len(PROMPT)
    is_counter = re.compile(r"lamina_\w+(_total|_count|_sum|_bucket)\{")
    assert [key for key in before if is_counter.match(key) and after[key] < before[key]] == []
    assert after["lamina_metrics_errors_total" + name] == 0


def test_metrics_of_a_server_that_works(server) -> None:
    def total(name: str) -> float:
        return sum(value for key, value in metrics_of(server).items() if key.startswith(name))

    names = ("lamina_requests_total", "lamina_time_to_first_token_seconds_count", "lamina_requests_finished_total")
    before = {name: total(name) for name in names}
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "n": 3, "seed": 1})
    assert len(answer.json()["choices"]) == 3
    assert {name: total(name) - before[name] for name in names} == dict.fromkeys(names, 1)
    assert total('lamina_http_requests_total{endpoint="/v1/completions"') > 0
    assert total("lamina_metrics_errors_total") == 0
    with pytest.raises(openai.BadRequestError):
        server.openai.completions.create(model="tiny", prompt="x", n=0)
    assert total('lamina_http_requests_total{endpoint="/v1/completions",model_name="tiny",status="400"') > 0
