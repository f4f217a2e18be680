"""Models with one latent per token: routers, stored formats, files with fp8 weights and draft layers, what is refused."""

import json
import random
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lamina.base.errors import ConfigError
from lamina.models import deepseek_v3
from lamina.models.network import Network
from lamina.ops.quantise import dequantise_fp8_weight, quantise_fp8_weight
from lamina.ops.route import route_sigmoid, route_softmax

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NETWORKS = {
    "deepseek-v2-lite": deepseek_v3.network_2, "deepseek-v3": deepseek_v3.network_3, "deepseek-v3.2": deepseek_v3.network_32,
}  # fmt: skip


def facts(name: str) -> dict[str, object]:
    values: dict[str, object] = json.loads((CONFIGS / f"{name}.json").read_text())
    return values


@pytest.fixture(scope="module")
def families() -> ModuleType:
    """tests/models/families.py"""
    name = "lamina_tests_families"
    if name not in sys.modules:
        spec = spec_from_file_location(name, Path(__file__).resolve().parent / "families.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# Routers --------------------------------------------------------------------------------------------------------------


def by_expert(chosen: torch.Tensor, weights: torch.Tensor, num: int) -> torch.Tensor:
    """[T, E] weights, NaN where an expert was not chosen."""
    return torch.full((chosen.shape[0], num), torch.nan).scatter_(1, chosen, weights)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "kept", "normalises"),
    [(8, 3, 4, 2, True), (16, 4, 4, 1, False), (16, 8, 8, 4, True), (12, 5, 2, 2, True), (6, 1, 1, 1, False)],
)
def test_sigmoid_router(experts: int, top_k: int, groups: int, kept: int, normalises: bool) -> None:
    """Biases far below 0 must not let an expert of a group that was not kept be chosen."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        n_routed_experts=experts, num_experts_per_tok=top_k, n_group=groups, topk_group=kept, norm_topk_prob=normalises,
        hidden_size=16,
    )  # fmt: skip
    gate, generator = DeepseekV3TopkRouter(config), torch.Generator().manual_seed(experts)
    gate.weight.data = torch.randn(experts, 16, generator=generator)
    gate.e_score_correction_bias.data = torch.randn(experts, generator=generator) - 1.5
    x = torch.randn(300, 16, generator=generator)
    logits, weights, chosen = gate(x)
    own = route_sigmoid(logits.detach(), gate.e_score_correction_bias, top_k, normalises, 2.5, groups, kept)
    torch.testing.assert_close(by_expert(*own, experts), by_expert(chosen, weights.detach(), experts), equal_nan=True)


@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), [(8, 3, 4, 2), (16, 6, 8, 3), (16, 4, 4, 1), (6, 2, 1, 1)])
def test_softmax_router(experts: int, top_k: int, groups: int, kept: int) -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = transformers.DeepseekV2Config(
        n_routed_experts=experts, num_experts_per_tok=top_k, n_group=groups, topk_group=kept, hidden_size=16,
        num_attention_heads=2, topk_method="group_limited_greedy" if groups > 1 else "greedy", routed_scaling_factor=1.5,
    )  # fmt: skip
    gate, generator = DeepseekV2TopkRouter(config), torch.Generator().manual_seed(experts)
    gate.weight.data = torch.randn(experts, 16, generator=generator) * 3
    logits, weights, chosen = gate(torch.randn(300, 16, generator=generator))
    own = route_softmax(logits.detach(), top_k, False, 1.5, groups, kept)
    torch.testing.assert_close(by_expert(*own, experts), by_expert(chosen, weights.detach(), experts), equal_nan=True)


# Files and formats ----------------------------------------------------------------------------------------------------


def test_fp8_weights_and_draft_layers(families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    """A checkpoint as the hub has it (e4m3 with fp32 scales in squares of 128, a draft layer) is what its values say."""
    recipe = families.recipes()["deepseek-v3"]
    families.build(recipe).save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    stored, values = {}, {}
    for name, tensor in tensors.items():
        values[name] = tensor
        is_linear = name.endswith("proj.weight") or name.endswith("proj_with_mqa.weight")
        if not is_linear:
            stored[name] = tensor
            continue
        codes, scale = quantise_fp8_weight(tensor)
        scales = scale.view(torch.float8_e8m0fnu).float() * 1.25  # no powers of two, as V3's
        stored[name], stored[f"{name}_scale_inv"] = codes, scales
        values[name] = dequantise_fp8_weight(codes, scales)
    for name in ("eh_proj.weight", "embed_tokens.weight", "self_attn.q_a_proj.weight", "shared_head.norm.weight"):
        stored[f"model.layers.{config['num_hidden_layers']}.{name}"] = torch.zeros(4, 4)
    answers = []
    for folder, own, more in (
        ("fp8", stored, {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}),
        ("fp32", values, {}),
    ):
        (tmp_path / folder).mkdir()
        save_file(own, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
        engine = families.LLM(str(tmp_path / folder), cache_bytes="16MiB", block_tokens=16).engine
        with driving.Recorder(engine) as recorder:
            driving.serve(engine, [families.token_ids(40, 1, 257)], families.SamplingParams(max_tokens=8, temperature=0))
            answers.append([row for _, row in sorted(recorder.logits.items())])
    assert len(answers[0]) == 8 and all(driving.same_bits(*rows) for rows in zip(*answers, strict=True))


@pytest.mark.parametrize(
    ("recipe", "cache_format", "index_format", "allowed"),
    [
        ("deepseek-v3", "bf16", "fp4", 0.05),
        ("deepseek-v3", "fp8", "fp4", 0.5),
        ("deepseek-v3.2", "auto", "auto", 1e-4),
        ("deepseek-v3.2", "fp32", "bf16", None),
        ("deepseek-v3.2", "bf16", "fp8", None),
        ("deepseek-v3.2", "fp8", "fp4", None),
    ],
)
def test_stored_formats(
    recipe: str, cache_format: str, index_format: str, allowed: float | None, families: ModuleType, driving: ModuleType,
    tmp_path: Path,
) -> None:  # fmt: skip
    """What is read equals what is stored: bits do not depend on cuts and hits; numbers are near those of fp32."""
    own = families.recipes()[recipe]
    formats = {"cache_format": cache_format, "index_format": index_format}
    bench = families.Bench(driving, tmp_path, replace(own, llm=own.llm | formats))
    ids = bench.ids(150, 2)
    bench.reset()
    (group,) = bench.serve([ids])
    known = bench.scores(group)
    if allowed is not None:
        want = bench.reference(group.requests[0].tokens[:-1])[len(ids) - 1 :]
        assert 0 < max(float((one - other).abs().max()) for one, other in zip(known, want, strict=True)) <= allowed
    (again,) = bench.serve([ids])
    bench.check_scores(again, known)
    for budget in (1, 64):
        bench.reset(budget)
        (group,) = bench.serve([ids])
        bench.check_scores(group, known)


# Configs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_rotary_positions_as_older_and_newer_files_have_them(name: str) -> None:
    """`rope_scaling` with `type` beside `rope_theta`, or `rope_parameters`: the same network, and scores have its temperature."""
    numbers = {"factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    numbers["original_max_position_embeddings"] = 4096

    def built(more: dict[str, object]) -> Network:
        return NETWORKS[name](facts(name) | {"num_experts_per_tok": 4, "num_hidden_layers": 4} | more)

    def part(network: Network) -> Any:
        return network.layers[0][0].part

    old = part(built({"rope_theta": 50000, "rope_scaling": numbers | {"type": "yarn"}}))
    new = part(built({"rope_parameters": numbers | {"rope_type": "yarn", "rope_theta": 50000}}))
    assert old.scale == new.scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541 + 1) ** 2)
    assert old.rope.theta == new.rope.theta == 50000 and old.rope.is_pairs
    assert part(built({})).scale == 192**-0.5 and part(built({})).rope.kind == "default"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("deepseek-v2-lite", "norm_topk_prob", True),
        ("deepseek-v2-lite", "scoring_func", "sigmoid"),
        ("deepseek-v2-lite", "topk_method", "noaux_tc"),
        ("deepseek-v2-lite", "num_experts_per_tok", None),
        ("deepseek-v2-lite", "num_experts_per_tok", 65),
        ("deepseek-v2-lite", "rope_interleave", False),
        ("deepseek-v2-lite", "hidden_act", "gelu"),
        ("deepseek-v2-lite", "num_key_value_heads", 8),
        ("deepseek-v3", "n_group", 7),
        ("deepseek-v3", "n_group", 256),
        ("deepseek-v3", "n_group", None),
        ("deepseek-v3", "topk_group", 9),
        ("deepseek-v3", "topk_group", None),
        ("deepseek-v3", "num_experts_per_tok", 200),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "topk_method", "greedy"),
        ("deepseek-v3", "qk_rope_head_dim", 63),
        ("deepseek-v3", "mlp_bias", True),
        ("deepseek-v3.2", "layer_types", ["full_attention"] * 61),
        ("deepseek-v3.2", "index_head_dim", 32),
        ("deepseek-v3.2", "index_topk", 0),
        ("deepseek-v3.2", "indexer_rope_interleave", True),
        ("deepseek-v3.2", "q_lora_rank", None),
    ],
)
def test_what_is_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        NETWORKS[name](facts(name) | {field: value})
    assert refused.value.field in (field, "topk_group") and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_layers_with_an_index_by_both_their_names(kind: str) -> None:
    named = facts("deepseek-v3.2") | {"layer_types": [kind] * 61}
    assert NETWORKS["deepseek-v3.2"](named) == NETWORKS["deepseek-v3.2"](facts("deepseek-v3.2"))


def test_quantised_files_that_are_refused() -> None:
    for quantised in ({"quant_method": "fp8", "fmt": "e4m3"}, {"quant_method": "mxfp4"}):
        with pytest.raises(ConfigError, match="quantization_config"):
            deepseek_v3.network_3(facts("deepseek-v3") | {"quantization_config": quantised})


# Random models --------------------------------------------------------------------------------------------------------


def random_recipe(families: ModuleType, seed: int) -> Any:
    """A family and every option that its config has."""
    draw = random.Random(seed)
    family = ("DeepseekV2Config", "DeepseekV3Config", "DeepseekV32Config")[seed % 3]
    heads, group, groups = draw.choice([1, 2, 4, 6]), draw.choice([2, 3, 4]), draw.choice([1, 2, 4])
    kept = draw.randint(1, groups)
    layers = draw.randint(1, 4)
    values: dict[str, object] = {
        "vocab_size": draw.randint(100, 400), "hidden_size": heads * draw.choice([8, 12, 16]),
        "intermediate_size": draw.choice([24, 40]), "moe_intermediate_size": draw.choice([8, 20, 32]),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "kv_lora_rank": draw.choice([8, 16, 20, 40]), "q_lora_rank": draw.choice([12, 24, 32]),
        "qk_nope_head_dim": draw.choice([4, 8, 20]), "qk_rope_head_dim": draw.choice([2, 6, 8, 16]),
        "v_head_dim": draw.choice([5, 8, 24]), "max_position_embeddings": 2048, "n_routed_experts": groups * group,
        "num_experts_per_tok": draw.randint(1, kept * group), "n_group": groups, "topk_group": kept,
        "first_k_dense_replace": draw.randint(0, layers), "n_shared_experts": draw.choice([1, 2]),
        "routed_scaling_factor": draw.choice([1.0, 2.5]), "attention_bias": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.3, "rms_norm_eps": draw.choice([1e-6, 1e-5]), "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    if draw.random() < 0.6:
        values["rope_parameters"] = {
            "rope_type": "yarn", "factor": draw.choice([4.0, 40.0]), "original_max_position_embeddings": draw.choice([32, 256]),
            "rope_theta": 10000.0, "mscale": draw.choice([0.7, 1.0]), "mscale_all_dim": draw.choice([0.0, 0.7, 1.0]),
        }  # fmt: skip
    if family == "DeepseekV2Config":
        values |= {"topk_method": draw.choice(["greedy", "group_limited_greedy"]), "mlp_bias": draw.random() < 0.5}
    if family == "DeepseekV3Config":
        values |= {"rope_interleave": draw.random() < 0.5, "norm_topk_prob": draw.random() < 0.5}
    if family != "DeepseekV32Config":
        values["q_lora_rank"] = draw.choice([None, values["q_lora_rank"]])
    borders: tuple[int, ...] = (64, 128)
    if family == "DeepseekV32Config":
        top_k = draw.choice([5, 16, 33, 64, 100])
        values |= {"index_n_heads": draw.choice([12, 16]), "index_head_dim": draw.choice([16, 20, 32]), "index_topk": top_k}
        borders = (top_k, 64, 128)
    return families.Recipe(family, values, seed=seed, borders=borders, llm={"block_tokens": draw.choice([16, 64])})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(18))
def test_random_models(seed: int, families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    bench = families.Bench(driving, tmp_path, random_recipe(families, seed))
    for length in bench.recipe.lengths:
        bench.reset()
        (group,) = bench.serve([bench.ids(length)], prompt_logprobs=0)
        bench.check(group)
    prompts = [bench.ids(length, 3) for length in (150, 90, 33, 1)]
    alone = []
    for prompt in prompts:
        bench.reset()
        (group,) = bench.serve([prompt])
        bench.check(group)
        alone.append(bench.scores(group))
    for budget in (1, 7, 64, 129):
        bench.reset(budget)
        for group, known in zip(bench.serve(prompts), alone, strict=True):
            bench.check_scores(group, known)
        for group, known in zip(bench.serve(prompts), alone, strict=True):
            bench.check_scores(group, known)
