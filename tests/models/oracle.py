"""DeepSeek-V4 literally: fp64, dense, one token after another, in NumPy. Slow on purpose, and written from the reference alone.

Weights go by Transformers' in-memory names, config fields by the official ones. What a cache would store goes through a
`Storage`, so that the same forward pass is exact (nothing is rounded) or simulates a format (golden rounding below).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Number formats: every value that a code can have, rounded to by distance, ties to the even code ---------------------------


def _e4m3_values() -> Array:
    """The 127 finite non-negative values of e4m3, by code: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = _e4m3_values()  # 0 ... 448
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def round_to(values: Array, table: Array) -> Array:
    """The nearest entry of `table` (ascending, from 0), signed; half way goes to the even code, beyond the end to the last."""
    size = np.abs(values)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    middle = (low + high) / 2
    take_high = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.sign(values) * np.where(take_high, high, low)


def power_of_two_above(x: float) -> float:
    """2^ceil(log2(x)), exactly."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def _by_block(x: Array, block: int, table: Array, smallest: float) -> Array:
    """Rows [N, n] rounded in blocks of the last dim with a power-of-two scale each, and back."""
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], block):
            part = x[row, start : start + block]
            scale = power_of_two_above(max(float(np.abs(part).max()), smallest) / table[-1])
            out[row, start : start + block] = round_to(part / scale, table) * scale
    return out


def fp8_blocks(x: Array, block: int = 64) -> Array:
    """[N, n] in and out of e4m3."""
    return _by_block(x, block, E4M3, 1e-4)


def fp4_blocks(x: Array, block: int = 32) -> Array:
    """[N, n] in and out of e2m1."""
    return _by_block(x, block, E2M1, 6 * 2.0**-126)


def bf16(x: Array) -> Array:
    """Rounded to 8 significant bits, half way to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256), exponent - 8)


def hadamard(x: Array) -> Array:
    """[N, n] times the orthonormal Sylvester matrix: element (i, j) has the sign of the parity of i & j."""
    n = x.shape[-1]
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
    return x @ signs / math.sqrt(n)


# Storage -------------------------------------------------------------------------------------------------------------------

#: (layer, "window" | "entries" | "keys" | "queries", rows [N, n]) -> what reading them back gives
StoreRows = Callable[[int, str, Array], Array]


def exact(layer: int, what: str, x: Array) -> Array:
    """Nothing is rounded."""
    return x


@dataclass(frozen=True)
class Rounding:
    """What the formats of a cache do to rows. Index keys and queries come back in the basis they are stored in."""

    cache_format: str
    index_format: str
    rope: int

    def __call__(self, layer: int, what: str, x: Array) -> Array:
        return self.round(what, self.turn(what, x))

    def turn(self, what: str, x: Array) -> Array:
        """Rows in the basis that they are rounded in."""
        return hadamard(x) if what in ("keys", "queries") and self.index_format in ("fp4", "fp8") else x

    def round(self, what: str, x: Array) -> Array:
        """Turned rows, in and out of their format."""
        if what in ("window", "entries"):
            if self.cache_format == "fp8":
                return np.concatenate([fp8_blocks(x[:, : -self.rope]), bf16(x[:, -self.rope :])], axis=1)
            return bf16(x) if self.cache_format == "bf16" else x
        if self.index_format == "fp4":
            return fp4_blocks(x)
        if self.index_format == "fp8":
            return fp8_blocks(x, x.shape[-1])
        return bf16(x) if self.index_format == "bf16" else x


