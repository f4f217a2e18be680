"""Gated delta rules and decayed linear attention: what is refused, how heads forget, and more random models."""

import json
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from lamina.base.errors import ConfigError
from lamina.models import minimax, qwen3_next
from lamina.models.families import NETWORKS, describe
from lamina.models.network import Attention, Branch
from lamina.models.parts_delta import DecayedAttention, DeltaRule

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FULL, LINEAR = "full_attention", "linear_attention"


def facts(name: str, **changes: object) -> dict[str, object]:
    values: dict[str, object] = json.loads((CONFIGS / f"{name}.json").read_text())
    return values | changes


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


def mixers(network: Any) -> list[Any]:
    """The first part of each layer."""
    return [layer[0].part for layer in network.layers]


def test_the_shipped_configs() -> None:
    """What the two files say, layer by layer."""
    found = mixers(qwen3_next.network(facts("qwen3-next-80b")))
    assert [type(part) for part in found] == [DeltaRule, DeltaRule, DeltaRule, Attention] * 12
    assert (found[0].groups, found[0].key_dim, found[0].heads, found[0].value_dim, found[0].kernel) == (16, 128, 32, 128, 4)
    assert found[3].rope.dim == 64 and found[3].is_gated and found[3].q_norm.kind == "rms1"
    network = minimax.network_original(facts("minimax-text-01", rope_theta=10000000))
    found = mixers(network)
    assert [type(part) for part in found] == [*[DecayedAttention] * 7, Attention] * 10
    assert (found[7].rope.dim, found[7].rope.theta, found[7].dim, len(found[0].slopes)) == (64, 1e7, 128, 64)
    for layer in network.layers:
        first, second = layer
        assert isinstance(first, Branch) and isinstance(second, Branch)
        assert first.keeps_normed and second.keeps_normed and (second.kept, second.scale) == (1.0, 1.0)
        assert (first.kept, first.scale) == (3.5565588200778455, 1.0)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_slopes(heads: int, layers: int) -> None:
    """Those of Transformers; and the original's, which differ where the heads are no power of two."""
    config = MiniMaxConfig(
        hidden_size=8 * heads, num_attention_heads=heads, num_hidden_layers=layers, layer_types=[LINEAR] * layers
    )
    values = facts(
        "minimax-text-01", num_attention_heads=heads, num_key_value_heads=1, num_hidden_layers=layers, head_dim=8, rotary_dim=8,
        layer_types=[LINEAR] * layers, attn_type_list=[0] * layers, hidden_size=8 * heads,
    )  # fmt: skip
    ours, original = mixers(minimax.network(values)), mixers(minimax.network_original(values))
    for number in range(layers):
        want = MiniMaxLightningAttention(config, number).slope_rate.flatten()
        torch.testing.assert_close(torch.tensor(ours[number].slopes), want, rtol=1e-4, atol=1e-7)
        if heads & (heads - 1) == 0:
            torch.testing.assert_close(torch.tensor(original[number].slopes), want, rtol=1e-4, atol=1e-4)
    base = original[0].slopes
    if heads == 6:
        assert base == pytest.approx([slope * (1 + 1e-5) for slope in (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8)])


@pytest.mark.parametrize("kind", ["minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"])
def test_spellings(kind: str) -> None:
    """Every spelling of a release means the same."""
    assert NETWORKS[kind](facts("minimax-text-01", model_type=kind)) == NETWORKS["minimax_text_01"](facts("minimax-text-01"))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3-next-80b", "hidden_act", "gelu"),
        ("qwen3-next-80b", "partial_rotary_factor", 0.0),
        ("qwen3-next-80b", "partial_rotary_factor", 0.02),
        ("qwen3-next-80b", "partial_rotary_factor", 1.5),
        ("qwen3-next-80b", "num_experts_per_tok", 513),
        ("qwen3-next-80b", "linear_num_value_heads", 17),
        ("qwen3-next-80b", "mamba_ssm_dtype", "float16"),
        ("qwen3-next-80b", "norm_topk_prob", "yes"),
        ("qwen3-next-80b", "layer_types", ["sliding_attention"] * 48),
        ("minimax-text-01", "hidden_act", "relu"),
        ("minimax-text-01", "rotary_dim", 63),
        ("minimax-text-01", "rotary_dim", 130),
        ("minimax-text-01", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("minimax-text-01", "postnorm", 1),
        ("minimax-text-01", "layernorm_mlp_beta", "1"),
        ("minimax-text-01", "num_experts_per_tok", 33),
        ("minimax-text-01", "sliding_window", 128),
        ("minimax-text-01", "shared_intermediate_size", 64),
    ],
)
def test_refused(name: str, field: str, value: object) -> None:
    values = facts(name, **{field: value})
    with pytest.raises(ConfigError) as refused:
        describe(values)
        NETWORKS[str(values["model_type"])](values)
    assert refused.value.field.split("[")[0] == field and "\n" not in str(refused.value)


