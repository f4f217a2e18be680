"""What shipped attention models remember, from facts of their config.json, against numbers worked by hand.

K and V of one layer and token: 2 x kv heads x head_dim x bytes. A window of W tokens keeps W - 1 of them: the last one is the
token that is being computed.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB, MiB
from lamina.memory.kinds import Alias, Field, Window, check_memories, replay_tokens
from lamina.models.description import Choices, Description
from lamina.models.families import FAMILIES, describe

CONFIGS = Path(__file__).parent.parent / "configs"
M = 2**20


def facts(name: str) -> dict[str, object]:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(values, dict)
    return values


def described(name: str, cache: str | None = None, index: str | None = None, tp: int = 1, draft: int = 0) -> Description:
    return describe(facts(name), Choices(cache, index, tp, draft))


def live(description: Description, position: int) -> dict[str, int]:
    """Live bytes by memory name, all layers together."""
    totals: Counter[str] = Counter()
    for memory in description.memories:
        totals[memory.name] += memory.live_bytes(position)
    return dict(totals)


def layers(description: Description, name: str) -> list[int]:
    return [memory.layer for memory in description.memories if memory.name == name and memory.kind != "alias"]


def window_of(description: Description, name: str) -> Window:
    """The one window that all layers of this name have."""
    found = [memory for memory in description.memories if memory.name == name and isinstance(memory, Window)]
    assert len({(memory.entry, memory.size, memory.reset, memory.keep_first, memory.lag) for memory in found}) == 1
    return found[0]


# Full attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_layers", "entry"),
    [
        ("llama-3.1-8b", 32, 2 * 8 * 128 * 2),  # 4,096 B: 128 KiB a token, 16 GiB at 131,072
        ("qwen3-32b", 64, 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 48, 2 * 4 * 128 * 2),
        ("ministral-3-8b", 34, 2 * 8 * 128 * 2),
    ],
)
def test_full_attention(name: str, num_layers: int, entry: int) -> None:
    found = described(name)
    assert layers(found, "kv") == list(range(num_layers)) and len(found.memories) == num_layers
    assert live(found, 1000) == {"kv": num_layers * entry * 1000}
    assert found.hidden is None  # nothing but logs: no slot, so nothing to keep in it
    assert found.cache_format == "bf16" and found.index_format is None
    assert replay_tokens(found.memories) == 0


def test_llama_at_its_full_length() -> None:
    assert live(described("llama-3.1-8b"), 131072) == {"kv": 16 * GiB}  # 32 x 4,096 B x 2^17 = 2^(5 + 12 + 17)


def test_formats_of_keys_and_values() -> None:
    """8 heads x 128: bf16 4,096 B, fp8 half, fp32 twice; one number per tensor scales fp8, which the notes say."""
    for cache_format, dtype, nbytes in (("bf16", "bf16", 4096), ("fp8", "e4m3", 2048), ("fp32", "fp32", 8192)):
        found = described("llama-3.1-8b", cache_format)
        (memory, *_) = found.memories
        parts = memory.block_parts(1)
        assert [part.field for part in parts] == [Field("k", dtype, (8, 128)), Field("v", dtype, (8, 128))]
        assert memory.live_bytes(1) == nbytes and found.cache_format == cache_format
        assert any("scale" in note for note in found.notes) == (cache_format == "fp8")


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_tensor_parallel_divides_heads(tp: int, heads: int) -> None:
    """8 key/value heads: an equal share each, and one each where there are more GPUs than heads."""
    found = described("llama-3.1-8b", tp=tp)
    assert {part.field.shape for memory in found.memories for part in memory.block_parts(1)} == {(heads, 128)}
    assert any("on several" in note for note in found.notes) == (tp > 8)
    assert found.weights == described("llama-3.1-8b").weights  # of the whole model: `split` says who holds what


@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 3), ("llama-3.1-8b", 64), ("deepseek-v3", 3), ("gpt-oss-20b", 24)])
def test_heads_that_cannot_be_shared_are_refused(name: str, tp: int) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel="):
        described(name, tp=tp)


# Latents --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_layers"), [("deepseek-v2-lite", 27), ("deepseek-v3", 61)])
def test_latent_attention(name: str, num_layers: int) -> None:
    """One latent of 512 + 64 dims a layer and token: bf16 576 x 2 = 1,152 B, fp8 512 + 4 x 4 + 64 x 2 = 656 B."""
    assert live(described(name), 7) == {"latent": num_layers * 1152 * 7}
    assert live(described(name, "fp8"), 7) == {"latent": num_layers * 656 * 7}
    assert live(described(name, "fp32"), 7) == {"latent": num_layers * 2304 * 7}
    assert described(name).hidden is None and described(name).index_format is None
    assert live(described(name, tp=8), 7) == live(described(name), 7)  # all heads read it: replicated


def test_latent_attention_with_an_index() -> None:
    """Served: (656 + 132) B x 61 layers x 2^20 = 48,068 MiB = 46.94 GiB; bf16: (1,152 + 256) x 61 = 85,888 MiB = 83.88 GiB."""
    served, plain = described("deepseek-v3.2"), described("deepseek-v3.2", "bf16", "bf16")
    assert (served.cache_format, served.index_format) == ("fp8", "fp8")
    assert live(served, M) == {"latent": 61 * 656 * M, "index": 61 * 132 * M}
    assert sum(live(served, M).values()) == 48_068 * MiB and f"{48_068 / 1024:.2f}" == "46.94"
    assert sum(live(plain, M).values()) == 85_888 * MiB and f"{85_888 / 1024:.2f}" == "83.88"
    assert live(described("deepseek-v3.2", None, "fp4"), 1)["index"] == 61 * (64 + 4)
    assert live(described("deepseek-v3.2", None, "fp32"), 1)["index"] == 61 * 512
    fields = [part.field for part in served.memories[0].block_parts(1)]
    assert fields == [Field("latent", "e4m3", (512,)), Field("scale", "fp32", (4,)), Field("rope", "bf16", (64,))]
    assert served.hidden is None


def test_a_draft_layer_lags_one_token_behind() -> None:
    """V3 and V3.2 store one draft layer; at p tokens it has rows for p - 1, because a row needs the next token."""
    found = described("deepseek-v3.2", draft=1)
    assert live(found, 10)["draft_latent"] == 9 * 656 and live(found, 10)["draft_index"] == 9 * 132
    assert layers(found, "draft_latent") == [61]
    assert described("deepseek-v3", draft=3).memories[:61] == described("deepseek-v3").memories


# Windows --------------------------------------------------------------------------------------------------------------


def test_gemma_3_27b_at_128k() -> None:
    """2 x 16 heads x 128 x 2 B = 8,192 B. Full layers (every sixth of 62): 10 x 131,072 x 8,192 B = 10 GiB.

    Windows: 52 layers x 1,023 rows x 8,192 B = 435,781,632 B, whatever the length; as full layers they would take 52 GiB.
    """
    found = described("gemma-3-27b")
    assert layers(found, "kv") == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    assert len(layers(found, "window")) == 52 and window_of(found, "window").size == 1024
    assert live(found, 131072) == {"kv": 10 * GiB, "window": 435_781_632}
    assert live(found, 2000)["window"] == 435_781_632
    assert live(found, 1000)["window"] == 52 * 1000 * 8192
    assert found.hidden == Field("hidden", "fp32", (5376,))
    # a lost window is rebuilt from its 1,023 tokens and, below it, those of the 51 windows that feed it
    assert replay_tokens(found.memories) == 52 * 1023
    assert found.max_positions == 131072 and found.vocab_size == 262208  # from the config class: the file is silent


def test_gemma_2_9b() -> None:
    """2 x 8 x 256 x 2 = 8,192 B; layers 0, 2, ... have windows of 4,096, layers 1, 3, ... see all 8,192 tokens."""
    found = described("gemma-2-9b")
    assert layers(found, "window") == list(range(0, 42, 2)) and layers(found, "kv") == list(range(1, 42, 2))
    assert live(found, 8192) == {"window": 21 * 4095 * 8192, "kv": 21 * 8192 * 8192}


@pytest.mark.parametrize(("name", "half"), [("gpt-oss-120b", 18), ("gpt-oss-20b", 12)])
def test_gpt_oss(name: str, half: int) -> None:
    """2 x 8 x 64 x 2 = 2,048 B; windows of 128 in layers 0, 2, ...; a sink is a logit and takes no bytes."""
    found = described(name)
    assert layers(found, "window") == list(range(0, 2 * half, 2)) and layers(found, "kv") == list(range(1, 2 * half, 2))
    assert live(found, 131072) == {"window": half * 127 * 2048, "kv": half * 131072 * 2048}  # kv: 4.5 or 3 GiB
    assert window_of(found, "window").keep_first == 0


def test_mistral_7b() -> None:
    """Every layer has a window of 4,096, and a request never more than 32 x 4,095 x 4,096 B = 512 MiB less 128 KiB a row."""
    found = described("mistral-7b-v0.1")
    assert live(found, 4095) == live(found, 32768) == {"window": 32 * 4095 * 4096}
    assert live(found, 4095)["window"] == 512 * MiB - 32 * 4096
    assert replay_tokens(found.memories) == 32 * 4095
    full = describe(facts("mistral-7b-v0.1") | {"sliding_window": None})
    assert live(full, 32768) == {"kv": 32 * 32768 * 4096} and full.hidden is None


def test_ministral_8b() -> None:
    """Of every four layers the first sees everything: 9 of 36; 27 windows of 32,768."""
    found = described("ministral-8b-2410")
    assert layers(found, "kv") == list(range(0, 36, 4))
    assert live(found, 131072) == {"kv": 9 * 131072 * 4096, "window": 27 * 32767 * 4096}


def test_command_r7b() -> None:
    """Of every four layers the last sees everything: 8 of 32; 24 windows of 4,096; 2 x 8 x 128 x 2 = 4,096 B."""
    found = described("command-r7b")
    assert layers(found, "kv") == list(range(3, 32, 4))
    assert live(found, 100_000) == {"kv": 8 * 100_000 * 4096, "window": 24 * 4095 * 4096}


def test_llama_4_scout() -> None:
    """12 layers without rotation (3, 7, ...) see everything, 36 see their chunk of 8,192 tokens; 4,096 B a row.

    At 100,000 = 12 x 8,192 + 1,696 a chunk layer holds 1,696 rows; at a multiple of 8,192 none.
    """
    found = described("llama-4-scout")
    assert layers(found, "kv") == list(range(3, 48, 4)) and len(layers(found, "chunk")) == 36
    chunk = window_of(found, "chunk")
    assert (chunk.size, chunk.reset) == (8192, 8192)
    assert live(found, 100_000) == {"kv": 12 * 100_000 * 4096, "chunk": 36 * 1696 * 4096}
    assert live(found, 16 * 8192)["chunk"] == 0 and live(found, 8191)["chunk"] == 36 * 8191 * 4096
    assert live(described("llama-4-scout", tp=8), 1)["chunk"] == 36 * 512


def test_gemma_3n_shares() -> None:
    """35 layers, every fifth full. The last 15 own nothing: their windows are layer 18's, their full attention layer 19's.

    2 x 2 x 256 x 2 = 2,048 B. Of layers 0..19 four are full (4, 9, 14, 19) and 16 have windows of 512.
    At 32,768: full 4 x 32,768 x 2,048 B = 256 MiB; windows 16 x 511 x 2,048 B.
    """
    found = described("gemma-3n-e4b")
    assert layers(found, "kv") == [4, 9, 14, 19]
    assert live(found, 32768) == {"kv": 256 * MiB, "window": 16 * 511 * 2048}
    aliases = [memory for memory in found.memories if isinstance(memory, Alias)]
    assert [alias.layer for alias in aliases] == list(range(20, 35))
    assert all((alias.of, alias.of_layer) == (("kv", 19) if alias.layer % 5 == 4 else ("window", 18)) for alias in aliases)
    assert all(alias.name == alias.of for alias in aliases)


# DeepSeek-V4 ----------------------------------------------------------------------------------------------------------


def test_v4_pro_in_bf16_at_a_million() -> None:
    """At 2^20: a c4 layer 2^18 x (1,024 + 256) B = 256 + 64 = 320 MiB, a c128 layer 2^13 x 1,024 B = 8 MiB.

    30 x 320 + 31 x 8 = 9,848 MiB = 9.617 GiB grow with the length. The published 9.625 GiB adds windows of 128 rows:
    61 x 128 x 1,024 B = 7.625 MiB; we keep 127, because the 128th is the token that is being computed.
    """
    found = live(described("deepseek-v4-pro", "bf16", "bf16"), M)
    assert (found["c4"] + found["index"], found["c128"]) == (30 * 320 * MiB, 31 * 8 * MiB)
    growing = found["c4"] + found["index"] + found["c128"]
    assert growing == 9848 * MiB and f"{growing / GiB:.3f}" == "9.617"
    assert found["window"] == 61 * 127 * 1024
    assert f"{(growing + 61 * 128 * 1024) / GiB:.3f}" == f"{(growing + found['window']) / GiB:.3f}" == "9.625"


def test_v4_at_ten_to_the_sixth() -> None:
    """10^6 / 4 x 1,280 B x 30 + floor(10^6 / 128) x 1,024 B x 31 = 9,600,000,000 + 247,984,128 B = 9.17 GiB, windows left out."""
    found = live(described("deepseek-v4-pro", "bf16", "bf16"), 10**6)
    growing = found["c4"] + found["index"] + found["c128"]
    assert growing == 9_600_000_000 + 7812 * 1024 * 31 and f"{growing / GiB:.2f}" == "9.17"


def test_v4_flash_in_bf16_at_a_million() -> None:
    """21 x 320 + 20 x 8 = 6,880 MiB = 6.72 GiB, with or without 43 windows of 127 KiB."""
    found = live(described("deepseek-v4-flash", "bf16", "bf16"), M)
    growing = found["c4"] + found["index"] + found["c128"]
    assert growing == 6880 * MiB and found["window"] == 43 * 127 * 1024
    assert f"{growing / GiB:.2f}" == f"{(growing + found['window']) / GiB:.2f}" == "6.72"


@pytest.mark.parametrize(
    ("name", "index", "c4", "c128", "all_layers", "published"),
    [
        ("deepseek-v4-pro", "fp4", 30, 31, 61, "4.927"),
        ("deepseek-v4-pro", "fp8", 30, 31, 61, "5.396"),
        ("deepseek-v4-flash", "fp4", 21, 20, 43, "3.441"),
        ("deepseek-v4-flash", "fp8", 21, 20, 43, "3.769"),
    ],
)
def test_v4_in_fp8_at_a_million(name: str, index: str, c4: int, c128: int, all_layers: int, published: str) -> None:
    """Entries of 584 B, index keys of 68 or 132 B: 2^18 of both in a c4 layer, 2^13 entries in a c128 layer.

    The published payloads (4.93, 5.40, 3.44, 3.77 GiB) belong to an engine that keeps raw fp32 rows until a group closes, 5.5
    of 8,192 + 2,048 B in a c4 layer and 63.5 of 4,096 B in a c128 layer on average over positions. That is 9 or 6 MiB which
    we do not store: at a multiple of 128 the c128 fold is empty, the c4 folds are 3 x (512 + 128) numbers of 4 B a layer.
    """
    found = live(described(name, "fp8", index), M)
    key = {"fp4": 68, "fp8": 132}[index]
    entries = 2**18 * (584 + key) * c4 + 2**13 * 584 * c128
    assert found["c4"] + found["index"] + found["c128"] == entries
    assert found["window"] == 127 * 584 * all_layers
    assert (found["c4_fold"], found["index_fold"], found["c128_fold"]) == (c4 * 3 * 512 * 4, c4 * 3 * 128 * 4, 0)
    raw = c4 * 5.5 * (8192 + 2048) + c128 * 63.5 * 4096
    assert f"{(entries + found['window'] + raw) / GiB:.3f}" == published
    folds = sum(found[name] for name in ("c4_fold", "index_fold", "c128_fold"))
    assert 0 < raw - folds < 10 * MiB


def test_v4_bytes_per_native_token_and_layer() -> None:
    """bf16: index 256 / 4 = 64, c4 1,024 / 4 = 256, c128 1,024 / 128 = 8; fp8: 132 / 4 = 33, 584 / 4 = 146, 584 / 128 = 4.56."""
    for formats, expected in ((("bf16", "bf16"), (64, 256, 8)), (("fp8", "fp8"), (33, 146, 4.5625))):
        found, num = live(described("deepseek-v4-pro", *formats), M), {"index": 30, "c4": 30, "c128": 31}
        assert tuple(found[name] / M / num[name] for name in ("index", "c4", "c128")) == expected


def test_v4_layers_and_default_formats() -> None:
    pro, flash = described("deepseek-v4-pro"), described("deepseek-v4-flash")
    assert layers(pro, "c128") == [0, 1, *range(3, 60, 2)] and layers(pro, "c4") == layers(pro, "index") == list(range(2, 61, 2))
    assert layers(flash, "c4") == list(range(2, 43, 2)) and layers(flash, "c128") == list(range(3, 42, 2))
    assert layers(pro, "window") == list(range(61)) and layers(flash, "window") == list(range(43))
    assert (pro.cache_format, pro.index_format) == ("fp8", "fp4")
    assert pro.hidden == Field("hidden", "fp32", (7168,)) and flash.hidden == Field("hidden", "fp32", (4096,))
    # the 61 x 127 and 43 x 127
    assert (replay_tokens(pro.memories), replay_tokens(flash.memories)) == (7747, 5461)
    assert described("deepseek-v4-pro", tp=8).memories == pro.memories


def test_v4_states() -> None:
    """Three numbers a channel. In the middle of a group both halves of a c4 fold live, at its end the half carried over."""
    found = described("deepseek-v4-pro")
    assert live(found, 130)["c4_fold"] == 30 * 2 * 3 * 512 * 4 and live(found, 130)["c128_fold"] == 31 * 3 * 512 * 4
    assert live(found, 128)["c4_fold"] == 30 * 3 * 512 * 4 and live(found, 128)["c128_fold"] == 0
    # 636 KiB: 30 x 2 x 3 x (512 + 128) x 4 + 31 x 3 x 512 x 4 = 460,800 + 190,464 = 651,264 B
    states = sum(live(found, 130)[name] for name in ("c4_fold", "index_fold", "c128_fold"))
    assert states == 651_264 == 636 * 1024


@pytest.mark.parametrize(
    ("name", "first", "blocks", "lag"),
    [("deepseek-v4-flash", 43, 1, 1), ("deepseek-v4-flash-0731", 43, 3, 0), ("deepseek-v4-pro", 61, 1, 1)],
)
def test_v4_draft_blocks(name: str, first: int, blocks: int, lag: int) -> None:
    """An MTP block is fed token p + 1 and lags; DSpark's three stages are fed the main model's outputs and do not.

    A window of 127 rows x 584 B = 74,168 B each. Without drafts nothing of them is there.
    """
    without, found = described(name), described(name, draft=3)
    assert found.memories[: len(without.memories)] == without.memories
    assert layers(found, "draft_window") == list(range(first, first + blocks))
    drafts = window_of(found, "draft_window")
    assert (drafts.size, drafts.lag, drafts.entry.nbytes) == (128, lag, 584)
    assert live(found, 1000)["draft_window"] == blocks * 74_168
    assert live(found, 50)["draft_window"] == blocks * (50 - lag) * 584
    assert "draft_window" not in live(without, 1000) and any("left out" in note for note in without.notes)
    # what lags needs the last token's four residual streams beside its final vector
    width = int(str(facts(name)["hidden_size"]))
    assert found.hidden == Field("hidden", "fp32", ((5 if lag else 1) * width,))


# All ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_shipped_config_is_sound(name: str) -> None:
    for draft in (0, 3):
        if draft and not all(memory.takes_drafts for memory in described(name).memories):
            with pytest.raises(ConfigError, match=r"draft_tokens=3 is not valid: 0: .* cannot give drafts back"):
                described(name, draft=draft)
            continue
        found = described(name, draft=draft)
        check_memories(found.memories)
        assert found.model_type == facts(name)["model_type"] and found.model_type in FAMILIES
        assert found.weights and all(part.num_params >= 0 and part.nbytes > 0 for part in found.weights)
        assert {part.split for part in found.weights} <= {"tensor", "expert", "none"}
        assert len({part.component for part in found.weights}) == len(found.weights)


def test_drafts_from_outside_are_said() -> None:
    assert any("outside" in note for note in described("llama-3.1-8b", draft=2).notes)
    assert described("llama-3.1-8b", draft=2).memories == described("llama-3.1-8b").memories
