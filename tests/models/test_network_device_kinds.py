"""What `test_network_device.py` says, of models with experts of other kinds, chunks, large windows, shared rows and latents."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina.memory.layout import make_layout
from lamina.models.registry import blueprint
from lamina.weights.headers import read_config
from tests.conftest import load_helper

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if importlib.util.find_spec("transformers") is None:
    pytest.skip("Transformers is not installed", allow_module_level=True)

networks = load_helper("models/test_network_device.py")
HAS_GPU, COMMON = networks.HAS_GPU, networks.COMMON

SOME = {"num_local_experts": 4, "num_experts_per_tok": 2}
OSS = SOME | {"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 2, "swiglu_limit": 0.5}
LLAMA4 = SOME | {
    "intermediate_size_mlp": 40, "intermediate_size": 24, "attention_chunk_size": 6, "floor_scale": 4, "attn_scale": 0.5,
    "head_dim": 12,
    "num_hidden_layers": 2, "no_rope_layers": [1, 0],
}  # fmt: skip
UNGATED = networks.PARTS | {
    "layers_block_type": ["full_attention", "moe"], "n_routed_experts": 6, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28, "moe_latent_size": None,
}  # fmt: skip
#: the last two layers read what the first two remember
STREAMS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 4,
    "sliding_window": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60,
    "laurel_rank": 6, "activation_sparsity_pattern": [0.9, 0.0, 0.3, 0.0], "head_dim": 12, "final_logit_softcapping": 5.0,
    "intermediate_size": 24,
}  # fmt: skip
LATENT = COMMON | {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 0,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip
LATENT_V2 = LATENT | {
    "topk_method": "group_limited_greedy", "attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
    "num_hidden_layers": 2, "first_k_dense_replace": 1,
}  # fmt: skip
WHOLE = LATENT | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1}
#: of 16 heads some see a token with a positive product: scores of 0, which are equal, are rare
INDEX = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 5, "attention_bias": True}
MODELS: dict[str, tuple[str, dict[str, object], str]] = {
    "latents, an index": ("DeepseekV32Config", LATENT | INDEX, ""),
    "latents": ("DeepseekV3Config", LATENT, ""),
    "latents, biases": ("DeepseekV2Config", LATENT_V2, ""),
    "latents, whole queries": ("DeepseekV3Config", WHOLE, ""),
    "latents, an index, as fp8": ("DeepseekV32Config", LATENT | INDEX, ""),
    "gpt-oss": ("GptOssConfig", COMMON | OSS, ""),
    "gpt-oss, packed": ("GptOssConfig", COMMON | OSS | {"intermediate_size": 96, "num_hidden_layers": 1}, ""),
    "llama 4": ("Llama4TextConfig", COMMON | LLAMA4, "Llama4ForCausalLM"),
    "a large window": ("Qwen2Config", COMMON | networks.WINDOWED | {"head_dim": 64}, ""),
    "a large window beside a log": ("GptOssConfig", COMMON | OSS | {"head_dim": 64, "sliding_window": 7}, ""),
    "a large chunk": ("Llama4TextConfig", COMMON | LLAMA4 | {"head_dim": 64}, "Llama4ForCausalLM"),
    "streams": ("Gemma3nTextConfig", COMMON | STREAMS, ""),
    "experts without gates": ("NemotronHConfig", UNGATED, ""),
    "experts behind a narrower projection": ("NemotronHConfig", UNGATED | {"moe_latent_size": 20, "mlp_bias": True}, ""),
}  # fmt: skip


USUAL = ("gpt-oss, packed", "llama 4", "latents", "latents, an index")


def pack_experts(directory: Path) -> None:
    """Random MXFP4 in place of the experts' matrices, as the official files have it."""
    draw, path, kept = torch.Generator().manual_seed(1), directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num, columns, rows = tensor.shape
            kept[f"{name}_blocks"] = torch.randint(0, 256, (num, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
            kept[f"{name}_scales"] = torch.randint(121, 125, (num, rows, columns // 32), generator=draw, dtype=torch.uint8)
        else:
            kept[name] = tensor.clone()
    save_file(kept, path)
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    families = load_helper("models/families.py")
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            config, values, model = MODELS[name]
            made[name] = tmp_path_factory.mktemp("network")
            families.build(families.Recipe(config, values, model=model, seed=len(made))).save_pretrained(made[name])
            if "packed" in name:
                pack_experts(made[name])
        return made[name]

    return find


@networks.runs_kernels
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt-oss, packed", marks=pytest.mark.long),
        pytest.param("llama 4", marks=pytest.mark.long),
        "latents",
        "latents, an index",
        *(pytest.param(one, marks=pytest.mark.long) for one in MODELS if one not in USUAL and "large" not in one),
    ],
)
def test_the_forward_pass(name: str, directory_of: Callable[[str], Path]) -> None:
    """Prompts together, cut, then decodes: the same sums in another order."""
    lengths, cuts = ((300, 77, 20), (64, 130)) if HAS_GPU else ((9, 2), (7,))
    directory = directory_of(name)
    formats, most = ("fp8", 2e-2 if HAS_GPU else 1e-5) if "fp8" in name else ("fp32", 1e-5)  # a code at a border becomes another
    plan = blueprint(read_config(directory), formats, formats)
    layout = make_layout(plan.memories, plan.hidden, 8, min_page_bytes=4096)
    blocks = -(-max(lengths) // layout.block_tokens) + 1
    of = networks.steps_of
    sides = tuple(of.Side(plan, layout, directory, "fp32", len(lengths), blocks, there) for there in (False, True))
    sides[0].model = networks.EveryRow(sides[0].model)
    of.compare(sides, lengths, cuts, 1, 67, most)


@networks.runs_kernels
@pytest.mark.parametrize(
    "name",
    [
        "a large window",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (*USUAL, "a large window beside a log", "a large chunk", "streams")
        ),
    ],
)
def test_whole_answers(name: str, directory_of: Callable[[str], Path]) -> None:
    """Greedy tokens of the GPU's runner, one step ahead, are the CPU's; cold and after hits."""
    draw = torch.Generator().manual_seed(1)
    longest, count = (90, 8) if HAS_GPU else (13, 3)
    prompts = [torch.randint(3, 67, (length,), generator=draw).tolist() for length in (longest, 1)]
    cpu, there = (networks.Serving(directory_of(name), is_there, 10, 4 if "large" in name else 16) for is_there in (False, True))
    assert bool(cpu.scheduler.ledger.layout.tails) == ("large" in name)
    truth = cpu.answers(prompts, count)
    assert there.answers(prompts, count) == truth
    assert there.answers(prompts[:1], 1) == [truth[0][:1]]


@pytest.mark.skipif(HAS_GPU or networks.INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
