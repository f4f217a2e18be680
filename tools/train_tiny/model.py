"""The trained model's forward pass: DeepSeek-V4 with every memory, whole rows at once, differentiable.

Numbers follow the engine's definitions: fp32 where they say so, bf16 residual streams and products. What differs is the form:
attention is computed against every entry with a mask, experts all at once with gates of zero: shapes never depend on data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.models.tiny import Shape, Spec, specs
from tools.train_tiny.quantise import cast, to_fp4, to_fp8
from tools.train_tiny.sinkhorn import sinkhorn

#: 23.6 MB in the official layout, with its MTP block.
SHAPE = Shape(
    ratios=(0, 4, 128, 4, 128, 4, 0), hidden=256, heads=8, head_dim=512, q_lora=128, o_groups=2, o_lora=64, expert_width=256,
    hash_layers=2, index_topk=64, route_scale=1.5, vocab=2816, experts=6,
)  # fmt: skip
WINDOW = 128
ROPE = 64
EPS = 1e-6
MTP = "mtp.0"


def _piece(function: Callable) -> Callable:
    """`function`, fused into few kernels where it is trained on a GPU."""
    compiled = torch.compile(function, dynamic=False)
    return lambda *args: (compiled if args[0].is_cuda and torch.is_grad_enabled() else function)(*args)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One batch. T = B x S.

    tokens [B, S + 1] int64; positions int64 [B, S], which may jump before a multiple of 128, by a multiple of 128;
    weights fp32 [B, S + 1], the loss weight of each token as a target; answers bool [B, S + 1];
    keep_c4, keep_c128 bool [B]: False hides that memory from the row; probes int64 [B, P]: positions where the index is trained.
    """

    tokens: Tensor
    positions: Tensor
    weights: Tensor
    answers: Tensor
    keep_c4: Tensor
    keep_c128: Tensor
    probes: Tensor


@dataclass(frozen=True, slots=True)
class Mode:
    """How a pass runs. `quantised`: weights, entries and keys as the engine stores them. `topk`: what the index selects, 0: all.

    The rest are ablations: index scores "random" or "recent", no window (the token itself alone), layers without their entries.
    """

    quantised: bool = False
    topk: int = 0
    index: str = "scores"
    window: int = WINDOW
    without: frozenset[int] = frozenset()


