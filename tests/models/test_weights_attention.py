"""What the weights of shipped attention models weigh, against what their official checkpoints store."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.description import Choices, WeightPart
from lamina.models.families import describe
from lamina.models.weight_parts import Size, Storage, gqa_attention, mlp, storage_of, weight_parts

CONFIGS = Path(__file__).parent.parent / "configs"


def facts(name: str) -> dict[str, object]:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(values, dict)
    return values


def parts(values: Mapping[str, object], draft: int = 0) -> dict[str, WeightPart]:
    return {part.component: part for part in describe(values, Choices(draft_tokens=draft)).weights}


def total(values: Mapping[str, object], draft: int = 0) -> tuple[int, int]:
    """(parameters, bytes)"""
    found = parts(values, draft).values()
    return sum(part.num_params for part in found), sum(part.nbytes for part in found)


@pytest.mark.parametrize(
    ("name", "params", "element_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 2),
        ("qwen3-32b", 32_762_123_264, 2),
        ("qwen3-30b-a3b", 30_532_122_624, 2),
        ("deepseek-v2-lite", 15_706_484_224, 2),
        ("gemma-2-9b", 9_241_705_984, 4),  # the base model is stored in fp32
        ("mistral-7b-v0.1", 7_241_732_096, 2),
        ("ministral-8b-2410", 8_019_808_256, 2),
    ],
)
def test_published_totals(name: str, params: int, element_bytes: int) -> None:
    """The numbers of parameters that the models' pages state for their safetensors files."""
    assert total(facts(name)) == (params, element_bytes * params)


def test_command_r7b_by_hand() -> None:
    """256,000 x 4,096 tied once = 1,048,576,000. A layer: 2 x 4,096^2 + 2 x 1,024 x 4,096 + 3 x 4,096 x 14,336 + 4,096.

    = 33,554,432 + 8,388,608 + 176,160,768 + 4,096 = 218,107,904; x 32 + 1,048,576,000 + 4,096 = 8,028,033,024.
    """
    found = parts(facts("command-r7b"))
    assert total(facts("command-r7b")) == (8_028_033_024, 16_056_066_048)
    assert found["attention"].num_params == 32 * (33_554_432 + 8_388_608) and found["mlp"].num_params == 32 * 176_160_768
    assert found["norms"].num_params == 33 * 4096 and "head" not in found


@pytest.mark.parametrize(
    ("name", "params", "nbytes"),
    [("gpt-oss-20b", 20_914_757_184, 13_761_264_768), ("gpt-oss-120b", 116_829_156_672, 65_248_815_744)],
)
def test_gpt_oss(name: str, params: int, nbytes: int) -> None:
    """`total_size` of the checkpoints' indexes: experts are MXFP4, 4 bits an element and one byte for 32, with bf16 biases."""
    assert total(facts(name)) == (params, nbytes)
    experts = parts(facts(name))["experts"]
    num = {"gpt-oss-20b": 24 * 32, "gpt-oss-120b": 36 * 128}[name]
    elements, biases = 3 * 2880 * 2880 * num, (2 * 2880 + 2880) * num  # gate and up, then down
    assert experts.num_params == elements + biases and experts.nbytes == elements // 2 + elements // 32 + 2 * biases


def test_deepseek_v3() -> None:
    """The checkpoint's page: 680,571,043,840 elements in e4m3, 3,918,786,560 in bf16, 41,555,600 in fp32; 684,531,386,000 in all.

    The page counts scales, and the copies of embedding and head (2 x 129,280 x 7,168) that its draft layer brings.
    fp32 are 59 x 256 = 15,104 router biases and the scales.
    """
    e4m3, bf16, fp32, copies = 680_571_043_840, 3_918_786_560, 41_555_600, 2 * 129_280 * 7168
    params, nbytes = total(facts("deepseek-v3"), draft=1)
    assert params == e4m3 + bf16 + 59 * 256 - copies
    assert nbytes == e4m3 + 2 * bf16 + 4 * fp32 - 2 * copies
    # the main model alone, "671B": 671,026,419,200
    assert total(facts("deepseek-v3"))[0] == 671_026_419_200


