"""Families with a recurrent state, from their config.json: bytes worked out by hand, and Transformers' own shapes and counts.

Figures of the shipped models are derived in comments from the fields in tests/configs. The property tests build random tiny
models, run them once and read the shapes of the cache that Transformers filled.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Memory
from lamina.memory.layout import make_layout
from lamina.models.description import Choices, Description
from lamina.models.families import describe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
OFFICIAL = ("jamba-1.5-mini", "bamba-9b", "falcon-h1-7b", "nemotron-h-8b", "minimax-text-01", "qwen3-next-80b")
Values = dict[str, object]


def official(name: str, **changes: object) -> Values:
    """The fields of a shipped config, some of them changed."""
    values: Values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return values | changes


def named(description: Description, name: str) -> list[Memory]:
    return [memory for memory in description.memories if memory.name == name]


def per_layer(description: Description, name: str, position: int = 1_000) -> int:
    """Live bytes of one layer's memory of this name; all layers have the same."""
    found = {memory.live_bytes(position) for memory in named(description, name)}
    assert len(found) == 1
    return found.pop()


def per_token(description: Description) -> int:
    """Bytes that each further token adds, all layers together."""
    return sum(memory.live_bytes(5_001) - memory.live_bytes(5_000) for memory in description.memories)


# Figures worked out by hand --------------------------------------------------------------------------------------------


def test_jamba_has_one_state_per_request_whatever_its_length() -> None:
    found = describe(official("jamba-1.5-mini"))
    # attention where layer mod 8 = 4; Mamba in the other 28 of 32
    assert [memory.layer for memory in named(found, "kv")] == [4, 12, 20, 28]
    assert [memory.layer for memory in named(found, "state")] == [i for i in range(32) if i not in (4, 12, 20, 28)]
    # keys and values: 2 x 8 heads x 128 dims x 2 B = 4,096 B a layer, 4 layers
    assert per_token(found) == 4 * 4_096 == 16_384
    # state: 2 x 4,096 channels x 16 numbers x 4 B; window: 8,192 channels x 2 B x 3 tokens
    assert per_layer(found, "state") == 8_192 * 16 * 4 == 524_288
    assert per_layer(found, "conv") == 8_192 * 2 * 3 == 49_152
    layout = make_layout(found.memories, found.hidden)
    for position in (3, 100, 262_144):
        live = layout.live_bytes(position)
        assert live["state"] == 28 * 524_288 == 14_680_064  # 14 MiB, after 3 tokens as after 262,144
        assert live["conv"] == 28 * 49_152 and live["kv"] == position * 16_384 and live["hidden"] == 4_096 * 4
    assert layout.live_bytes(0) == {"kv": 0, "conv": 0, "state": 0, "hidden": 0}
    assert layout.live_bytes(1)["conv"] == 28 * 16_384  # one token is in the window
    assert layout.live_bytes(4_096)["kv"] == 64 * 2**20  # 4,096 x 16 KiB = 64 MiB: four and a half times the states


def test_jambas_slot_in_pages() -> None:
    found = describe(official("jamba-1.5-mini"))
    layout = make_layout(found.memories, found.hidden, block_tokens=32)
    assert layout.page_bytes == 32 * 16_384 == 524_288
    # A state fills a page. A window's ring has 4 rows, 65,536 B: 8 a page, 28 of them and the hidden vector (16,384 B) 4 pages.
    assert layout.slot_pages == 28 + 4
    assert [layout.pages_for(n) for n in (1, 32, 33, 4_096)] == [33, 33, 34, 128 + 32]
    assert layout.replay == float("inf") and layout.checkpoint_pages(10) == 28 + 3  # live: 3 rows, 10 windows a page


