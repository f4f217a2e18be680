"""Gated delta rules and linear attention with decay, with full attention in between, and experts."""

import json
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch

Recipe = sys.modules["lamina_tests_families"].Recipe

FULL, LINEAR = "full_attention", "linear_attention"
BASE = {
    "vocab_size": 257, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DELTA = BASE | {
    "intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
#: a state read with few dims may come out small, and is then normed: a smaller scale keeps what is lost there out of the logits
SCALE = 0.5
LIGHTNING = BASE | {"intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2}


def _as_released(model: Any, directory: Path, rotated: int, postnorm: bool, model_type: str) -> None:
    """Turns what Transformers computes, and the config, into those of the original releases.

    Slopes of 6 heads are those of 4 and, of 8, the first and the third; `rotated` dims of a head are rotated, which a model that
    rotates all does if the others stand still; and the residual may be what comes before the norm.
    """
    config, inner = model.config, model.model
    layers, dim = config.num_hidden_layers, config.head_dim
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    half = rotated // 2
    still = rotated + dim // 2 - half  # dims before this one stand in the first half of a head
    order = [*range(half), *range(rotated, still), *range(half, rotated), *range(still, dim)]
    inner.rotary_emb.inv_freq[:half] = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(half) / half)
    inner.rotary_emb.inv_freq[half:] = 0
    for number, layer in enumerate(inner.layers):
        mixer = layer.self_attn
        if config.layer_types[number] == LINEAR:
            mixer.slope_rate.copy_((slopes * (1 - number / (layers - 1) + 1e-5))[:, None, None])
            found = mixer.decay_factors(mixer.slope_rate)
            for name, values in zip(("query_decay", "key_decay", "diagonal_decay"), found, strict=True):
                getattr(mixer, name).copy_(values)
        else:
            for projection in (mixer.q_proj, mixer.k_proj):
                rows = projection.weight.view(-1, dim, config.hidden_size)
                rows.copy_(rows[:, order].clone())
        if not postnorm:
            layer.forward = MethodType(_prenormed, layer)
    file = directory / "config.json"
    values = json.loads(file.read_text())
    values |= {
        "model_type": model_type, "postnorm": postnorm, "rotary_dim": rotated, "rope_theta": config.rope_parameters["rope_theta"],
        "attn_type_list": [int(kind == FULL) for kind in values.pop("layer_types")], "shared_intermediate_size": 0,
    }  # fmt: skip
    for ours, theirs in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp")):
        for letter in ("alpha", "beta"):
            values[f"layernorm_{ours}_{letter}"] = values.pop(f"{theirs}_{letter}_factor")
    del values["rope_parameters"]
    file.write_text(json.dumps(values))


def _prenormed(layer: Any, hidden_states: Any, **others: Any) -> Any:
    """A layer whose residual is not normed."""
    found = layer.self_attn(layer.input_layernorm(hidden_states), **others)[0]
    hidden_states = hidden_states * layer.attn_alpha_factor + found * layer.attn_beta_factor
    found = layer.mlp(layer.post_attention_layernorm(hidden_states))
    return hidden_states * layer.mlp_alpha_factor + found * layer.mlp_beta_factor


FACTORS = {
    "full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 0.75, "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 1.25, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.5,
}  # fmt: skip
RELEASED = LIGHTNING | FACTORS | {
    "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "num_attention_heads": 6, "head_dim": 12,
    "num_key_value_heads": 3,
}  # fmt: skip

RECIPES = {
    "qwen3-next": Recipe("Qwen3NextConfig", DELTA, exact=False, scale=SCALE),
    "qwen3-next-odd": Recipe(
        "Qwen3NextConfig",
        DELTA | {"num_hidden_layers": 3, "layer_types": [FULL, LINEAR, LINEAR], "attention_bias": True, "norm_topk_prob": False,
                 "mlp_only_layers": [2], "decoder_sparse_step": 1, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
                 "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
                 "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
                                     "original_max_position_embeddings": 64}},
        exact=False, seed=1, borders=(3, 64, 128), scale=SCALE,
    ),
    "qwen3-next-dense": Recipe(
        "Qwen3NextConfig",
        DELTA | {"num_hidden_layers": 4, "full_attention_interval": 2, "num_experts": 0, "linear_num_key_heads": 1,
                 "linear_num_value_heads": 2, "linear_conv_kernel_dim": 1, "partial_rotary_factor": 1.0,
                 "tie_word_embeddings": True},
        exact=False, seed=2, is_long=True, borders=(64,), scale=SCALE,
    ),
    "minimax": Recipe(
        "MiniMaxConfig",
        LIGHTNING | FACTORS | {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "block_size": 32},
        exact=False, seed=3, borders=(32, 64, 128),
    ),
    "minimax-defaults": Recipe(
        "MiniMaxConfig",
        LIGHTNING | {"num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 10, "tie_word_embeddings": True},
        exact=False, seed=4, is_long=True, borders=(64, 256), budgets=(7, 129),
    ),
    "minimax-text-01": Recipe(
        "MiniMaxConfig", RELEASED, exact=False, seed=5, borders=(64, 128), budgets=(7, 64, 129),
        edit=lambda model, directory: _as_released(model, directory, 8, True, "minimax_text_01"),
    ),
    "minimax-m1": Recipe(
        "MiniMaxConfig", RELEASED, exact=False, seed=6, is_long=True, borders=(64,), budgets=(7, 129),
        edit=lambda model, directory: _as_released(model, directory, 6, False, "MiniMaxM1"),
    ),
}  # fmt: skip
