"""What the doctor says of checkpoints, whole, damaged or hostile, held against what the engine says when it loads them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import lamina
from lamina.base.config import EngineConfig
from lamina.base.errors import LaminaError, WeightError
from lamina.base.sizes import GiB, KiB, MiB
from lamina.layers.entries import StoreSpec
from lamina.memory.layout import make_layout
from lamina.models import families, registry
from lamina.models.checkpoints import RUNNING, contents_of
from lamina.models.description import Choices
from lamina.models.families import describe
from lamina.models.needed import Needed
from lamina.ops.store import Store
from lamina.plan.doctor import TORCH_VERSIONS, Gpu, Machine, Report, TokenizerFound, diagnose
from lamina.runtime.worker import Worker
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint

TinyOf = Callable[[str, str], Path]
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MACHINE = Machine(
    system="Linux x86_64", processor="a processor", cores=4, memory_bytes=16 * GiB, available_bytes=12 * GiB, gpus=(),
    python="3.12.1", lamina=lamina.__version__, torch="2.13.0", torch_backend="cpu",
)  # fmt: skip
TOKENIZER = TokenizerFound(num_tokens=1024)


def examined(
    directory: Path, cache_bytes: int = GiB, machine: Machine = MACHINE, tokenizer: TokenizerFound = TOKENIZER
) -> Report:
    report = diagnose(machine, directory, cache_bytes, Choices(), tokenizer)
    for sentence in (*report.reasons, *report.limits):
        assert sentence.isprintable() and 0 < len(sentence) <= 400
    return report


def refused(directory: Path, *words: str, reasons: int | None = None) -> Report:
    """The report of a checkpoint that does not run; all words are in one of its reasons."""
    report = examined(directory)
    assert not report.is_yes
    assert any(all(word in reason for word in words) for reason in report.reasons), report.reasons
    assert reasons is None or len(report.reasons) == reasons, report.reasons
    return report


def load(directory: Path) -> None:
    """Loads the checkpoint as the engine does."""
    Worker(directory, EngineConfig(str(directory), cache_bytes=4 * MiB)).load()


@pytest.fixture
def tiny(tiny_of: TinyOf, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_of("flash", "official"), tmp_path / "tiny"))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def reconfigure(directory: Path, **changes: object) -> None:
    values = read_config(directory) | changes
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")


# The list of tensors is the loader's ------------------------------------------------------------------------------------


class Recorder(Checkpoint):
    """Notes what a model takes."""

    taken: list[Needed]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.taken.append(Needed(name, shape))
        return super().take(name, shape)

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        self.taken.append(Needed(name, shape, is_integer=True))
        return super().take_int(name, shape, low, high)


def taken(directory: Path) -> list[Needed]:
    """What the model of a checkpoint takes when it is loaded."""
    blueprint = registry.blueprint(read_config(directory), "bf16", "bf16")

    def make(spec: StoreSpec) -> Store:
        return Store(spec.codec, tuple(torch.zeros(1, 1, elements) for _, _, elements in spec.codec.fields))

    with Recorder(directory, blueprint.names) as recorder:
        recorder.taken = []
        blueprint.load(recorder, "fp32", make)
        return recorder.taken


def test_every_family_that_runs_can_be_examined() -> None:
    assert set(registry._MODELS) | set(families.NETWORKS) == RUNNING


@pytest.mark.parametrize("shape", ["flash", "pro", "bench"])
@pytest.mark.parametrize("file_format", ["official", "transformers"])
def test_needed_is_what_the_model_takes(tiny_of: TinyOf, shape: str, file_format: str) -> None:
    directory = tiny_of(shape, file_format)
    values = read_config(directory)
    contents = contents_of(values)
    needed, loaded = list(contents.needed(frozenset())), taken(directory)
    assert len(needed) == len(loaded) and set(needed) == set(loaded)
    assert contents.names is registry.blueprint(values, "fp8", "fp4").names
    report = examined(directory)
    assert report.is_yes and report.model is not None and report.model.tensors is not None
    # fp32 for all but the tables of experts, which are int64
    sizes = [(8 if one.is_integer else 4) * torch.Size(one.shape).numel() for one in needed]
    assert report.model.loaded_bytes == sum(sizes)


def test_needed_is_what_random_models_take(checkpoint_of: Callable[[str], Path], random_models: object) -> None:
    for name in vars(random_models)["RECIPES"]:
        directory = checkpoint_of(name)
        values = read_config(directory)
        needed, loaded = list(contents_of(values).needed(frozenset())), taken(directory)
        assert len(needed) == len(loaded) and set(needed) == set(loaded)
        assert examined(directory, tokenizer=TokenizerFound()).is_yes


# Whole checkpoints -----------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_and_its_figures(tiny_of: TinyOf) -> None:
    directory = tiny_of("flash", "official")
    report = examined(directory, cache_bytes=4 * MiB)
    model = report.model
    assert report.is_yes and model is not None and model.tensors is not None and model.capacity is not None
    stored = tensors_of(directory)
    assert (model.num_files, model.num_tensors) == (1, len(stored))
    assert model.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
    drafts = [name for name in stored if name.startswith("mtp.")]
    assert model.tensors.ignored == len(drafts) and model.tensors.num_found == len(stored) - len(drafts)
    assert any(limit.startswith(f"{len(drafts)} tensors") and "draft" in limit for limit in report.limits)
    # what the engine says of the same memory
    worker = Worker(directory, EngineConfig(str(directory), cache_bytes=4 * MiB))
    assert (model.capacity.pages, model.capacity.page_bytes) == (worker.num_pages, worker.layout.page_bytes)
    assert model.capacity.most_tokens == lamina.LLM(directory, cache_bytes=4 * MiB).engine.max_model_len
    assert model.max_positions is not None and model.capacity.most_tokens < model.max_positions
    assert any(f"{model.capacity.most_tokens:,} tokens" in limit for limit in report.limits)
    layout = make_layout(describe(read_config(directory)).memories, describe(read_config(directory)).hidden)
    assert model.capacity.short_requests == worker.num_pages // layout.peak_pages(4_096)


def test_the_size_it_asks_for_is_enough_and_little_more(tiny_of: TinyOf) -> None:
    directory = tiny_of("pro", "official")
    report = examined(directory, cache_bytes=4 * MiB)
    size = next(limit for limit in report.limits if "--cache-bytes" in limit).rpartition(" ")[2]
    needed = int(size.removesuffix("MiB")) * MiB
    whole, less = examined(directory, cache_bytes=needed).model, examined(directory, cache_bytes=needed - 2 * MiB).model
    assert whole is not None and whole.capacity is not None and whole.capacity.most_tokens == whole.max_positions
    assert less is not None and less.capacity is not None and less.capacity.most_tokens < whole.capacity.most_tokens


def test_memory_of_the_machine(tiny_of: TinyOf) -> None:
    directory = tiny_of("flash", "official")
    small = replace(MACHINE, memory_bytes=64 * MiB, available_bytes=32 * MiB)
    report = examined(directory, cache_bytes=64 * MiB, machine=small)
    assert len(report.reasons) == 1 and "64.00 MiB" in report.reasons[0] and "fp32" in report.reasons[0]
    busy = replace(MACHINE, available_bytes=32 * MiB)
    report = examined(directory, cache_bytes=64 * MiB, machine=busy)
    assert report.is_yes and any("32.00 MiB are free now" in limit for limit in report.limits)
    unknown = replace(MACHINE, memory_bytes=None, available_bytes=None)
    assert examined(directory, machine=unknown).is_yes


def test_a_cache_too_small_for_one_request(tiny_of: TinyOf) -> None:
    directory = tiny_of("flash", "official")
    worker = Worker(directory, EngineConfig(str(directory)))
    least = worker.layout.pages_for(1) * worker.layout.page_bytes
    report = examined(directory, cache_bytes=least - 1)
    assert len(report.reasons) == 1 and f"({least})" in report.reasons[0] and "--cache-bytes" in report.reasons[0]
    assert report.model is not None and report.model.capacity is not None and report.model.capacity.most_tokens == 0
    assert examined(directory, cache_bytes=least).is_yes
    with pytest.raises(LaminaError, match=f"at least {least} B"):
        lamina.LLM(directory, cache_bytes=least - 1)


def test_tokenizers(tiny_of: TinyOf) -> None:
    directory = tiny_of("flash", "official")
    none = examined(directory, tokenizer=TokenizerFound())
    assert none.is_yes and any("no tokenizer.json" in limit for limit in none.limits)
    assert not any("tokenizer" in limit for limit in examined(directory).limits)
    broken = examined(directory, tokenizer=TokenizerFound(problem="tokenizer='x' is not valid"))
    assert broken.reasons == ("tokenizer='x' is not valid",)
    large = examined(directory, tokenizer=TokenizerFound(num_tokens=1025))
    assert len(large.reasons) == 1 and "1,025" in large.reasons[0] and "1,024" in large.reasons[0]


# Damaged tensors: the engine refuses each of them too, and says the same --------------------------------------------------


NORM, QUERY, EXPERT = "layers.1.attn_norm.weight", "layers.2.attn.wq_b.weight", "layers.0.ffn.experts.3.w2.weight"
TABLE = "layers.0.ffn.gate.tid2eid"


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def scale(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "gone": (lambda t: t.pop(NORM), ("1 tensor is missing", repr(NORM))),
    "renamed": (lambda t: t.update({"layers.1.extra": t.pop(NORM)}), ("1 tensor is missing", repr(NORM))),
    "shorter": (changed(NORM, lambda x: x[:-1]), (repr(NORM), "expected shape [128], found BF16 [127]")),
    "doubles": (changed(NORM, torch.Tensor.double), (repr(NORM), "expected F32, BF16, F16", "F64 [128]")),
    "turned": (changed(QUERY, lambda x: x.view(torch.uint8).t().contiguous().view(x.dtype)), (repr(QUERY), "[512, 128]")),
    "no scale": (lambda t: t.pop(scale(QUERY)), (repr(QUERY), repr(scale(QUERY)), "found none")),
    "scale cut": (changed(scale(QUERY), lambda x: x[:1]), (repr(scale(QUERY)), "expected scales [4, 1]", "[1, 1]")),
    "scale type": (changed(scale(QUERY), lambda x: x.float().half()), (repr(scale(QUERY)), "F16")),
    "no fp4 scale": (lambda t: t.pop(scale(EXPERT)), (repr(EXPERT), "packed FP4", "found none")),
    "half an expert": (changed(EXPERT, lambda x: x[:, :32]), (repr(EXPERT), "packed FP4 [128, 64] for [128, 128]", "[128, 32]")),
    "fp4 scale cut": (changed(scale(EXPERT), lambda x: x[:, :1]), (repr(scale(EXPERT)), "expected scales [128, 4]")),
    "table of floats": (changed(TABLE, torch.Tensor.float), (repr(TABLE), "expected integers [1024, 2]", "F32")),
    "left over": (lambda t: t.update({"layers.9.x": torch.zeros(2)}), ("1 tensor is not used", "'layers.9.x'")),
    "twice": (lambda t: t.update({"model.norm.weight": t["norm.weight"]}), ("'norm.weight' is stored twice",)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors(tiny: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    tensors = tensors_of(tiny)
    change(tensors)
    rewrite(tiny, tensors)
    report = refused(tiny, *words)
    with pytest.raises(WeightError) as caught:
        load(tiny)
    said = str(caught.value)
    if " is missing from " in said:  # the engine stops at the first, the doctor counts them
        assert said.split("'")[1] in " ".join(report.reasons)
    else:
        assert said in report.reasons
    assert report.model is not None and report.model.tensors is not None


def test_many_damages_are_counted_and_the_first_are_named(tiny: Path) -> None:
    tensors = tensors_of(tiny)
    gone = [name for name in tensors if name.startswith("layers.3.ffn.experts.")]
    for name in gone:
        del tensors[name]
    for index in range(7):
        tensors[f"extra.{index}"] = torch.zeros(1)
    for layer in range(5):
        tensors[f"layers.{layer}.attn_norm.weight"] = torch.zeros(3)
    rewrite(tiny, tensors)
    report = examined(tiny)
    model = report.model
    assert model is not None and model.tensors is not None
    # a missing expert's scales are not missed on their own
    assert len(gone) == 8 * 3 * 2 and len(model.tensors.missing) == 8 * 3
    assert report.reasons[0].startswith("24 tensors are missing: 'layers.3.ffn.experts.0.w1.weight', ")
    assert report.reasons[0].endswith(" and 21 more")
    assert [reason.split("'")[1] for reason in report.reasons[1:4]] == [f"layers.{n}.attn_norm.weight" for n in range(3)]
    assert report.reasons[4] == "2 more tensors are not what config.json asks for"
    assert report.reasons[5] == "7 tensors are not used by this model: 'extra.0', 'extra.1', 'extra.2' and 4 more"


def test_a_config_of_another_size(tiny: Path) -> None:
    reconfigure(tiny, num_hidden_layers=4, compress_ratios=[0, 0, 4, 128])
    refused(tiny, "not used by this model", "'layers.4.")
    reconfigure(tiny, num_hidden_layers=5, compress_ratios=[0, 0, 4, 128, 4], hidden_size=256)
    refused(tiny, "'embed.weight'", "[1024, 256]", "[1024, 128]")


def test_a_config_that_asks_for_more_than_there_is_anywhere(tiny: Path) -> None:
    reconfigure(tiny, n_routed_experts=2**39)
    report = refused(tiny, "10,000 tensors are missing at least; the search ended there")
    assert report.model is not None and report.model.tensors is not None and not report.model.tensors.is_complete
    assert not any("not used" in reason for reason in report.reasons)
    assert any("the machine has 16.00 GiB" in reason for reason in report.reasons)


# Damaged files ---------------------------------------------------------------------------------------------------------


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def header_of(path: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def put_header(path: Path, header: dict[str, dict[str, object]], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def shards(directory: Path, count: int = 4) -> list[Path]:
    """The checkpoint again, in shards with an index."""
    tensors = tensors_of(directory)
    (directory / "model.safetensors").unlink()
    names, files, placed = sorted(tensors), [], {}
    for index in range(count):
        file = directory / f"model-{index:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[index::count]}
        save_file(part, file)
        placed |= dict.fromkeys(part, file.name)
        files.append(file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return files


def test_shards_are_as_good_as_one_file(tiny: Path) -> None:
    before = examined(tiny)
    shards(tiny)
    after = examined(tiny)
    assert before.model is not None and after.model is not None
    assert after.is_yes and after.model.num_files == 4 and after.model.tensors == before.model.tensors


def test_damaged_files(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    whole = path.read_bytes()
    cut(path, 1)
    report = refused(tiny, "model.safetensors is truncated", reasons=1)
    assert report.model is not None and report.model.num_tensors is None and report.model.capacity is not None
    path.write_bytes(whole + b"\0")
    refused(tiny, "longer than its header says", reasons=1)
    path.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    refused(tiny, "header", f"{2**62} bytes", reasons=1)
    path.write_bytes(b"")
    refused(tiny, "header", reasons=1)
    path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    refused(tiny, "JSON object", reasons=1)
    path.write_bytes(whole)
    header, data = header_of(path)
    header.pop("__metadata__", None)
    first, second = list(header)[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    header[second]["shape"], header[second]["dtype"] = header[first]["shape"], header[first]["dtype"]
    put_header(path, header, data)
    refused(tiny, "overlaps", reasons=1)
    path.unlink()
    refused(tiny, "holds neither", reasons=1)
    (tiny / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tiny, "pickled", reasons=1)


def test_every_damaged_or_absent_shard_is_named(tiny: Path) -> None:
    files = shards(tiny, 6)
    cut(files[1], 1)
    cut(files[4], 10)
    report = refused(tiny, f"{files[1].name} is truncated", reasons=2)
    assert f"{files[4].name} is truncated" in report.reasons[1]
    for file in (files[0], files[2], files[3], files[5]):
        file.unlink()
    report = refused(tiny, "index.json names 4 files that are not there", repr(files[0].name), "and 1 more", reasons=3)
    for file in files:
        file.unlink(missing_ok=True)
    refused(tiny, "names 6 files that are not there", reasons=1)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "\0", None, 3])
def test_an_index_cannot_name_what_it_likes(tiny: Path, file: object) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": file}}))
    refused(tiny, "plain *.safetensors file name")


def test_both_kinds_of_checkpoint_at_once(tiny: Path) -> None:
    whole = (tiny / "model.safetensors").read_bytes()
    shards(tiny)
    (tiny / "model.safetensors").write_bytes(whole)
    refused(tiny, "keep one", reasons=1)


def test_configs(tiny: Path) -> None:
    path, whole = tiny / "config.json", (tiny / "config.json").read_text(encoding="utf-8")
    for text in ("", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "\0"):
        path.write_text(text)
        report = refused(tiny, "config.json", reasons=1)
        assert report.model is not None and report.model.num_tensors  # the files are judged all the same
    path.unlink()
    refused(tiny, "config.json", reasons=1)
    for model_type in (None, 7, "gpt2", "x\n\x1b[31m" * 99):
        path.write_text(json.dumps(json.loads(whole) | {"model_type": model_type}))
        refused(tiny, "config.json: model_type=", reasons=1)
    path.write_text(json.dumps(json.loads(whole) | {"o_groups": 3}))
    refused(tiny, "config.json: o_groups=3", reasons=1)
    path.write_text(whole)
    (tiny / "generation_config.json").write_text("{")
    refused(tiny, "generation_config.json", reasons=1)


def test_names_cannot_command_the_terminal_nor_fill_it(tiny: Path) -> None:
    tensors = tensors_of(tiny)
    tensors["\x1b[2J\x1b]0;owned\x07\n[bold red]"] = torch.zeros(1)
    tensors["layers." + "x" * 300_000] = torch.zeros(1)
    rewrite(tiny, tensors)
    report = refused(tiny, "2 tensors are not used", "xxx…", "\\x1b[2J")
    assert all("\x1b" not in reason and "\n" not in reason for reason in report.reasons)


def test_links(tiny: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tiny / "model.safetensors").rename(elsewhere / "w")
    (tiny / "model.safetensors").symlink_to(elsewhere / "w")
    report = examined(tiny)
    assert report.is_yes and any("1 file is a link to elsewhere: model.safetensors -> " in limit for limit in report.limits)
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors").symlink_to(tiny / "model.safetensors")  # leads to itself
    refused(tiny, "holds neither")
    # a hub's cache: snapshots/REVISION/file -> ../../blobs/DIGEST
    repo = tmp_path / "models--a--b"
    snapshot, blobs = repo / "snapshots" / "0123", repo / "blobs"
    blobs.mkdir(parents=True)
    (tiny / "model.safetensors").unlink()
    shutil.copytree(tiny, snapshot)
    (elsewhere / "w").rename(blobs / "w")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "w"))
    report = examined(snapshot)
    assert report.is_yes and not any("link" in limit for limit in report.limits)


def test_what_is_no_directory(tiny: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tiny / "config.json"):
        report = refused(path, "is no directory", reasons=1)
        assert report.model is not None and not report.model.exists
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refused(loop, "is no directory", reasons=1)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "config.json", reasons=2)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_yes_means_that_the_engine_loads_it(
    tiny_of: TinyOf, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any change to one entry of the header: the doctor says yes exactly if the engine takes it."""
    directory = tmp_path_factory.mktemp("changed")
    shutil.copytree(tiny_of("flash", "official"), directory, dirs_exist_ok=True)
    path = directory / "model.safetensors"
    header, content = header_of(path)
    header.pop("__metadata__", None)
    name = data.draw(st.sampled_from(sorted(header)))
    entry = header[name]
    change = data.draw(st.sampled_from(["dtype", "shape", "offsets", "rename", "swap", "none"]))
    if change == "dtype":
        entry["dtype"] = data.draw(st.sampled_from(["F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8", "I8", "I64", "BOOL", "x"]))
    elif change == "shape":
        shape = list(entry["shape"]) if isinstance(entry["shape"], list) else []
        entry["shape"] = data.draw(st.sampled_from([shape[::-1], [*shape, 1], shape[1:], [torch.Size(shape).numel()]]))
    elif change == "offsets":
        entry["data_offsets"] = data.draw(st.sampled_from([[0, 0], [0, 1], [-1, 1], [0], None]))
    elif change == "rename":
        header[data.draw(st.sampled_from([name + "x", "model." + name, "mtp." + name]))] = header.pop(name)
    elif change == "swap":
        other = data.draw(st.sampled_from(sorted(header)))
        header[name], header[other] = header[other], header[name]
    put_header(path, header, content)
    said = examined(directory)
    try:
        load(directory)
    except WeightError as error:
        by_value = any(words in str(error) for words in ("finite", "expected values from"))
        assert by_value or not said.is_yes, str(error)  # what only the data shows cannot be seen in headers
    else:
        assert said.is_yes, said.reasons


