"""DeepSeek-V4's tensor names. The official ones are canonical; Transformers' names, in memory or as saved, come out the same."""

from dataclasses import replace

from lamina.weights.names import NameScheme, Rename, Split

_BLOCK = r"^((?:layers|mtp)\.\d+)\."
_RENAMES = (
    (r"^model\.", r""),
    (r"^embed_tokens\.", r"embed."),
    (r"^lm_head\.", r"head."),
    (r"^hc_head\.hc_", r"hc_head_"),
    (_BLOCK + r"self_attn\.", r"\1.attn."),
    (_BLOCK + r"mlp\.", r"\1.ffn."),
    (_BLOCK + r"input_layernorm\.", r"\1.attn_norm."),
    (_BLOCK + r"post_attention_layernorm\.", r"\1.ffn_norm."),
    (_BLOCK + r"(attn|ffn)_hc\.", r"\1.hc_\2_"),
    (_BLOCK + r"attn\.sinks$", r"\1.attn.attn_sink"),
    (_BLOCK + r"attn\.q_a_proj\.", r"\1.attn.wq_a."),
    (_BLOCK + r"attn\.q_a_norm\.", r"\1.attn.q_norm."),
    (_BLOCK + r"attn\.q_b_proj\.", r"\1.attn.wq_b."),
    (_BLOCK + r"attn\.kv_proj\.", r"\1.attn.wkv."),
    (_BLOCK + r"attn\.norm\.", r"\1.attn.kv_norm."),  # save_pretrained's spelling, neither official nor its own in memory
    (_BLOCK + r"attn\.o_([ab])_proj\.", r"\1.attn.wo_\2."),
    (_BLOCK + r"attn\.compressor\.indexer\.q_b_proj\.", r"\1.attn.indexer.wq_b."),
    (_BLOCK + r"attn\.compressor\.indexer\.scorer\.", r"\1.attn.indexer."),
    (_BLOCK + r"attn\.compressor\.indexer\.", r"\1.attn.indexer.compressor."),
    (_BLOCK + r"attn\.((?:indexer\.)?compressor)\.kv_proj\.", r"\1.attn.\2.wkv."),
    (_BLOCK + r"attn\.((?:indexer\.)?compressor)\.gate_proj\.", r"\1.attn.\2.wgate."),
    (_BLOCK + r"attn\.((?:indexer\.)?compressor)\.position_bias$", r"\1.attn.\2.ape"),
    (_BLOCK + r"attn\.((?:indexer\.)?compressor)\.kv_norm\.", r"\1.attn.\2.norm."),
    (_BLOCK + r"ffn\.gate\.e_score_correction_bias$", r"\1.ffn.gate.bias"),
    (_BLOCK + r"ffn\.(shared_experts|experts\.\d+)\.gate_proj\.", r"\1.ffn.\2.w1."),
    (_BLOCK + r"ffn\.(shared_experts|experts\.\d+)\.down_proj\.", r"\1.ffn.\2.w2."),
    (_BLOCK + r"ffn\.(shared_experts|experts\.\d+)\.up_proj\.", r"\1.ffn.\2.w3."),
    (r"\.weight_scale_inv$", r".scale"),  # a multiplier all the same
    (r"_proj_scale_inv$", r"_proj.scale"),
)
_EXPERTS = r"((?:layers|mtp)\.\d+\.ffn\.experts)\."

NAMES = NameScheme(
    renames=tuple(Rename(pattern, replacement) for pattern, replacement in _RENAMES),
    splits=(
        Split(_EXPERTS + r"gate_up_proj", (r"\1.{index}.w1.weight", r"\1.{index}.w3.weight")),
        Split(_EXPERTS + r"gate_up_proj\.scale", (r"\1.{index}.w1.scale", r"\1.{index}.w3.scale")),
        Split(_EXPERTS + r"down_proj", (r"\1.{index}.w2.weight",)),
        Split(_EXPERTS + r"down_proj\.scale", (r"\1.{index}.w2.scale",)),
    ),
    ignored=("mtp.",),
)
#: the same where the draft blocks are used
ALL_NAMES = replace(NAMES, ignored=())

#: canonical name -> what Transformers calls it in memory; fused experts come out as `model.layers.N.mlp.experts.e.wK.weight`.
TO_TRANSFORMERS = NameScheme(
    renames=tuple(
        Rename(pattern, replacement)
        for pattern, replacement in (
            (r"^embed\.", r"model.embed_tokens."),
            (r"^head\.", r"lm_head."),
            (r"^norm\.", r"model.norm."),
            (r"^hc_head_", r"model.hc_head.hc_"),
            (r"^layers\.", r"model.layers."),
            (r"\.hc_(attn|ffn)_", r".\1_hc."),
            (r"\.attn_norm\.", r".input_layernorm."),
            (r"\.ffn_norm\.", r".post_attention_layernorm."),
            (r"\.attn\.attn_sink$", r".self_attn.sinks"),
            (r"\.attn\.wq_([ab])\.", r".self_attn.q_\1_proj."),
            (r"\.attn\.q_norm\.", r".self_attn.q_a_norm."),
            (r"\.attn\.wkv\.", r".self_attn.kv_proj."),
            (r"\.attn\.wo_([ab])\.", r".self_attn.o_\1_proj."),
            (r"\.attn\.indexer\.compressor\.", r".attn.compressor.indexer."),
            (r"\.attn\.indexer\.wq_b\.", r".attn.compressor.indexer.q_b_proj."),
            (r"\.attn\.indexer\.weights_proj\.", r".attn.compressor.indexer.scorer.weights_proj."),
            (r"\.(compressor(?:\.indexer)?)\.wkv\.", r".\1.kv_proj."),
            (r"\.(compressor(?:\.indexer)?)\.wgate\.", r".\1.gate_proj."),
            (r"\.(compressor(?:\.indexer)?)\.ape$", r".\1.position_bias"),
            (r"\.(compressor(?:\.indexer)?)\.norm\.", r".\1.kv_norm."),
            (r"\.attn\.", r".self_attn."),
            (r"\.ffn\.", r".mlp."),
            (r"\.gate\.bias$", r".gate.e_score_correction_bias"),
            (r"\.shared_experts\.w1\.", r".shared_experts.gate_proj."),
            (r"\.shared_experts\.w2\.", r".shared_experts.down_proj."),
            (r"\.shared_experts\.w3\.", r".shared_experts.up_proj."),
        )
    ),
)
