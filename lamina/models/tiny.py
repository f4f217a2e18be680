"""A small DeepSeek-V4 made on the spot: real layout, names and formats, random weights, a tokenizer trained on Python's help."""

import builtins
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lamina.base.errors import ConfigError
from lamina.models.deepseek_v4_names import TO_TRANSFORMERS
from lamina.weights.writer import Encoded, encode, write_safetensors

FORMATS = ("official", "transformers")
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
#: control tokens that follow the vocabulary; like the shipped ones they are text to a decoder, which only hides BOS, EOS and PAD.
CONTROL = (
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜",
    "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between small models of this architecture.

    ratios  of the layers, then a 0 for each draft block.   taps  layers that feed the draft blocks (DSpark); none: one MTP block.
    """

    ratios: tuple[int, ...]
    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    expert_width: int
    hash_layers: int
    index_topk: int
    route_scale: float
    vocab: int = 1024
    experts: int = 8
    experts_per_token: int = 2
    index_heads: int = 16
    index_dim: int = 128
    taps: tuple[int, ...] = ()
    stages: int = 1
    markov_rank: int = 32

    @property
    def layers(self) -> tuple[int, ...]:
        """Ratios of the decoder layers."""
        return self.ratios[: len(self.ratios) - self.stages]


#: flash and pro: the two shipped schedules, every matrix whole in 128x128 squares, 4.4 and 5.4 M parameters in the main model.
#: bench: shipped entry widths in 5.4 M parameters; its low ranks give partial squares.
SHAPES = {
    "flash": Shape((0, 0, 4, 128, 4, 0), 128, 4, 128, 128, 2, 128, 128, 3, 16, 1.5),
    "pro": Shape((128, 128, 4, 128, 4, 0), 128, 8, 128, 128, 4, 128, 128, 3, 32, 2.5),
    "bench": Shape((0, 4, 128, 4, 128, 0), 256, 4, 512, 32, 2, 32, 32, 3, 512, 1.5),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One official tensor, stored as fp4, fp8, bf16, fp32 or tid2eid (distinct experts a row). Random: uniform around `mean`."""

    name: str
    shape: tuple[int, ...]
    storage: str
    std: float = 0.0
    mean: float = 0.0


def tiny_config(shape: str = "flash") -> dict[str, object]:
    """The official config.json of the tiny model `shape` (flash, pro or bench). Raises ConfigError for another shape."""
    if shape not in SHAPES:
        raise ConfigError("shape", shape, f"one of {', '.join(SHAPES)}")
    return config_of(SHAPES[shape])


def config_of(s: Shape) -> dict[str, object]:
    """The official config.json of a model of shape `s`."""
    drafts: dict[str, object] = {}
    if s.taps:
        drafts = {
            "dspark_block_size": 5, "dspark_markov_rank": s.markov_rank, "dspark_noise_token_id": s.vocab - 1,
            "dspark_target_layer_ids": list(s.taps),
        }  # fmt: skip
    return drafts | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": list(s.ratios),
        "compress_rope_theta": 160000.0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "index_head_dim": s.index_dim,
        "index_n_heads": s.index_heads,
        "index_topk": s.index_topk,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": s.expert_width,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.experts_per_token,
        "num_hash_layers": s.hash_layers,
        "num_hidden_layers": len(s.layers),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": s.o_groups,
        "o_lora_rank": s.o_lora,
        "pad_token_id": 2,
        "q_lora_rank": s.q_lora,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000.0,
        "routed_scaling_factor": s.route_scale,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": s.vocab,
    }