def test_qwen3_next_at_1k_and_at_128k() -> None:
    found = describe(official("qwen3-next-80b"))
    assert [memory.layer for memory in named(found, "kv")] == list(range(3, 48, 4))
    assert len(named(found, "state")) == len(named(found, "conv")) == 36
    # state: 32 heads x 128 x 128 x 4 B; window: (2 x 16 + 32) heads x 128 = 8,192 channels x 2 B x 3 tokens
    assert per_layer(found, "state") == 32 * 128 * 128 * 4 == 2_097_152
    assert per_layer(found, "conv") == 8_192 * 2 * 3 == 49_152
    assert per_layer(found, "kv") == 1_000 * 2 * 2 * 256 * 2 == 1_000 * 2_048
    layout = make_layout(found.memories, found.hidden, block_tokens=256)
    fixed = 36 * (2_097_152 + 49_152) + 2_048 * 4
    assert fixed == 77_275_136  # 73.7 MiB
    # 1,024 tokens x 12 layers x 2,048 B = 24 MiB: a third of the fixed part; 131,072 tokens: 3 GiB, the fixed part is 2.4 %
    assert sum(layout.live_bytes(1_024).values()) == 24 * 2**20 + fixed
    assert sum(layout.live_bytes(131_072).values()) == 3 * 2**30 + fixed
    # A page is 256 x 24,576 B: three states fill one exactly (12 pages), all rings of 4 rows and the hidden vector one more.
    assert layout.page_bytes == 6_291_456 == 3 * 2_097_152
    assert layout.slot_pages == 13
    assert layout.pages_for(1_024) == 4 + 13 and layout.pages_for(131_072) == 512 + 13


def test_minimax_text_01() -> None:
    found = describe(official("minimax-text-01"))
    # full attention in every eighth layer of 80, lightning attention, which has no convolution, in 70
    assert [memory.layer for memory in named(found, "kv")] == list(range(7, 80, 8))
    assert len(named(found, "state")) == 70 and not named(found, "conv")
    assert per_layer(found, "state") == 64 * 128 * 128 * 4 == 4_194_304
    assert per_token(found) == 10 * 2 * 8 * 128 * 2 == 40_960
    layout = make_layout(found.memories, found.hidden)
    # one million tokens: 39.06 GiB of keys and values and 280 MiB of states; with full attention in 80 layers 312.5 GiB
    assert layout.live_bytes(2**20) == {"kv": 40 * 2**30, "state": 280 * 2**20, "hidden": 6_144 * 4}


def test_mamba_2_families() -> None:
    bamba, falcon, nemotron = (describe(official(name)) for name in OFFICIAL[1:4])
    assert [memory.layer for memory in named(bamba, "kv")] == [9, 18, 27] and len(named(bamba, "state")) == 29
    assert per_layer(bamba, "state") == 128 * 64 * 128 * 4 == 4_194_304
    assert per_layer(bamba, "conv") == (128 * 64 + 2 * 1 * 128) * 2 * 3 == 50_688
    assert per_token(bamba) == 3 * 2 * 8 * 128 * 2 == 12_288
    # every layer of Falcon-H1 has all three
    assert [memory.name for memory in falcon.memories[:4]] == ["kv", "conv", "state", "kv"] and len(falcon.memories) == 3 * 44
    assert per_layer(falcon, "state") == 24 * 128 * 256 * 4 == 3_145_728
    assert per_layer(falcon, "conv") == (24 * 128 + 2 * 1 * 256) * 2 * 3 == 21_504
    assert per_token(falcon) == 44 * 2 * 2 * 128 * 2 == 45_056
    # 52 letters: 24 M, 24 -, 4 *; a layer that only feeds forward remembers nothing
    assert [memory.layer for memory in named(nemotron, "kv")] == [7, 18, 29, 40]
    assert len(named(nemotron, "state")) == 24 and len(nemotron.memories) == 2 * 24 + 4
    assert per_layer(nemotron, "state") == 128 * 64 * 128 * 4 == 4_194_304
    assert per_layer(nemotron, "conv") == (128 * 64 + 2 * 8 * 128) * 2 * 3 == 61_440
    assert per_token(nemotron) == 4 * 2 * 8 * 128 * 2 == 16_384


