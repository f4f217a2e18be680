"""Families with selective scans: other spellings of configs and tensors, what is refused, bits at chunks, random configs."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError
from lamina.models import bamba, falcon_h1, jamba, nemotron_h
from lamina.models.network import Network
from lamina.models.parts_scan import ChannelScan, HeadScan, Scaled
from lamina.models.registry import blueprint

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCANS = ["jamba-1.5-mini", "bamba-9b", "falcon-h1-7b", "nemotron-h-8b"]
LINEAR, FULL = "linear_attention", "full_attention"


@pytest.fixture(scope="module")
def families() -> ModuleType:
    """tests/models/families.py, as `test_families.py` loads it."""
    name = "lamina_tests_families"
    if name not in sys.modules:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, Path(__file__).resolve().parent / "families.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def official(name: str, **changes: object) -> dict[str, object]:
    """A config of tests/configs with some fields changed."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(values, dict)
    return values | changes


def scans_of(network: Network) -> list[object]:
    """The scan of each layer that has one."""
    parts = [branch.part for branches in network.layers for branch in branches]
    flat = [inner for part in parts for inner in getattr(part, "parts", (part,))]
    flat = [part.part if isinstance(part, Scaled) else part for part in flat]
    return [part for part in flat if isinstance(part, ChannelScan | HeadScan)]


def test_official_configs() -> None:
    counts = {"jamba-1.5-mini": 28, "bamba-9b": 29, "falcon-h1-7b": 44, "nemotron-h-8b": 24}
    networks = {name: blueprint_network(official(name)) for name in SCANS}
    assert {name: len(scans_of(network)) for name, network in networks.items()} == counts
    assert {type(scans_of(networks[name])[0]) for name in SCANS[1:]} == {HeadScan}
    for name in SCANS:  # and what is remembered can be laid out
        assert blueprint(official(name), "bf16", "bf16", "bf16").memories


def blueprint_network(values: dict[str, object]) -> Network:
    """The network of a config of any of these families."""
    makers = {
        "jamba": jamba.network, "bamba": bamba.network, "granitemoehybrid": bamba.network_granite,
        "falcon_h1": falcon_h1.network, "nemotron_h": nemotron_h.network,
    }  # fmt: skip
    return makers[str(values["model_type"])](values)


def test_other_spellings() -> None:
    """Older names of fields and layers give the same network."""
    nemotron = official("nemotron-h-8b")
    pattern = str(nemotron["hybrid_override_pattern"])
    for names in ({"M": LINEAR, "*": FULL, "-": "mlp"}, {"M": "mamba", "*": "attention", "-": "mlp"}):
        listed = {
            name: value for name, value in nemotron.items() if name not in ("hybrid_override_pattern", "attention_head_dim")
        }
        listed |= {"layers_block_type": [names[letter] for letter in pattern], "head_dim": 128}
        assert blueprint_network(listed) == blueprint_network(nemotron)
    granite: dict[str, object] = {
        "model_type": "granitemoehybrid", "num_hidden_layers": 3, "hidden_size": 64, "mamba_n_heads": 4, "num_attention_heads": 4
    }  # fmt: skip
    new = blueprint_network(granite | {"layer_types": [LINEAR, FULL, LINEAR]})
    assert blueprint_network(granite | {"layers_block_type": ["mamba", "attention", "mamba"]}) == new
    told = bamba.network(official("bamba-9b", attn_layer_indices=None, layers_block_type=[LINEAR] * 9 + [FULL] + [LINEAR] * 22))
    assert told == bamba.network(official("bamba-9b", attn_layer_indices=[9]))
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0.0, "Infinity"], None):
        assert bamba.network(official("bamba-9b", time_step_limit=limit)) == bamba.network(official("bamba-9b"))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((name, "hidden_act", "gelu") for name in SCANS[:3]),
        ("nemotron-h-8b", "mlp_hidden_act", "tanh"),
        ("nemotron-h-8b", "mamba_hidden_act", "gelu"),
        ("nemotron-h-8b", "time_step_limit", [0.0, 0.5]),
        ("nemotron-h-8b", "mamba_ssm_cache_dtype", "float16"),
        ("bamba-9b", "time_step_limit", [0.5, 0.1]),
        ("bamba-9b", "time_step_limit", [0.5]),
        ("bamba-9b", "time_step_limit", ["a", 1.0]),
        ("bamba-9b", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("falcon-h1-7b", "ssm_multipliers", [1.0, 2.0]),
        ("falcon-h1-7b", "mlp_multipliers", [1.0, "a"]),
        ("falcon-h1-7b", "key_multiplier", "a"),
        ("jamba-1.5-mini", "num_experts_per_tok", 17),
        ("jamba-1.5-mini", "sliding_window", 128),
    ],
)
def test_refused(name: str, field: str, value: object) -> None:
    """What is not implemented is refused by its name."""
    with pytest.raises(ConfigError) as refused:
        blueprint_network(official(name, **{field: value}))
    assert field in refused.value.field or refused.value.field in ("mamba_ssm_dtype", "rope_scaling.rope_type")