def test_deepseek_v32() -> None:
    """Its page: 685,355,329,792 parameters, scales left out; V3.2-Exp's, scales counted: 685,396,921,376.

    So there are 41,591,584 scales, 51,088 more than V3's 41,540,496: 62 x (64 x 12 + 1 x 56) of the index's two quantised
    matrices, [8192, 1536] and [128, 7168], in blocks of 128 x 128.
    """
    copies = 2 * 129_280 * 7168
    params, nbytes = total(facts("deepseek-v3.2"), draft=1)
    assert params == 685_355_329_792 - copies
    index = parts(facts("deepseek-v3.2"))["index"]
    quantised, plain = 8192 * 1536 + 128 * 7168, 64 * 7168 + 2 * 128
    assert index.num_params == 61 * (quantised + plain)
    assert index.nbytes == 61 * (quantised + 2 * plain + 4 * (64 * 12 + 56))
    v3_params, v3_bytes = total(facts("deepseek-v3"), draft=1)
    assert nbytes - v3_bytes == 62 * (quantised + 2 * plain + 4 * (64 * 12 + 56)) and params - v3_params == 62 * (
        quantised + plain
    )


@pytest.mark.parametrize(
    ("name", "params", "nbytes", "draft_bytes"),
    [
        ("deepseek-v4-flash", 290_942_289_362, 159_609_485_896, 3_593_787_756),
        ("deepseek-v4-flash-0731", None, 166_878_536_440, 10_862_838_300),
        ("deepseek-v4-pro", 1_598_837_347_742, 864_704_792_696, None),
    ],
)
def test_deepseek_v4(name: str, params: int | None, nbytes: int, draft_bytes: int | None) -> None:
    """Every tensor of the official files, draft blocks included, by their listings (reference, section 8.1)."""
    found, main = total(facts(name), draft=1), total(facts(name))
    assert found[1] == nbytes
    assert params is None or found[0] == params
    assert draft_bytes is None or found[1] - main[1] == draft_bytes


def test_deepseek_v4_with_fp8_experts() -> None:
    """Flash-Base keeps experts in FP8 and all scales in fp32: 292,555,345,480 B with its draft block (reference, 8.1)."""
    assert total(facts("deepseek-v4-flash") | {"expert_dtype": "fp8"}, draft=1)[1] == 292_555_345_480