def test_formats_change_what_they_name_and_nothing_else() -> None:
    values = official("qwen3-next-80b")
    plain, fp8, fp32 = (describe(values, Choices(cache_format=name)) for name in (None, "fp8", "fp32"))
    assert (plain.cache_format, fp8.cache_format, plain.index_format) == ("bf16", "fp8", None)
    assert [per_layer(one, "kv", 1) for one in (plain, fp8, fp32)] == [2_048, 1_024, 4_096]
    assert per_layer(plain, "state") == per_layer(fp8, "state") == per_layer(fp32, "state")
    # inputs of convolutions are kept as the model computes, which is in fp32 where its keys and values are
    assert 2 * per_layer(plain, "conv") == 2 * per_layer(fp8, "conv") == per_layer(fp32, "conv")
    assert per_layer(describe(values | {"mamba_ssm_dtype": "bfloat16"}), "state") == 2_097_152 // 2
    assert per_layer(describe(official("nemotron-h-8b", mamba_ssm_cache_dtype="float16")), "state") == 4_194_304 // 2
    wide = describe(values | {"torch_dtype": "float32"})
    assert per_layer(wide, "conv") == 49_152 * 2 and per_layer(wide, "state") == 2_097_152
    assert sum(part.nbytes for part in wide.weights) == 2 * sum(part.nbytes for part in plain.weights)


# Tensor parallelism ----------------------------------------------------------------------------------------------------


def test_what_one_gpu_holds() -> None:
    # Qwen3-Next on 4: 1 of 2 key/value heads (each on two GPUs); 8 value heads; (2 x 4 + 8) x 128 = 2,048 channels
    qwen = describe(official("qwen3-next-80b"), Choices(tensor_parallel=4))
    assert (per_layer(qwen, "kv", 1), per_layer(qwen, "state")) == (2 * 1 * 256 * 2, 8 * 128 * 128 * 4)
    assert per_layer(qwen, "conv") == 2_048 * 2 * 3
    assert any("on several" in note for note in qwen.notes)
    # Falcon-H1 on 4: 6 heads of the scan, and its only group on every GPU: 6 x 128 + 2 x 256 channels
    falcon = describe(official("falcon-h1-7b"), Choices(tensor_parallel=4))
    assert (per_layer(falcon, "state"), per_layer(falcon, "conv")) == (6 * 128 * 256 * 4, (768 + 512) * 2 * 3)
    # Nemotron-H on 8 and on 16: 16 and 8 heads; one group each, on 16 GPUs each group twice
    on_8, on_16 = (describe(official("nemotron-h-8b"), Choices(tensor_parallel=n)) for n in (8, 16))
    assert (per_layer(on_8, "conv"), per_layer(on_16, "conv")) == ((16 * 64 + 256) * 2 * 3, (8 * 64 + 256) * 2 * 3)
    # MiniMax on 8: 8 heads.   Jamba on 8: 1,024 channels.
    assert per_layer(describe(official("minimax-text-01"), Choices(tensor_parallel=8)), "state") == 8 * 128 * 128 * 4
    jamba = describe(official("jamba-1.5-mini"), Choices(tensor_parallel=8))
    assert (per_layer(jamba, "state"), per_layer(jamba, "conv")) == (1_024 * 16 * 4, 1_024 * 2 * 3)


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("ways", [2, 4])
def test_states_are_parts_and_not_copies(name: str, ways: int) -> None:
    whole, part = describe(official(name)), describe(official(name), Choices(tensor_parallel=ways))
    assert per_layer(part, "state") * ways == per_layer(whole, "state")
    assert [memory.layer for memory in part.memories] == [memory.layer for memory in whole.memories]
    assert part.hidden == whole.hidden and part.weights == whole.weights


