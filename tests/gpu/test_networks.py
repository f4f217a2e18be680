"""Models that are given as networks, on a GPU: against the CPU in fp32, and which bits are promised. Random weights."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lamina import LLM, SamplingParams
from tests.conftest import load_helper

if importlib.util.find_spec("transformers") is None:
    pytest.skip("Transformers is not installed", allow_module_level=True)

Serve = Callable[..., list]
Words = Callable[[int, int], list[int]]
Load = Callable[..., LLM]

COMMON = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LONGER = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
SCANS = {"mamba_n_heads": 8, "mamba_d_state": 64}
FACTORS = {
    "mamba_d_ssm": 384, "mamba_n_groups": 2, "mamba_rms_norm": True, "lm_head_multiplier": 0.4, "embedding_multiplier": 2.5,
    "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6, "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.3,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7], "mlp_bias": True,
    "projectors_bias": True, "mamba_proj_bias": True, "head_dim": 64,
}  # fmt: skip
CHANNELS = {"mamba_d_state": 16, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1}
DELTA = EXPERTS | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 96, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 128, "attention_bias": True,
}  # fmt: skip
DECAYED = {
    "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "mlp_beta_factor": 0.5, "linear_attn_alpha_factor": 1.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
SOME = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
OSS = SOME | {"sliding_window": 100, "num_attention_heads": 8}
CHUNKS = SOME | {
    "intermediate_size": 96, "intermediate_size_mlp": 384, "attention_chunk_size": 100, "floor_scale": 50, "attn_scale": 0.5,
    "no_rope_layers": [1, 0, 1],
}  # fmt: skip
UNGATED = {name: value for name, value in COMMON.items() if name != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "moe", "full_attention"], "head_dim": 64, "ssm_state_size": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2,
    "n_routed_experts": 8, "moe_intermediate_size": 96, "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 160, "mlp_bias": True,
}  # fmt: skip
STREAMS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "num_hidden_layers": 4,
    "sliding_window": 100, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1000,
    "laurel_rank": 16, "activation_sparsity_pattern": [0.9, 0.0, 0.3, 0.0], "head_dim": 64, "final_logit_softcapping": 5.0,
}  # fmt: skip
LATENT = COMMON | {
    "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 192, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64, "moe_intermediate_size": 96, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
WIDE_LATENT = LATENT | {
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_hidden_layers": 2,
}  # fmt: skip
#: chooses in prompts of 300 and 700 tokens
INDEX = {"index_n_heads": 32, "index_head_dim": 64, "index_topk": 256, "num_hidden_layers": 2}
WIDE_INDEX = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 90}
#: the models of configs whose own are of more than text
CLASSES = {"Llama4TextConfig": "Llama4ForCausalLM"}
#: of each model the class of its config in Transformers, and its values
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "128 dims": ("LlamaConfig", COMMON | {"head_dim": 128, "rope_parameters": LONGER}),
    "biases": ("LlamaConfig", COMMON | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": 64}),
    "64 dims, experts": ("Qwen3MoeConfig", COMMON | EXPERTS | {"mlp_only_layers": [1]}),
    "norms of heads": ("Qwen3Config", COMMON | {"head_dim": 96, "num_attention_heads": 6, "tie_word_embeddings": True}),
    "a window": ("MistralConfig", COMMON | {"head_dim": 128, "sliding_window": 100, "num_key_value_heads": 1}),
    "scans": ("BambaConfig", COMMON | SCANS | {"attn_layer_indices": [1]}),
    "scans beside attention": ("FalconH1Config", COMMON | SCANS | FACTORS),
    "scanned channels": ("JambaConfig", COMMON | CHANNELS),
    "delta rule": ("Qwen3NextConfig", COMMON | DELTA),
    "decayed attention": ("MiniMaxConfig", COMMON | DECAYED),
    "experts with biases, sinks": ("GptOssConfig", COMMON | OSS),
    "chunks": ("Llama4TextConfig", COMMON | CHUNKS),
    "experts without gates": ("NemotronHConfig", UNGATED),
    "a large window": ("MistralConfig", COMMON | {"head_dim": 256, "sliding_window": 300, "num_key_value_heads": 4}),
    "a large chunk": (
        "Llama4TextConfig",
        COMMON | CHUNKS | {"head_dim": 256, "attention_chunk_size": 300, "num_key_value_heads": 4},
    ),
    "streams": ("Gemma3nTextConfig", COMMON | STREAMS),
    "latents": ("DeepseekV3Config", LATENT),
    "latents of the real size": ("DeepseekV3Config", WIDE_LATENT),
    "latents, biases": (
        "DeepseekV2Config",
        LATENT | {"q_lora_rank": None, "attention_bias": True, "topk_method": "group_limited_greedy", "kv_lora_rank": 96},
    ),
    "latents, an index": ("DeepseekV32Config", LATENT | INDEX),
    "latents of the real size, an index": ("DeepseekV32Config", WIDE_LATENT | WIDE_INDEX),
    "caps": ("Gemma2Config", COMMON | {"head_dim": 256, "sliding_window": 70, "query_pre_attn_scalar": 64}),
}
NAMES = list(MODELS)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 99, 100, 101, 128, 300, 700)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """load(name, settings) -> an engine; each is made once."""
    families = load_helper("models/families.py")
    directories: dict[str, Path] = {}
    engines: dict[tuple[object, ...], LLM] = {}

    def find(name: str, **settings: object) -> LLM:
        if name not in directories:
            config, values = MODELS[name]
            directories[name] = tmp_path_factory.mktemp("network")
            families.build(families.Recipe(config, values, model=CLASSES.get(config, ""), seed=len(directories))).save_pretrained(
                directories[name]
            )
        key = (name, *sorted(settings.items()))
        if key not in engines:
            usual = {"cache_bytes": "256MiB", "max_step_tokens": 512, "max_requests": 32, "max_model_len": 1024, "warmup": False}
            engines[key] = LLM(str(directories[name]), **(usual | settings))  # type: ignore[arg-type]
        engines[key].engine.ledger.drop_index()
        return engines[key]

    return find


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_a_cpu(name: str, load: Load, serve: Serve, words: Words) -> None:
    """fp32 everywhere: scores of the likeliest tokens to 1e-3, greedy tokens equal."""
    prompts = [words(length, length) for length in LENGTHS]
    exact = {"dtype": "fp32", "cache_format": "fp32"}
    truth = serve(load(name, device="cpu", **exact), prompts, 8)
    llm = load(name, device="cuda", **exact)
    found = serve(llm, prompts, 8)
    assert llm.engine.worker.runner.graphs.num_captured > 0, "decodes ran without graphs"
    for length, one, other in zip(LENGTHS, found, truth, strict=True):
        assert one.tokens == other.tokens, length
        for mine, theirs in zip(one.scores, other.scores, strict=True):
            known = dict(theirs)
            assert max(abs(score - known[token]) for token, score in mine if token in known) <= 1e-3, length


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_company_changes_no_bit(name: str, cache_format: str, load: Load, serve: Serve, words: Words) -> None:
    """A request alone, and beside others that come with it; from nothing, and after a hit."""
    llm = load(name, device="cuda", dtype="bf16", cache_format=cache_format)
    prompts = [words(length, 7 + length) for length in (5, 130, 300, 64, 99)]
    together = serve(llm, prompts, 24, salt="together")
    alone = [serve(llm, [prompt], 24, salt="alone")[0] for prompt in prompts]
    assert together == alone
    warm = serve(llm, prompts, 24, salt="alone")
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in alone]
    assert warm == alone


@pytest.mark.parametrize("index_format", ["fp4", "fp8", "fp32"])
def test_company_changes_no_choice(index_format: str, load: Load, serve: Serve, words: Words) -> None:
    """The same of an index, whatever its keys are stored as; among the others are prompts that are too short for a choice."""
    llm = load("latents of the real size, an index", device="cuda", dtype="bf16", index_format=index_format)
    prompts = [words(length, 7 + length) for length in (5, 130, 300, 64, 89)]
    together = serve(llm, prompts, 24, salt="together")
    alone = [serve(llm, [prompt], 24, salt="alone")[0] for prompt in prompts]
    assert together == alone
    assert serve(llm, prompts, 24, salt="alone") == alone


def test_a_choice_of_all_is_no_choice(load: Load, serve: Serve, words: Words) -> None:
    """Requests that see no more tokens than are listed have the bits that they have where nobody can see more."""
    name, prompts = "latents, an index", [words(length, 7 + length) for length in (5, 130, 200)]
    settings = {"device": "cuda", "dtype": "bf16", "cache_format": "bf16"}
    short = serve(load(name, max_model_len=256, **settings), prompts, 24)
    assert short == serve(load(name, **settings), prompts, 24)
    answers = serve(load(name, **settings), [*prompts, words(700, 1)], 24)
    assert answers[:3] == short


@pytest.mark.parametrize("name", NAMES)
def test_cuts_change_no_bit_where_all_is_strict(name: str, load: Load, serve: Serve, words: Words) -> None:
    """Prompts of one step, cut into many."""
    answers: list[Sequence[object]] = []
    prompts = [words(length, length) for length in (3, 400, 129)]
    for tokens in (512, 48):
        llm = load(name, device="cuda", dtype="bf16", deterministic="strict", max_step_tokens=tokens)
        answers.append(serve(llm, prompts, 10))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_warming_up(kernels: str, load: Load, words: Words) -> None:
    """Nothing is compiled while requests are served."""
    from lamina.models.implementations import watch_compilations

    llm = load("128 dims", device="cuda", warmup=True, max_step_tokens=256, kernels=kernels, max_requests=8)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with watch_compilations() as seen:
        llm.generate([words(length, length) for length in (1, 3, 17, 200, 256, 257, 600)], params)
    assert seen == []
