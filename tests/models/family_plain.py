"""Full attention in every layer, with what such models differ in: grouped heads, biases, tied embeddings, rotary scalings."""

import sys

Recipe = sys.modules["lamina_tests_families"].Recipe

BASE = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
#: models that remember nothing but logs hit whole blocks
SMALL = {"block_tokens": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip

WINDOW = "sliding_attention"
WINDOWED = {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}

RECIPES = {
    "llama": Recipe("LlamaConfig", BASE, llm=SMALL),
    "llama-3": Recipe(
        "LlamaConfig", BASE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}, seed=1, llm=SMALL
    ),
    "llama-bias": Recipe(
        "LlamaConfig", BASE | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "num_hidden_layers": 2},
        seed=2, is_long=True, llm=SMALL,
    ),
    "llama-longrope": Recipe(
        "LlamaConfig",
        BASE | {"head_dim": 8, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096,
            "short_factor": [1.0, 1.5, 2.5, 3.0], "long_factor": [2.0, 4.0, 5.0, 6.0],
        }}, seed=10, is_long=True, llm=SMALL,
    ),
    "qwen2": Recipe("Qwen2Config", BASE, seed=3, llm=SMALL),
    "qwen2-window": Recipe("Qwen2Config", BASE | WINDOWED, seed=4, is_long=True, borders=(20, 64, 84)),
    "qwen3": Recipe("Qwen3Config", BASE | {"head_dim": 20, "tie_word_embeddings": True}, seed=5, llm=SMALL),
    "qwen3-moe": Recipe(
        "Qwen3MoeConfig",
        BASE | {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
                "mlp_only_layers": [1]},
        seed=9, llm=SMALL,
    ),
    "mistral": Recipe("MistralConfig", BASE | {"sliding_window": 65, "head_dim": 12}, seed=6, borders=(64, 65, 129)),
    "ministral": Recipe(
        "MinistralConfig", BASE | {"sliding_window": 33, "head_dim": 12, "layer_types": [WINDOW, "full_attention", WINDOW]},
        seed=7, is_long=True, borders=(33, 64, 97),
    ),
    # a window larger than a page, which is kept in pages of its own
    "mistral-large-window": Recipe(
        "MistralConfig", BASE | {"sliding_window": 1500, "head_dim": 96, "num_hidden_layers": 2}, seed=8, borders=(1500,),
        is_long=True, cache="256MiB", budgets=(129, 700),
    ),
}  # fmt: skip