@pytest.mark.parametrize(("field", "value"), [("rotary_dim", 64), ("rope_parameters", {"partial_rotary_factor": 0.5})])
def test_half_a_head_is_rotated_by_the_original_alone(field: str, value: object) -> None:
    """Transformers rotates whole heads, whatever the config has of the original's."""
    values = facts("minimax-text-01", model_type="minimax", rotary_dim=128)
    minimax.network(values)
    with pytest.raises(ConfigError):
        minimax.network(values | {field: value})


@pytest.mark.parametrize("name", ["qwen3-next", "minimax"])
def test_bits_of_cuts_at_chunks(name: str, families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    """Steps that end at multiples of 64 tokens give the bits of one step, alone and beside others."""
    bench = families.Bench(driving, tmp_path, families.recipes()[name])
    ids = bench.ids(300, 9)
    bench.reset()
    (whole,) = bench.serve([ids])
    known = bench.scores(whole)
    for budget in (64, 128, 192):
        bench.reset(budget)
        (group,) = bench.serve([ids])
        assert all(driving.same_bits(one, two) for one, two in zip(bench.scores(group), known, strict=True))
    bench.reset()
    groups = bench.serve([bench.ids(64, 10), ids, bench.ids(1, 11)])
    assert all(driving.same_bits(one, two) for one, two in zip(bench.scores(groups[1]), known, strict=True))


def random_recipe(families: ModuleType, seed: int) -> Any:
    """A model of one of the two kinds."""
    chance = random.Random(seed)
    heads, layers = chance.choice([(2, 1), (3, 3), (4, 2), (6, 2)]), chance.randint(2, 4)
    dim = chance.choice([8, 12, 16, 20])
    values: dict[str, object] = {
        "vocab_size": chance.randint(100, 400), "hidden_size": heads[0] * chance.choice([8, 12, 16]),
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "num_experts_per_tok": chance.randint(1, 3),
        "layer_types": [chance.choice([FULL, LINEAR, LINEAR]) for _ in range(layers - 1)] + [LINEAR],
        "rope_parameters": {"rope_type": "default", "rope_theta": chance.choice([100.0, 1e4, 1e6])},
    }  # fmt: skip
    if chance.random() < 0.5:
        groups, each = chance.randint(1, 3), chance.randint(1, 3)
        rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": chance.choice([0.5, 1.0])}
        values |= {
            "head_dim": dim, "linear_num_key_heads": groups, "linear_num_value_heads": groups * each, "rope_parameters": rope,
            "linear_key_head_dim": chance.choice([12, 16, 24]), "linear_value_head_dim": chance.choice([7, 12, 16]),
            "linear_conv_kernel_dim": chance.randint(1, 5), "num_experts": chance.choice([0, 3, 5]),
            "moe_intermediate_size": chance.choice([8, 20]), "intermediate_size": 24, "attention_bias": chance.random() < 0.5,
            "shared_expert_intermediate_size": chance.choice([8, 24]), "norm_topk_prob": chance.random() < 0.5,
            "decoder_sparse_step": chance.choice([1, 2]), "mlp_only_layers": chance.choice([[], [1]]),
        }  # fmt: skip
        return families.Recipe("Qwen3NextConfig", values, exact=False, scale=0.5, seed=seed, borders=(5, 64, 128))
    factors = {
        f"{kind}_{letter}_factor": chance.choice([0.5, 1, 1.5])
        for kind in ("full_attn", "linear_attn", "mlp")
        for letter in ("alpha", "beta")
    }
    values |= factors | {
        "head_dim": chance.choice([None, dim]), "intermediate_size": 24, "num_local_experts": chance.randint(3, 5),
        "block_size": chance.choice([7, 64, 256]), "tie_word_embeddings": chance.random() < 0.3,
    }  # fmt: skip
    return families.Recipe("MiniMaxConfig", values, exact=False, seed=seed, borders=(7, 64, 128))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_models(seed: int, families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    """Scores are those of Transformers, cold, warm, cut and in company."""
    bench = families.Bench(driving, tmp_path, random_recipe(families, seed))
    for length in bench.recipe.lengths:
        bench.reset()
        (group,) = bench.serve([bench.ids(length)], prompt_logprobs=0)
        bench.check(group)
    prompts = [bench.ids(length, 3) for length in (150, 90, 33, 1)]
    for budget in (None, 1, 7, 64, 129):
        bench.reset(budget)
        for _ in range(2):
            for group in bench.serve(prompts):
                bench.check(group)
