"""generation_config.json as the defaults of sampling, with vLLM's names and meanings."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lamina import LLM, SamplingParams
from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.engine.client import EngineClient
from lamina.engine.default_sampling import SamplingDefaults, find_defaults
from lamina.server.asking import sampling_params
from lamina.server.schema import CHAT_DECODER
from lamina.server.settings import ServerSettings
from lamina.server.state import ServerState

MADE = {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "max_new_tokens": 8, "min_p": None, "eos_token_id": 1, "do_sample": True}


def folder(path: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_whose_defaults_apply(tmp_path: Path) -> None:
    own, other = folder(tmp_path / "own", **MADE), folder(tmp_path / "other", repetition_penalty=1.1)
    found = find_defaults(own)
    assert found == SamplingDefaults(0.6, 0.95, 40, 0.0, 1.0, 8)
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 40, max_tokens 8"
    assert found.params() == SamplingParams(temperature=0.6, top_p=0.95, top_k=40, max_tokens=8)
    assert [found.most_tokens(most) for most in (None, 4, 100)] == [8, 4, 8]
    plain = find_defaults(own, "vllm")
    assert plain == find_defaults(tmp_path) == SamplingDefaults() and str(plain) == "" and plain.params() == SamplingParams()
    assert plain.most_tokens(None) is None and plain.most_tokens(4) == 4
    assert find_defaults(own, str(other)) == SamplingDefaults(repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -1}, "generation_config.temperature"),
        ({"max_new_tokens": 0}, "generation_config.max_new_tokens"),
        ({"top_p": "all"}, "generation_config"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_defaults(folder(tmp_path, **values))
    assert caught.value.field == field
    with pytest.raises(ConfigError, match="a directory with generation_config"):
        find_defaults(tmp_path, str(tmp_path / "nowhere"))


def test_a_request_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ServerState(ServerSettings(), EngineClient(EngineConfig(str(tmp_path))), defaults=SamplingDefaults(0.6, 0.9, 40, 0.1))
    monkeypatch.setattr(SamplingParams, "validate_for_vocab", lambda *_: None)
    monkeypatch.setattr(ServerState, "ready", type("Ready", (), {"vocab_size": 100}))
    for given, wanted in (
        ({}, (0.6, 0.9, 40, 0.1)),
        ({"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}, (0.0, 1.0, 0, 0.0)),
    ):
        body = {"messages": [{"role": "user", "content": "x"}]} | given
        params = sampling_params(state, CHAT_DECODER.decode(msgspec.json.encode(body)), None, None, None)
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == wanted


def test_calls_without_parameters_take_them(tiny_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    llm = LLM(
        str(tiny_of("flash", "official")),
        cache_bytes="64MiB",
        generation_config=str(folder(tmp_path, temperature=0, max_new_tokens=3)),
    )
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0, max_tokens=3)
    assert llm.generate("Once")[0].outputs[0].token_ids == llm.generate("Once", params)[0].outputs[0].token_ids
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.generate("Once", params)[0].outputs[0].token_ids) == 5