# Families that are only planned ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configs(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "config.json")
    report = examined(tmp_path)
    model_type = read_config(tmp_path)["model_type"]
    assert not report.is_yes and report.model is not None
    model = report.model
    assert model.is_known and model.runs == (model_type in RUNNING)
    assert any("can be planned" in reason for reason in report.reasons) != model.runs
    assert any("holds neither" in reason for reason in report.reasons)
    assert model.num_params is not None and model.planned_bytes is not None and model.capacity is not None
    layout = make_layout(describe(read_config(tmp_path)).memories, describe(read_config(tmp_path)).hidden)
    assert model.capacity.most_tokens <= layout.most_tokens(GiB // layout.page_bytes, model.max_positions or 0) + 1


def test_sizes_of_planned_families_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "model_type": "paper", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    monkeypatch.setitem(families.FAMILIES, "paper", families.FAMILIES["llama"])
    (tmp_path / "config.json").write_text(json.dumps(values))
    planned = sum(part.nbytes for part in describe(values).weights)
    save_file({"all": torch.zeros(planned // 2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    report = examined(tmp_path)
    (reason,) = report.reasons
    assert reason.startswith("paper can be planned (`lamina plan`) but not run by this version, which runs ")
    assert not any("implies" in limit for limit in report.limits)
    save_file({"all": torch.zeros(planned, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert any("config.json implies" in limit for limit in examined(tmp_path).limits)


# Machines ----------------------------------------------------------------------------------------------------------------


def machine_report(**changes: object) -> Report:
    return diagnose(replace(MACHINE, **changes), None, GiB, Choices())  # type: ignore[arg-type]


def test_machines_alone() -> None:
    assert machine_report() == Report((), (), MACHINE, None)
    report = machine_report(torch=None, torch_backend=None, torch_problem="OSError: libfoo.so: cannot open\nshared object")
    assert report.reasons == ("torch cannot be imported: OSError: libfoo.so: cannot open shared object",)
    for version in ("2.10.1", "2.15.0", "3.0.0", "nightly"):
        report = machine_report(torch=version)
        assert report.is_yes and len(report.limits) == 1 and "from 2.11, below 2.15" in report.limits[0]
    for version in ("2.11.0", "2.14.1+cu130"):
        assert machine_report(torch=version).limits == ()
    assert "driver too old" in machine_report(torch_problem="driver too old").limits[0]


def test_gpus() -> None:
    gpus = (Gpu("H200", 140 * GiB, 0, "9.0", "570.1", torch=True), Gpu("H200", 140 * GiB, 0, "9.0", "570.1"))
    report = machine_report(gpus=gpus, torch_backend="cuda 12.8", devices=("cpu", "cuda"))
    assert len(report.limits) == 1 and "torch cannot use 1 GPU (" in report.limits[0]
    report = machine_report(gpus=gpus[1:], devices=("cpu", "cuda"))
    assert report.limits == ("torch 2.13.0 is built for the CPU: it cannot use 1 GPU",)
    report = machine_report(gpus=gpus[:1], torch_backend="cuda 12.8")
    assert report.limits == ("1 GPU would stay idle: a GPU needs compute capability 8.0, a torch built for CUDA, and Triton",)
    both = (gpus[0], gpus[0])
    report = machine_report(gpus=both, torch_backend="cuda 12.8", devices=("cpu", "cuda"))
    assert report.limits == ("this version computes on one GPU: 1 GPU would stay idle",)


def test_the_versions_of_torch_are_the_projects() -> None:
    project = (Path(__file__).resolve().parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    low, high = (".".join(map(str, version)) for version in TORCH_VERSIONS)
    assert f'"torch>={low},<{high}"' in project


def test_a_report_of_a_directory_of_junk(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json"):
        (tmp_path / name).mkdir()
    report = examined(tmp_path, cache_bytes=4 * KiB)
    assert not report.is_yes and len(report.reasons) == 2
