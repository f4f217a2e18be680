"""DeepSeek-V4's blocks on a GPU: what one computes, and how it is loaded, its weights in their stored formats."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.base.errors import WeightError
from lamina.base.log import event, get_logger
from lamina.layers.compressed import AttentionStores
from lamina.layers.device_attention import DeviceAttention, DeviceIndexer
from lamina.layers.device_moe import DeviceMixture
from lamina.layers.entries import StoreKey
from lamina.layers.stored import Part, stack
from lamina.models.deepseek_v4_blocks import attention_stores
from lamina.models.deepseek_v4_config import Config
from lamina.models.deepseek_v4_memory import INDEXED
from lamina.ops.compress import Folding
from lamina.ops.experts import Activation as ExpertActivation
from lamina.ops.experts import ExpertsCase, PackedExperts, pack_weights
from lamina.ops.experts.plain import PlainExperts, StoredExperts
from lamina.ops.experts.triton import refuses as experts_refuse
from lamina.ops.gemm.stored import BLOCK, StoredWeight
from lamina.ops.hyper import Mixer
from lamina.ops.machine import Machine
from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8_weight
from lamina.ops.store import Store
from lamina.weights.loader import StoredTensor, TensorSource

_LOG = get_logger(__name__)
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """One decoder layer."""

    attention_mixer: Mixer
    attention_norm: Tensor
    attention: DeviceAttention
    ffn_mixer: Mixer
    ffn_norm: Tensor
    ffn: DeviceMixture
    is_compressed: bool


class DeviceLoader:
    """Builds the layers of one checkpoint."""

    def __init__(
        self, config: Config, source: TensorSource, dtype: torch.dtype, stores: dict[StoreKey, Store], device: torch.device,
        machine: Machine, activation: ExpertActivation, only_portable: bool,
    ) -> None:  # fmt: skip
        self.only_portable = only_portable
        self.config = config
        self.source = source
        self.dtype = dtype
        self.stores = stores
        self.device = device
        self.machine = machine
        self.activation = activation
        self.has_fp8 = activation == "fp8" and machine.has_fp8 and dtype == _BF16

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in fp32."""
        return self.source.take(name, shape).to(self.device)

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor as stored."""
        return self.source.take_stored(name, shape).to(self.device)

    def weight(self, name: str, shape: tuple[int, int]) -> StoredWeight:
        """A matrix as products read it: as stored, but for bf16 where activations are fp32 and the other way round."""
        found = self.stored(name, shape)
        if found.kind == "fp4":
            assert found.scales is not None
            event(_LOG, "weight_expanded", tensor=name, stored="fp4", used=str(self.dtype))
            return StoredWeight(dequantise_fp4_weight(found.codes, found.scales).to(self.dtype).contiguous())
        return StoredWeight(found.codes.contiguous(), found.scales)

    def mixer(self, prefix: str, parts: tuple[int, ...]) -> Mixer:
        """A mixer whose rows come in parts (pre, post, comb) with a scale each."""
        config, rows = self.config, sum(parts)
        fn = self.take(prefix + "fn", (rows, config.streams * config.hidden_size)).contiguous()
        base, scales = self.take(prefix + "base", (rows,)), self.take(prefix + "scale", (len(parts),))
        scale = scales.repeat_interleave(torch.tensor(parts, device=self.device))
        return Mixer(fn, base, scale, config.sinkhorn_iterations, config.hyper_eps, config.norm_eps)

    def layer(self, layer: int) -> DeviceBlock:
        """Decoder layer number `layer`."""
        config, prefix, ratio = self.config, f"layers.{layer}.", self.config.ratios[layer]
        attention = self.attention(prefix + "attn.", ratio, attention_stores(self.stores, layer, ratio))
        return self.block(prefix, attention, ratio > 0, layer < config.num_hash_layers)

    def draft_attention(self, block: int) -> DeviceAttention:
        """Of the block number `block` of those that draft: a window alone."""
        stores = attention_stores(self.stores, self.config.num_layers + block, 0, "draft_window")
        return self.attention(f"mtp.{block}.attn.", 0, stores)

    def block(self, prefix: str, attention: DeviceAttention, is_compressed: bool, is_hash: bool) -> DeviceBlock:
        """What surrounds an attention."""
        config = self.config
        parts = (config.streams, config.streams, config.streams**2)
        return DeviceBlock(
            attention_mixer=self.mixer(prefix + "hc_attn_", parts),
            attention_norm=self.take(prefix + "attn_norm.weight", (config.hidden_size,)),
            attention=attention,
            ffn_mixer=self.mixer(prefix + "hc_ffn_", parts),
            ffn_norm=self.take(prefix + "ffn_norm.weight", (config.hidden_size,)),
            ffn=self.ffn(prefix + "ffn.", is_hash),
            is_compressed=is_compressed,
        )

    def attention(self, prefix: str, ratio: int, stores: AttentionStores) -> DeviceAttention:
        config = self.config
        width, dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
        inputs = [
            Part("q_low", self.weight(prefix + "wq_a.weight", (rank, width)), self.dtype),
            Part("kv", self.weight(prefix + "wkv.weight", (dim, width)), self.dtype),
        ]
        queries = [Part("q", self.weight(prefix + "wq_b.weight", (config.num_heads * dim, rank)), self.dtype)]
        folding = indexer = None
        if ratio:
            assert stores.entries is not None and stores.fold_open is not None
            folding = self.folding(
                prefix + "compressor.", "", ratio, dim, inputs, (stores.fold_open, stores.fold_next, stores.entries)
            )
        if ratio == INDEXED:
            assert stores.index is not None and stores.index_open is not None
            states = (stores.index_open, stores.index_next, stores.index)
            keys = self.folding(prefix + "indexer.compressor.", "index_", ratio, config.index_dim, inputs, states)
            heads = self.weight(prefix + "indexer.weights_proj.weight", (config.index_heads, width))
            inputs.append(Part("index_weights", heads, torch.float32))
            index = self.weight(prefix + "indexer.wq_b.weight", (config.index_heads * config.index_dim, rank))
            queries.append(Part("index", index, self.dtype))
            indexer = DeviceIndexer(config.index_heads, config.index_topk, keys)
        group_width = config.num_heads // config.o_groups * dim
        return DeviceAttention(
            w_in=stack(inputs),
            q_norm=self.take(prefix + "q_norm.weight", (rank,)),
            wq_b=stack(queries),
            kv_norm=self.take(prefix + "kv_norm.weight", (dim,)),
            wo_a=self.weight(prefix + "wo_a.weight", (config.o_groups * config.o_lora_rank, group_width)),
            groups=config.o_groups,
            wo_b=self.weight(prefix + "wo_b.weight", (width, config.o_groups * config.o_lora_rank)),
            sink=self.take(prefix + "attn_sink", (config.num_heads,)),
            folding=folding, indexer=indexer, stores=stores, ratio=ratio, heads=config.num_heads, dim=dim, window=config.window,
            eps=config.norm_eps, dtype=self.dtype, has_fp8=self.has_fp8,
        )  # fmt: skip

    def folding(
        self, prefix: str, name: str, ratio: int, dim: int, inputs: list[Part], states: tuple[Store, Store | None, Store]
    ) -> Folding:
        """A compressor; its two projections go to `inputs` as name + values and name + gates."""
        width = dim * (2 if ratio == INDEXED else 1)
        for part, stored in (("values", "wkv"), ("gates", "wgate")):
            weight = self.weight(f"{prefix}{stored}.weight", (width, self.config.hidden_size))
            inputs.append(Part(name + part, weight, torch.float32))
        ape, norm = self.take(prefix + "ape", (ratio, width)), self.take(prefix + "norm.weight", (dim,))
        return Folding(ratio, ape.contiguous(), norm, self.config.norm_eps, *states)

    def ffn(self, prefix: str, is_hash: bool) -> DeviceMixture:
        config = self.config
        width, inner, num = config.hidden_size, config.expert_width, config.num_experts
        gate = self.weight(prefix + "gate.weight", (num, width))
        shared = prefix + "shared_experts."
        down = self.weight(shared + "w2.weight", (width, inner))
        gate_up = [Part(name, self.weight(f"{shared}{name}.weight", (inner, width)), torch.float32) for name in ("w1", "w3")]
        joined = self.joined(gate_up)
        experts = self.experts(prefix + "experts.", num, width, inner)
        bias = table = None
        if is_hash:
            shape = (config.vocab_size, config.experts_per_token)
            table = self.source.take_int(prefix + "gate.tid2eid", shape, 0, num).to(self.device, torch.int32)
        else:
            bias = self.take(prefix + "gate.bias", (num,))
        return DeviceMixture(
            gate=gate, bias=bias, table=table, experts=experts, shared_gate_up=joined, shared_down=down,
            top_k=config.experts_per_token, scale=config.routed_scale, limit=config.swiglu_limit, dtype=self.dtype,
            has_fp8=self.has_fp8,
        )  # fmt: skip

    def joined(self, parts: list[Part]) -> StoredWeight:
        """Parts as one weight; expanded, with a line in the log, where the scales of fp8 do not allow it."""
        stacked = stack(parts).products
        if len(stacked) == 1:
            return stacked[0].weight
        event(_LOG, "weight_expanded", tensor=parts[0].name, stored="fp8", used=str(self.dtype))
        return StoredWeight(torch.cat([_expanded(part.weight).to(self.dtype) for part in parts]))

    def experts(self, prefix: str, num: int, width: int, inner: int) -> PackedExperts | PlainExperts:
        """All routed experts of a layer, gate and up stacked."""
        taken = self._expert(prefix, 0, width, inner)
        gate_up = _Gathered(num, 2, taken[0])
        down = _Gathered(num, 1, taken[2])
        for expert in range(num):
            first, second, last = taken if expert == 0 else self._expert(prefix, expert, width, inner)
            gate_up.put(f"{prefix}{expert}.w1.weight", expert, 0, first)
            gate_up.put(f"{prefix}{expert}.w3.weight", expert, 1, second)
            down.put(f"{prefix}{expert}.w2.weight", expert, 0, last)
        packed = self._packed(prefix, gate_up, down, width, inner) if "fp4" in (gate_up.kind, down.kind) else None
        return packed or PlainExperts(gate_up.plain(self.dtype), down.plain(self.dtype))

    def _packed(self, prefix: str, gate_up: "_Gathered", down: "_Gathered", width: int, inner: int) -> PackedExperts | None:
        """FP4 in the kernels' order; None, with a line in the log, where they refuse: then it is expanded."""
        why: str | None
        if self.dtype != _BF16:
            why = "activations are fp32"
        elif gate_up.kind != down.kind:
            why = f"w1 and w3 are stored in {gate_up.kind}, w2 in {down.kind}"
        else:
            activation: ExpertActivation = "fp8" if self.has_fp8 else "bf16"
            why = experts_refuse(self.machine, ExpertsCase(activation, width, inner))
            if why is None:
                return pack_weights(*gate_up.packed(), *down.packed(), activation)
        event(_LOG, "weight_expanded", tensor=prefix + "*", stored="fp4", used=str(self.dtype), reason=why)
        return None

    def _expert(self, prefix: str, expert: int, width: int, inner: int) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
        name = f"{prefix}{expert}."
        first = self.stored(name + "w1.weight", (inner, width))
        return first, self.stored(name + "w3.weight", (inner, width)), self.stored(name + "w2.weight", (width, inner))


