"""Keywords that are not there: one line that names them, what they are called here, or the nearest one that there is."""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from lamina.base.errors import KeywordError

P = ParamSpec("P")
R = TypeVar("R")

#: what other engines' keywords of LLM are here
LLM_ELSEWHERE = {
    "block_size": "it is block_tokens here",
    "compilation_config": "nothing is compiled from the model's code; kernels chooses the kernels",
    "cpu_offload_gb": "weights stay where they are computed with: leave it out",
    "data_parallel_size": "one process runs one copy: start several servers",
    "disable_custom_all_reduce": "a model runs on one device: leave it out",
    "disable_log_stats": "nothing is logged unless asked for: leave it out",
    "download_dir": "give model a directory, or HF_HOME to the process",
    "enable_chunked_prefill": "prompts longer than max_step_tokens are always cut: leave it out",
    "enable_lora": "adapters are not supported: merge them into the weights",
    "enable_prefix_caching": "prefixes are always kept for reuse; cache_salt of generate keeps requests apart",
    "enforce_eager": "decodes on a GPU are always graphs; warmup=False captures them when they are first needed",
    "hf_overrides": "config.json is what counts: change it there",
    "hf_token": "give HF_TOKEN to the process",
    "kv_cache_dtype": "it is cache_format here (fp8, bf16, fp32, auto)",
    "kv_cache_memory_bytes": "it is cache_bytes here",
    "limit_mm_per_prompt": "prompts are text: leave it out",
    "load_format": "safetensors and GGUF files are told apart by themselves: leave it out",
    "max_num_batched_tokens": "it is max_step_tokens here",
    "max_num_seqs": "it is max_requests here",
    "max_seq_len_to_capture": "graphs are captured up to max_requests and max_model_len: leave it out",
    "max_seq_len": "it is max_model_len here",
    "model_path": "it is model here",
    "n_ctx": "it is max_model_len here",
    "num_speculative_tokens": "it is draft_tokens here",
    "num_gpu_blocks_override": "cache_bytes sets the pool, in bytes",
    "pipeline_parallel_size": "a model runs on one device: leave it out",
    "prefix_cache_retention_interval": "it is checkpoint_interval here",
    "quantization": "formats are read from the checkpoint: leave it out",
    "revision": "give model the directory of that revision",
    "served_model_name": "an option of lamina serve",
    "skip_tokenizer_init": "a checkpoint without tokenizer.json takes token ids: leave it out",
    "speculative_config": 'give draft, such as "auto", and draft_tokens',
    "swap_space": "nothing is swapped to the host: leave it out",
    "task": "a model generates: leave it out",
    "tensor_parallel_size": "a model runs on one device: leave it out",
    "tokenizer": "tokenizer.json of the checkpoint is read: put it there",
    "tokenizer_mode": "tokenizer.json of the checkpoint is read: leave it out",
    "torch_dtype": "it is dtype here",
    "trust_remote_code": "no code of a checkpoint is ever run: leave it out",
}
#: what other engines' options of a command are, where it is not what their keywords are in Python
OPTIONS_ELSEWHERE = {
    "api_key": "it is --api-key-file: other users can read a command line",
    "base_url": "give the address as the first argument",
    "chat_template_content_format": "texts and lists of texts are both taken: leave it out",
    "disable_log_requests": "prompts are never logged: leave it out",
    "enable_auto_tool_choice": "tools are always on: leave it out",
    "enforce_eager": "decodes on a GPU are always graphs; --no-warmup captures them when they are first needed",
    "num_speculative_tokens": "it is --draft-tokens",
    "reasoning_parser": "the chat format of the model reads its own thoughts: leave it out",
    "served_model_name": "an option of lamina serve",
    "speculative_config": "give --draft auto, and --draft-tokens if it matters",
    "tokens_only": "see /tokenize and prompts of token ids",
    "tool_call_parser": "the chat format of the model reads its own calls: leave it out",
    "uvicorn_log_level": "-v and -vv show more",
}
#: what other engines' keywords of SamplingParams are here
SAMPLING_ELSEWHERE = {
    "allowed_token_ids": "not supported; logit_bias=-100 for the others comes near",
    "bad_words": "not supported; logit_bias=-100 bans single tokens",
    "beam_width": "beams are not supported: n draws several outputs",
    "best_of": "not supported: draw n outputs and take the best by cumulative_logprob",
    "detokenize": "texts are always made: leave it out",
    "do_sample": "temperature=0 takes the most likely tokens",
    "early_stopping": "beams are not supported: leave it out",
    "eos_token_id": "it is stop_token_ids here",
    "extra_args": "not supported: leave it out",
    "guided_decoding": "grammars are for the server: response_format of lamina serve",
    "length_penalty": "beams are not supported: leave it out",
    "logits_processors": "functions of the caller are not supported; logit_bias changes single tokens",
    "max_completion_tokens": "it is max_tokens here",
    "max_length": "it is max_tokens here, without the prompt",
    "max_new_tokens": "it is max_tokens here",
    "min_new_tokens": "it is min_tokens here",
    "num_beams": "beams are not supported: n draws several outputs",
    "num_return_sequences": "it is n here",
    "output_kind": "generate gives whole outputs, stream gives pieces",
    "random_seed": "it is seed here",
    "response_format": "grammars are for the server: response_format of lamina serve",
    "spaces_between_special_tokens": "tokens are decoded as the tokenizer does: leave it out",
    "stop_sequences": "it is stop here",
    "stop_strings": "it is stop here",
    "structured_outputs": "grammars are for the server: response_format of lamina serve",
    "temp": "it is temperature here",
    "top_logprobs": "it is logprobs here",
    "truncate_prompt_tokens": "prompts are never cut: shorten them",
    "use_beam_search": "beams are not supported: n draws several outputs",
}
#: what other engines' keywords of LLM.generate and LLM.chat are here
CALL_ELSEWHERE = {
    "lora_request": "adapters are not supported: merge them into the weights",
    "multi_modal_data": "prompts are text: leave it out",
    "priority": "an option of a request to lamina serve",
    "prompt_token_ids": "give the ids as prompts",
    "use_tqdm": "on_step is called with (finished, all)",
}


def known_only(owner: str, elsewhere: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse keywords that it does not have with a KeywordError of one line.

    owner  whose it is.   elsewhere  what keywords that others have are here.
    """

    def wrap(call: Callable[P, R]) -> Callable[P, R]:
        known = frozenset(inspect.signature(call).parameters) - {"self"}

        @wraps(call)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in kwargs.items():
                if name not in known:
                    raise KeywordError(owner, name, value, _hint(name, known, elsewhere))
            return call(*args, **kwargs)

        return checked

    return wrap


def option_hint(option: str) -> str:
    """What another engine's option, such as --max-num-seqs, is here; empty if nothing is known of it."""
    name = option.removeprefix("--").partition("=")[0].replace("-", "_")
    if name in OPTIONS_ELSEWHERE:
        return OPTIONS_ELSEWHERE[name]
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda found: f"--{found.group().replace('_', '-')}", LLM_ELSEWHERE.get(name, ""))


def _hint(name: str, known: frozenset[str], elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return elsewhere[name]
    near = get_close_matches(name.lower(), [*known, *elsewhere], 1, 0.75)
    if near and near[0] in known:
        return f"did you mean {near[0]}?"
    if near:
        return f"did you mean {near[0]}? {elsewhere[near[0]]}"
    return f"it has {', '.join(sorted(known))}"