def write_tiny(directory: Path, shape: str | Shape = "flash", seed: int = 0, file_format: str = "official") -> None:
    """Writes a complete checkpoint to `directory`: config.json, model.safetensors, generation_config.json and a tokenizer.

    shape        flash, pro or bench, or one of one's own.
    seed         >= 0. A tensor's values depend on the seed, its name and its shape only, on every machine.
    file_format  official (FP8, FP4, BF16, F32, with draft blocks), or transformers (the same numbers as BF16 and F32 under its
                 in-memory names, without them).
    Raises ConfigError for another shape, seed or format, or if `directory` exists and is not an empty directory.
    Matrices are uniform with deviation gain / sqrt(fan in); nothing is zero, so that a part left out shows in the logits.
    All or nothing: the files are written beside and renamed into place.
    """
    config = config_of(shape) if isinstance(shape, Shape) else tiny_config(shape)
    if file_format not in FORMATS:
        raise ConfigError("format", file_format, f"one of {', '.join(FORMATS)}")
    if seed < 0:
        raise ConfigError("seed", seed, "0 or more")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError("directory", str(directory), "a new or an empty directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_files(staging, shape if isinstance(shape, Shape) else SHAPES[shape], config, seed, file_format)
        staging.chmod(0o777 & ~_umask())
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(directory: Path, shape: Shape, config: dict[str, object], seed: int, file_format: str) -> None:
    if file_format == "transformers":
        plain = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
        config = plain | {"compress_ratios": list(shape.layers), "num_nextn_predict_layers": 0}
    tensors = (_official if file_format == "official" else _transformers)(shape, seed)
    write_safetensors(directory / "model.safetensors", tensors)
    write_settings(directory, config)
    _help_tokenizer(shape.vocab).save(str(directory / "tokenizer.json"))


def write_settings(directory: Path, config: dict[str, object]) -> None:
    """Writes config.json, generation_config.json and tokenizer_config.json beside weights and tokenizer."""
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": 0, "do_sample": True, "eos_token_id": 1, "pad_token_id": 2, "temperature": 1.0, "top_p": 1.0},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": BOS,
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "model_max_length": config["max_position_embeddings"],
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _official(shape: Shape, seed: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for spec in specs(shape):
        encoded = _make(spec, seed)
        tensors[spec.name] = encoded.stored
        if encoded.scale is not None:
            tensors[spec.name.removesuffix(".weight") + ".scale"] = encoded.scale
    return tensors


def _transformers(shape: Shape, seed: int) -> dict[str, Tensor]:
    """The main model's tensors under Transformers' names, experts fused. Every stored form's values are exact in bf16."""
    tensors: dict[str, Tensor] = {}
    for spec in specs(shape):
        if not spec.name.startswith("mtp."):
            encoded = _make(spec, seed)
            is_matrix = len(spec.shape) > 1 and spec.storage in ("bf16", "fp8", "fp4")
            tensors[TO_TRANSFORMERS.rename(spec.name)] = encoded.values.to(torch.bfloat16) if is_matrix else encoded.values
    for layer in range(len(shape.layers)):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, down, up = (
            torch.stack([tensors.pop(f"{experts}.{expert}.{part}.weight") for expert in range(shape.experts)])
            for part in ("w1", "w2", "w3")
        )
        tensors[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)  # [E, 2I, D]
        tensors[f"{experts}.down_proj"] = down  # [E, D, I]
    return tensors


def specs(s: Shape) -> Iterator[Spec]:
    """Every tensor of the official file of a model of shape `s`, except the scales; main model first."""
    yield Spec("embed.weight", (s.vocab, s.hidden), "bf16", 1.0)
    for layer, ratio in enumerate(s.layers):
        yield from _block(s, f"layers.{layer}", ratio, layer < s.hash_layers)
    yield _norm("norm", s.hidden)
    yield from _mixer("hc_head", s.hidden, 4, 1)
    yield _matrix("head", s.vocab, s.hidden, "bf16")
    for stage in range(s.stages):
        yield from _block(s, f"mtp.{stage}", 0, False)
    last = f"mtp.{s.stages - 1}"
    if s.taps:
        yield _matrix("mtp.0.main_proj", s.hidden, len(s.taps) * s.hidden)
        yield _norm("mtp.0.main_norm", s.hidden)
        yield Spec(f"{last}.markov_head.markov_w1.weight", (s.vocab, s.markov_rank), "bf16", 1.0)
        yield _matrix(f"{last}.markov_head.markov_w2", s.vocab, s.markov_rank, "bf16")
        yield _matrix(f"{last}.confidence_head.proj", 1, s.hidden + s.markov_rank, "bf16")
    else:
        yield _matrix("mtp.0.e_proj", s.hidden, s.hidden)
        yield _matrix("mtp.0.h_proj", s.hidden, s.hidden)
        yield _norm("mtp.0.enorm", s.hidden)
        yield _norm("mtp.0.hnorm", s.hidden)
    yield _norm(f"{last}.norm", s.hidden)
    yield from _mixer(f"{last}.hc_head", s.hidden, 4, 1)


def _block(s: Shape, prefix: str, ratio: int, is_hashed: bool) -> Iterator[Spec]:
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    yield from _mixer(f"{prefix}.hc_attn", s.hidden, 24, 3)
    yield _norm(f"{prefix}.attn_norm", s.hidden)
    yield Spec(f"{attn}.attn_sink", (s.heads,), "fp32", 1.0)
    yield _matrix(f"{attn}.wq_a", s.q_lora, s.hidden)
    yield _norm(f"{attn}.q_norm", s.q_lora)
    yield _matrix(f"{attn}.wq_b", s.heads * s.head_dim, s.q_lora)
    yield _matrix(f"{attn}.wkv", s.head_dim, s.hidden)
    yield _norm(f"{attn}.kv_norm", s.head_dim)
    yield _matrix(f"{attn}.wo_a", s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups)
    yield _matrix(f"{attn}.wo_b", s.hidden, s.o_groups * s.o_lora, gain=4.0)  # an average over many values is small
    if ratio:
        yield from _compressor(f"{attn}.compressor", s.hidden, s.head_dim, ratio)
    if ratio == 4:
        yield _matrix(f"{attn}.indexer.wq_b", s.index_heads * s.index_dim, s.q_lora)
        yield _matrix(f"{attn}.indexer.weights_proj", s.index_heads, s.hidden, "bf16")
        yield from _compressor(f"{attn}.indexer.compressor", s.hidden, s.index_dim, ratio)
    yield from _mixer(f"{prefix}.hc_ffn", s.hidden, 24, 3)
    yield _norm(f"{prefix}.ffn_norm", s.hidden)
    yield _matrix(f"{ffn}.gate", s.experts, s.hidden, "bf16")
    if is_hashed:
        yield Spec(f"{ffn}.gate.tid2eid", (s.vocab, s.experts_per_token), "tid2eid", mean=s.experts)
    else:
        yield Spec(f"{ffn}.gate.bias", (s.experts,), "fp32", 0.1)
    for expert, storage in [*((f"experts.{index}", "fp4") for index in range(s.experts)), ("shared_experts", "fp8")]:
        yield _matrix(f"{ffn}.{expert}.w1", s.expert_width, s.hidden, storage)
        yield _matrix(f"{ffn}.{expert}.w2", s.hidden, s.expert_width, storage, gain=2.0)
        yield _matrix(f"{ffn}.{expert}.w3", s.expert_width, s.hidden, storage)


def _compressor(prefix: str, hidden: int, width: int, ratio: int) -> Iterator[Spec]:
    wide = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: one half for each of two entries
    yield Spec(f"{prefix}.ape", (ratio, wide), "fp32", 0.5)
    yield _matrix(f"{prefix}.wkv", wide, hidden, "bf16")
    yield _matrix(f"{prefix}.wgate", wide, hidden, "bf16")
    yield _norm(f"{prefix}.norm", width)


def _mixer(prefix: str, hidden: int, outputs: int, scales: int) -> Iterator[Spec]:
    yield Spec(f"{prefix}_fn", (outputs, 4 * hidden), "fp32", (4 * hidden) ** -0.5)
    yield Spec(f"{prefix}_base", (outputs,), "fp32", 1.0)
    yield Spec(f"{prefix}_scale", (scales,), "fp32", 0.2, mean=1.0)


def _norm(name: str, width: int) -> Spec:
    return Spec(f"{name}.weight", (width,), "bf16", 0.2, mean=1.0)


def _matrix(name: str, rows: int, columns: int, storage: str = "fp8", gain: float = 1.0) -> Spec:
    return Spec(f"{name}.weight", (rows, columns), storage, gain * columns**-0.5)


def _make(spec: Spec, seed: int) -> Encoded:
    """The tensor of `spec`. Uniform numbers are exact multiples of 2^-24 everywhere; normal ones differ between processors."""
    digest = hashlib.blake2b(f"{seed}/{spec.name}/{spec.shape}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    if spec.storage == "tid2eid":
        order = torch.rand((spec.shape[0], int(spec.mean)), generator=generator).argsort(dim=1, stable=True)
        ids = order[:, : spec.shape[1]].contiguous()
        return Encoded(ids, None, ids)
    uniform = torch.rand(spec.shape, generator=generator) - 0.5
    return encode(uniform * (12**0.5 * spec.std) + spec.mean, spec.storage)


def _help_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of Python's help."""
    help_texts = [value.__doc__ for _, value in sorted(vars(builtins).items()) if isinstance(value, type)]
    return train_tokenizer([*(topics[key] for key in sorted(topics)), *(text for text in help_texts if text)], vocab)


def train_tokenizer(texts: Iterable[str], vocab: int, shows_progress: bool = False) -> Tokenizer:
    """A byte-level BPE of `vocab` tokens, digits apart. Ids: BOS 0, EOS 1, PAD 2, the 256 bytes, merges, CONTROL last.

    Raises ConfigError if the texts are too short for that many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL),
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=shows_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in CONTROL])
    if tokenizer.get_vocab_size() != vocab:
        raise ConfigError("vocab_size", tokenizer.get_vocab_size(), f"{vocab} tokens; the texts are too short")
    return tokenizer


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