class _Gathered:
    """One matrix of every expert, [E, parts * rows, columns] as stored, filled one after another."""

    def __init__(self, num: int, parts: int, like: StoredTensor) -> None:
        self.kind = like.kind
        self.rows = like.codes.shape[0]
        self.scale_rows = 0 if like.scales is None else like.scales.shape[0]
        device = like.codes.device
        self.codes = torch.empty(num, parts * self.rows, like.codes.shape[1], dtype=like.codes.dtype, device=device)
        self.scales = None
        if like.scales is not None:
            shape = (num, parts * self.scale_rows, like.scales.shape[1])
            self.scales = torch.empty(shape, dtype=like.scales.dtype, device=device)

    def put(self, name: str, expert: int, part: int, tensor: StoredTensor) -> None:
        """The part-th rows of one expert. WeightError, with its name, for a tensor that is stored otherwise than the first."""
        if tensor.kind != self.kind or tensor.codes.dtype != self.codes.dtype:
            expected, found = f"{self.kind} ({self.codes.dtype})", f"{tensor.kind} ({tensor.codes.dtype})"
            raise WeightError(f"tensor {name!r}: expected {expected} as the layer's other experts, found {found}")
        self.codes[expert, part * self.rows : (part + 1) * self.rows] = tensor.codes
        if self.scales is not None and tensor.scales is not None:
            self.scales[expert, part * self.scale_rows : (part + 1) * self.scale_rows] = tensor.scales

    def packed(self) -> tuple[Tensor, Tensor]:
        """FP4 codes and scales."""
        assert self.kind == "fp4" and self.scales is not None
        return self.codes, self.scales

    def plain(self, dtype: torch.dtype) -> StoredExperts:
        """As products of any other format read it; FP4, and fp8 whose scales do not fit the stack, are expanded to `dtype`."""
        if self.scales is None:
            return StoredExperts(self.codes)
        if self.kind == "fp8" and self.rows % BLOCK == 0:
            return StoredExperts(self.codes, self.scales)
        expand = dequantise_fp4_weight if self.kind == "fp4" else dequantise_fp8_weight
        parts = self.codes.shape[1] // self.rows
        pieces = zip(self.codes.flatten(0, 1).split(self.rows), self.scales.flatten(0, 1).split(self.scale_rows), strict=True)
        whole = torch.stack([expand(codes, scales).to(dtype) for codes, scales in pieces])
        return StoredExperts(whole.view(self.codes.shape[0], parts * self.rows, -1))


def _expanded(weight: StoredWeight) -> Tensor:
    """fp32."""
    return weight.codes.float() if weight.scales is None else dequantise_fp8_weight(weight.codes, weight.scales)


def reads_fp8(block: DeviceBlock) -> bool:
    """Whether any product of a layer that reads its input multiplies in fp8."""
    experts = block.ffn.experts
    routed = experts.activation == "fp8" if isinstance(experts, PackedExperts) else experts.gate_up.is_fp8
    weights = [product.weight for product in block.attention.w_in.products]
    return routed or any(weight.is_fp8 for weight in (*weights, block.ffn.shared_gate_up))