def test_deepseek_v4_experts_by_hand() -> None:
    """Flash: 43 x 256 x 3 x 4,096 x 2,048 elements, half a byte each, and a scale byte for 32."""
    elements = 43 * 256 * 3 * 4096 * 2048
    experts = parts(facts("deepseek-v4-flash"))["experts"]
    assert (experts.num_params, experts.nbytes, experts.split) == (elements, elements // 2 + elements // 32, "expert")


def test_deepseek_v4_components() -> None:
    found = parts(facts("deepseek-v4-flash-0731"), draft=5)
    assert set(found) == {
        "embedding", "head", "attention", "low-rank projections", "norms", "compressor", "index", "hyper-connections", "router",
        "experts", "shared experts", "draft blocks", "draft experts",
    }  # fmt: skip
    assert {name: part.split for name, part in found.items() if part.split != "tensor"} == {
        "low-rank projections": "none", "norms": "none", "compressor": "none", "index": "none", "hyper-connections": "none",
        "router": "none", "experts": "expert", "draft experts": "expert",
    }  # fmt: skip


def test_a_checkpoint_without_quantisation_is_plain() -> None:
    values = {
        name: value for name, value in facts("deepseek-v4-flash").items() if name not in ("quantization_config", "expert_dtype")
    }
    experts = parts(values)["experts"]
    assert experts.nbytes == 2 * experts.num_params
    assert parts(values | {"torch_dtype": "float32"})["attention"].nbytes == 4 * parts(values)["attention"].num_params


# The counters ---------------------------------------------------------------------------------------------------------


def test_storage_by_hand() -> None:
    """[300, 200] in blocks of 128 x 128: 3 x 2 scales. In MXFP4 [4, 64]: 4 x 2 scales of a byte and half a byte an element."""
    assert Storage().linear(300, 200, bias=True) == Size(60_300, 2 * 60_300)
    assert Storage("bf16", "e4m3").linear(300, 200) == Size(60_000, 60_000 + 4 * 6)
    assert Storage("bf16", "e4m3").linear(300, 200, bias=True) == Size(60_300, 60_000 + 4 * 6 + 600)
    assert Storage("bf16", "e4m3", (0, 0)).linear(300, 200) == Size(60_000, 60_000 + 4)  # one scale for the matrix
    assert Storage("bf16", "e2m1", (1, 32), "e8m0").linear(4, 64) == Size(256, 128 + 8)
    assert Storage("bf16", "e2m1", (1, 32), "e8m0").plain.linear(4, 64) == Size(256, 512)
    assert Storage("fp16").tensor(3, 5, dtype="int64") == Size(15, 120)


def test_blocks_by_hand() -> None:
    store = Storage("fp32")
    # 6 heads of 4, 2 of them for keys and values, width 10: q 240, k and v 80 each, out 240; biases 24 + 8 + 8 + 10; norms 4 + 4
    assert gqa_attention(store, 10, 6, 2, 4).num_params == 640
    assert gqa_attention(store, 10, 6, 2, 4, bias=True).num_params == 690
    assert gqa_attention(store, 10, 6, 2, 4, bias=True, out_bias=False, qk_norm=(4, 4)).num_params == 688
    assert mlp(store, 10, 7).num_params == 210 and mlp(store, 10, 7, bias=True, gated=False).num_params == 157
    assert weight_parts([("x", Size(1, 2)), ("y", Size()), ("experts", Size(5, 5)), ("x", Size(1, 2))]) == (
        WeightPart("x", 2, 4, "tensor"), WeightPart("experts", 5, 5, "expert"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, Storage("bf16")),
        ({"torch_dtype": "float16"}, Storage("fp16")),
        ({"dtype": "float32", "torch_dtype": "float16"}, Storage("fp32")),
        ({"torch_dtype": "torch.bfloat16"}, Storage("bf16")),
        ({"torch_dtype": "auto"}, Storage("bf16")),
        ({"quantization_config": {"quant_method": "fp8"}}, Storage("bf16", "e4m3", (0, 0))),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}, Storage("bf16", "e4m3", (64, 32))),
        ({"quantization_config": {"quant_method": "mxfp4"}}, Storage("bf16", "e2m1", (1, 32), "e8m0")),
        ({"quantization_config": None}, Storage("bf16")),
    ],
)
def test_what_a_config_says_of_storage(values: dict[str, object], expected: Storage) -> None:
    assert storage_of(ConfigFields(values)) == expected


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"torch_dtype": "int8"}, "dtype"),
        ({"torch_dtype": ["bfloat16"]}, "dtype"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": {}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "quantization_config.fmt"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "quantization_config.weight_block_size"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
            "quantization_config.weight_block_size",
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "quantization_config.weight_block_size"),
    ],
)
def test_storage_that_is_not_known_is_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        storage_of(ConfigFields(values))
    assert refused.value.field == field and "\n" not in str(refused.value)


def test_text_models_ask_the_config_around_them() -> None:
    """The type and the quantisation of a model for text and images stand outside `text_config`."""
    nested = ConfigFields({"torch_dtype": "float16"}, "text_config.")
    assert storage_of(nested, ConfigFields({"torch_dtype": "float32"})) == Storage("fp16")
    around = ConfigFields({"quantization_config": {"quant_method": "fp8"}})
    assert storage_of(ConfigFields({}, "text_config."), around) == Storage("bf16", "e4m3", (0, 0))
    # Ministral 3 8B: 8,489,553,920 parameters; embedding and head (2 x 131,072 x 4,096) and 69 norms of 4,096 in bf16, the rest
    # a byte each, and one scale for each of 34 x 7 matrices
    params, nbytes = total(facts("ministral-3-8b"))
    plain = 2 * 131072 * 4096 + 69 * 4096
    assert (params, nbytes) == (8_489_553_920, params + plain + 4 * 34 * 7)