def test_granite_refuses() -> None:
    small: dict[str, object] = {"model_type": "granitemoehybrid", "num_hidden_layers": 1, "hidden_size": 64, "mamba_n_heads": 4}
    for field, value in (("position_embedding_type", "alibi"), ("logits_scaling", 0.0), ("num_experts_per_tok", 9)):
        with pytest.raises(ConfigError) as refused:
            blueprint_network(small | {field: value, "num_attention_heads": 4})
        assert refused.value.field == field


def saved(families: ModuleType, name: str, directory: Path, **changes: object) -> Any:
    """The recipe's model, its checkpoint in `directory`."""
    recipe = families.recipes()[name]
    model = families.build(replace(recipe, values=recipe.values | changes))
    model.save_pretrained(directory)
    return model


def engine(driving: ModuleType, directory: Path, **settings: object) -> Any:
    """(engine, recorder) of a checkpoint."""
    arguments: dict[str, Any] = {"cache_bytes": "64MiB", **settings}
    found = LLM(str(directory), **arguments).engine
    return found, driving.Recorder(found)


def scores(driving: ModuleType, found: Any, recorder: Any, ids: list[int], budget: int | None) -> list[torch.Tensor]:
    """Scores of a greedy answer, from steps of at most `budget` tokens, nothing remembered."""
    driving.wipe(found)
    recorder.forget()
    full, found.scheduler.max_step_tokens = found.scheduler.max_step_tokens, budget or found.scheduler.max_step_tokens
    driving.serve(found, [ids], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    found.scheduler.max_step_tokens = full
    return [row for _, row in sorted((position, row) for (_, position), row in recorder.logits.items())]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["jamba", "bamba", "falcon-h1-norm", "nemotron-h"])
