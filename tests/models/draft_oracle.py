"""Draft blocks literally: fp64, whole prompts, no cache. Written from the reference's sections 7.1 and 7.2 alone.

The blocks are layers beyond the last of an `oracle.Oracle`: weights go by the names of such layers, the rest by official ones.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from lamina.models.deepseek_v4_names import ALL_NAMES, TO_TRANSFORMERS
from lamina.models.deepseek_v4_tensors import needed_tensors
from lamina.weights.loader import Checkpoint, read_config

Array = NDArray[np.float64]


def weights_of(directory: Path) -> dict[str, Array]:
    """Every tensor of an official checkpoint, draft blocks included, as an `Oracle` calls it; experts fused."""
    values = read_config(directory)
    layers, experts = values["num_hidden_layers"], values["n_routed_experts"]
    assert isinstance(layers, int) and isinstance(experts, int)
    found: dict[str, Array] = {}
    ends: dict[str, Array] = {}
    with Checkpoint(directory, ALL_NAMES) as checkpoint:
        for need in needed_tensors(values, with_drafts=True):
            name = need.name
            if need.is_integer:
                tensor = checkpoint.take_int(name, need.shape, 0, experts)
            else:
                tensor = checkpoint.take(name, need.shape)
            array = tensor.double().numpy()
            head, _, tail = name.partition(".")
            number, _, part = tail.partition(".")
            if head == "mtp" and part.startswith(("attn", "ffn", "hc_attn", "hc_ffn")):
                name = f"layers.{layers + int(number)}.{part}"
            elif head == "mtp":
                ends[name] = array
                continue
            found[TO_TRANSFORMERS.rename(name)] = array
    for layer in range(sum(name.endswith("self_attn.sinks") for name in found)):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {part: [found.pop(f"{prefix}{expert}.{part}.weight") for expert in range(experts)] for part in ("w1", "w2", "w3")}
        found[prefix + "gate_up_proj"] = np.concatenate([np.stack(parts["w1"]), np.stack(parts["w3"])], axis=1)
        found[prefix + "down_proj"] = np.stack(parts["w2"])
    return found | ends


def chained(oracle: ModuleType, config: Mapping[str, object], weights: Mapping[str, Array], ids: list[int], count: int) -> Array:
    """Section 7.1: logits [count, V] of the drafts that follow `ids`, whose last token no layer of the main model has seen.

    The block sees position p with the streams of the main model at p and token p + 1, or a zero for it at p = 0; from the last
    position on with its own streams and the draft.
    """
    model = oracle.Oracle(config, weights)
    eps, block = model.number("rms_norm_eps"), model.count("num_hidden_layers")
    streams = model.streams(ids[:-1])[-1]  # [T, S, D]
    following, found = list(ids[1:]), []
    for _ in range(count):
        embedded = weights["model.embed_tokens.weight"][following].copy()
        embedded[0] = 0
        e = oracle.rms(embedded, weights["mtp.0.enorm.weight"], eps) @ weights["mtp.0.e_proj.weight"].T
        h = oracle.rms(streams, weights["mtp.0.hnorm.weight"], eps) @ weights["mtp.0.h_proj.weight"].T
        model.watch = oracle.Watch(np.full(len(following), np.inf))
        y = model.block(block, h + e[:, None])
        z = oracle.rms(model.collapse(y, "mtp.0.hc_head_"), weights["mtp.0.norm.weight"], eps)
        logits = z[-1] @ weights["lm_head.weight"].T
        found.append(logits)
        following.append(int(logits.argmax()))
        streams = np.concatenate([streams, y[-1:]])
    return np.array(found)


def block_drafted(
    oracle: ModuleType, config: Mapping[str, object], weights: Mapping[str, Array], ids: list[int]
) -> tuple[Array, Array, Array]:
    """Section 7.2: logits [B, V] of the drafts that follow `ids`, the same with the Markov head's, and their confidence [B]."""
    model = oracle.Oracle(config, weights)
    eps, layers, window = model.number("rms_norm_eps"), model.count("num_hidden_layers"), model.count("sliding_window")
    size, taps = model.count("dspark_block_size"), config["dspark_target_layer_ids"]
    assert isinstance(taps, list)
    outputs = model.streams(ids[:-1])
    tapped = np.concatenate([outputs[layer].mean(1) for layer in taps], axis=1)
    c = oracle.rms(tapped @ weights["mtp.0.main_proj.weight"].T, weights["mtp.0.main_norm.weight"], eps)  # [T, D]
    block = [ids[-1]] + [model.count("dspark_noise_token_id")] * (size - 1)
    streams = np.repeat(weights["model.embed_tokens.weight"][block][:, None], model.count("hc_mult"), axis=1)
    model.watch = oracle.Watch(np.full(size, np.inf))
    stages = sum(name.endswith("self_attn.sinks") for name in weights) - layers
    last = f"mtp.{stages - 1}."
    for stage in range(stages):
        model.attention = _attention(oracle, model, c[-window:], len(ids) - 1)
        streams = model.block(layers + stage, streams)
    x = model.collapse(streams, last + "hc_head_")
    logits = oracle.rms(x, weights[last + "norm.weight"], eps) @ weights["lm_head.weight"].T
    base, previous, confidence = logits.copy(), ids[-1], []
    for n in range(size):
        embedded = weights[last + "markov_head.markov_w1.weight"][previous]
        logits[n] += weights[last + "markov_head.markov_w2.weight"] @ embedded
        both = np.concatenate([x[n], embedded])
        confidence.append(oracle.sigmoid(weights[last + "confidence_head.proj.weight"][0] @ both))
        previous = int(logits[n].argmax())
    return base, logits, np.array(confidence)


