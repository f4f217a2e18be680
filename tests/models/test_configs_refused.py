"""Hostile config.json files: each is refused with one line that names the field. And what `describe` needs: no torch."""

import ast
import json
from pathlib import Path

import pytest
import torch

from lamina.base.errors import ConfigError
from lamina.base.formats import attention_entry, index_key, key_value, latent
from lamina.memory.kinds import Field
from lamina.models.description import Choices
from lamina.models.families import FAMILIES, describe
from lamina.models.registry import blueprint
from lamina.ops.store import attention_codec, index_codec

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "tests" / "configs"
NESTED = {"gemma-3-27b", "gemma-3n-e4b", "llama-4-scout", "ministral-3-8b"}
HUGE = 2**70
SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "max_position_embeddings")


def facts(name: str) -> dict[str, object]:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(values, dict)
    return values


def changed(name: str, field: str, value: object) -> dict[str, object]:
    """The config with one field changed, where the text model's fields are."""
    values = facts(name)
    inner = values["text_config"] if name in NESTED else values
    assert isinstance(inner, dict)
    inner[field] = value
    return values


ATTENTION = sorted(
    path.stem
    for path in CONFIGS.glob("*.json")
    if path.stem.startswith(("llama", "qwen3-3", "deepseek", "gemma", "gpt", "mistral", "ministral", "command"))
)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("field", SIZES)
def test_sizes_of_the_wrong_kind(name: str, field: str) -> None:
    for value in (0, -1, HUGE, 1.5, "64", True, [64], {}, float("nan")):
        with pytest.raises(ConfigError) as refused:
            describe(changed(name, field, value))
        assert refused.value.field.removeprefix("text_config.") == field
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "field", "value", "named"),
    [
        ("llama-3.1-8b", "num_key_value_heads", 5, "num_key_value_heads"),
        ("llama-3.1-8b", "num_key_value_heads", 64, "num_key_value_heads"),
        ("llama-3.1-8b", "head_dim", 0, "head_dim"),
        ("llama-3.1-8b", "hidden_size", 4097, "hidden_size"),
        ("llama-3.1-8b", "attention_bias", "yes", "attention_bias"),
        ("llama-3.1-8b", "tie_word_embeddings", 1, "tie_word_embeddings"),
        ("llama-3.1-8b", "intermediate_size", None, None),
        ("qwen3-32b", "layer_types", ["full_attention"] * 63, "layer_types"),
        ("qwen3-32b", "layer_types", ["linear_attention"] * 64, "layer_types[0]"),
        ("qwen3-32b", "layer_types", ["full_attention"] * 63 + ["sliding_attention"], "sliding_window"),
        ("qwen3-32b", "layer_types", "full_attention", "layer_types"),
        ("qwen3-32b", "layer_types", [["full_attention"]] * 64, "layer_types[0]"),
        ("qwen3-30b-a3b", "mlp_only_layers", [1, "2"], "mlp_only_layers"),
        ("qwen3-30b-a3b", "decoder_sparse_step", 0, "decoder_sparse_step"),
        ("qwen3-30b-a3b", "num_experts", -1, "num_experts"),
        ("gemma-2-9b", "sliding_window", None, "sliding_window"),
        ("gemma-2-9b", "sliding_window", 0, "sliding_window"),
        ("gemma-3-27b", "sliding_window_pattern", 0, "text_config.sliding_window_pattern"),
        ("gemma-3-27b", "use_bidirectional_attention", True, "text_config.use_bidirectional_attention"),
        ("gemma-3n-e4b", "num_kv_shared_layers", 35, "text_config.num_kv_shared_layers"),
        ("gemma-3n-e4b", "num_kv_shared_layers", 31, "text_config.num_kv_shared_layers"),
        ("gemma-3n-e4b", "intermediate_size", [16384] * 34, "text_config.intermediate_size"),
        ("gemma-3n-e4b", "intermediate_size", [16384] * 34 + [-1], "text_config.intermediate_size"),
        ("gpt-oss-20b", "num_local_experts", 0, "num_local_experts"),
        ("gpt-oss-20b", "layer_types", ["chunked_attention"] * 24, "layer_types[0]"),
        ("llama-4-scout", "no_rope_layers", [1] * 47, "text_config.no_rope_layers"),
        ("llama-4-scout", "no_rope_layers", [1.0] * 48, "text_config.no_rope_layers"),
        ("llama-4-scout", "attention_chunk_size", -8192, "text_config.attention_chunk_size"),
        ("llama-4-scout", "moe_layers", "all", "text_config.moe_layers"),
        ("llama-4-scout", "interleave_moe_layer_step", 0, "text_config.interleave_moe_layer_step"),
        ("deepseek-v3", "kv_lora_rank", 0, "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim", "64", "qk_rope_head_dim"),
        ("deepseek-v3", "moe_layer_freq", 2, "moe_layer_freq"),
        ("deepseek-v3", "num_nextn_predict_layers", 10**9, "num_nextn_predict_layers"),
        ("deepseek-v3", "first_k_dense_replace", -1, "first_k_dense_replace"),
        ("deepseek-v3.2", "q_lora_rank", None, "q_lora_rank"),
        ("deepseek-v3.2", "mlp_layer_types", ["dense"] * 60, "mlp_layer_types"),
        ("deepseek-v3.2", "index_head_dim", 96, "index_format"),
        ("deepseek-v4-flash", "compress_ratios", [0] * 42, "compress_ratios"),
        ("deepseek-v4-flash", "compress_ratios", [0, 8] + [4] * 41, "compress_ratios[1]"),
        ("deepseek-v4-flash", "compress_ratios", [4] * 44, "compress_ratios"),
        ("deepseek-v4-flash", "expert_dtype", "int8", "expert_dtype"),
        ("deepseek-v4-flash-0731", "dspark_target_layer_ids", [40, 43], "dspark_target_layer_ids"),
        ("deepseek-v4-flash-0731", "dspark_target_layer_ids", None, "dspark_target_layer_ids"),
        ("deepseek-v4-flash-0731", "dspark_markov_rank", None, "dspark_markov_rank"),
        ("deepseek-v4-flash-0731", "dspark_block_size", 0, "dspark_block_size"),
    ],
)
def test_fields_of_families(name: str, field: str, value: object, named: str | None) -> None:
    values = changed(name, field, value)
    if named is None:
        describe(values)
        return
    with pytest.raises(ConfigError) as refused:
        describe(values)
    assert refused.value.field == named and "\n" not in str(refused.value)