@pytest.mark.parametrize(
    ("name", "ways", "changes"),
    [
        ("qwen3-next-80b", 3, {}),
        ("qwen3-next-80b", 32, {"num_attention_heads": 32}),  # 16 key heads
        ("jamba-1.5-mini", 7, {}),
        ("minimax-text-01", 24, {}),
        ("falcon-h1-7b", 8, {}),  # 12 query heads
        ("nemotron-h-8b", 6, {"num_attention_heads": 48, "num_key_value_heads": 6}),  # 128 heads of the scan
        ("nemotron-h-8b", 2, {"mamba_num_heads": 24, "n_groups": 3}),  # 3 groups on 2 GPUs
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, ways: int, changes: Values) -> None:
    describe(official(name, **changes))
    with pytest.raises(ConfigError, match=rf"^tensor_parallel={ways} is not valid: a divisor[^\n]*$"):
        describe(official(name, **changes), Choices(tensor_parallel=ways))


# Spellings and defaults ------------------------------------------------------------------------------------------------


def test_the_two_spellings_of_minimax_mean_the_same() -> None:
    original = official("minimax-text-01")
    codes = original.pop("attn_type_list")
    assert isinstance(codes, list)
    theirs = original | {
        "model_type": "minimax",
        "layer_types": ["full_attention" if code else "linear_attention" for code in codes],
    }
    first, second = describe(official("minimax-text-01")), describe(theirs)
    assert (first.memories, first.weights, first.hidden) == (second.memories, second.weights, second.hidden)
    for model_type in ("MiniMaxText01", "minimax_m1", "MiniMaxM1"):
        assert describe(official("minimax-text-01", model_type=model_type)).memories == first.memories
    # Transformers' own default where nothing is said: full attention in even layers
    del theirs["layer_types"]
    assert [memory.layer for memory in named(describe(theirs), "kv")] == list(range(0, 80, 2))


def test_lists_of_layers_in_every_spelling() -> None:
    nemotron = official("nemotron-h-8b")
    pattern = str(nemotron.pop("hybrid_override_pattern"))
    for words in ({"M": "mamba", "*": "attention"}, {"M": "linear_attention", "*": "full_attention"}):
        listed = [(words | {"-": "mlp"})[letter] for letter in pattern]
        assert describe(nemotron | {"layers_block_type": listed}).memories == describe(official("nemotron-h-8b")).memories
    assert describe(official("nemotron-h-8b", attention_head_dim=None, head_dim=128)) == describe(official("nemotron-h-8b"))
    bamba = official("bamba-9b")
    del bamba["attn_layer_indices"]
    listed = ["attention" if layer in (9, 18, 27) else "mamba" for layer in range(32)]
    assert describe(bamba | {"layers_block_type": listed}).memories == describe(official("bamba-9b")).memories
    assert not named(describe(bamba), "kv")  # no list: no layer attends
    qwen = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(48)]
    with_list = official("qwen3-next-80b", layer_types=qwen, full_attention_interval=7)
    assert describe(with_list).memories == describe(official("qwen3-next-80b")).memories


def test_absent_and_null_differ_where_transformers_says_so() -> None:
    falcon = official("falcon-h1-7b", mamba_d_head="auto", mamba_n_heads=16)
    assert per_layer(describe(falcon | {"mamba_d_ssm": None}), "state") == 2 * 3_072 * 256 * 4  # mamba_expand x hidden_size
    del falcon["mamba_d_ssm"]
    assert per_layer(describe(falcon), "state") == 1_024 * 256 * 4  # the default
    assert per_layer(describe(official("jamba-1.5-mini", num_key_value_heads=None)), "kv", 1) == 2 * 32 * 128 * 2
    jamba = official("jamba-1.5-mini")
    del jamba["num_key_value_heads"]
    assert per_layer(describe(jamba), "kv", 1) == 2 * 8 * 128 * 2


def test_draft_blocks_are_named_and_not_guessed() -> None:
    values = official("nemotron-h-8b", num_nextn_predict_layers=1)
    assert any("1 draft block" in note for note in describe(values).notes)
    with pytest.raises(ConfigError, match=r"^draft_tokens=2 is not valid: 0: "):
        describe(values, Choices(draft_tokens=2))
    plain = describe(official("nemotron-h-8b"))
    for refuse in (
        lambda: describe(official("nemotron-h-8b"), Choices(draft_tokens=2)),
        lambda: make_layout(plain.memories, plain.hidden, draft_tokens=2),
    ):
        with pytest.raises(ConfigError, match=r"^draft_tokens=2 is not valid: 0: .* cannot give drafts back"):
            refuse()


# Against Transformers --------------------------------------------------------------------------------------------------


def built(values: Mapping[str, object], device: str) -> PreTrainedModel:
    """Transformers' model of a config.json."""
    fields = dict(values)
    model_type, codes = str(fields.pop("model_type")), fields.pop("attn_type_list", None)
    if isinstance(codes, list):
        model_type = "minimax"
        fields["layer_types"] = ["full_attention" if code else "linear_attention" for code in codes]
    if "attention_head_dim" in fields:
        fields["head_dim"] = fields.pop("attention_head_dim")
    with torch.device(device):
        config = AutoConfig.for_model(model_type, **fields)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")


def num_params(description: Description) -> int:
    return sum(part.num_params for part in description.weights)