class Model(nn.Module):
    """All weights, fp32, tensors of one shape, storage and role stacked: `stacks[key][i]` is the tensor `names[key][i]`.

    Experts are [E, out, in] under the name `...experts.wK`. Raises ValueError for a shape this program does not know.
    """

    def __init__(self, shape: Shape = SHAPE, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        if shape.heads % shape.o_groups or any(ratio not in (0, 4, 128) for ratio in shape.ratios):
            raise ValueError(f"ratios {shape.ratios} are 0, 4 and 128; {shape.heads} heads divide into {shape.o_groups} groups")
        self.shape = shape
        self.names: dict[str, list[str]] = {}
        self.storage: dict[str, str] = {}
        generator = torch.Generator().manual_seed(seed)
        values: dict[str, list[Tensor]] = {}
        for name, spec in _merged(shape):
            if spec.storage == "tid2eid" or name.endswith("ffn.gate.bias"):
                continue
            tensor = _initial(name, spec, generator)
            key = f"{spec.storage}_{'muon' if _by_muon(name, spec) else 'adam'}_{'x'.join(map(str, spec.shape))}"
            values.setdefault(key, []).append(tensor)
            self.names.setdefault(key, []).append(name)
            self.storage[key] = spec.storage
        self.stacks = nn.ParameterDict({key: nn.Parameter(torch.stack(tensors)) for key, tensors in values.items()})
        self.routes = [name for name, spec in _merged(shape) if spec.storage == "tid2eid"]
        self.biases = [name for name, spec in _merged(shape) if name.endswith("ffn.gate.bias")]
        for name in self.routes:
            self.register_buffer(_flat(name), torch.zeros((shape.vocab, shape.experts_per_token), dtype=torch.int64))
        for name in self.biases:
            self.register_buffer(_flat(name), torch.zeros(shape.experts))  # moved by a rule, not by gradients
        self.turns: dict[bool, tuple[Tensor, Tensor]] = {}  # of the pass that runs: cos, sin of each position

    def weights(self, quantised: bool) -> dict[str, Tensor]:
        """Every tensor by its official name: matrices in bf16 (rounded to what is stored, if `quantised`), the rest in fp32."""
        found: dict[str, Tensor] = {}
        for key, stack in self.stacks.items():
            found.update(zip(self.names[key], cast(stack, self.storage[key], quantised, self.dtype).unbind(0), strict=True))
        return found

    def buffer(self, name: str) -> Tensor:
        return self.get_buffer(_flat(name))

    def rotations(self, ratio: int, stride: int = 1) -> tuple[Tensor, Tensor]:
        """cos, sin fp32 [B, S / stride, 32] of every `stride`th position in a layer of `ratio`."""
        cos, sin = self.turns[ratio > 0]
        return cos[:, ::stride], sin[:, ::stride]

    def forward(self, inputs: Inputs, mode: Mode) -> dict[str, Tensor]:
        """fp32 scalars: `loss`, its parts `main`, `mtp`, `index`, and what is watched: `text`, `answer`, `right`, `draft`.

        Also `predicted` [B, S] int64, the likeliest next tokens, and `nats` fp32 [B, S].
        """
        w = self.weights(mode.quantised)
        tokens, targets = inputs.tokens[:, :-1].contiguous(), inputs.tokens[:, 1:].contiguous()
        rows, length = tokens.shape
        self.turns = {compressed: _turns(inputs.positions, compressed) for compressed in (False, True)}
        x = F.embedding(tokens.flatten(), w["embed.weight"])
        streams = x.unsqueeze(1).expand(-1, 4, -1).contiguous()  # [T, 4, D]
        index_loss = x.new_zeros((), dtype=torch.float32)
        for layer, ratio in enumerate(self.shape.ratios[:-1]):
            streams, loss = self._block(w, f"layers.{layer}", layer, ratio, streams, tokens, inputs, mode)
            index_loss = index_loss + loss
        z = _collapse(streams, _mixed(streams, w["hc_head_fn"]), w["hc_head_scale"], w["hc_head_base"], w["norm.weight"])
        logits = z @ w["head.weight"].t()
        nats, predicted = _cross_entropy(logits, targets.flatten())
        wanted = inputs.weights[:, 1:].flatten()
        main = (nats * wanted).sum() / wanted.sum().clamp_min(1.0)
        drafts = self._drafts(w, streams, targets, inputs, mode)
        draft_logits = drafts @ w["head.weight"].t()
        # drafts at position p speak of p + 2: what the main model says at p + 1
        held = torch.roll(logits.detach().view(rows, length, -1), -1, 1).flatten(0, 1)
        inside = (wanted.view(rows, length).roll(-1, 1) > 0) & (torch.arange(length, device=x.device) < length - 1)
        draft_nats, draft_predicted = _soft_cross_entropy(draft_logits, held)
        inside = inside.flatten()
        count = inside.sum().clamp_min(1)
        mtp = (draft_nats * inside).sum() / count
        answers = inputs.answers[:, 1:].flatten()
        plain = (wanted == 1.0) & ~answers
        hit = predicted == targets.flatten()
        agreed = draft_predicted == predicted.view(rows, length).roll(-1, 1).flatten()
        plain_next = plain.view(rows, length).roll(-1, 1).flatten() & inside
        return {
            "loss": main + 0.3 * mtp + index_loss,
            "main": main, "mtp": mtp, "index": index_loss,
            "text": (nats * plain).sum() / plain.sum().clamp_min(1),
            "answer": (nats * answers).sum() / answers.sum().clamp_min(1),
            "right": (hit & answers).sum() / answers.sum().clamp_min(1),
            "draft": (agreed & plain_next).sum() / plain_next.sum().clamp_min(1),
            "predicted": predicted.view(rows, length), "nats": nats.view(rows, length),
        }  # fmt: skip

    def _drafts(self, w: dict[str, Tensor], streams: Tensor, following: Tensor, inputs: Inputs, mode: Mode) -> Tensor:
        """Hidden vectors [T, D] of the MTP block: reference section 7.1."""
        e = _rms(F.embedding(following.flatten(), w["embed.weight"]), w[f"{MTP}.enorm.weight"]) @ w[f"{MTP}.e_proj.weight"].t()
        h = _rms(streams.detach().flatten(0, 1), w[f"{MTP}.hnorm.weight"]) @ w[f"{MTP}.h_proj.weight"].t()
        y = h.view(streams.shape) + e.unsqueeze(1)
        y, _ = self._block(w, MTP, -1, 0, y, following, inputs, mode)
        return _collapse(
            y, _mixed(y, w[f"{MTP}.hc_head_fn"]), w[f"{MTP}.hc_head_scale"], w[f"{MTP}.hc_head_base"], w[f"{MTP}.norm.weight"]
        )

    def _block(
        self, w: dict[str, Tensor], p: str, layer: int, ratio: int, streams: Tensor, tokens: Tensor, inputs: Inputs, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        attn = f"{p}.hc_attn"
        x, post, comb = _enter(
            streams, _mixed(streams, w[f"{attn}_fn"]), w[f"{attn}_scale"], w[f"{attn}_base"], w[f"{p}.attn_norm.weight"]
        )
        y, loss = self._attention(w, f"{p}.attn", layer, ratio, x, tokens.shape, inputs, mode)
        streams = _leave(streams, y, post, sinkhorn(comb))
        ffn = f"{p}.hc_ffn"
        x, post, comb = _enter(
            streams, _mixed(streams, w[f"{ffn}_fn"]), w[f"{ffn}_scale"], w[f"{ffn}_base"], w[f"{p}.ffn_norm.weight"]
        )
        y = self._experts(w, f"{p}.ffn", x, tokens)
        return _leave(streams, y, post, sinkhorn(comb)), loss

    def _attention(
        self, w: dict[str, Tensor], p: str, layer: int, ratio: int, x: Tensor, size: torch.Size, inputs: Inputs, mode: Mode
    ) -> tuple[Tensor, Tensor]:
        s, (rows, length) = self.shape, size
        cos, sin = (table.flatten(0, 1) for table in self.rotations(ratio))  # [T, 32]
        r = _rms(x @ w[f"{p}.wq_a.weight"].t(), w[f"{p}.q_norm.weight"])
        q = _queries((r @ w[f"{p}.wq_b.weight"].t()).view(-1, s.heads, s.head_dim), cos, sin)
        kv = _keys(x @ w[f"{p}.wkv.weight"].t(), w[f"{p}.kv_norm.weight"], cos, sin)
        if mode.quantised:
            kv = to_fp8(kv, kv.shape[-1] - ROPE, 64)
        chunks = length // WINDOW
        kv = kv.view(rows, chunks, WINDOW, s.head_dim)
        near = torch.cat([F.pad(kv[:, :-1], (0, 0, 0, 0, 1, 0)), kv], 2)  # [B, C, 256, d]
        by_chunk = q.view(rows, chunks, WINDOW * s.heads, s.head_dim)
        scores = (by_chunk @ near.transpose(-1, -2)).view(rows, length, s.heads, 2 * WINDOW)
        loss = x.new_zeros((), dtype=torch.float32)
        seen = _window(length, mode.window, x.device)
        if not ratio or layer in mode.without:
            weight = _softmax(scores, w[f"{p}.attn_sink"], seen)
            out = (weight.view(rows, chunks, -1, 2 * WINDOW) @ near).view(-1, s.heads, s.head_dim)
        else:
            entries = self._entries(w, f"{p}.compressor", ratio, x, rows, length, s.head_dim)
            if mode.quantised:
                entries = to_fp8(entries, s.head_dim - ROPE, 64)
            entries = entries.view(rows, -1, s.head_dim)  # [B, E, d]
            count = entries.shape[1]
            closed = (torch.arange(length, device=x.device) + 1) // ratio
            visible = (torch.arange(count, device=x.device) < closed[:, None])[None]  # [1, S, E]
            visible = visible & (inputs.keep_c4 if ratio == 4 else inputs.keep_c128)[:, None, None]
            index = None
            if ratio == 4:
                index = _Index(self, w, f"{p}.indexer", x.detach(), r.detach(), rows, length, mode)
                if mode.topk and (mode.topk < count or mode.index != "scores"):
                    visible = visible & index.selected(visible, mode)
            far = (q.view(rows, length * s.heads, s.head_dim) @ entries.transpose(-1, -2)).view(rows, length, s.heads, count)
            weight, far_weight = _softmax_two(scores, far, w[f"{p}.attn_sink"], seen, visible)
            out = (weight.view(rows, chunks, -1, 2 * WINDOW) @ near).view(rows, length * s.heads, s.head_dim)
            out = torch.baddbmm(out, far_weight.view(rows, -1, count), entries).view(-1, s.heads, s.head_dim)
            if index is not None and torch.is_grad_enabled():
                at = inputs.probes
                wanted = far_weight.detach().gather(1, at[:, :, None, None].expand(-1, -1, s.heads, count))
                loss = _index_loss(
                    index.scores(at), wanted, visible.expand(rows, -1, -1).gather(1, at[:, :, None].expand(-1, -1, count))
                )
        out = _unrotated(out, cos, sin).view(-1, s.o_groups, s.heads // s.o_groups * s.head_dim)
        wo_a = w[f"{p}.wo_a.weight"].view(s.o_groups, s.o_lora, -1)
        low = torch.bmm(out.transpose(0, 1), wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return low @ w[f"{p}.wo_b.weight"].t(), loss

    def _entries(self, w: dict[str, Tensor], p: str, ratio: int, x: Tensor, rows: int, length: int, width: int) -> Tensor:
        """Compressed entries [B * S / ratio, width]: reference section 3."""
        cos, sin = (table.flatten(0, 1) for table in self.rotations(ratio, ratio))
        a, b = x @ w[f"{p}.wkv.weight"].t(), x @ w[f"{p}.wgate.weight"].t()
        pool = _pool4 if ratio == 4 else _pool128
        first = torch.arange(rows * length // ratio, device=x.device) % (length // ratio) == 0
        return pool(a, b, w[f"{p}.ape"], w[f"{p}.norm.weight"], cos, sin, first).to(self.dtype)

    def _experts(self, w: dict[str, Tensor], p: str, x: Tensor, tokens: Tensor) -> Tensor:
        s = self.shape
        score = F.softplus((x @ w[f"{p}.gate.weight"].t()).float()).clamp_min(1e-12).sqrt()
        if f"{p}.gate.bias" in self.biases:
            chosen = (score.detach() + self.buffer(f"{p}.gate.bias")).topk(s.experts_per_token, dim=-1).indices
        else:
            chosen = self.buffer(f"{p}.gate.tid2eid")[tokens.flatten()]
        picked = score.gather(1, chosen)
        gates = torch.zeros_like(score).scatter(1, chosen, picked / picked.sum(1, keepdim=True) * s.route_scale)
        if f"{p}.gate.bias" in self.biases and torch.is_grad_enabled():
            with torch.no_grad():
                load = (gates > 0).float().sum(0)
                self.buffer(f"{p}.gate.bias").add_(torch.sign(load.mean() - load), alpha=1e-3)
        gates = F.pad(gates, (0, 1), value=1.0)  # the shared expert
        gate, up = (
            x @ torch.cat([w[f"{p}.experts.{k}"].flatten(0, 1), w[f"{p}.shared_experts.{k}.weight"]]).t() for k in ("w1", "w3")
        )
        down = torch.cat([w[f"{p}.experts.w2"].transpose(0, 1).flatten(1), w[f"{p}.shared_experts.w2.weight"]], 1)  # [D, (E+1) I]
        return _swiglu(gate, up, gates) @ down.t()


class _Index:
    """The index of one layer: scores of its own small queries and keys. Its inputs carry no gradient to the rest."""

    def __init__(
        self, model: Model, w: dict[str, Tensor], p: str, x: Tensor, r: Tensor, rows: int, length: int, mode: Mode
    ) -> None:
        self.model, self.w, self.p, self.rows, self.length, self.mode = model, w, p, rows, length, mode
        self.x, self.r = x.view(rows, length, -1), r.view(rows, length, -1)
        self.width = model.shape.index_dim
        keys = model._entries(w, f"{p}.compressor", 4, x, rows, length, self.width)
        self.keys = (to_fp4(keys) if mode.quantised else keys).view(rows, -1, self.width)

    def scores(self, at: Tensor) -> Tensor:
        """fp32 [B, P, E] at positions `at` [B, P]."""
        heads = self.model.shape.index_heads
        r, x = (t.gather(1, at[:, :, None].expand(-1, -1, t.shape[-1])) for t in (self.r, self.x))
        cos, sin = (
            table.gather(1, at[:, :, None].expand(-1, -1, ROPE // 2)).flatten(0, 1) for table in self.model.rotations(4)
        )
        q = _rotated((r.flatten(0, 1) @ self.w[f"{self.p}.wq_b.weight"].t()).view(-1, heads, self.width), cos, sin)
        if self.mode.quantised:
            q = to_fp4(q)
        weight = (x @ self.w[f"{self.p}.weights_proj.weight"].t()).float() * (self.width * heads) ** -0.5
        products = (q.view(self.rows, -1, self.width) @ self.keys.transpose(1, 2)).view(self.rows, -1, heads, self.keys.shape[1])
        return _weighted(products, weight)

    @torch.no_grad()
    def selected(self, visible: Tensor, mode: Mode) -> Tensor:
        """bool [B, S, E]: the `topk` best visible entries of each query."""
        count = self.keys.shape[1]
        if mode.index == "random":
            scores = torch.rand((self.rows, self.length, count), device=self.x.device)
        elif mode.index == "recent":
            scores = torch.arange(count, device=self.x.device, dtype=torch.float32).expand(self.rows, self.length, count)
        else:
            scores = self.scores(torch.arange(self.length, device=self.x.device).expand(self.rows, -1))
        scores = scores.masked_fill(~visible, -torch.inf)
        return scores >= scores.topk(min(mode.topk, count), dim=-1).values[..., -1:]


def _turns(positions: Tensor, compressed: bool) -> tuple[Tensor, Tensor]:
    """cos, sin fp32 [B, S, 32] of positions [B, S] in layers with or without compressed entries: reference section 2.3."""
    p = torch.arange(ROPE // 2, dtype=torch.float64, device=positions.device)
    frequency = (160000.0 if compressed else 10000.0) ** (-p / 32)
    if compressed:
        ramp = ((p - 15) / (25 - 15)).clamp(0, 1)
        frequency = frequency * (1 - ramp) + frequency / 16 * ramp
    angle = positions[..., None].double() * frequency
    return angle.cos().float(), angle.sin().float()


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """bool [S, 256]: which of its own chunk and the one before a token sees."""
    at = torch.arange(length, device=device)[:, None]
    key = at // WINDOW * WINDOW - WINDOW + torch.arange(2 * WINDOW, device=device)
    return (key >= 0) & (key <= at) & (key > at - window)


def _mixed(streams: Tensor, fn: Tensor) -> Tensor:
    return streams.flatten(1) @ fn.to(streams.dtype).t()


@_piece
def _rms(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


@_piece
def _enter(streams: Tensor, mixed: Tensor, scale: Tensor, base: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = streams.float()
    m = mixed.float() * torch.rsqrt(x.square().mean((1, 2)) + EPS)[:, None]
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = (m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)
    u = (pre[:, 0, None] * x[:, 0] + pre[:, 1, None] * x[:, 1]) + (pre[:, 2, None] * x[:, 2] + pre[:, 3, None] * x[:, 3])
    u = u.to(streams.dtype).float()
    y = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS) * norm.float()
    return y.to(streams.dtype), post, comb


@_piece
def _leave(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    x, y = streams.float(), y.float()
    out = [post[:, k, None] * y + sum(comb[:, j, k, None] * x[:, j] for j in range(4)) for k in range(4)]
    return torch.stack(out, 1).to(streams.dtype)


@_piece
def _collapse(streams: Tensor, mixed: Tensor, scale: Tensor, base: Tensor, norm: Tensor) -> Tensor:
    x = streams.float()
    m = mixed.float() * torch.rsqrt(x.square().mean((1, 2)) + EPS)[:, None]
    pre = torch.sigmoid(m * scale + base) + EPS
    h = sum(pre[:, j, None] * x[:, j] for j in range(4)).to(streams.dtype).float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * norm.float()).to(streams.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 x [..., n] with its last 64 dims rotated in pairs; cos and sin broadcast to [..., 32]."""
    plain, turned = x[..., :-ROPE], x[..., -ROPE:].unflatten(-1, (ROPE // 2, 2))
    a, b = turned[..., 0], turned[..., 1]
    return torch.cat([plain, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)], -1)


@_piece
def _queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = q.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return _turn(y, cos[:, None], sin[:, None]).to(q.dtype)


@_piece
def _rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn(q.float(), cos[:, None], sin[:, None]).to(q.dtype)


@_piece
def _unrotated(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turn(o.float(), cos[:, None], -sin[:, None]).to(o.dtype)


@_piece
def _keys(kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = kv.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight.float()
    return _turn(y, cos, sin).to(kv.dtype)


@_piece
def _pool4(a: Tensor, b: Tensor, ape: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, first: Tensor) -> Tensor:
    a, b = a.float().view(-1, 4, 2, norm.shape[0]), b.float().view(-1, 4, 2, norm.shape[0]) + ape.view(4, 2, -1)
    before_a, before_b = torch.roll(a[:, :, 0], 1, 0), torch.roll(b[:, :, 0], 1, 0).masked_fill(first[:, None, None], -torch.inf)
    gate = torch.softmax(torch.cat([before_b, b[:, :, 1]], 1), 1)
    return _finished((gate * torch.cat([before_a, a[:, :, 1]], 1)).sum(1), norm, cos, sin)


@_piece
def _pool128(a: Tensor, b: Tensor, ape: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, first: Tensor) -> Tensor:
    a, b = a.float().view(-1, 128, norm.shape[0]), b.float().view(-1, 128, norm.shape[0]) + ape
    return _finished((torch.softmax(b, 1) * a).sum(1), norm, cos, sin)


def _finished(u: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS) * norm.float()
    return _turn(u, cos, sin)


@_piece
def _softmax(scores: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    s = (scores.float() * 512**-0.5).masked_fill(~seen[None, :, None], -torch.inf)
    top = torch.maximum(s.amax(-1), sink)
    e = torch.exp(s - top[..., None])
    return (e / (e.sum(-1) + torch.exp(sink - top))[..., None]).to(scores.dtype)


@_piece
def _softmax_two(near: Tensor, far: Tensor, sink: Tensor, seen: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    s = (near.float() * 512**-0.5).masked_fill(~seen[None, :, None], -torch.inf)
    f = (far.float() * 512**-0.5).masked_fill(~visible[:, :, None], -torch.inf)
    top = torch.maximum(torch.maximum(s.amax(-1), f.amax(-1)), sink)
    es, ef = torch.exp(s - top[..., None]), torch.exp(f - top[..., None])
    total = (es.sum(-1) + ef.sum(-1) + torch.exp(sink - top))[..., None]
    return (es / total).to(near.dtype), (ef / total).to(near.dtype)


@_piece
def _weighted(products: Tensor, weight: Tensor) -> Tensor:
    return (torch.relu(products.float()) * weight[..., None]).sum(2)


@_piece
def _index_loss(scores: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """How far the index's distribution over visible entries is from attention's (mean over heads), by attention's mass there."""
    wanted = weights.float().mean(2)  # [B, P, E]
    mass = wanted.sum(-1, keepdim=True)
    target = wanted / mass.clamp_min(1e-9)
    logs = torch.log_softmax(scores.masked_fill(~visible, -1e30), -1)
    distance = torch.where(target > 0, target * (torch.log(target.clamp_min(1e-12)) - logs), 0.0).sum(-1)
    return (distance * mass[..., 0]).mean()


@_piece
def _swiglu(gate: Tensor, up: Tensor, gates: Tensor) -> Tensor:
    g, u = gate.float().clamp(max=10.0), up.float().clamp(-10.0, 10.0)
    y = (F.silu(g) * u).view(gates.shape[0], gates.shape[1], -1) * gates[..., None]
    return y.flatten(1).to(gate.dtype)


@_piece
def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.float()
    return torch.logsumexp(x, -1) - x.gather(1, targets[:, None])[:, 0], x.argmax(-1)


@_piece
def _soft_cross_entropy(logits: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.float()
    return -(torch.softmax(held.float(), -1) * torch.log_softmax(x, -1)).sum(-1), x.argmax(-1)


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _merged(shape: Shape) -> list[tuple[str, Spec]]:
    """Every official tensor; an expert's matrices of one kind are one [E, out, in]."""
    found: list[tuple[str, Spec]] = []
    for spec in specs(shape):
        head, experts, tail = spec.name.partition(".experts.")
        if not experts:
            found.append((spec.name, spec))
        elif tail.startswith("0."):
            found.append((f"{head}.experts.{tail.split('.')[1]}", Spec(spec.name, (shape.experts, *spec.shape), spec.storage)))
    return found


def _by_muon(name: str, spec: Spec) -> bool:
    """Hidden matrices. The rest, and what reads or writes the vocabulary, is AdamW's."""
    apart = ("embed.", "head.", "ffn.gate.", "weights_proj")
    return spec.storage in ("fp4", "fp8", "bf16") and len(spec.shape) > 1 and not any(part in name for part in apart)


def _initial(name: str, spec: Spec, generator: torch.Generator) -> Tensor:
    def normal(std: float) -> Tensor:
        return torch.randn(spec.shape, generator=generator) * std

    if name == "embed.weight":
        return normal(0.5)
    if name == "head.weight":
        return normal(0.01)
    if name.endswith(("norm.weight", "_scale")):
        return torch.ones(spec.shape)
    if name.endswith(("attn_sink", "ape")):
        return torch.zeros(spec.shape)
    if name.endswith("_fn"):
        return normal(0.005)
    if name.endswith("_base"):
        base = normal(0.5)  # differs by stream, or the streams would stay copies of each other
        base[:4] -= 1.1
        if base.shape[0] > 8:
            base[8:] = 4 * torch.eye(4).flatten()
        return base
    gain = (
        0.3
        if name.endswith(("wo_b.weight", "w2", "w2.weight"))
        else 0.5
        if name.endswith(("wgate.weight", "gate.weight"))
        else 1.0
    )
    return normal(gain * spec.shape[-1] ** -0.5)
