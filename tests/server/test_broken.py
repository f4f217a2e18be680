"""A checkpoint with a broken row, and an engine that stands still: who is hit, what they are told, and what goes on."""

import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from lamina.models.tiny import write_tiny

BAD = 300  # the token whose embedding is out of range
COMPLETIONS = "/v1/completions"


def break_row(directory: Path, token: int) -> None:
    """Makes one row of the embedding so large that sums over it are infinite; a NaN itself would be found while loading."""
    for path in directory.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        for name, item in msgspec.json.decode(data[8 : 8 + length]).items():
            if name.endswith(("embed.weight", "embed_tokens.weight")):
                begin, end = item["data_offsets"]
                row = (end - begin) // item["shape"][0]
                at = 8 + length + begin + token * row
                data[at : at + row] = b"\x7f" * row
                path.write_bytes(data)
                return
    raise AssertionError("there is no embedding")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, serving: ModuleType) -> Iterator[object]:
    directory = tmp_path_factory.mktemp("broken")
    write_tiny(directory, "flash", 1, "official")
    break_row(directory, BAD)
    served = serving.start(directory, "--cache-bytes", "64MiB", "--stall-seconds", "1")
    yield served
    assert served.stop() == 0


def test_scores_that_are_not_finite_fail_one_request_alone(broken) -> None:
    """Long prompts, so that blocks of theirs are full; the others run in the same steps."""
    good = {"prompt": [5 + place % 200 for place in range(600)], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    alone = broken.post(COMPLETIONS, good).json()["choices"]
    bad = good | {"prompt": [*good["prompt"][:520], BAD, *range(10, 400)]}
    for body in (bad, bad | {"n": 3, "temperature": 1.0}, bad | {"logprobs": 2}, bad | {"prompt_logprobs": 1}):
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(broken.post, COMPLETIONS, good | {"cache_salt": str(place)}) for place in range(2)]
            refused = pool.submit(broken.post, COMPLETIONS, body).result()
            answers = [other.result() for other in others]
            assert all(answer.status_code == 200 and answer.json()["choices"] == alone for answer in answers), answers[0].text
        error = refused.json()["error"]
        assert refused.status_code == 500 and error["code"] == "engine_error" and "NaN" in error["message"], refused.text
    stream = broken.post(COMPLETIONS, bad | {"stream": True})
    assert "NaN" in stream.text and "[DONE]" not in stream.text
    assert broken.idle_pages()["held"] == 0
    cached = broken.http.get("/v1/cache?limit=100").json()
    assert max(row["tokens"] for row in cached["prefixes"]) <= 624, "of the broken prompt something is kept"
    healed = broken.post(COMPLETIONS, bad | {"prompt": [*bad["prompt"][:520], 9]})
    assert healed.status_code == 200, healed.text + broken.stderr()[-2500:]
    assert healed.json()["usage"]["completion_tokens"] == 24 and broken.post(COMPLETIONS, good).json()["choices"] == alone


def test_an_engine_that_stands_still_is_not_well(broken) -> None:
    """After the seconds of --stall-seconds, and no longer than it stands still."""
    pid = broken.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        body = {
            "prompt": "x",
            "max_tokens": 400,
            "ignore_eos": True,
            "logit_bias": {str(BAD): -100},
        }  # the broken token is never drawn
        answer = pool.submit(broken.post, COMPLETIONS, body)
        until = time.monotonic() + 20
        while not broken.http.get("/health").json()["running"]:
            assert time.monotonic() < until
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        try:
            while (health := broken.http.get("/health")).status_code == 200:
                assert time.monotonic() < begin + 20
                time.sleep(0.1)
            assert time.monotonic() - begin > 0.5 and "no token has moved" in health.json()["status"]
            assert health.json()["stalled_s"] >= 1
        finally:
            os.kill(pid, signal.SIGCONT)
        while broken.http.get("/health").status_code != 200:
            assert time.monotonic() < begin + 40
            time.sleep(0.05)
        assert answer.result(60).json()["usage"]["completion_tokens"] == 400
    assert broken.engine_pid() == pid
