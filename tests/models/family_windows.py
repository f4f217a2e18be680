"""Windows and chunks beside full attention: Gemma, gpt-oss, Llama 4, Command R, Ministral, and layers that share a memory."""

import sys

Recipe = sys.modules["lamina_tests_families"].Recipe

FULL, WINDOW = "full_attention", "sliding_attention"
BASE = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
#: what encodes images, as small as it goes
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8, "patch_size": 4,
}  # fmt: skip
GEMMA3 = BASE | {"sliding_window": 20, "query_pre_attn_scalar": 20}
#: of layers that have experts
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 1000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
#: the last three layers read what the first two remember
GEMMA3N = BASE | {
    "sliding_window": 20, "num_hidden_layers": 5, "layer_types": [WINDOW, FULL, WINDOW, FULL, WINDOW],
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257, "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.3],
}  # fmt: skip
GPT_OSS = BASE | EXPERTS | {"sliding_window": 20, "intermediate_size": 32, "hidden_size": 64, "num_hidden_layers": 2}
#: images as Mistral encodes them
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}
MINISTRAL3 = BASE | {"rope_parameters": YARN | {
    "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 32,
}}  # fmt: skip
LLAMA4 = BASE | EXPERTS | {
    "intermediate_size": 24, "intermediate_size_mlp": 40, "num_hidden_layers": 4, "attention_chunk_size": 24, "floor_scale": 20,
    "attn_scale": 0.5,
}  # fmt: skip

RECIPES = {
    "gemma2": Recipe(
        "Gemma2Config", BASE | {"sliding_window": 20, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
                                "final_logit_softcapping": 3.0},
        borders=(20, 64, 84),
    ),
    "gemma2-uncapped": Recipe(
        "Gemma2Config", BASE | {"sliding_window": 65, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                "attention_bias": True, "tie_word_embeddings": False},
        borders=(64, 65, 129), seed=1, is_long=True, scale=0.4,
    ),
    "gemma3": Recipe(
        "Gemma3TextConfig", GEMMA3 | {
            "layer_types": [WINDOW, FULL, WINDOW], "final_logit_softcapping": 4.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                WINDOW: {"rope_type": "default", "rope_theta": 300.0},
            },
        }, borders=(20, 64, 84), seed=2,
    ),
    # the spelling of older files, and a window in pages of its own
    "gemma3-large-window": Recipe(
        "Gemma3TextConfig", GEMMA3 | {
            "sliding_window": 400, "head_dim": 128, "sliding_window_pattern": 2, "num_hidden_layers": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 2000.0, "rope_local_base_freq": 500.0,
        }, borders=(400,), seed=3, scale=0.5, budgets=(7, 129, 300),
    ),
    "gemma3-images": Recipe(
        "Gemma3Config", {"text_config": GEMMA3 | {"num_hidden_layers": 6, "tie_word_embeddings": False}, "vision_config": VISION,
                         "mm_tokens_per_image": 1},
        model="Gemma3ForConditionalGeneration", borders=(20, 64), seed=4, is_long=True,
    ),
    "gpt-oss": Recipe("GptOssConfig", GPT_OSS | {"rope_parameters": YARN}, borders=(20, 64, 84), seed=5),
    "gpt-oss-defaults": Recipe(
        "GptOssConfig", GPT_OSS | {"attention_bias": False, "swiglu_limit": 0.5, "tie_word_embeddings": True,
                                   "sliding_window": 65, "layer_types": [FULL, WINDOW]},
        borders=(64, 65, 129), seed=6, is_long=True,
    ),
    "llama4": Recipe("Llama4TextConfig", LLAMA4, model="Llama4ForCausalLM", borders=(20, 24, 48, 120), seed=7),
    "llama4-dense": Recipe(
        "Llama4TextConfig", LLAMA4 | {
            "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True, "no_rope_layers": [1, 0, 1, 1],
            "attn_temperature_tuning": False, "tie_word_embeddings": True, "attention_chunk_size": 64, "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64, "rope_theta": 10000.0},
        }, model="Llama4ForCausalLM", borders=(64, 128), seed=8, is_long=True,
    ),
    # a chunk in pages of its own
    "llama4-large-chunk": Recipe(
        "Llama4TextConfig", LLAMA4 | {"attention_chunk_size": 300, "num_hidden_layers": 2, "no_rope_layer_interval": 2,
                                      "head_dim": 256},
        model="Llama4ForCausalLM", borders=(300, 600), seed=9, budgets=(7, 129, 301),
    ),
    "llama4-images": Recipe(
        "Llama4Config", {"text_config": LLAMA4, "vision_config": VISION | {
            "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8,
        }}, model="Llama4ForConditionalGeneration", text="language_model", borders=(24, 64), seed=10, is_long=True,
    ),
    "cohere2": Recipe(
        "Cohere2Config", BASE | {"sliding_window": 20, "num_hidden_layers": 4, "logit_scale": 0.5}, borders=(20, 64, 84), seed=11,
    ),
    "cohere2-untied": Recipe(
        "Cohere2Config", BASE | {"sliding_window": 65, "layer_types": [FULL, WINDOW], "num_hidden_layers": 2,
                                 "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4},
        borders=(64, 65, 129), seed=12, is_long=True,
    ),
    "ministral3": Recipe("Ministral3Config", MINISTRAL3, borders=(32, 64, 96), seed=13, llm={"block_tokens": 16}),
    "ministral3-window": Recipe(
        "Ministral3Config", BASE | {"sliding_window": 20, "tie_word_embeddings": True, "num_hidden_layers": 2},
        borders=(20, 64), seed=14, is_long=True,
    ),
    "mistral3": Recipe(
        "Mistral3Config", {"text_config": MINISTRAL3 | {"model_type": "ministral3"}, "vision_config": PIXTRAL},
        model="Mistral3ForConditionalGeneration", borders=(32, 64), seed=15, is_long=True, llm={"block_tokens": 16},
    ),
    "mistral3-untied": Recipe(
        "Mistral3Config", {"text_config": BASE | {"model_type": "mistral", "sliding_window": 20, "num_hidden_layers": 2},
                           "vision_config": PIXTRAL, "tie_word_embeddings": False},
        model="Mistral3ForConditionalGeneration", borders=(20, 64), seed=16, is_long=True,
    ),
    "gemma3n": Recipe("Gemma3nTextConfig", GEMMA3N, borders=(20, 64), seed=17, budgets=(1, 7, 64)),
    # a window in pages of its own that two layers share, and every option the other way
    "gemma3n-options": Recipe(
        "Gemma3nTextConfig", GEMMA3N | {
            "layer_types": [FULL, WINDOW, WINDOW], "num_hidden_layers": 3, "num_kv_shared_layers": 1, "altup_num_inputs": 3,
            "altup_active_idx": 1, "altup_correct_scale": False, "intermediate_size": [32, 48, 64],
            "activation_sparsity_pattern": [0.0, 0.5, 0.95], "vocab_size_per_layer_input": 200, "final_logit_softcapping": 5.0,
            "head_dim": 128, "sliding_window": 400, "attention_bias": True,
        }, borders=(400,), seed=18, is_long=True, budgets=(7, 129, 300),
    ),
}  # fmt: skip