def _attention(oracle: ModuleType, model: "object", context: Array, seen: int) -> Callable[[int, Array], Array]:
    """A stage's attention: `context` [N, D] at positions seen - N .. seen - 1, then the block's rows, which all see all."""
    w, eps = model.w, model.number("rms_norm_eps")  # type: ignore[attr-defined]
    heads, dim, groups = (model.count(name) for name in ("num_attention_heads", "head_dim", "o_groups"))  # type: ignore[attr-defined]

    def attention(layer: int, x: Array) -> Array:
        prefix, num = f"model.layers.{layer}.self_attn.", x.shape[0]
        angles = model.angles(0, np.arange(seen, seen + num))  # type: ignore[attr-defined]
        q = oracle.rms(x @ w[prefix + "q_a_proj.weight"].T, w[prefix + "q_a_norm.weight"], eps) @ w[prefix + "q_b_proj.weight"].T
        q = oracle.rotate(oracle.rms(q.reshape(num, heads, dim), 1.0, eps), angles[:, None])
        inputs = np.concatenate([context, x])
        rows = oracle.rms(inputs @ w[prefix + "kv_proj.weight"].T, w[prefix + "kv_norm.weight"], eps)
        rows = oracle.rotate(rows, model.angles(0, np.arange(seen - len(context), seen + num)))  # type: ignore[attr-defined]
        scores = np.einsum("thd,nd->thn", q, rows) * dim**-0.5
        sinks = np.broadcast_to(w[prefix + "sinks"][None, :, None], (num, heads, 1))
        out = oracle.softmax(np.concatenate([scores, sinks], axis=2), 2)[:, :, :-1] @ rows
        out = oracle.rotate(out, -angles[:, None]).reshape(num, groups, -1)
        wo_a = w[prefix + "o_a_proj.weight"].reshape(groups, model.count("o_lora_rank"), -1)  # type: ignore[attr-defined]
        return np.einsum("tgi,gri->tgr", out, wo_a).reshape(num, -1) @ w[prefix + "o_b_proj.weight"].T

    return attention
