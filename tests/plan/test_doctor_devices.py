"""What the doctor says where there is a GPU, and of end tokens that are none: held against the engine."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import lamina
from lamina.base.config import EngineConfig
from lamina.base.errors import LaminaError
from lamina.base.sizes import GiB, MiB
from lamina.models import families
from lamina.models.description import Choices
from lamina.plan.doctor import Gpu, Machine, Report, TokenizerFound, diagnose
from lamina.runtime.worker import Worker
from lamina.weights.headers import read_config

TinyOf = Callable[[str, str], Path]
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MACHINE = Machine(
    system="Linux x86_64", processor="a processor", cores=4, memory_bytes=16 * GiB, available_bytes=12 * GiB, gpus=(),
    python="3.12.1", lamina=lamina.__version__, torch="2.13.0", torch_backend="cpu",
)  # fmt: skip
TOKENIZER = TokenizerFound(num_tokens=1024)


@pytest.fixture
def tiny(tiny_of: TinyOf, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_of("flash", "official"), tmp_path / "tiny"))


def examined(directory: Path) -> Report:
    return diagnose(MACHINE, directory, GiB, Choices(), TOKENIZER)


def load(directory: Path) -> None:
    """Loads the checkpoint as the engine does."""
    Worker(directory, EngineConfig(str(directory), cache_bytes=4 * MiB)).load()


def test_an_end_token_that_is_no_token_is_refused(tiny: Path) -> None:
    """By the doctor and by the engine, whichever file names it."""
    path = tiny / "generation_config.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | {"eos_token_id": [1, 10**9]}))
    words = "generation_config.eos_token_id=1000000000 is not valid: a token id below vocab_size (1024)"
    assert examined(tiny).reasons == (words,)
    with pytest.raises(LaminaError, match="vocab_size"):
        load(tiny)
    path.write_text(json.dumps(before))
    (tiny / "config.json").write_text(json.dumps(read_config(tiny) | {"eos_token_id": 1024}))
    (reason,) = examined(tiny).reasons
    assert "eos_token_id=1024" in reason and "below vocab_size (1024)" in reason
    with pytest.raises(LaminaError, match="vocab_size"):
        load(tiny)
    llama = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    with pytest.raises(LaminaError, match="eos_token_id=1000000000"):
        families.NETWORKS["llama"](llama | {"eos_token_id": [1, 10**9]})


def test_a_gpu_is_judged_by_its_own_memory(tiny_of: TinyOf) -> None:
    """The tiny model takes 4 MB as stored and 23 MB as fp32; the pool is 64 MiB."""
    directory = tiny_of("flash", "official")

    def on(gpu_bytes: int, memory_bytes: int, device: str = "auto", used_bytes: int = 0) -> tuple[bool, str]:
        gpu = Gpu("A GPU", gpu_bytes, used_bytes, "9.0", "570.1", torch=True)
        machine = replace(
            MACHINE, memory_bytes=memory_bytes, available_bytes=memory_bytes, gpus=(gpu,), devices=("cpu", "cuda"),
            torch_backend="cuda 12.8", triton="3.6.0",
        )  # fmt: skip
        report = diagnose(machine, directory, 64 * MiB, Choices(), TOKENIZER, device)
        assert report.model is not None and report.model.device == ("cpu" if device == "cpu" else "cuda")
        assert (report.model.gpu_bytes or 0) < (report.model.loaded_bytes or 0)
        return report.is_yes, "; ".join((*report.reasons, *report.limits))

    assert on(GiB, 70 * MiB)[0], "what fits the GPU need not fit the machine"
    fits, words = on(GiB, GiB, used_bytes=GiB - 10 * MiB)
    assert fits and "only 10.00 MiB of the GPU are free now" in words and "as stored" in words
    fits, words = on(65 * MiB, GiB)
    assert fits and "the GPU has 65.00 MiB: it runs with --device cpu" in words
    assert not on(65 * MiB, GiB, "cuda")[0] and on(65 * MiB, GiB, "cpu")[0]
    fits, words = on(65 * MiB, 70 * MiB)
    assert not fits and "the GPU has 65.00 MiB" in words and "the machine has 70.00 MiB" in words
    report = diagnose(MACHINE, directory, 64 * MiB, Choices(), TOKENIZER, "cuda")
    assert report.reasons == ("--device cuda: there is no GPU here that can be used",)