# The model -----------------------------------------------------------------------------------------------------------------


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    """Root-mean-square norm over the last dim."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Array, angles: Array) -> Array:
    """Turns the last dims of x [..., n] in pairs (2p, 2p + 1) by angles [..., p]; the first dims stay."""
    out = x.copy()
    tail = x.shape[-1] - 2 * angles.shape[-1]
    a, b = x[..., tail::2], x[..., tail + 1 :: 2]
    out[..., tail::2] = a * np.cos(angles) - b * np.sin(angles)
    out[..., tail + 1 :: 2] = b * np.cos(angles) + a * np.sin(angles)
    return out


def frequencies(dim: int, theta: float, yarn: Mapping[str, float] | None) -> Array:
    """Angle per position of each of dim / 2 pairs."""
    plain = np.array([theta ** (-2 * p / dim) for p in range(dim // 2)])
    if yarn is None:
        return plain

    def pair(turns: float) -> float:
        return dim * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = min(max(math.floor(pair(yarn["beta_fast"])), 0), dim - 1)
    high = min(max(math.ceil(pair(yarn["beta_slow"])), 0), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def softmax(x: Array, axis: int) -> Array:
    """Softmax; -inf weighs nothing."""
    weights = np.exp(x - x.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@dataclass
class Watch:
    """Narrowest choice on the way to each position [T]."""

    margins: Array

    def narrow(self, position: int, scores: Array, count: int) -> None:
        """scores [N] of which `count` are chosen."""
        if len(scores) > count:
            best = np.sort(scores)[::-1]
            self.margins[position] = min(self.margins[position], best[count - 1] - best[count])


class Oracle:
    """config: official config.json fields.   weights: fp64, by Transformers' names.   store: what a cache does to rows."""

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, Array], store: StoreRows = exact) -> None:
        self.c = config
        self.w = weights
        self.store = store

    def number(self, name: str) -> float:
        value = self.c[name]
        assert isinstance(value, int | float)
        return value

    def count(self, name: str) -> int:
        return int(self.number(name))

    def logits(self, ids: list[int]) -> tuple[Array, Array]:
        """([T, V] scores after each token, [T] narrowest margin of any choice of experts or entries)."""
        streams = self.streams(ids)[-1]
        h = self.collapse(streams, "model.hc_head.hc_")
        return rms(h, self.w["model.norm.weight"], self.number("rms_norm_eps")) @ self.w["lm_head.weight"].T, self.watch.margins

    def streams(self, ids: list[int]) -> list[Array]:
        """The residual streams [T, S, D] after each layer."""
        self.ids = ids
        self.watch = Watch(np.full(len(ids), np.inf))
        streams = np.repeat(self.w["model.embed_tokens.weight"][ids][:, None], self.count("hc_mult"), axis=1)  # [T, S, D]
        found = []
        for layer in range(self.count("num_hidden_layers")):
            streams = self.block(layer, streams)
            found.append(streams)
        return found

    def block(self, layer: int, streams: Array) -> Array:
        """One decoder layer, [T, S, D] -> [T, S, D]."""
        prefix, eps = f"model.layers.{layer}.", self.number("rms_norm_eps")
        pre, post, comb = self.mixer(streams, prefix + "attn_hc.")
        u = (pre[:, :, None] * streams).sum(1)
        y = self.attention(layer, rms(u, self.w[prefix + "input_layernorm.weight"], eps))
        streams = self.mix(streams, y, post, comb)
        pre, post, comb = self.mixer(streams, prefix + "ffn_hc.")
        u = (pre[:, :, None] * streams).sum(1)
        y = self.moe(layer, rms(u, self.w[prefix + "post_attention_layernorm.weight"], eps))
        return self.mix(streams, y, post, comb)

    def collapse(self, streams: Array, prefix: str) -> Array:
        """[T, S, D] -> [T, D]."""
        mixes = self.mixes(streams, self.w[prefix + "fn"])
        pre = sigmoid(mixes * self.w[prefix + "scale"] + self.w[prefix + "base"]) + self.number("hc_eps")
        return (pre[:, :, None] * streams).sum(1)

    # -- hyper-connections

    def mixes(self, streams: Array, fn: Array) -> Array:
        flat = streams.reshape(streams.shape[0], -1)
        return (flat @ fn.T) / np.sqrt((flat**2).mean(-1, keepdims=True) + self.number("rms_norm_eps"))

    def mixer(self, streams: Array, prefix: str) -> tuple[Array, Array, Array]:
        num, eps = streams.shape[1], self.number("hc_eps")
        m, base, scale = self.mixes(streams, self.w[prefix + "fn"]), self.w[prefix + "base"], self.w[prefix + "scale"]
        pre = sigmoid(m[:, :num] * scale[0] + base[:num]) + eps
        post = 2 * sigmoid(m[:, num : 2 * num] * scale[1] + base[num : 2 * num])
        comb = softmax((m[:, 2 * num :] * scale[2] + base[2 * num :]).reshape(-1, num, num), 2) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.count("hc_sinkhorn_iters") - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return pre, post, comb

    def mix(self, streams: Array, y: Array, post: Array, comb: Array) -> Array:
        out = np.zeros_like(streams)
        for k in range(streams.shape[1]):
            out[:, k] = post[:, k, None] * y
            for j in range(streams.shape[1]):
                out[:, k] += comb[:, j, k, None] * streams[:, j]
        return out

    # -- attention

    def angles(self, ratio: int, positions: NDArray[np.int64]) -> Array:
        yarn = self.c["rope_scaling"] if ratio else None
        assert yarn is None or isinstance(yarn, Mapping)
        theta = self.number("compress_rope_theta" if ratio else "rope_theta")
        return positions[:, None] * frequencies(self.count("qk_rope_head_dim"), theta, yarn)

    def attention(self, layer: int, x: Array) -> Array:
        prefix, eps = f"model.layers.{layer}.self_attn.", self.number("rms_norm_eps")
        ratios = self.c["compress_ratios"]
        assert isinstance(ratios, list)
        ratio, heads, dim, num = ratios[layer], self.count("num_attention_heads"), self.count("head_dim"), x.shape[0]
        angles = self.angles(ratio, np.arange(num))
        r = rms(x @ self.w[prefix + "q_a_proj.weight"].T, self.w[prefix + "q_a_norm.weight"], eps)
        q = rms((r @ self.w[prefix + "q_b_proj.weight"].T).reshape(num, heads, dim), 1.0, eps)
        q = rotate(q, angles[:, None])
        own = rotate(rms(x @ self.w[prefix + "kv_proj.weight"].T, self.w[prefix + "kv_norm.weight"], eps), angles)
        own = self.store(layer, "window", own)
        entries, selected = np.zeros((0, dim)), None
        if ratio:
            entries = self.store(layer, "entries", self.compressed(prefix + "compressor.", ratio, dim, x))
        if ratio == 4:
            selected = self.selected(layer, prefix + "compressor.indexer.", x, r, angles)
        out = np.zeros((num, heads, dim))
        window, sinks = self.count("sliding_window"), self.w[prefix + "sinks"]
        for t in range(num):
            visible = (t + 1) // ratio if ratio else 0
            chosen = range(visible) if selected is None else selected[t]
            rows = np.concatenate([own[max(0, t - window + 1) : t + 1], entries[list(chosen)]])
            scores = q[t] @ rows.T * dim**-0.5  # [H, N]
            weights = softmax(np.concatenate([scores, sinks[:, None]], axis=1), 1)[:, :-1]
            out[t] = weights @ rows
        out = rotate(out, -angles[:, None])
        groups = self.count("o_groups")
        wo_a = self.w[prefix + "o_a_proj.weight"].reshape(groups, self.count("o_lora_rank"), -1)
        parts = out.reshape(num, groups, -1)
        low = np.concatenate([parts[:, group] @ wo_a[group].T for group in range(groups)], axis=1)
        return low @ self.w[prefix + "o_b_proj.weight"].T

    def compressed(self, prefix: str, ratio: int, dim: int, x: Array) -> Array:
        """[floor(T / ratio), dim] entries, normed and rotated, not yet stored."""
        a = x @ self.w[prefix + "kv_proj.weight"].T
        b = x @ self.w[prefix + "gate_proj.weight"].T
        b = b + self.w[prefix + "position_bias"][np.arange(x.shape[0]) % ratio]
        entries = []
        for i in range(x.shape[0] // ratio):
            now = slice(ratio * i, ratio * (i + 1))
            values, gates = a[now], b[now]
            if ratio == 4:
                values, gates = values[:, dim:], gates[:, dim:]
                if i:
                    before = slice(ratio * (i - 1), ratio * i)
                    values = np.concatenate([a[before, :dim], values])
                    gates = np.concatenate([b[before, :dim], gates])
            entries.append((softmax(gates, 0) * values).sum(0))
        rows = np.array(entries).reshape(-1, dim)
        rows = rms(rows, self.w[prefix + "kv_norm.weight"], self.number("rms_norm_eps"))
        return rotate(rows, self.angles(ratio, np.arange(rows.shape[0]) * ratio))

    def selected(self, layer: int, prefix: str, x: Array, r: Array, angles: Array) -> list[list[int]]:
        """The entries that each query attends to; equal scores go to the lowest entry."""
        heads, dim, num = self.count("index_n_heads"), self.count("index_head_dim"), x.shape[0]
        keys = self.store(layer, "keys", self.compressed(prefix, 4, dim, x))
        queries = rotate((r @ self.w[prefix + "q_b_proj.weight"].T).reshape(num, heads, dim), angles[:, None])
        queries = self.store(layer, "queries", queries.reshape(-1, dim)).reshape(num, heads, dim)
        weights = x @ self.w[prefix + "scorer.weights_proj.weight"].T * dim**-0.5 * heads**-0.5
        found = []
        for t in range(num):
            visible, top_k = (t + 1) // 4, self.count("index_topk")
            scores = (weights[t, :, None] * np.maximum(queries[t] @ keys[:visible].T, 0)).sum(0)
            self.watch.narrow(t, scores, top_k)
            found.append(sorted(np.argsort(-scores, kind="stable")[:top_k].tolist()))
        return found

    # -- experts

    def moe(self, layer: int, x: Array) -> Array:
        prefix, top_k = f"model.layers.{layer}.mlp.", self.count("num_experts_per_tok")
        scores = np.sqrt(np.logaddexp(0, x @ self.w[prefix + "gate.weight"].T))
        out = np.zeros_like(x)
        for t in range(x.shape[0]):
            if layer < self.count("num_hash_layers"):
                chosen = self.w[prefix + "gate.tid2eid"][self.ids[t]].astype(int).tolist()
            else:
                biased = scores[t] + self.w[prefix + "gate.e_score_correction_bias"]
                self.watch.narrow(t, biased, top_k)
                chosen = np.argsort(-biased, kind="stable")[:top_k].tolist()
            total = sum(scores[t, expert] for expert in chosen)
            for expert in chosen:
                gate_up, down = self.w[prefix + "experts.gate_up_proj"][expert], self.w[prefix + "experts.down_proj"][expert]
                out[t] += (
                    self.swiglu(gate_up @ x[t]) @ down.T * (scores[t, expert] / total * self.number("routed_scaling_factor"))
                )
        shared = prefix + "shared_experts."
        gate_up = np.concatenate([self.w[shared + "gate_proj.weight"], self.w[shared + "up_proj.weight"]])
        return out + self.swiglu(x @ gate_up.T) @ self.w[shared + "down_proj.weight"].T

    def swiglu(self, gate_up: Array) -> Array:
        limit = self.number("swiglu_limit")
        gate, up = np.split(gate_up, 2, axis=-1)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(gate) * up