JUNK: tuple[object, ...] = (
    None, 0, -1, HUGE, 10**400, 1.5, 1e308, float("inf"), "", "x", True, [], [None], [[]], [HUGE] * 61, [[]] * 61, {},
    {"type": []}, {"": {}},
)  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_junk_in_any_field(name: str) -> None:
    """Whatever stands in a field, the answer is a description or one line that names a field."""
    whole = facts(name)
    inner = whole.get("text_config", whole)
    assert isinstance(inner, dict)
    extra = ("layer_types", "mlp_layer_types", "sliding_window", "rope_parameters", "partial_rotary_factor", "dtype", "head_dim")
    for field in sorted({*inner, *extra} - {"model_type"}):
        for value in JUNK:
            try:
                found = describe(changed(name, field, value), Choices(draft_tokens=1))
            except ConfigError as refused:
                assert refused.field and "\n" not in str(refused)
            else:
                assert found.weights and found.memories


@pytest.mark.parametrize("name", sorted(NESTED))
@pytest.mark.parametrize("value", [[], "text", 7, True])
def test_text_configs_of_the_wrong_kind(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^text_config="):
        describe(facts(name) | {"text_config": value})


def test_a_text_model_of_another_family_is_refused() -> None:
    values = changed("ministral-3-8b", "model_type", "mixtral")
    with pytest.raises(ConfigError, match=r"^text_config.model_type="):
        describe(values)


@pytest.mark.parametrize("kind", [None, "", "gpt2", 4, ["llama"], {}])
def test_unknown_families_are_refused_with_the_known_ones(kind: object) -> None:
    with pytest.raises(ConfigError) as refused:
        describe({"model_type": kind})
    assert refused.value.field == "model_type" and all(name in str(refused.value) for name in FAMILIES)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(
    ("choices", "field"),
    [
        (Choices(cache_format="int8"), "cache_format"),
        (Choices(cache_format="fp4"), "cache_format"),
        (Choices(index_format="int8"), "index_format"),
        (Choices(tensor_parallel=0), "tensor_parallel"),
        (Choices(tensor_parallel=-2), "tensor_parallel"),
        (Choices(tensor_parallel=True), "tensor_parallel"),
        (Choices(draft_tokens=-1), "draft_tokens"),
    ],
)
def test_choices_of_the_wrong_kind(name: str, choices: Choices, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        describe(facts(name), choices)
    assert refused.value.field == field


def test_an_index_format_without_an_index_is_said_to_be_unused() -> None:
    found = describe(facts("llama-3.1-8b"), Choices(index_format="fp8"))
    assert found.index_format is None and any("index_format=fp8" in note for note in found.notes)
    assert not describe(facts("deepseek-v3.2"), Choices(index_format="fp8")).notes[1:]


# One list, one source -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("index", ["fp4", "fp8", "bf16", "fp32"])
def test_the_engine_remembers_what_is_described(cache: str, index: str) -> None:
    for name in ("deepseek-v4-flash", "deepseek-v4-flash-0731", "deepseek-v4-pro"):
        running, found = blueprint(facts(name), cache, index), describe(facts(name), Choices(cache, index))
        assert running.memories == found.memories and running.hidden == found.hidden
        assert (running.vocab_size, running.max_positions) == (found.vocab_size, found.max_positions)


@pytest.mark.parametrize("cache", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("index", ["fp4", "fp8", "bf16", "fp32"])
def test_codecs_fill_the_described_fields(cache: str, index: str) -> None:
    """What a codec really makes of a vector has the fields of the entries, byte for byte."""
    found = describe(facts("deepseek-v4-pro"), Choices(cache, index)).memories
    entries = {memory.name: [part.field for part in memory.block_parts(128) + memory.slot_parts(0)] for memory in found}
    for name, codec, width in (
        ("window", attention_codec(cache, 512, 64), 512),
        ("c4", attention_codec(cache, 512, 64), 512),
        ("index", index_codec(index, 128), 128),
    ):
        stored = codec.encode(torch.randn(1, width))
        assert [field.numel() * field.element_size() for field in stored] == [field.nbytes for field in entries[name]]
        assert [field.name for field in entries[name]] == [field[0] for field in codec.fields]


def test_formats_by_hand() -> None:
    def nbytes(fields: tuple[tuple[str, str, tuple[int, ...]], ...]) -> list[int]:
        return [Field(*field).nbytes for field in fields]

    assert nbytes(attention_entry("fp8", 512, 64)) == [448, 128, 8]  # 7 scales of 64 and a pad
    assert nbytes(attention_entry("fp8", 128, 64)) == [64, 128, 8]  # one scale, padded to 8
    assert nbytes(attention_entry("fp8", 640, 64)) == [576, 128, 16]  # nine scales, padded to 16
    assert nbytes(attention_entry("bf16", 512, 64)) == [1024] and nbytes(attention_entry("fp32", 512, 64)) == [2048]
    assert nbytes(index_key("fp8", 128)) == [128, 4] and nbytes(index_key("fp4", 128)) == [64, 4]
    assert nbytes(index_key("bf16", 96)) == [192]
    assert nbytes(latent("fp8", 512, 64)) == [512, 16, 128] and nbytes(latent("bf16", 512, 64)) == [1152]
    assert nbytes(latent("fp8", 500, 64)) == [500, 16, 128]  # a last block may be shorter
    assert nbytes(key_value("fp8", 8, 128, 96)) == [1024, 768] and nbytes(key_value("bf16", 1, 64, 64)) == [128, 128]
    for refused in (lambda: key_value("fp4", 1, 1, 1), lambda: latent("", 1, 1), lambda: index_key("e4m3", 8)):
        with pytest.raises(ConfigError, match=r"_format="):
            refused()


def test_describing_needs_no_torch() -> None:
    """No module that `lamina.models.families` imports, directly or not, imports torch (package files are not followed)."""
    seen: set[str] = set()
    todo = ["lamina.models.families"]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.is_file(), f"{module} is a package: its contents are not all torch-free"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [name for name in whole if (ROOT / (name.replace(".", "/") + ".py")).is_file()] or [node.module]
            assert not any(name.split(".")[0] in ("torch", "transformers") for name in names), module
            todo += [name for name in names if name.split(".")[0] == "lamina"]
    assert {"lamina.models.deepseek_v4_memory", "lamina.memory.kinds", "lamina.base.formats"} <= seen
