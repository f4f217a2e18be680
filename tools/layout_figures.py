"""The memory figures of README.md: what requests of DeepSeek-V4 Flash and Pro take, calculated from their configs alone.

python tools/layout_figures.py [--cache-format fp8 --index-format fp4]
"""

import argparse

from lamina.base.sizes import GiB, KiB, MiB, format_bytes
from lamina.memory.layout import Layout, make_layout
from lamina.memory.plan import requests_that_fit
from lamina.models.registry import blueprint
from lamina.models.tiny import tiny_config

POOL_BYTES = int(26.09 * GiB)
SHIPPED = {"head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128}
CONFIGS: dict[str, dict[str, object]] = {
    "V4-Flash": SHIPPED | {
        "num_hidden_layers": 43, "hidden_size": 4096, "num_attention_heads": 64, "o_groups": 8, "index_topk": 512,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "n_routed_experts": 256, "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048, "vocab_size": 129_280,
    },
    "V4-Pro": SHIPPED | {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "o_groups": 16, "index_topk": 1024,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0], "n_routed_experts": 384, "num_experts_per_tok": 6,
        "moe_intermediate_size": 3072, "vocab_size": 129_280,
    },
}  # fmt: skip


def layout_of(name: str, cache_format: str, index_format: str) -> Layout:
    """The layout of a shipped model."""
    plan = blueprint(tiny_config() | CONFIGS[name], cache_format, index_format)
    return make_layout(plan.memories, plan.hidden)


def padding(layout: Layout, num_tokens: int) -> float:
    """Share of a request's pages that holds no live byte."""
    live = sum(layout.live_bytes(num_tokens).values())
    return 1 - live / (layout.pages_for(num_tokens) * layout.page_bytes)


def main() -> None:
    """Prints one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-format", default="fp8")
    parser.add_argument("--index-format", default="fp4")
    args = parser.parse_args()
    layouts = {name: layout_of(name, args.cache_format, args.index_format) for name in CONFIGS}
    print(f"| calculated, {args.cache_format} entries, {args.index_format} index | {' | '.join(layouts)} |")
    print("|---|" + "---|" * len(layouts))

    def row(what: str, *cells: str) -> None:
        print(f"| {what} | {' | '.join(cells)} |")

    each = layouts.values()
    row("page = one block of 256 tokens", *(f"{one.page_bytes / MiB:.2f} MiB" for one in each))
    row("slot of a running request", *(f"{one.slot_pages} pages" for one in each))
    spread = [sorted({one.checkpoint_pages(position) for position in range(KiB, 2 * KiB)}) for one in each]
    row("checkpoint past the window", *(f"{pages[0]}-{pages[-1]} pages" for pages in spread))
    for title, tokens in (("1K", KiB), ("4K", 4 * KiB), ("32K", 32 * KiB), ("1M", MiB)):
        cells = [(one.pages_for(tokens), one.pages_for(tokens) * one.page_bytes, padding(one, tokens)) for one in each]
        texts = (f"{pages:,} pages, {format_bytes(size)} ({part:.1%} not live)" for pages, size, part in cells)
        row(f"{title}-token request", *texts)
    row("1K-token requests in 26.09 GiB", *(f"{requests_that_fit(one, POOL_BYTES, KiB):,}" for one in each))


if __name__ == "__main__":
    main()
