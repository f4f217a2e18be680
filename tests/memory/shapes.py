"""Layouts that the memory tests share: the shipped V4 shapes with exact bytes, and tiny ones where borders are everywhere."""

from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Memory, Snapshot, Window
from lamina.memory.layout import Layout, make_layout

FP8 = EntryFormat(
    "fp8", (Field("nope", "e4m3", (448,)), Field("rope", "bf16", (64,)), Field("scale", "e8m0", (8,)))
)  # 7 scales, 1 pad
BF16 = EntryFormat("bf16", (Field("row", "bf16", (512,)),))
FP32 = EntryFormat("fp32", (Field("row", "fp32", (512,)),))
INDEX_FP4 = EntryFormat("fp4", (Field("key", "e2m1", (128,)), Field("scale", "e8m0", (4,))))
INDEX_FP8 = EntryFormat("fp8", (Field("key", "e4m3", (128,)), Field("scale", "fp32", (1,))))


def soft_fold(width: int, prefix: str = "") -> tuple[Field, ...]:
    """A running softmax per channel: max, sum of weights, weighted sum."""
    return tuple(Field(prefix + name, "fp32", (width,)) for name in ("max", "sum", "acc"))


def v4_memories(ratios: list[int], entry: EntryFormat = FP8, index: EntryFormat = INDEX_FP4) -> list[Memory]:
    """What the layers of a model with these compression ratios remember (0: window only)."""
    found: list[Memory] = []
    for layer, ratio in enumerate(ratios):
        found.append(Window("window", layer, entry, 128))
        if ratio == 4:
            carry = soft_fold(512, "next_")
            found += [Log("c4", layer, entry, 4), Fold("c4_fold", layer, soft_fold(512) + carry, 4, tuple(f.name for f in carry))]
            carry = soft_fold(128, "next_")
            found += [
                Log("index", layer, index, 4),
                Fold("index_fold", layer, soft_fold(128) + carry, 4, tuple(f.name for f in carry)),
            ]
        elif ratio == 128:
            found += [Log("c128", layer, entry, 128), Fold("c128_fold", layer, soft_fold(512), 128)]
    return found


PRO_RATIOS = [128, 128, *[4, 128] * 29, 4]
FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4]


def v4_pro(entry: EntryFormat = FP8, index: EntryFormat = INDEX_FP4, draft_tokens: int = 0) -> Layout:
    """61 layers, 7,168 wide."""
    return make_layout(v4_memories(PRO_RATIOS, entry, index), Field("hidden", "bf16", (7168,)), draft_tokens=draft_tokens)


def v4_flash(entry: EntryFormat = FP8, index: EntryFormat = INDEX_FP4, draft_tokens: int = 0) -> Layout:
    """43 layers, 4,096 wide."""
    return make_layout(v4_memories(FLASH_RATIOS, entry, index), Field("hidden", "bf16", (4096,)), draft_tokens=draft_tokens)


SMALL = EntryFormat("small", (Field("a", "u8", (10,)), Field("b", "fp32", (3,))))
ROWS = EntryFormat("rows", (Field("x", "u8", (200,)), Field("y", "u8", (61,))))


def tiny(block_tokens: int = 4, hidden: bool = True, draft_tokens: int = 0) -> Layout:
    """Logs of two strides, windows and folds; pages of a few hundred bytes, two slot pages, one or two checkpoint pages."""
    return make_layout(
        [
            Window("window", 0, SMALL, 5),
            Log("c2", 1, ROWS, 2),
            Fold("c2_fold", 1, (Field("open", "fp32", (4,)), Field("next", "fp32", (4,))), 2, ("next",)),
            Log("c4", 2, SMALL, 4),
            Window("window", 2, SMALL, 5),
            Fold("c4_fold", 2, (Field("open", "fp32", (4,)),), 4),
        ],
        Field("hidden", "fp32", (8,)) if hidden else None,
        block_tokens=block_tokens,
        draft_tokens=draft_tokens,
    )


def logs_only(block_tokens: int = 4) -> Layout:
    """Full attention: no slot, no checkpoint."""
    return make_layout([Log("kv", 0, ROWS, 1), Log("kv", 1, ROWS, 1)], block_tokens=block_tokens)


def scans_only() -> Layout:
    """No log: blocks are keys without pages."""
    return make_layout(
        [Snapshot("state", layer, (Field("s", "fp32", (16,)),)) for layer in range(3)], Field("hidden", "fp32", (8,)), 4
    )


def paged(hidden: bool = True, draft_tokens: int = 0) -> Layout:
    """Windows larger than a page: a plain one in two layers, one that is cleared every 8 tokens, one that keeps its first 3."""
    return make_layout(
        [
            Log("kv", 0, ROWS, 1),
            Window("window", 1, ROWS, 6),
            Window("window", 2, ROWS, 6),
            Window("chunk", 3, ROWS, 8, reset=8),
            Window("sinks", 4, ROWS, 6, keep_first=3),
            Fold("fold", 5, (Field("open", "fp32", (4,)),), 3),
        ],
        Field("hidden", "fp32", (8,)) if hidden else None,
        block_tokens=4,
        min_page_bytes=256,
        draft_tokens=draft_tokens,
    )


def paged_only() -> Layout:
    """No log and no small window: everything is in pages with a left edge, and can be rebuilt by replay."""
    return make_layout(
        [Window("window", layer, ROWS, 5) for layer in range(3)],
        Field("hidden", "fp32", (8,)),
        block_tokens=4,
        min_page_bytes=1024,
    )


def replayed() -> Layout:
    """A log beside small windows and a fold in two layers: 1 token below and 4 of its own are to be replayed, and 1 more."""
    return make_layout(
        [
            Log("c2", 0, ROWS, 2),
            Window("window", 0, SMALL, 2),
            Log("c2", 1, SMALL, 2),
            Window("window", 1, SMALL, 2),
            Fold("c2_fold", 1, (Field("open", "fp32", (4,)), Field("next", "fp32", (4,))), 2, ("next",)),
        ],
        Field("hidden", "fp32", (8,)),
        block_tokens=2,
    )
