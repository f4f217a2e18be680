"""What a GGUF file's metadata and names mean: the config.json that the model had, and its tensors' names there. No torch.

Source: llama.cpp's converter. Metadata keys begin with the architecture's name; one that is not known here might change the
result and is refused, and so is every architecture that is not in the table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lamina.base.errors import ConfigError
from lamina.models.gguf_tokenizer import special_ids
from lamina.weights.gguf_header import Converted, GgufFile, GgufTensor, shown

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_NEEDED = frozenset(("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
                     "attention.layer_norm_rms_epsilon"))  # fmt: skip
#: keys that are read otherwise, or say nothing that counts
_KNOWN = frozenset(("vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.type", "rope.scaling.factor",
                    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"))  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)", re.ASCII)
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FREQUENCIES = "rope_freqs.weight"
_MOST_PAIRS = 1 << 12


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one architecture was written.

    parts  names inside a layer that differ from the usual ones.   has_pairs  rows of queries and keys are permuted.
    norm_shift  added to the weights of norms.   keys  more keys, with the fields that they are.   fields  those it implies.
    """

    model_type: str
    parts: Mapping[str, str] = field(default_factory=dict)
    has_pairs: bool = False
    norm_shift: float = 0.0
    keys: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, object] = field(default_factory=dict)


#: by `general.architecture`
_ARCHITECTURES = {
    "llama": _Architecture("llama", has_pairs=True, fields={"rope_theta": 10000.0}),
    "qwen2": _Architecture("qwen2", fields={"rope_theta": 10000.0}),
    "qwen3": _Architecture("qwen3", fields={"rope_theta": 10000.0}),
}


def config_values(file: GgufFile) -> dict[str, object]:
    """The fields of the config.json that the model had.

    Raises ConfigError for an architecture or a key that is not known here, or one that is missing.
    """
    name, known = _architecture(file)
    values: dict[str, object] = {"model_type": known.model_type, "hidden_act": "silu", **known.fields}
    keys = {**_COMMON, **known.keys}
    for key, value in file.metadata.items():
        own = key.removeprefix(f"{name}.")
        if own == key:
            continue
        if own in keys:
            if isinstance(value, str | tuple):
                raise ConfigError(f"{file.path.name}: {key}", shown(value), "a number")
            values[keys[own]] = value
        elif own not in _KNOWN and value not in (0, False, ""):
            raise ConfigError(f"{file.path.name}: {key!r:.80}", shown(value), "absent, as its meaning is not known here")
    for own in sorted(_NEEDED):
        if keys[own] not in values:
            raise ConfigError(f"{file.path.name}: {name}.{own}", None, "a number in the file's metadata")
    names = {tensor.name for tensor in file.tensors}
    values["tie_word_embeddings"] = "output.weight" not in names
    if known.has_pairs:
        values["attention_bias"] = "blk.0.attn_q.bias" in names
    _read_vocabulary(file, name, values)
    _read_rope(file, name, values)
    value_dim = file.metadata.get(f"{name}.attention.value_length")
    if value_dim is not None and value_dim != values["head_dim"]:
        allowed = f"attention.key_length ({values['head_dim']})"
        raise ConfigError(f"{file.path.name}: {name}.attention.value_length", shown(value_dim), allowed)
    return values


def converted_tensors(file: GgufFile) -> list[Converted]:
    """The tensors under the names that Transformers has for them; what has no such name keeps its own, and is never used."""
    _, known = _architecture(file)
    values = config_values(file)
    heads = {"attn_q": _integer(values["num_attention_heads"])}
    heads["attn_k"] = _integer(values.get("num_key_value_heads", values["num_attention_heads"]))
    found: list[Converted] = []
    for tensor in file.tensors:
        if tensor.name == _FREQUENCIES:
            continue
        name, part = _name(tensor.name, {**_PARTS, **known.parts})
        shift = known.norm_shift if part.endswith("_norm") or tensor.name == "output_norm.weight" else 0.0
        found.append(Converted(name, tensor, heads.get(part, 0) if known.has_pairs else 0, shift))
    return found


def _architecture(file: GgufFile) -> tuple[str, _Architecture]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ConfigError(f"{file.path.name}: general.architecture", shown(name), f"one of {', '.join(_ARCHITECTURES)}")
    return name, _ARCHITECTURES[name]


def _name(stored: str, parts: Mapping[str, str]) -> tuple[str, str]:
    """(name, part of the layer or ""); the number of a layer is kept as it is written."""
    match = _LAYER.fullmatch(stored)
    if match is None or match[2] not in parts:
        return _WHOLE.get(stored, stored), ""
    return f"model.layers.{match[1]}.{parts[match[2]]}.{match[3]}", match[2]


def _read_vocabulary(file: GgufFile, name: str, values: dict[str, object]) -> None:
    """`vocab_size` is the number of rows that the embedding has; ids that end a text."""
    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path.name}: token_embd.weight", None, "a matrix among its tensors")
    values["vocab_size"] = embedding.shape[0]
    values["bos_token_id"] = special_ids(file).get("bos_token")
    values["eos_token_id"] = sorted({token for role, token in special_ids(file).items() if role in ("eos_token", "eot", "eom")})


def _read_rope(file: GgufFile, name: str, values: dict[str, object]) -> None:
    """Head dim and rotary positions: plain, stretched evenly, or with a factor for each pair in a tensor of the file."""
    hidden, heads = _integer(values["hidden_size"]), _integer(values["num_attention_heads"])
    dims = file.metadata.get(f"{name}.rope.dimension_count")
    values.setdefault("head_dim", hidden // max(1, heads))
    if dims is not None and dims != values["head_dim"]:
        raise ConfigError(f"{file.path.name}: {name}.rope.dimension_count", shown(dims), f"the head dim, {values['head_dim']}")
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ConfigError(f"{file.path.name}: {name}.rope.scaling.type", shown(kind), "none or linear")
    if kind == "linear":
        factor = file.metadata.get(f"{name}.rope.scaling.factor")
        if type(factor) not in (int, float):
            raise ConfigError(f"{file.path.name}: {name}.rope.scaling.factor", shown(factor), "a number")
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    stored = next((tensor for tensor in file.tensors if tensor.name == _FREQUENCIES), None)
    if stored is not None:
        if kind != "none":
            raise ConfigError(f"{file.path.name}: {name}.rope.scaling.type", kind, f"none beside {_FREQUENCIES}")
        factors = _factors(file, stored)
        values["rope_scaling"] = {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": values["max_position_embeddings"],
        }  # fmt: skip


def _factors(file: GgufFile, stored: GgufTensor) -> list[float]:
    if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MOST_PAIRS:
        raise ConfigError(f"{file.path.name}: {_FREQUENCIES}", f"{stored.dtype} {list(stored.shape)}", "F32, one a pair of dims")
    factors = np.fromfile(file.path, "<f4", stored.shape[0], offset=stored.offset)
    if len(factors) != stored.shape[0] or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ConfigError(f"{file.path.name}: {_FREQUENCIES}", "as stored", "finite numbers above 0")
    return [float(factor) for factor in factors]


def _integer(value: object) -> int:
    """A head count; what is no number is refused where the family reads its config, and is 0 here."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
