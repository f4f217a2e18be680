"""Random DeepSeek-V4 models made by Transformers, nothing in them zero, and what they say about a sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

#: a choice of experts or entries whose margin is smaller than this may fall either way
TIE = 1e-5

_BASE: dict[str, object] = {
    "vocab_size": 257, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 2, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8,
    "sliding_window": 128, "compress_rope_theta": 160000.0, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 16384, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """One random model: layer schedule, seed and what differs from the smallest config."""

    ratios: tuple[int, ...]
    seed: int
    changes: tuple[tuple[str, object], ...] = ()

    @property
    def config(self) -> dict[str, object]:
        """The official config.json's fields; the last schedule entry is the draft block's."""
        scaling = {"rope_scaling": dict(_BASE["rope_scaling"])}  # type: ignore[call-overload]
        schedule = {"num_hidden_layers": len(self.ratios), "compress_ratios": [*self.ratios, 0]}
        return _BASE | scaling | schedule | dict(self.changes)


FLASH, PRO = (0, 4, 128, 4, 128), (128, 128, 4, 128, 4)
RECIPES = {
    "flash": Recipe(FLASH, 0),
    # few layers, and blocks of 256 tokens like the others: for tests of what surrounds a model
    "short": Recipe((0, 4, 128, 4), 5),
    "pro": Recipe(PRO, 1, (("routed_scaling_factor", 2.5), ("num_hash_layers", 3))),
    # a window smaller than a tile, other widths everywhere, groups of one head, no hash layers, a tight clamp
    "narrow": Recipe(
        (4, 0, 4, 128), 2,
        (
            ("sliding_window", 16), ("hidden_size", 40), ("num_attention_heads", 6), ("o_groups", 6), ("o_lora_rank", 12),
            ("head_dim", 48), ("qk_rope_head_dim", 16), ("q_lora_rank", 20), ("index_n_heads", 24), ("index_head_dim", 32),
            ("n_routed_experts", 6), ("num_experts_per_tok", 3), ("moe_intermediate_size", 24), ("num_hash_layers", 0),
            ("swiglu_limit", 0.5), ("hc_mult", 3), ("hc_sinkhorn_iters", 5), ("index_topk", 5),
        ),
    ),
    # widths of whole format blocks: two fp8 blocks of 64 in an entry, two fp4 blocks of 32 in an index key
    "blocks": Recipe(
        FLASH, 3,
        (
            ("head_dim", 160), ("qk_rope_head_dim", 32), ("index_head_dim", 64), ("num_attention_heads", 2), ("o_groups", 1),
            ("sliding_window", 100),
        ),
    ),
    "blocks-pro": Recipe(
        PRO, 4,
        (("head_dim", 96), ("qk_rope_head_dim", 16), ("index_head_dim", 32), ("num_attention_heads", 8), ("o_groups", 4)),
    ),
}  # fmt: skip


def build(recipe: Recipe) -> DeepseekV4ForCausalLM:
    """The model of a recipe in fp32; every parameter random, also those that Transformers leaves at zero."""
    config = DeepseekV4Config(**recipe.config, attn_implementation="eager", experts_implementation="eager")
    model = DeepseekV4ForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                values.copy_(_random(name, values, config.num_local_experts, generator))
    return model


def _random(name: str, like: Tensor, experts: int, generator: torch.Generator) -> Tensor:
    last = name.rsplit(".", 1)[-1]
    if last == "tid2eid":
        return torch.stack([torch.randperm(experts, generator=generator)[: like.shape[1]] for _ in range(like.shape[0])])
    noise = torch.randn(like.shape, generator=generator)
    if last in ("position_bias", "sinks"):
        return noise
    if last in ("scale", "hc_scale") or "norm" in name:
        return 1 + 0.2 * noise
    if last in ("base", "hc_base"):
        return 0.5 * noise
    if last == "e_score_correction_bias":
        return 0.3 * noise
    return noise if "embed_tokens" in name else noise * like.shape[-1] ** -0.5


def token_ids(length: int, seed: int, vocab_size: int = 257) -> list[int]:
    """Random token ids that are no control tokens."""
    return torch.randint(2, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True, slots=True)
class Reference:
    """logits [T, V], and per position the smallest margin of any choice of experts or entries on the way [T]."""

    logits: Tensor
    margins: Tensor

    @property
    def ties(self) -> Tensor:
        """[T] bool: positions whose answer may legitimately differ."""
        return self.margins < TIE


def refer(model: DeepseekV4ForCausalLM, ids: list[int]) -> Reference:
    """One unpadded forward pass over `ids`, watched for narrow choices."""
    margins = torch.full((len(ids),), torch.inf)

    def watch_router(router: nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
        scores = torch.nn.functional.softplus(output[0]).sqrt() + router.e_score_correction_bias
        _narrow(margins, scores, router.top_k)

    def watch_scorer(top_k: int, rate: int, scores: Tensor) -> None:
        visible = (torch.arange(len(ids))[:, None] + 1) // rate
        hidden = torch.arange(scores.shape[-1]) >= visible
        _narrow(margins, scores[0].masked_fill(hidden, -torch.inf), top_k)

    hooks = []
    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4TopKRouter):
            hooks.append(module.register_forward_hook(watch_router))
        elif isinstance(module, modeling.DeepseekV4Indexer):
            top_k, rate = module.index_topk, module.compress_rate
            hooks.append(module.scorer.register_forward_hook(lambda _, __, out, k=top_k, r=rate: watch_scorer(k, r, out)))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Reference(logits, margins)


def _narrow(margins: Tensor, scores: Tensor, top_k: int) -> None:
    """scores [T, N] -> margins [T] lowered to the gap between the last chosen and the first left out, where there is one."""
    if scores.shape[1] <= top_k:
        return
    best = scores.topk(top_k + 1, dim=-1).values
    gap = best[:, top_k - 1] - best[:, top_k]
    margins.copy_(torch.where(best[:, top_k].isfinite(), torch.minimum(margins, gap), margins))
