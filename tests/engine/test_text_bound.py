"""No text has fewer tokens than the bound says, whatever the tokenizer does to it."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lamina.engine.text import BYTE_OF, TextCodec

BYTES = {char: index for index, char in enumerate(sorted(BYTE_OF))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE({**BYTES, "aa": 256, "aaaa": 257, "ĠĠ": 258}, [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|user|>", normalized=False)])
    return made


def by_fallback() -> Tokenizer:
    made = Tokenizer(models.BPE({**FALLBACK, "▁": 256, "a": 257, "▁a": 258}, [("▁", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def changed(change: Callable[[Tokenizer], object]) -> Tokenizer:
    made = byte_level()
    change(made)
    return made


@pytest.mark.parametrize(("make", "longest"), [(byte_level, 8), (by_fallback, 6)])
def test_the_bound_holds(make: Callable[[], Tokenizer], longest: int, tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    codec, rng = TextCodec(tmp_path / "tokenizer.json"), random.Random(0)
    assert codec.fewest_tokens("x" * 800) == -(-800 // longest)
    for _ in range(300):
        text = "".join(rng.choices(["a", "aaaa", " ", "  ", "é", "😀", "1", "<|user|>", "\n", "\0"], k=rng.randrange(60)))
        assert codec.fewest_tokens(text) <= len(codec.encode(text)), text
    assert codec.fewest_tokens("\ud800") == 1


def set_normalizer(made: Tokenizer) -> None:
    made.normalizer = normalizers.NFC()


def set_remover(made: Tokenizer) -> None:
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])


def set_words(made: Tokenizer) -> None:
    made.model = models.WordLevel({"a": 0, "?": 1}, unk_token="?")


def drop_bytes(made: Tokenizer) -> None:
    made.model = models.BPE({"a": 0}, [])


def add_greedy(made: Tokenizer) -> None:
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [set_normalizer, set_remover, set_words, drop_bytes, add_greedy])
def test_where_a_token_may_stand_for_anything_there_is_none(change: Callable[[Tokenizer], object], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    changed(change).save(str(path))
    assert json.loads(path.read_bytes())["model"]
    assert TextCodec(path).fewest_tokens("x" * 800) == 0
