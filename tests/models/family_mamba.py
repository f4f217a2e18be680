"""Selective scans beside attention: in layers of their own with a decay for each number or for each head, and in parallel."""

import sys

Recipe = sys.modules["lamina_tests_families"].Recipe

BASE = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
#: a scan's chunk has 64 rows, the window before it 4
BORDERS = (4, 64, 128)
CHANNELS = {"mamba_d_state": 8, "attn_layer_period": 3, "attn_layer_offset": 1}
HEADS = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 32}
LINEAR, FULL = "linear_attention", "full_attention"
NEMOTRON = {name: value for name, value in BASE.items() if name != "num_hidden_layers"} | {
    "head_dim": 10, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "chunk_size": 32,
    "n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 28,
}  # fmt: skip

RECIPES = {
    "jamba": Recipe(
        "JambaConfig", BASE | CHANNELS | {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
        borders=BORDERS, exact=False, seed=1,
    ),
    "jamba-dense": Recipe(
        "JambaConfig",
        BASE | CHANNELS | {"num_experts": 1, "mamba_d_conv": 3, "mamba_dt_rank": 5, "mamba_proj_bias": True,
                           "mamba_conv_bias": False, "tie_word_embeddings": True, "mamba_expand": 1},
        borders=(3, 64, 128), exact=False, seed=2, is_long=True,
    ),
    "bamba": Recipe("BambaConfig", BASE | HEADS | {"attn_layer_indices": [1]}, borders=BORDERS, exact=False, seed=3),
    "bamba-bias": Recipe(
        "BambaConfig",
        BASE | HEADS | {"attn_layer_indices": [2], "mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False,
                        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "mamba_d_conv": 2,
                        "time_step_limit": (0.2, 0.9)},
        borders=(2, 64, 128), exact=False, seed=4, is_long=True,
    ),
    "granite-hybrid": Recipe(
        "GraniteMoeHybridConfig",
        BASE | HEADS | {"layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 5, "shared_intermediate_size": 24,
                        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5,
                        "attention_multiplier": 0.2, "mamba_n_groups": 4},
        borders=BORDERS, exact=False, seed=5,
    ),
    "granite-hybrid-dense": Recipe(
        "GraniteMoeHybridConfig",
        BASE | HEADS | {"layer_types": [LINEAR, LINEAR, FULL], "num_local_experts": 0, "shared_intermediate_size": 40,
                        "position_embedding_type": "rope", "tie_word_embeddings": True, "attention_bias": True},
        borders=BORDERS, exact=False, seed=6, is_long=True,
    ),
    "falcon-h1": Recipe(
        "FalconH1Config",
        BASE | HEADS | {"mamba_d_ssm": 24, "mamba_n_groups": 2, "num_hidden_layers": 2, "lm_head_multiplier": 0.4,
                        "embedding_multiplier": 2.5, "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6,
                        "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.3, "ssm_in_multiplier": 1.2,
                        "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7]},
        borders=BORDERS, exact=False, seed=7,
    ),
    "falcon-h1-norm": Recipe(
        "FalconH1Config",
        BASE | HEADS | {"mamba_d_ssm": 48, "mamba_n_groups": 4, "num_hidden_layers": 2, "mamba_rms_norm": True,
                        "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True,
                        "tie_word_embeddings": True, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7], "head_dim": 12,
                        "attention_in_multiplier": 1.3, "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6},
        borders=BORDERS, exact=False, seed=8, is_long=True,
    ),
    "falcon-h1-norm-last": Recipe(
        "FalconH1Config",
        BASE | HEADS | {"mamba_d_ssm": None, "num_hidden_layers": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
                        "time_step_limit": (0.1, 0.5), "mamba_conv_bias": False, "num_key_value_heads": 4},
        borders=BORDERS, exact=False, seed=9, is_long=True,
    ),
    "nemotron-h": Recipe(
        "NemotronHConfig", NEMOTRON | {"layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "moe"], "moe_latent_size": None},
        borders=BORDERS, exact=False, seed=10,
    ),
    "nemotron-h-bias": Recipe(
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": ["moe", LINEAR, FULL, "mlp"], "moe_latent_size": 20, "use_bias": True, "mlp_bias": True,
                    "use_conv_bias": False, "n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.7,
                    "time_step_min": 0.4, "mlp_hidden_act": "silu", "n_groups": 1},
        borders=BORDERS, exact=False, seed=11, is_long=True,
    ),
}  # fmt: skip
