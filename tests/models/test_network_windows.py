"""Models with windows and chunks as data: spellings of configs, what is refused, and other formats of checkpoints."""

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
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.base.errors import ConfigError
from lamina.memory.kinds import Alias, Log, Window
from lamina.models.description import Choices
from lamina.models.families import NETWORKS, describe
from lamina.models.network_model import attentions

CONFIGS = Path(__file__).parent.parent / "configs"
FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
#: values of e2m1 codes; bit 3 is the sign
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """tests/models/families.py, by the name under which the recipes know it."""
    name = "lamina_tests_families"
    if name not in sys.modules:
        spec = spec_from_file_location(name, Path(__file__).resolve().parent / "families.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def values_of(name: str) -> dict[str, Any]:
    found = json.loads((CONFIGS / f"{name}.json").read_text())
    assert isinstance(found, dict)
    return found


def network_of(values: dict[str, Any]) -> Any:
    return NETWORKS[values["model_type"]](values)


SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.json") if values_of(path.stem)["model_type"] in NETWORKS)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "ministral-3-8b"])
def test_layers_look_at_what_is_remembered(name: str) -> None:
    """Of every shipped config: an attention layer's window, chunk and source are those of its memory."""
    values = values_of(name)
    network, checked = network_of(values), 0
    for layer, parts in enumerate(network.layers):
        for part in attentions(parts):
            owned = [m for m in describe(values, Choices()).memories if m.layer == layer]
            memory = next(m for m in owned if m.name == part.memory)
            if isinstance(memory, Alias):
                assert part.shares == memory.of_layer
            elif isinstance(memory, Window):
                assert (memory.size, memory.reset) == (part.window or part.chunk, part.chunk) and part.shares is None
            else:
                assert isinstance(memory, Log) and part.window is part.chunk is part.shares is None
            checked += 1
    assert checked > 0 or "deepseek" in name


def test_older_spellings_of_rotary_positions() -> None:
    base = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    old = base | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    new = base | {"rope_parameters": {FULL: full, WINDOW: {"rope_theta": 2e4}}}
    # what Transformers makes of the old one, which it changes
    told = transformers.Gemma3TextConfig(**json.loads(json.dumps(old))).to_dict()
    assert told["rope_parameters"][WINDOW]["rope_theta"] == 2e4
    networks = [network_of(values) for values in (old, new, told, base)]
    ropes = [
        [(part.rope.kind, part.rope.theta, dict(part.rope.scaling).get("factor")) for part in attentions(network.layers)]
        for network in networks
    ]
    assert ropes[0] == ropes[1] == ropes[2] == [("default", 2e4, None)] * 5 + [("linear", 5e5, 8.0)]
    assert ropes[3] == [("default", 1e4, None)] * 5 + [("default", 1e6, None)]


def test_a_pattern_and_a_list_of_types_are_the_same() -> None:
    for kind, period in (("gemma3_text", 3), ("cohere2", 3)):
        types = [WINDOW, WINDOW, FULL, WINDOW]
        base = {"model_type": kind, "num_hidden_layers": 4}
        assert network_of(base | {"layer_types": types}).layers == network_of(base | {"sliding_window_pattern": period}).layers


def test_no_cap_is_null() -> None:
    assert network_of({"model_type": "gemma2"}).softcap == 30 and network_of({"model_type": "gemma3_text"}).softcap == 0
    assert network_of({"model_type": "gemma2", "final_logit_softcapping": None}).softcap == 0
    assert network_of({"model_type": "gemma3n_text"}).softcap == 30
    (part, *_) = attentions(network_of({"model_type": "gemma2", "attn_logit_softcapping": None}).layers)
    assert part.softcap == 0


REFUSED = [
    ("gemma-2-9b", "hidden_activation", "relu"), ("gemma-2-9b", "final_logit_softcapping", 0), ("gemma-2-9b", "rope_scaling", 3),
    ("gemma-3-27b", "attn_logit_softcapping", 50.0), ("gemma-3-27b", "use_bidirectional_attention", True),
    ("gemma-3-27b", "rope_parameters", {"rope_type": "linear", "factor": 8.0}), ("gemma-3-27b", "hidden_act", "silu"),
    ("gemma-3n-e4b", "activation_sparsity_pattern", [0.5]), ("gemma-3n-e4b", "altup_active_idx", 4),
    ("gemma-3n-e4b", "activation_sparsity_pattern", [1.0] * 35), ("gemma-3n-e4b", "use_bidirectional_attention", True),
    ("gpt-oss-20b", "hidden_act", "gelu"), ("gpt-oss-20b", "num_experts_per_tok", 33),
    ("gpt-oss-20b", "rope_scaling.type", "dyn"),
    ("llama-4-scout", "attn_temperature_tuning", "yes"),
    ("llama-4-scout", "hidden_act", "gelu"), ("llama-4-scout", "num_experts_per_tok", 0), ("llama-4-scout", "floor_scale", 0),
    ("llama-4-scout", "quantization_config.quant_method", "mxfp4"),
    ("command-r7b", "use_qk_norm", True), ("command-r7b", "use_parallel_block", False), ("command-r7b", "rotary_pct", 0.5),
    ("command-r7b", "logit_scale", "1"),
    ("ministral-3-8b", "hidden_act", "gelu"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field", "value"), REFUSED)
def test_what_is_not_computed_is_refused(name: str, field: str, value: object) -> None:
    values = values_of(name)
    values.pop("quantization_config", None)
    inner = values.get("text_config", values)
    network_of(values)
    outer, _, last = field.rpartition(".")
    inner[outer or last] = {last: value} if outer else value
    with pytest.raises(ConfigError) as refused:
        network_of(values)
    named = refused.value.field.removeprefix("text_config.")
    assert named in (field, field.replace("rope_scaling.type", "rope_scaling.rope_type")) and "\n" not in str(refused.value)


def test_one_scale_for_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        network_of(values_of("ministral-3-8b"))
    assert refused.value.field.endswith("quantization_config.weight_block_size")


# Other formats --------------------------------------------------------------------------------------------------------


def recipe_named(families: ModuleType, name: str) -> Any:
    return families.recipes()[name]


def random_recipe(families: ModuleType, seed: int) -> Any:
    """A family and its options by chance."""
    draw = random.Random(seed)
    family = draw.choice(["gemma2", "gemma3", "gpt-oss", "llama4", "cohere2", "ministral3", "gemma3n"])
    layers, groups, kv_heads, dim = draw.randint(1, 5), draw.choice([1, 2, 3]), draw.choice([1, 2]), 2 * draw.randint(4, 16)
    heads, window = groups * kv_heads, draw.choice([2, 5, 16, 63, 64, 65, 100, 128, 150])
    hidden = 4 * heads * -(-draw.randint(6, 15) // heads)  # Transformers multiplies by experts in multiples of 16 bytes
    values: dict[str, Any] = {
        "vocab_size": draw.choice([97, 257]), "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": 4 * draw.randint(1, 22), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": 4096, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "sliding_window": window,
        "layer_types": [draw.choice([FULL, WINDOW]) for _ in range(layers)], "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip
    plain = {"rope_theta": draw.choice([100.0, 1e4, 1e6]), "rope_type": "default"}
    yarn = plain | {"rope_type": "yarn", "factor": draw.choice([2.0, 8.0]), "original_max_position_embeddings": 64}
    rope: dict[str, Any] = draw.choice([plain, yarn, plain | {"rope_type": "linear", "factor": 4.0}])
    if family in ("gemma3", "gemma3n"):
        rope = {FULL: rope, WINDOW: plain}
    scalar = draw.randint(1, 60)
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": scalar, "attn_logit_softcapping": draw.choice([None, 5.0])}),
        "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": scalar, "attention_bias": draw.random() < 0.5}),
        "gpt-oss": ("GptOssConfig", {"num_local_experts": draw.randint(1, 7), "num_experts_per_tok": 1, "swiglu_limit": 1.0}),
        "llama4": ("Llama4TextConfig", {
            "attention_chunk_size": window, "no_rope_layers": [draw.randint(0, 1) for _ in range(layers)], "floor_scale": 7,
            "moe_layers": [layer for layer in range(layers) if draw.random() < 0.6], "num_local_experts": draw.randint(1, 5),
            "intermediate_size_mlp": draw.randint(3, 70), "use_qk_norm": draw.random() < 0.5,
            "layer_types": [draw.choice([FULL, CHUNK]) for _ in range(layers)],
        }),
        "cohere2": ("Cohere2Config", {"logit_scale": draw.choice([0.1, 1.0])}),
        "ministral3": ("Ministral3Config", {"sliding_window": draw.choice([None, window])}),
        "gemma3n": ("Gemma3nTextConfig", {
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": draw.randint(2, 9), "laurel_rank": draw.randint(1, 9),
            "altup_num_inputs": draw.randint(2, 4), "vocab_size_per_layer_input": draw.choice([50, 300]),
            "activation_sparsity_pattern": [draw.choice([0.0, 0.2, 0.8]) for _ in range(layers)],
        }),
    }  # fmt: skip
    config, own = options[family]
    values |= own | {"rope_parameters": rope}
    if family == "ministral3":
        values.pop("layer_types")
        rope |= {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 48}
    if family == "cohere2":
        values.pop("head_dim")
        values["hidden_size"] = heads * dim
    if family == "gemma3n" and len(set(values["layer_types"][:-1])) == len(set(values["layer_types"])):
        values["num_kv_shared_layers"] = 1
    model = "Llama4ForCausalLM" if family == "llama4" else ""
    return families.Recipe(config, values, model, (window, 64), seed=seed, scale=0.7, budgets=(1, 5, 70))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_any_config(driving: ModuleType, families: ModuleType, tmp_path: Path, seed: int) -> None:
    """Scores are those of Transformers, cold, warm, cut and in company."""
    bench = families.Bench(driving, tmp_path, random_recipe(families, seed))
    for length in bench.recipe.lengths:
        bench.reset()
        (group,) = bench.serve([bench.ids(length)], prompt_logprobs=0)
        bench.check(group)
    prompts = [bench.ids(length, 40 + length) for length in (1, 30, 64, 170)] + [bench.ids(170, 210)[:100]]
    bench.reset()
    cold = bench.serve(prompts)
    for group in cold:
        bench.check(group)
    known = [bench.scores(group) for group in cold]
    for budget in bench.recipe.budgets:
        bench.reset(budget)
        for _ in range(2):
            for scores, group in zip(known, bench.serve(prompts), strict=True):
                bench.check_scores(group, scores)


def scores_of(driving: ModuleType, directory: Path, ids: list[int], **settings: Any) -> Tensor:
    """[n, V]: those of the tokens drawn after the ids."""
    engine = LLM(str(directory), cache_format="fp32", cache_bytes="64MiB", **settings).engine
    recorder = driving.Recorder(engine)
    (group,) = driving.serve(engine, [ids], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    request = group.requests[0]
    return torch.stack([recorder.logits[request.id, p] for p in range(len(request.prompt) - 1, len(request.tokens) - 1)])


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The checkpoint in `source` with other tensors, and fields of its config changed."""
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    values = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))


def test_experts_in_mxfp4(driving: ModuleType, families: ModuleType, tmp_path: Path) -> None:
    """Blocks and scales, as the official files have them, give the bits of the values that they mean; and these are right."""
    recipe = recipe_named(families, "gpt-oss")
    model = families.build(recipe)
    generator = torch.Generator().manual_seed(1)
    packed: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                num, columns, rows = values.shape
                codes = torch.randint(0, 16, (num, rows, columns), generator=generator)
                scales = torch.randint(122, 126, (num, rows, columns // 32), generator=generator, dtype=torch.uint8)
                factors = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)
                values.copy_((E2M1[codes] * factors).transpose(1, 2))
                nibbles = codes.view(num, rows, columns // 32, 16, 2).to(torch.uint8)
                packed[f"{name}_blocks"], packed[f"{name}_scales"] = nibbles[..., 0] | nibbles[..., 1] << 4, scales
    model.save_pretrained(tmp_path / "plain")
    rest = load_file(tmp_path / "plain" / "model.safetensors")
    kept = {name: tensor for name, tensor in rest.items() if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    rewrite(tmp_path / "plain", tmp_path / "packed", kept | packed, {"quantization_config": {"quant_method": "mxfp4"}})
    ids = families.token_ids(70, 3, 257)
    plain, other = (scores_of(driving, tmp_path / name, ids) for name in ("plain", "packed"))
    assert torch.equal(plain, other)
    assert float((plain[0] - families.logits_of(model, ids)[-1]).abs().max()) < families.TOLERANCE


def test_matrices_in_fp8(driving: ModuleType, families: ModuleType, tmp_path: Path) -> None:
    """Blocks of 128 x 128 with scales beside them give the bits of the values that they mean."""
    recipe = recipe_named(families, "ministral3-window")
    model = families.build(replace(recipe, values=recipe.values | {"intermediate_size": 200}))
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("_proj.weight"):
                blocks = tuple(-(-side // 128) for side in values.shape)
                scales = torch.rand(blocks, generator=torch.Generator().manual_seed(len(stored))) * 1e-3 + 1e-4
                factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
                codes = (values / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
                values.copy_(codes.float() * factors)
                stored[name], stored[f"{name}_scale_inv"] = codes, scales
    model.save_pretrained(tmp_path / "plain")
    rest = load_file(tmp_path / "plain" / "model.safetensors")
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}
    rewrite(tmp_path / "plain", tmp_path / "fp8", rest | stored, quantised)
    ids = families.token_ids(40, 5, 257)
    plain, other = (scores_of(driving, tmp_path / name, ids) for name in ("plain", "fp8"))
    assert torch.equal(plain, other)
    assert float((plain[0] - families.logits_of(model, ids)[-1]).abs().max()) < families.TOLERANCE


def test_a_text_model_among_images_and_sound(driving: ModuleType, families: ModuleType, tmp_path: Path) -> None:
    """Names and config of the official files: the text model within another, with tensors that nobody reads."""
    model = families.build(recipe_named(families, "gemma3n"))
    model.save_pretrained(tmp_path / "text")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        nested[f"model.language_model.layers.4.self_attn.{name}"] = torch.ones(24, 48)
    nested |= {f"model.{name}.weight": torch.ones(2, 2) for name in ("vision_tower.a", "audio_tower.b", "embed_vision.c")}
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    rewrite(tmp_path / "text", tmp_path / "several", nested, {"model_type": "gemma3n", "text_config": text})
    ids = families.token_ids(50, 7, 257)
    plain, other = (scores_of(driving, tmp_path / name, ids) for name in ("text", "several"))
    assert torch.equal(plain, other)


def test_a_head_that_the_file_has(driving: ModuleType, families: ModuleType, tmp_path: Path) -> None:
    """mistral3: what the config says of tied embeddings gives way to a head in the file."""
    model = families.build(recipe_named(families, "mistral3-untied"))
    model.save_pretrained(tmp_path / "untied")
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    rewrite(tmp_path / "untied", tmp_path / "silent", tensors, {"tie_word_embeddings": True})
    ids = families.token_ids(30, 9, 257)
    plain, other = (scores_of(driving, tmp_path / name, ids) for name in ("untied", "silent"))
    assert torch.equal(plain, other)
