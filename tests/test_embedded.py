"""The model in the package: found by its name wherever a model is asked for, the default, and in every wheel."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from lamina import LLM, SamplingParams
from lamina.base.config import EMBEDDED
from lamina.base.errors import ConfigError
from lamina.cli import main
from lamina.engine.locate import locate
from lamina.models.files import about_embedded, is_embedded, model_name, model_path
from lamina.weights.headers import INDEX

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES, MOST_FILE_BYTES = 24_000_000, 16 * 2**20
ABOUT = "embedded model lamina-tiny (24 MB, trained: simple English, looks things up in long contexts)"


def test_its_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = locate(EMBEDDED)
    assert directory == ROOT / "lamina" / "models" / "lamina_tiny" and is_embedded(directory)
    assert model_name(directory) == EMBEDDED and about_embedded() == ABOUT
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="existing directory"):
        locate("./lamina-tiny")
    (tmp_path / EMBEDDED).mkdir()
    (tmp_path / EMBEDDED / "config.json").write_text("{}")
    assert not caplog.messages and locate(EMBEDDED) == directory  # a directory is meant by a path with a separator
    assert caplog.messages == ["embedded_model name=lamina-tiny passed_over=./lamina-tiny"]
    assert not is_embedded(locate("./lamina-tiny")) and not is_embedded(model_path(str(tmp_path / EMBEDDED)))
    assert main(["plan", EMBEDDED, "--json"]) == 0 and json.loads(capsys.readouterr().out)["model"] == EMBEDDED
    assert main(["doctor", EMBEDDED, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == EMBEDDED
    assert main(["ops", EMBEDDED, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == EMBEDDED


def test_it_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["--prompt", "Once upon a time", "--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--cache-bytes", "64MiB"]
    assert main(["generate", *greedy]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == ABOUT and " tokens in | 6 out" in printed.err
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = LLM(cache_bytes="64MiB").generate("Once upon a time", params)
    assert len(output.outputs[0].token_ids) == 6 and printed.out == output.outputs[0].text + "\n"
    assert main(["generate", *greedy, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_it_is_served_by_its_name(serving: ModuleType) -> None:
    served = serving.start(None, "--cache-bytes", "64MiB")
    try:
        assert [model["id"] for model in served.http.get("/v1/models").json()["data"]] == [EMBEDDED]
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "ignore_eos": True}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        assert answer["model"] == EMBEDDED and answer["usage"]["completion_tokens"] == 4
        assert ABOUT in served.stderr()
    finally:
        assert served.stop() == 0


def test_a_wheel_holds_it() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path: Path(file.path) for file in builder.recurse_included_files()}
    model = {path.removeprefix("lamina/models/lamina_tiny/"): file for path, file in packed.items() if "/lamina_tiny/" in path}
    weights = set(json.loads(model[INDEX].read_text(encoding="utf-8"))["weight_map"].values())
    assert set(model) == weights | {INDEX, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    sizes = [file.stat().st_size for file in model.values()]
    assert max(sizes) <= MOST_FILE_BYTES and sum(sizes) <= MOST_BYTES
    assert {"lamina/cli/demo_prompt.txt", "lamina/ops/native.h"} <= set(packed)
