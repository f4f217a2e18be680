"""Text in and out: streamed decoding equals whole decoding, and stop strings never leak."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lamina.base.errors import ConfigError
from lamina.engine import text as text_module
from lamina.engine.text import Detokeniser, TextCodec, load_codec
from lamina.engine.text_stops import StopChecker

TEXT = [
    "The log and the slot: what a request remembers is short, exact and explained.",
    "Größe, naïve café, 你好世界, привет мир, مرحبا, 🙂🚀👩‍👩‍👧 e\u0301 \u2581 don't, can't , it 's . ok ? yes !",
    "def main():\n    return  'x'   # three   spaces\n\n\ttab",
] * 4
SPECIAL = ["<|bos|>", "<|eos|>", "<｜User｜>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("é"), AddedToken("two words"), AddedToken("你")])
    return tokenizer


def unigram(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False)
    )
    tokenizer.decoder = decoder
    tokenizer.add_tokens(["▁", "▁▁", " ", "▁x▁", "##ing", "##", "a", " .", " n't", "|", "<pad>", "</w>", "b</w>", "'s"])
    tokenizer.add_tokens([f"<0x{byte:02X}>" for byte in [*b"a\xc3\xa9\xf0\x9f\x99\x82", 0xFF, 0x20]] + ["<0x+5>", "<0xG1>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


STREAMED: dict[str, decoders.Decoder | None] = {
    "none": None,
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "ctc_plain": decoders.CTC(cleanup=False),
    "fallback": decoders.ByteFallback(),
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "strip_both": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 3)]),
    "strip_each": decoders.Sequence([decoders.Strip("▁", 2, 0), decoders.ByteFallback()]),
    "strip_each_end": decoders.Strip("a", 0, 1),
    "regex_each": decoders.Replace(Regex("[aeiou▁]+"), "-"),
    "fused_replace": decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("▁▁", "="), decoders.Strip("=", 1, 1), decoders.Fuse()]
    ),
    "byte_level_last": decoders.Sequence([decoders.Replace("▁", "Ġ"), decoders.ByteLevel(), decoders.Strip(" ", 1, 1)]),
    "ctc_wordpiece": decoders.Sequence([decoders.CTC(), decoders.WordPiece(cleanup=False)]),
    "ends_then_words": decoders.Sequence([decoders.BPEDecoder(), decoders.Metaspace()]),
}
WHOLE_ONLY: dict[str, decoders.Decoder] = {
    "fused_regex": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("▁+$"), "")]),
    "fused_bytes": decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
}


@pytest.fixture(scope="session")
def codecs_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {"byte_level": byte_level(), "trained_wordpiece": wordpiece()}
    base = unigram(decoders.Metaspace()).to_str()
    for name, decoder in (STREAMED | WHOLE_ONLY).items():
        made[name] = Tokenizer.from_str(base)
        made[name].decoder = decoder
    made["byte_level_sequence"] = Tokenizer.from_str(made["byte_level"].to_str())
    made["byte_level_sequence"].decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    codecs = {}
    for name, tokenizer in made.items():
        tokenizer.save(str(folder / f"{name}.json"))
        codecs[name] = TextCodec(folder / f"{name}.json")
    return codecs


def streamed(codec: TextCodec, ids: list[int], skip: bool) -> str:
    detokeniser = Detokeniser(codec, skip)
    return "".join([detokeniser.push(token_id) for token_id in ids]) + detokeniser.finish()


def streamed_in_runs(codec: TextCodec, ids: list[int], skip: bool, rng: random.Random) -> str:
    """As `streamed`, several tokens at a time."""
    detokeniser, shown, at = Detokeniser(codec, skip), "", 0
    while at < len(ids):
        count = rng.randrange(1, 9)
        shown += detokeniser.push(*ids[at : at + count])
        at += count
    return shown + detokeniser.finish()


STRIPS_ENDS = {"strip_both", "strip_each_end", "fused_replace", "byte_level_last"}
NAMES = ["byte_level", "byte_level_sequence", "trained_wordpiece", *STREAMED, *WHOLE_ONLY]


@pytest.mark.parametrize("name", NAMES)
def test_streamed_equals_whole_for_random_ids(name: str, codecs_by_name: dict[str, TextCodec]) -> None:
    codec, rng = codecs_by_name[name], random.Random(name)
    num_ids, compared = codec.vocab_size, 0
    late = range(max(0, num_ids - 30), num_ids)  # the hostile added tokens
    for trial in range(400):
        pool = (
            [*late, *rng.sample(range(num_ids), 5)]
            if trial % 2
            else [*range(num_ids), num_ids, num_ids + 7, 1 << 31, -1, 1 << 40]
        )
        ids = rng.choices(pool, k=rng.randrange(0, 12 if trial % 3 else 60))
        for skip in (True, False):
            try:
                whole = codec.decode(ids, skip)
            except BaseException as error:  # the library stops at texts shorter than what Strip may drop at the end
                assert "Panic" in type(error).__name__ and name in STRIPS_ENDS
                continue
            compared += 1
            assert streamed(codec, ids, skip) == whole, (ids, skip)
            assert streamed_in_runs(codec, ids, skip, rng) == whole, (ids, skip)
    assert compared > 200


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "trained_wordpiece"])
def test_streamed_equals_whole_for_real_text(name: str, codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name[name]
    ids = codec.encode("<|bos|>" + "\n".join(TEXT) + "<|eos|>")
    for skip in (True, False):
        assert streamed(codec, ids, skip) == codec.decode(ids, skip)
    assert ("<|bos|>" in codec.decode(ids)) is False
    assert "<|bos|>" in codec.decode(ids, skip_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_byte_level_lossy_decoding_agrees(codecs_by_name: dict[str, TextCodec], data: st.DataObject) -> None:
    """Any bytes at all, so that the library's lossy UTF-8 and ours must agree on every malformed sequence."""
    codec = codecs_by_name["byte_level"]
    hostile = st.sampled_from([0xC0, 0xC3, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x41])
    values = data.draw(st.lists(hostile | st.integers(0, 255), max_size=24))
    byte_ids = one_byte_ids(codec)
    assert len(byte_ids) == 256
    ids = [byte_ids[value] for value in values]
    assert codec.decode(ids) == bytes(values).decode("utf-8", "replace")
    assert streamed(codec, ids, True) == codec.decode(ids)


