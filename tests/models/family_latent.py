"""One latent per token for the keys and values of all heads, experts in groups, and an index that chooses what is attended to."""

import sys

Recipe = sys.modules["lamina_tests_families"].Recipe

BASE = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 4096, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
#: models that remember nothing but logs hit whole blocks
SMALL = {"block_tokens": 16}
YARN = {
    "rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
#: of 16 heads of an index some see a key with a positive product: no two keys score exactly 0
INDEX = {"index_n_heads": 16, "index_head_dim": 16}

RECIPES = {
    "deepseek-v2": Recipe(
        "DeepseekV2Config",
        BASE | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
                "n_shared_experts": 2, "attention_bias": True, "rope_parameters": YARN},
        seed=1, llm=SMALL,
    ),
    "deepseek-v2-lite": Recipe(
        "DeepseekV2Config",
        BASE | {"q_lora_rank": None, "topk_method": "greedy", "mlp_bias": True, "num_hidden_layers": 2, "qk_rope_head_dim": 4},
        seed=2, llm=SMALL,
    ),
    "deepseek-v3": Recipe(
        "DeepseekV3Config",
        BASE | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0}, "tie_word_embeddings": True,
                "num_hidden_layers": 2},
        seed=3, llm=SMALL,
    ),
    "deepseek-v3-halves": Recipe(
        "DeepseekV3Config",
        BASE | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False,
                "attention_bias": True, "num_hidden_layers": 2},
        seed=4, is_long=True, llm=SMALL,
    ),
    # an index that chooses from the second tile of queries on; the other in the middle of the first
    "deepseek-v3.2": Recipe(
        "DeepseekV32Config",
        BASE | INDEX | {"n_group": 2, "topk_group": 1, "index_topk": 64, "rope_parameters": YARN, "num_hidden_layers": 2},
        seed=5, borders=(64, 128), llm=SMALL,
    ),
    "deepseek-v3.2-few": Recipe(
        "DeepseekV32Config",
        BASE | INDEX | {"n_group": 2, "topk_group": 2, "index_topk": 21, "num_hidden_layers": 2, "attention_bias": True},
        seed=6, is_long=True, borders=(21, 64, 130), llm=SMALL,
    ),
}  # fmt: skip
