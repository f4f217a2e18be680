"""/v1/completions through OpenAI's own client and raw HTTP."""

import json
import math
from typing import Protocol

import httpx
import openai
import pytest

from lamina.engine.text import TextCodec, load_codec


class Served(Protocol):
    """See serving.Served."""

    openai: openai.OpenAI
    http: httpx.Client
    url: str

    def post(self, path: str, body: object) -> httpx.Response: ...


GREEDY = {"model": "tiny", "temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def codec(tiny_of) -> TextCodec:  # type: ignore[no-untyped-def]
    found = load_codec(tiny_of("flash", "official"))
    assert found is not None
    return found


def joined(server: Served, **fields: object) -> tuple[list[str], list[str | None]]:
    """Texts and finish reasons of a streamed answer, by index."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in server.openai.completions.create(stream=True, **fields):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                assert choice.index not in reasons, "an output ended twice"
                reasons[choice.index] = choice.finish_reason
    return [texts[index] for index in sorted(texts)], [reasons[index] for index in sorted(reasons)]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "The memory of a model"},
        {"prompt": "def f(x):", "max_tokens": 12, "n": 3, "temperature": 1.0},
        {"prompt": ["one", "two and more"], "n": 2, "temperature": 0.7, "max_tokens": 9},
        {"prompt": [5, 6, 7], "echo": True},
        {"prompt": [[5, 6, 7], [300, 9]], "echo": True, "max_tokens": 3},
        {"prompt": "a", "max_tokens": 24, "stop": ["e", "the"], "temperature": 1.5},
        {"prompt": "a", "max_tokens": 24, "stop": " ", "temperature": 1.5, "extra_body": {"include_stop_str_in_output": True}},
    ],
    ids=str,
)
def test_a_stream_joins_to_the_whole_answer(server: Served, fields: dict[str, object]) -> None:
    fields = GREEDY | fields
    whole = server.openai.completions.create(**fields)  # type: ignore[call-overload]
    texts, reasons = joined(server, **fields)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(len(whole.choices)))
    num_prompts = len(fields["prompt"]) if isinstance(fields["prompt"], list) and not isinstance(fields["prompt"][0], int) else 1
    assert len(whole.choices) == num_prompts * int(str(fields.get("n", 1)))
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_sixteen_tokens_are_the_default(server: Served) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_a_seed_repeats_an_answer_whatever_else_runs(server: Served) -> None:
    fields = {"model": "tiny", "prompt": "Once", "temperature": 1.0, "seed": 7, "max_tokens": 20}
    first = server.openai.completions.create(**fields)  # type: ignore[call-overload]
    several = server.openai.completions.create(**fields | {"prompt": ["other text", "Once", "x"]})  # type: ignore[call-overload]
    assert several.choices[1].text == first.choices[0].text


def test_stop_strings_never_leak_and_may_lie_across_tokens(server: Served) -> None:
    free = server.openai.completions.create(**GREEDY, prompt="Remember", max_tokens=24, extra_body={"ignore_eos": True})
    text = free.choices[0].text
    for start in range(5, len(text) - 5, 20):
        stop = text[start : start + 5]
        fields = GREEDY | {"prompt": "Remember", "max_tokens": 24, "stop": stop, "extra_body": {"ignore_eos": True}}
        answer = server.openai.completions.create(**fields).choices[0]  # type: ignore[call-overload]
        assert answer.text == text[: text.index(stop)] and answer.finish_reason == "stop"
        assert answer.model_extra is not None and answer.model_extra["stop_reason"] == stop
        if start % 40 == 5:
            shown = ""
            for chunk in server.openai.completions.create(stream=True, **fields):  # type: ignore[call-overload]
                shown += "".join(choice.text for choice in chunk.choices)
                assert text.startswith(shown) and len(shown) <= text.index(stop)


def test_usage_of_a_stop_string_counts_what_was_read(server: Served, codec: TextCodec) -> None:
    fields = GREEDY | {"prompt": "Remember", "max_tokens": 60}
    free = server.post("/v1/completions", fields | {"logprobs": 0, "ignore_eos": True}).json()["choices"][0]
    stop = free["text"][8:11]
    cut = server.post("/v1/completions", fields | {"stop": stop, "logprobs": 0, "ignore_eos": True}).json()
    tokens = cut["choices"][0]["logprobs"]["tokens"]
    assert cut["usage"]["completion_tokens"] == len(tokens) < 60
    assert tokens == free["logprobs"]["tokens"][: len(tokens)]


def test_min_tokens_lets_an_early_stop_string_pass(server: Served) -> None:
    fields = GREEDY | {"prompt": "Remember", "max_tokens": 30, "ignore_eos": True}
    text = server.post("/v1/completions", fields).json()["choices"][0]["text"]
    first = text[0]
    assert server.post("/v1/completions", fields | {"stop": first}).json()["choices"][0]["text"] == ""
    late = server.post("/v1/completions", fields | {"stop": first, "min_tokens": 10}).json()
    assert late["usage"]["completion_tokens"] >= 10


def test_a_stop_token_ends_and_is_named(server: Served, codec: TextCodec) -> None:
    fields = GREEDY | {"prompt": "Remember", "max_tokens": 20, "logprobs": 0, "ignore_eos": True}
    free = server.post("/v1/completions", fields).json()["choices"][0]
    name = free["logprobs"]["tokens"][4]
    token = next(i for i in range(1024) if codec.token_text(i) == name)
    first = free["logprobs"]["tokens"].index(name)
    cut = server.post("/v1/completions", fields | {"stop_token_ids": [token]}).json()["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == token
    ends = [*free["logprobs"]["text_offset"], len(free["text"])]
    assert cut["text"] == free["text"][: ends[first]]
    kept = server.post("/v1/completions", fields | {"stop_token_ids": [token], "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == free["text"][: ends[first + 1]]


@pytest.mark.parametrize("num", [0, 1, 20])
def test_logprobs_in_the_dialect_of_completions(server: Served, num: int) -> None:
    fields = GREEDY | {"prompt": "Remember", "max_tokens": 12, "logprobs": num}
    body = server.post("/v1/completions", fields).json()["choices"][0]
    rows = body["logprobs"]
    assert len(rows["tokens"]) == len(rows["token_logprobs"]) == len(rows["top_logprobs"]) == len(rows["text_offset"]) == 12
    for token, own, top, offset in zip(rows["tokens"], rows["token_logprobs"], rows["top_logprobs"], rows["text_offset"]):
        assert len(top) == max(1, num) and top[token] == own <= 0 and math.isfinite(own)
        assert num == 0 or own == max(top.values())  # greedy
        if not token.startswith("bytes:"):
            assert body["text"].startswith(token, offset)
    chunks = [json.loads(one) for one in events(server, fields)[:-1]]
    streamed = [
        part for chunk in chunks for choice in chunk["choices"] for part in (choice["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert streamed == rows["tokens"]


def events(server: Served, fields: dict[str, object]) -> list[str]:
    response = server.post("/v1/completions", fields | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return blocks


def test_echo_with_logprobs_scores_a_text(server: Served, codec: TextCodec) -> None:
    """What evaluation harnesses do: the prompt's own tokens with their log-probabilities."""
    ids = codec.encode_prompt("The quick brown fox is a list of values")
    fields = GREEDY | {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    body = server.post("/v1/completions", fields).json()
    rows = body["choices"][0]["logprobs"]
    assert len(rows["tokens"]) == len(ids) and rows["token_logprobs"][0] is None and rows["top_logprobs"][0] is None
    assert all(value <= 0 for value in rows["token_logprobs"][1:])
    assert body["usage"]["completion_tokens"] == 0 and body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == codec.decode(ids) == "".join(rows["tokens"]).replace("<｜begin▁of▁sentence｜>", "")
    one = server.post("/v1/completions", fields | {"max_tokens": 1}).json()["choices"][0]["logprobs"]
    assert len(one["tokens"]) == len(ids) + 1 and one["token_logprobs"][:-1] == pytest.approx(rows["token_logprobs"], nan_ok=True)
    chunks = [json.loads(block) for block in events(server, fields)[:-1]]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == body["choices"][0]["text"]
    streamed = [
        row for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] for row in choice["logprobs"]["tokens"]
    ]
    assert streamed == rows["tokens"]


def test_prompt_logprobs_by_token_id(server: Served, codec: TextCodec) -> None:
    ids = codec.encode_prompt("The quick brown fox")
    body = server.post("/v1/completions", GREEDY | {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 1}).json()
    rows = body["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(ids)
    for token, row in zip(ids[1:], rows[1:]):
        assert row[str(token)]["decoded_token"] == codec.token_text(token) and 2 <= len(row) <= 3


def test_usage_comes_once_at_the_end_and_counts_the_cache(server: Served) -> None:
    fields = GREEDY | {"prompt": "word " * 300, "max_tokens": 4, "stream_options": {"include_usage": True}}
    seen = []
    for _ in range(2):
        chunks = [json.loads(block) for block in events(server, fields)[:-1]]
        assert [chunk["usage"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["choices"] == [] and all(chunk["choices"] for chunk in chunks[:-1])
        seen.append(chunks[-1]["usage"])
    assert seen[0]["prompt_tokens_details"]["cached_tokens"] == 0 or seen[1] == seen[0]
    assert seen[1]["prompt_tokens_details"]["cached_tokens"] > 200
    assert seen[1]["memory"]["held_bytes"]["window"] > 0 and seen[1]["memory"]["prefix_stop"]


def test_continuous_usage_is_in_every_chunk(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [json.loads(one) for one in events(server, GREEDY | {"prompt": "x", "stream_options": options})[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 16


def test_a_salt_keeps_caches_apart(server: Served) -> None:
    fields = GREEDY | {"prompt": "salty " * 300, "max_tokens": 1}
    cached = [
        server.post("/v1/completions", fields | {"cache_salt": salt}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("a", "a", "b", "")
    ]
    assert cached[0] == 0 and cached[1] > 200 and cached[2:] == [0, 0]


def test_characters_of_several_tokens_come_whole(server: Served, codec: TextCodec) -> None:
    """The bias makes the model spell a four-byte character, one byte a token."""
    ids = codec.encode("🙂")
    assert len(ids) > 1
    bias = {str(token): 100 for token in ids}
    fields = {"model": "tiny", "prompt": "x", "temperature": 1.0, "seed": 3, "max_tokens": 24, "logit_bias": bias, "n": 3}
    whole = server.post("/v1/completions", fields).json()
    chunks = [json.loads(block) for block in events(server, fields)[:-1]]
    for choice in whole["choices"]:
        streamed = [one["text"] for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(streamed) == choice["text"]
        assert all(not set(text) & set(map(chr, range(0xD800, 0xE000))) for text in streamed)


def test_a_structured_answer(server: Served) -> None:
    fields = {"model": "tiny", "prompt": "x", "temperature": 1.0, "seed": 3, "max_tokens": 60}
    choice = server.post("/v1/completions", fields | {"guided_choice": ["yes", "no", "maybe"]}).json()["choices"][0]
    assert choice["text"] in ("yes", "no", "maybe") and choice["finish_reason"] == "stop"
    number = server.post("/v1/completions", fields | {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}}).json()
    assert len(number["choices"][0]["text"]) == 6 and number["choices"][0]["text"][3] == "-"


def test_a_priority_and_a_deadline_are_taken(server: Served) -> None:
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 3, "priority": -5, "deadline_s": 30}
    assert server.post("/v1/completions", fields).status_code == 200
    late = fields | {"max_tokens": 100_000, "deadline_s": 0.3, "ignore_eos": True}
    body = server.post("/v1/completions", late).json()
    assert body["choices"][0]["finish_reason"] == "deadline"