def counted(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", OFFICIAL)
def test_weights_of_shipped_models(name: str) -> None:
    found = describe(official(name))
    assert num_params(found) == counted(built(official(name), "meta"))
    assert sum(part.nbytes for part in found.weights) == 2 * num_params(found)
    # as their publishers call them: 52B, 9B, 7B, 8B, 456B, 80B
    published = dict(zip(OFFICIAL, (51.6, 9.8, 7.6, 8.1, 456.1, 79.7), strict=True))
    assert round(num_params(found) / 1e9, 1) == published[name]


FAMILIES = ("jamba", "bamba", "falcon_h1", "nemotron_h", "minimax", "qwen3_next", "granitemoehybrid")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_where_the_config_is_silent(model_type: str) -> None:
    found, model = describe({"model_type": model_type}), built({"model_type": model_type}, "meta")
    assert num_params(found) == counted(model)
    assert found.vocab_size == model.config.vocab_size and found.max_positions == model.config.max_position_embeddings


def decoder_fields(draw: st.DrawFn, max_layers: int = 5) -> Values:
    kv_heads, groups, head_dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 8]))
    return {
        "num_hidden_layers": draw(st.integers(1, max_layers)),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * groups * head_dim,
        "intermediate_size": draw(st.integers(1, 24)),
        "vocab_size": draw(st.integers(8, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 0,
    }


def mamba2_fields(draw: st.DrawFn, channels: int) -> Values:
    heads = draw(st.sampled_from([n for n in (1, 2, 4, 6) if channels % n == 0]))
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": draw(st.sampled_from(["auto", channels // heads])),
        "mamba_n_groups": draw(st.sampled_from([n for n in (1, 2, 3) if heads % n == 0])),
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_chunk_size": 8,
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
    }


def kinds_of(draw: st.DrawFn, count: object) -> list[str]:
    """A kind for each layer; one at least attends, because Transformers' cache cannot do without."""
    assert isinstance(count, int)
    kinds = draw(st.lists(st.sampled_from(["full_attention", "linear_attention"]), min_size=count, max_size=count))
    return kinds if "full_attention" in kinds else [*kinds[:-1], "full_attention"]


@st.composite
def jamba(draw: st.DrawFn) -> Values:
    fields, period, step = decoder_fields(draw), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return fields | {
        "attn_layer_period": period,
        "attn_layer_offset": draw(st.integers(0, min(period, int(str(fields["num_hidden_layers"]))) - 1)),
        "expert_layer_period": step,
        "expert_layer_offset": draw(st.integers(0, step - 1)),
        "num_experts": draw(st.integers(1, 3)),
        "num_experts_per_tok": 1,
        "mamba_d_state": draw(st.integers(1, 9)),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_expand": draw(st.integers(1, 3)),
        "mamba_dt_rank": draw(st.sampled_from(["auto", 1, 3])),
        "mamba_conv_bias": draw(st.booleans()),
        "mamba_proj_bias": draw(st.booleans()),
    }


@st.composite
def bamba(draw: st.DrawFn) -> Values:
    fields, expand = decoder_fields(draw), draw(st.integers(1, 2))
    layers = draw(st.lists(st.integers(0, int(str(fields["num_hidden_layers"])) - 1), unique=True, min_size=1))
    fields |= {"attn_layer_indices": layers, "mamba_expand": expand, "attention_bias": draw(st.booleans())}
    return fields | {"mlp_bias": draw(st.booleans())} | mamba2_fields(draw, expand * int(str(fields["hidden_size"])))


@st.composite
def falcon_h1(draw: st.DrawFn) -> Values:
    fields, channels = decoder_fields(draw, 3), draw(st.sampled_from([None, 12, 24]))
    hidden = int(str(fields["hidden_size"]))
    fields |= {"mamba_d_ssm": channels, "mamba_expand": 2, "mamba_rms_norm": draw(st.booleans())}
    fields |= {"projectors_bias": draw(st.booleans()), "attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    return fields | mamba2_fields(draw, channels or 2 * hidden)


@st.composite
def nemotron_h(draw: st.DrawFn) -> Values:
    fields, pattern = decoder_fields(draw), draw(st.text("M*E-", max_size=5)) + draw(st.sampled_from(["*", "*M", "*E-"]))
    heads = draw(st.sampled_from([2, 4, 6]))
    return fields | {
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "tie_word_embeddings": False,
        "head_dim": draw(st.sampled_from([4, 8])),
        "mamba_num_heads": heads,
        "mamba_head_dim": draw(st.sampled_from([2, 5])),
        "n_groups": draw(st.sampled_from([n for n in (1, 2, 3) if heads % n == 0])),
        "ssm_state_size": draw(st.integers(1, 9)),
        "conv_kernel": draw(st.integers(2, 5)),
        "chunk_size": 8,
        "use_bias": draw(st.booleans()),
        "use_conv_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "n_routed_experts": draw(st.sampled_from([2, 4])),
        "num_experts_per_tok": 1,
        "moe_intermediate_size": draw(st.integers(1, 9)),
        "moe_shared_expert_intermediate_size": draw(st.integers(0, 9)),
        "moe_latent_size": draw(st.sampled_from([None, 4])),
    }


@st.composite
def minimax(draw: st.DrawFn) -> Values:
    fields = decoder_fields(draw) | {"num_local_experts": draw(st.integers(1, 3)), "num_experts_per_tok": 1, "block_size": 4}
    fields["head_dim"] = draw(st.sampled_from([None, 2, 8]))
    return fields | {"layer_types": kinds_of(draw, fields["num_hidden_layers"])}


@st.composite
def qwen3_next(draw: st.DrawFn) -> Values:
    fields, keys = decoder_fields(draw), draw(st.sampled_from([1, 2]))
    layers = st.integers(0, int(str(fields["num_hidden_layers"])) - 1)
    return fields | {
        "layer_types": kinds_of(draw, fields["num_hidden_layers"]),
        "head_dim": 8,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.sampled_from([4, 6])),
        "linear_value_head_dim": draw(st.sampled_from([4, 10])),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "num_experts": draw(st.sampled_from([0, 1, 3])),
        "num_experts_per_tok": 1,
        "decoder_sparse_step": draw(st.integers(1, 3)),
        "mlp_only_layers": draw(st.lists(layers, unique=True, max_size=2)),
        "moe_intermediate_size": draw(st.integers(1, 9)),
        "shared_expert_intermediate_size": draw(st.integers(1, 9)),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def granitemoehybrid(draw: st.DrawFn) -> Values:
    fields, expand = decoder_fields(draw), draw(st.integers(1, 2))
    fields |= {"layer_types": kinds_of(draw, fields["num_hidden_layers"]), "mamba_expand": expand}
    fields |= {"num_local_experts": draw(st.integers(0, 2)), "num_experts_per_tok": 1}
    fields |= {"shared_intermediate_size": draw(st.integers(1, 9)), "attention_bias": draw(st.booleans())}
    return fields | mamba2_fields(draw, expand * int(str(fields["hidden_size"])))


STRATEGIES: dict[str, Callable[[], st.SearchStrategy[Values]]] = {
    "jamba": jamba, "bamba": bamba, "falcon_h1": falcon_h1, "nemotron_h": nemotron_h, "minimax": minimax,
    "qwen3_next": qwen3_next, "granitemoehybrid": granitemoehybrid,
}  # fmt: skip


def shapes_in_cache(model: PreTrainedModel, tokens: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """(layer, memory) -> shape of what Transformers keeps after `tokens` tokens, the batch of one left out."""
    with torch.no_grad():
        cache = model(torch.arange(tokens)[None] % 7, use_cache=True).cache
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    for index, layer in enumerate(cache.layers):
        fields = vars(layer)
        for name, held in (("conv", "conv_states"), ("state", "recurrent_states")):
            if fields.get(held, {}).get(0) is not None:
                found[index, name] = tuple(fields[held][0].shape[1:])
        if fields.get("keys") is not None:
            found[index, "kv"] = (*fields["keys"].shape[1:], *fields["values"].shape[1:])
    for index, state in enumerate(vars(cache).get("linear_cache", [])):
        if isinstance(state, torch.Tensor):
            found[index, "state"] = tuple(state.shape[1:])
    return found


def expected_shapes(description: Description, tokens: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """The same from the memories: a log of tokens x (heads, dim) twice, a ring of kernel x channels, a state."""
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    for memory in description.memories:
        logged, kept = memory.block_parts(tokens), memory.slot_parts(0)
        if logged:
            (heads, dim), (value_heads, value_dim) = (part.field.shape for part in logged)
            found[memory.layer, memory.name] = (heads, tokens, dim, value_heads, tokens, value_dim)
        else:
            ring = (kept[0].rows,) if memory.name == "conv" else ()
            found[memory.layer, memory.name] = (*kept[0].field.shape, *ring)
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_models_have_these_weights_and_this_cache(model_type: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(STRATEGIES[model_type](), st.integers(1, 9))
    def check(fields: Values, tokens: int) -> None:
        values = {"model_type": model_type, **fields}
        found, model = describe(values), built(values, "cpu").eval()
        assert num_params(found) == counted(model)
        assert expected_shapes(found, tokens) == shapes_in_cache(model, tokens)

    check()


# Configs that are wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("jamba-1.5-mini", "attn_layer_offset", 8),
        ("jamba-1.5-mini", "attn_layer_period", 0),
        ("jamba-1.5-mini", "expert_layer_offset", -1),
        ("jamba-1.5-mini", "mamba_d_state", "16"),
        ("jamba-1.5-mini", "mamba_dt_rank", "automatic"),
        ("jamba-1.5-mini", "mamba_conv_bias", 1),
        ("jamba-1.5-mini", "mamba_expand", 2**25),
        ("jamba-1.5-mini", "sliding_window", 4096),
        ("bamba-9b", "attn_layer_indices", [9, 32]),
        ("bamba-9b", "attn_layer_indices", [True]),
        ("bamba-9b", "attn_layer_indices", 9),
        ("bamba-9b", "mamba_n_heads", 100),
        ("bamba-9b", "mamba_d_head", 32),
        ("bamba-9b", "mamba_n_groups", 3),
        ("bamba-9b", "mamba_ssm_dtype", "int8"),
        ("falcon-h1-7b", "mamba_d_ssm", 100),
        ("falcon-h1-7b", "mamba_rms_norm", "yes"),
        ("falcon-h1-7b", "num_key_value_heads", 5),
        ("nemotron-h-8b", "hybrid_override_pattern", "M*x"),
        ("nemotron-h-8b", "hybrid_override_pattern", ""),
        ("nemotron-h-8b", "hybrid_override_pattern", ["M"]),
        ("nemotron-h-8b", "num_hidden_layers", 51),
        ("nemotron-h-8b", "n_groups", 7),
        ("nemotron-h-8b", "mamba_num_heads", 0),
        ("nemotron-h-8b", "mamba_ssm_cache_dtype", ["float32"]),
        ("minimax-text-01", "attn_type_list", [0] * 79),
        ("minimax-text-01", "attn_type_list", [0] * 79 + [2]),
        ("minimax-text-01", "attn_type_list", [False] * 80),
        ("minimax-text-01", "shared_intermediate_size", 1024),
        ("minimax-text-01", "sliding_window", 128),
        ("qwen3-next-80b", "linear_num_value_heads", 24),
        ("qwen3-next-80b", "linear_key_head_dim", "128"),
        ("qwen3-next-80b", "layer_types", ["linear_attention"] * 47),
        ("qwen3-next-80b", "layer_types", ["sliding_attention"] * 48),
        ("qwen3-next-80b", "full_attention_interval", 0),
        ("qwen3-next-80b", "mlp_only_layers", [48]),
        ("qwen3-next-80b", "num_hidden_layers", 10**9),
        ("qwen3-next-80b", "torch_dtype", "float8"),
    ],
)
def test_wrong_fields_are_named_in_one_line(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(official(name, **{field: value}))
    text = str(caught.value)
    told = {"mamba_d_ssm": "mamba_n_heads", "torch_dtype": "dtype"}.get(field, field)  # its width must divide among the heads
    assert text.startswith((f"{told}=", f"{told}[")), text
    assert "\n" not in text and len(text) < 400


@pytest.mark.parametrize("name", OFFICIAL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_value_crashes(name: str, data: st.DataObject) -> None:
    values = official(name)
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3),
        st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    )  # fmt: skip
    for field in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3)):
        values[field] = data.draw(junk)
    try:
        found = describe(values)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert found.weights and found.memories == describe(values).memories
