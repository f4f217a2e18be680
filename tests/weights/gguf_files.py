"""Random models of Transformers as GGUF files, written as llama.cpp's converter does, and as the safetensors they stand for."""

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BOS, EOS, USER = "<|im_start|>", "<|im_end|>", "<tool_call>"
TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = "In 1999 the quick brown fox didn't jump over 12 lazy dogs; they'd seen it before. It's 3.14, naïve café, 你好, 🙂! " * 40
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "pad_token_id": None,
}  # fmt: skip
#: config class, model class, what differs from _SIZES
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True, slots=True)
class Made:
    """gguf  the file.   directory  the same weights and tokenizer as Transformers writes them."""

    gguf: Path
    directory: Path


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE with control tokens in front and one token that users define."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", BOS, EOS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(USER, special=False, normalized=False)])
    return tokenizer


def make(folder: Path, family: str = "llama", dtype: str = "F32", seed: int = 0) -> Made:
    """A random model with the values that `dtype` can hold, in both forms."""
    tokenizer = train_tokenizer()
    config_class, model_class, changes = FAMILIES[family]
    sizes = {**_SIZES, **changes, "vocab_size": tokenizer.get_vocab_size() + 5, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes))
    kind = gguf.GGMLQuantizationType[dtype]
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * 0.3 / (1 if value.ndim == 1 else value.shape[-1] ** 0.5))
            if value.ndim == 2:
                kept = gguf.quants.dequantize(_quantise(_stored(model, name, value), kind), kind)
                value.copy_(_restored(model, name, torch.from_numpy(np.array(kept))))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "st")
    tokenizer.save(str(folder / "st" / "tokenizer.json"))
    words = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "st" / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    path = folder / f"{family}-{dtype}.gguf"
    writer = make_writer(path, model, tokenizer)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            is_matrix = value.ndim == 2
            stored = _stored(model, name, value)
            data = _quantise(stored, kind) if is_matrix else stored.numpy()
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind if is_matrix else None)
    finish(writer)
    return Made(path, folder / "st")


def make_writer(path: Path, model: PreTrainedModel, tokenizer: Tokenizer, pre: str = "smollm") -> gguf.GGUFWriter:
    """A writer that has the metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    add_tokenizer(writer, tokenizer, config.vocab_size, pre)
    return writer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int, pre: str) -> None:
    """The tokenizer, padded to `vocab_size`, and the chat template."""
    added, count = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab_size()
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(count)] + [5] * (vocab_size - count)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokenizer.id_to_token(i) for i in range(count)] + [f"[PAD{i}]" for i in range(count, vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """A name of Transformers as llama.cpp has it."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_LAYER[part]}.{kind}"


def _heads(model: PreTrainedModel, name: str) -> int:
    """Heads whose rows the converter permutes; 0 where it does not."""
    if model.config.model_type != "llama":
        return 0
    return model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads if "k_proj" in name else 0


def _stored(model: PreTrainedModel, name: str, value: Tensor) -> Tensor:
    heads, value = _heads(model, name), value.detach()
    if not heads:
        return value.clone()
    rows = value.shape[0] // heads
    return torch.stack([value.view(heads, 2, rows // 2, -1)[:, half] for half in (0, 1)], 2).reshape(value.shape)


def _restored(model: PreTrainedModel, name: str, value: Tensor) -> Tensor:
    heads, value = _heads(model, name), value.detach()
    if not heads:
        return value.clone()
    pairs = value.view(heads, value.shape[0] // heads // 2, 2, -1)
    return torch.cat([pairs[:, :, half] for half in (0, 1)], 1).reshape(value.shape)


def _quantise(value: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quants.quantize(value.contiguous().numpy(), kind)