def test_bits_of_cuts_at_chunks(families: ModuleType, driving: ModuleType, tmp_path: Path, name: str, dtype: str) -> None:
    """Steps of multiples of 64 tokens give the bits of one step, with states in fp32 and in bf16."""
    saved(families, name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state = "bfloat16" if dtype == "bf16" else "float32"
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_ssm_dtype": state}))
    found, recorder = engine(driving, tmp_path, dtype=dtype)
    ids = families.token_ids(300, 5, 199)
    whole = scores(driving, found, recorder, ids, None)
    assert len(whole) == 4
    for budget in (64, 128):
        cut = scores(driving, found, recorder, ids, budget)
        assert all(driving.same_bits(one, two) for one, two in zip(whole, cut, strict=True))
    # and whoever else is there
    driving.wipe(found)
    recorder.forget()
    prompts = [families.token_ids(length, length, 199) for length in (1, 30, 64, 65)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    *_, group = driving.serve(found, [*prompts, ids], params)
    mine = [row for (owner, _), row in sorted(recorder.logits.items()) if owner == group.requests[0].id]
    assert all(driving.same_bits(one, two) for one, two in zip(whole, mine, strict=True))


def test_weights_in_bf16(families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    """A checkpoint in bf16 that is computed in fp32 keeps the inputs of its convolutions in fp32 too."""
    saved(families, "bamba", tmp_path).bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = families.token_ids(70, 6, 199)
    found, recorder = engine(driving, tmp_path)
    for budget in (None, 7):
        got = scores(driving, found, recorder, ids, budget)
        torch.testing.assert_close(got[0], families.logits_of(model, ids)[-1], rtol=0, atol=1e-4)


def test_tensors_by_other_names(families: ModuleType, driving: ModuleType, tmp_path: Path) -> None:
    """Nemotron-H's tensors begin with `backbone.` or with `model.`, and a draft block beside them is not read."""
    model = saved(families, "nemotron-h", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): tensor.contiguous() for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed | {"mtp.layers.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    found, recorder = engine(driving, tmp_path)
    ids = families.token_ids(20, 7, 199)
    got = scores(driving, found, recorder, ids, None)
    torch.testing.assert_close(got[0], families.logits_of(model, ids)[-1], rtol=0, atol=1e-4)


# Random configs ---------------------------------------------------------------------------------------------------------


def random_recipe(families: ModuleType, seed: int) -> Any:
    """A random small model of a random one of these families."""
    draw = random.Random(seed)

    def flag() -> bool:
        return draw.random() < 0.5

    def factor() -> float:
        return draw.choice([0.5, 0.8, 1.0, 1.3])

    heads = draw.choice([2, 4])
    hidden = heads * draw.choice([4, 6, 8, 10])  # grouped products of Transformers need multiples of 4
    layers = draw.randint(1, 4)
    base: dict[str, object] = {
        "vocab_size": draw.choice([50, 199, 256]), "hidden_size": hidden, "intermediate_size": draw.choice([20, 48, 64]),
        "num_attention_heads": heads, "num_key_value_heads": draw.choice([1, 2, heads]), "max_position_embeddings": 2048,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "rms_norm_eps": draw.choice([1e-5, 1e-3]),
        "tie_word_embeddings": flag(), "num_hidden_layers": layers,
    }  # fmt: skip
    scan: dict[str, object] = {
        "mamba_d_state": draw.choice([1, 4, 16, 33]), "mamba_d_conv": draw.choice([2, 3, 4]), "mamba_conv_bias": flag(),
        "mamba_proj_bias": flag(),
    }  # fmt: skip
    of_heads = scan | {
        "mamba_n_groups": draw.choice([1, 2]), "mamba_n_heads": draw.choice([2, 4]), "mamba_expand": draw.choice([1, 2])
    }  # fmt: skip
    limits = {"time_step_limit": draw.choice([(0.0, float("inf")), (0.3, 1.0)])}
    kinds = [draw.choice([LINEAR, FULL]) for _ in range(layers)]
    kind = draw.choice(["Jamba", "Bamba", "GraniteMoeHybrid", "FalconH1", "NemotronH"])
    if kind == "Jamba":
        period, every = draw.randint(1, 3), draw.randint(1, 2)
        own: dict[str, object] = scan | {
            "attn_layer_period": period, "attn_layer_offset": draw.randrange(period), "expert_layer_period": every,
            "expert_layer_offset": draw.randrange(every), "num_experts": draw.choice([1, 2, 5]),
            "mamba_expand": draw.choice([1, 2]),
            "mamba_dt_rank": draw.choice([3, 7]),
        }  # fmt: skip
    elif kind == "Bamba":
        attending = [layer for layer, each in enumerate(kinds) if each == FULL] or None
        own = of_heads | limits | {"attn_layer_indices": attending, "attention_bias": flag(), "mlp_bias": flag()}
    elif kind == "GraniteMoeHybrid":
        own = of_heads | limits | {
            "layer_types": kinds, "num_local_experts": draw.choice([0, 2, 5]), "shared_intermediate_size": draw.choice([16, 32]),
            "position_embedding_type": draw.choice([None, "rope"]), "embedding_multiplier": factor(), "attention_bias": flag(),
            "residual_multiplier": factor(), "logits_scaling": factor(), "attention_multiplier": factor(),
        }  # fmt: skip
    elif kind == "FalconH1":
        names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
        own = of_heads | limits | {f"{name}_multiplier": factor() for name in names} | {
            "mamba_d_ssm": draw.choice([None, 16, 24]), "mamba_rms_norm": flag(), "mamba_norm_before_gate": flag(),
            "projectors_bias": flag(), "attention_bias": flag(), "mlp_bias": flag(), "mlp_multipliers": [factor(), factor()],
            "ssm_multipliers": [factor() for _ in range(5)],
        }  # fmt: skip
    else:
        groups = draw.choice([1, 2])
        own = {
            "layers_block_type": [draw.choice([LINEAR, LINEAR, FULL, "moe", "mlp"]) for _ in range(layers)],
            "head_dim": draw.choice([4, 10]), "ssm_state_size": draw.choice([3, 16]), "mamba_num_heads": draw.choice([2, 4]),
            "mamba_head_dim": draw.choice([3, 8]), "n_groups": draw.choice([1, 2]), "conv_kernel": draw.choice([2, 4]),
            "n_routed_experts": 6, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": draw.choice([0, 28]),
            "moe_latent_size": draw.choice([None, 12]), "use_bias": flag(), "mlp_bias": flag(), "use_conv_bias": flag(),
            "n_group": groups, "topk_group": draw.randint(1, groups), "norm_topk_prob": flag(), "routed_scaling_factor": factor(),
            "mlp_hidden_act": draw.choice(["relu2", "silu"]), "time_step_min": draw.choice([0.001, 0.4]),
            "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
        }  # fmt: skip
        own |= {"attention_bias": flag(), "mamba_proj_bias": flag(), "n_shared_experts": draw.choice([1, 2])}
        for name in ("num_hidden_layers", "rms_norm_eps"):
            del base[name]
    return families.Recipe(f"{kind}Config", base | own, exact=False, seed=seed, borders=(64, 128), budgets=(1, 7, 64))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 80))])
def test_random_configs(families: ModuleType, driving: ModuleType, tmp_path: Path, seed: int) -> None:
    """All scores of prompts around a chunk's borders, in steps of any size, and a hit."""
    recipe = random_recipe(families, seed)
    bench = families.Bench(driving, tmp_path, recipe)
    for length in (1, 64, 131):
        bench.reset()
        (group,) = bench.serve([bench.ids(length)], prompt_logprobs=0)
        bench.check(group)
    ids = bench.ids(150, 2)
    for budget in recipe.budgets:
        bench.reset(budget)
        bench.check(bench.serve([ids])[0])
    (again,) = bench.serve([ids + bench.ids(5, 3)])
    bench.check(again)
    state = bench.engine.worker.layout.has_state
    assert not state or again.output.usage.cached_tokens >= len(ids)