def one_byte_ids(codec: TextCodec) -> dict[int, int]:
    """Id of the one-character token of each byte, found through the library's own byte table."""
    found: dict[int, int] = {}
    pieces = {codec.token_piece(i): i for i in range(codec.vocab_size)}
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    for byte in range(256):
        char = chr(byte) if byte in shown else chr(0x100 + hidden.index(byte))
        if char in pieces:
            found[byte] = pieces[char]
    return found


def test_characters_come_out_as_soon_as_they_are_certain(codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name["byte_level"]
    byte_ids = one_byte_ids(codec)
    detokeniser = Detokeniser(codec)
    assert [detokeniser.push(byte_ids[b]) for b in "a🙂".encode()] == ["a", "", "", "", "🙂"]
    assert [detokeniser.push(byte_ids[b]) for b in b"\xf0\x9fA\xffB"] == ["", "", "\ufffdA", "\ufffd", "B"]
    assert detokeniser.push(byte_ids[0xE4]) == "" and detokeniser.finish() == "\ufffd"
    llama = Detokeniser(codecs_by_name["sentencepiece"])
    pieces = {codecs_by_name["sentencepiece"].token_piece(i): i for i in range(codecs_by_name["sentencepiece"].vocab_size)}
    out = [llama.push(pieces[p]) for p in ("▁", "▁x▁", "<0xC3>", "<0xA9>", "a")]
    assert out == ["", " x ", "", "", "éa"]


def test_each_token_costs_its_own_length(codecs_by_name: dict[str, TextCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded again: no call to the library's decode, whatever the length, on the streamed paths."""
    for name in ("byte_level", "sentencepiece"):
        codec = codecs_by_name[name]
        monkeypatch.setattr(codec, "decode", lambda *_: pytest.fail("decoded again"))
        detokeniser = Detokeniser(codec)
        for token_id in range(codec.vocab_size):
            detokeniser.push(token_id)
        detokeniser.finish()


def test_waiting_decoders_give_everything_at_the_end(codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name["fused_regex"]
    detokeniser = Detokeniser(codec)
    assert [detokeniser.push(i) for i in codec.encode("the log")] and detokeniser.finish() == codec.decode(
        codec.encode("the log")
    )


def test_codec_round_trip_and_tokens(codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name["byte_level"]
    for text in (TEXT[0], TEXT[1].replace("é", "e"), TEXT[2]):
        assert codec.decode(codec.encode(text)) == text
    assert codec.decode(codec.encode("é")) == "\ufffd"  # the library's rule: an added token spelt in the byte alphabet is bytes
    assert codec.encode("<|eos|>") == [1] and codec.is_special(1) and not codec.is_special(5) and not codec.is_special(1 << 40)
    assert codec.token_text(1) == "<|eos|>" and codec.token_text(10**6) == "" and codec.token_text(-1) == ""
    assert codec.vocab_size == 423
    with pytest.raises(ConfigError, match="surrogates"):
        codec.encode("a\ud800")


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_are_read_and_written_as_short_ones(
    name: str, codecs_by_name: dict[str, TextCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, text = codecs_by_name[name], "\n".join(TEXT)
    ids, ids_of_prompt = codec.encode(text + "<|eos|>"), codec.encode_prompt(text)
    plain, whole = codec.decode(ids), codec.decode(ids, skip_special_tokens=False)
    monkeypatch.setattr(text_module, "_LONG", 1)
    assert codec.encode(text + "<|eos|>") == ids and codec.encode_prompt(text) == ids_of_prompt
    assert codec.decode(ids) == plain and codec.decode(ids, skip_special_tokens=False) == whole
    with pytest.raises(ConfigError):
        codec.encode(text + "\ud800")


def test_a_long_text_lets_other_threads_run(codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name["byte_level"]
    text = "ab " * 100_000
    ticks: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        running = pool.submit(codec.encode, text)
        while not running.done():
            ticks.append(time.perf_counter())
            time.sleep(0.001)
        took = time.perf_counter() - began
    assert running.result() and max(b - a for a, b in pairwise([began, *ticks])) < max(0.1, took / 2), took


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=600)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_codec(tmp_path)
    assert codec is not None and codec.decode(codec.encode(TEXT[0])) == TEXT[0] and len(codec.encode(TEXT[0])) < 600


def write_directory(folder: Path, config: object | None, post: processors.TemplateProcessing | None = None) -> Path:
    tokenizer = byte_level()
    if post is not None:
        tokenizer.post_processor = post
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


BOS_FIRST = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)])


@pytest.mark.parametrize(
    ("config", "post", "num_bos", "num_bos_when_written"),
    [
        (None, None, 0, 1),
        ({"add_bos_token": True, "bos_token": "<|bos|>"}, None, 1, 1),
        ({"add_bos_token": True, "bos_token": {"content": "<|bos|>", "lstrip": False}}, None, 1, 1),
        ({"add_bos_token": True, "bos_token": "<|bos|>"}, BOS_FIRST, 1, 1),
        ({"add_bos_token": False, "bos_token": "<|bos|>"}, BOS_FIRST, 0, 1),
        ({"bos_token": "<|bos|>", "other": [1]}, BOS_FIRST, 1, 1),
    ],
)
def test_bos(
    config: object, post: processors.TemplateProcessing | None, num_bos: int, num_bos_when_written: int, tmp_path: Path
) -> None:
    codec = load_codec(write_directory(tmp_path, config, post))
    assert codec is not None
    plain = codec.encode("the log")
    assert codec.encode_prompt("the log") == [0] * num_bos + plain
    assert codec.encode_prompt("<|bos|>the log") == [0] * num_bos_when_written + plain


def test_missing_and_bad_files(tmp_path: Path) -> None:
    assert load_codec(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ConfigError, match="tokenizer="):
        load_codec(tmp_path)
    with pytest.raises(ConfigError, match="readable"):
        TextCodec(tmp_path / "absent.json")
    for config in (
        "{",
        '{"add_bos_token": "yes"}',
        '{"add_bos_token": true}',
        '{"add_bos_token": true, "bos_token": "<absent>"}',
        '{"bos_token": {"content": 3}}',
    ):
        with pytest.raises(ConfigError, match=r"tokenizer_config|bos_token"):
            load_codec(write_directory(tmp_path, config))


# Stop strings -------------------------------------------------------------------------------------------------------


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Brute force: the first end at which any stop string is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def reference_held(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def pieces_of(draw: st.DataObject, text: str) -> list[str]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(
    data=st.data(),
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stop_checker_equals_brute_force(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    expected, matched = reference_stop(text, stops, include)
    checker, shown, seen, stopped = StopChecker(stops, include), "", "", False
    for piece in pieces_of(data, text):
        emit, stopped = checker.push(piece)
        shown, seen = shown + emit, seen + piece
        assert expected.startswith(shown)
        if stopped:
            break
        if not include:
            assert len(seen) - len(shown) == reference_held(seen, stops)
        else:
            assert shown == seen
    assert stopped is (matched is not None) and checker.matched == matched
    if stopped:
        assert shown == expected and checker.push("more") == ("", True)
    assert shown + checker.finish() == expected
    assert checker.finish() == ""


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_completed_before_min_tokens_are_ignored(tokens: list[str], stops: list[str], min_tokens: int) -> None:
    text, free = "".join(tokens), len("".join(tokens[:min_tokens]))
    expected = text
    for end in range(free + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            expected = text[: end - len(max(hits, key=len))]
            break
    checker, shown, seen = StopChecker(stops, min_tokens=min_tokens), "", ""
    for token in tokens:
        emit, stopped = checker.push(token)
        shown, seen = shown + emit, seen + token
        if stopped:
            break
        assert len(seen) - len(shown) == reference_held(seen, stops)
    assert shown + checker.finish() == expected


def test_stop_checker_examples() -> None:
    checker = StopChecker(["</answer>", "\n\n"])
    assert checker.push("so</ans") == ("so", False)
    assert checker.push("wer! \n") == ("</answer! ", False)
    assert checker.push("\nmore") == ("", True)
    assert checker.matched == "\n\n" and checker.finish() == ""
    assert StopChecker([]).push("anything") == ("anything", False)
    assert StopChecker(["bc", "abcd"]).push("abcd") == ("a", True)
    assert StopChecker(["b", "ab"]).push("ab") == ("", True)
    assert StopChecker(["STOP"], include_in_output=True).push("go STOP now") == ("go STOP", True)
    late = StopChecker(["\ufffd!"])
    assert late.push("a\ufffd") == ("a", False) and late.finish("!b") == "" and late.matched == "\ufffd!"
    early = StopChecker(["b"], min_tokens=1)
    assert early.push("a") == ("a", False) and early.finish("b") == "b" and early.matched is None
    with pytest.raises(ConfigError):
        StopChecker([""])


def test_stop_checker_work_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts automaton moves and copied characters for a text that is held back all the time."""
    size = 3_000
    checker, copied = StopChecker(["a" * size + "b"]), 0
    for _ in range(4 * size):
        copied += len(checker.push("a")[0])
    assert copied == 3 * size and len(checker._held) == size
    assert checker.push("b") == ("", True)


def test_stop_strings_over_streamed_tokens(codecs_by_name: dict[str, TextCodec]) -> None:
    codec = codecs_by_name["byte_level"]
    text = "an answer 🙂 with 你好 in it"
    for stop in ("🙂", "你好", "n i", " "):
        detokeniser, checker, shown = Detokeniser(codec), StopChecker([stop]), ""
        for token_id in codec.encode(text):
            emit, stopped = checker.push(detokeniser.push(token_id))
            shown += emit
            if stopped:
                break
        assert shown == text[: text.index(stop)] and not re.search(re.escape(stop), shown)
