"""docs/memory.md says what the code does: each sentence with a number is made here from the layout and must be on the page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina.base.sizes import format_bytes
from lamina.memory import eviction, prefix
from lamina.memory.layout import HIDDEN, MIN_PAGE_BYTES, Layout, aligned, bytes_by_memory
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.plan.charts import waste_of
from lamina.plan.records import PlanOptions
from lamina.plan.source import open_source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
#: numbers that name things and say nothing of the memory's size
NAMES = {"128-bit", "fp32", "fp8", "fp4", "bf16", "4-token", "128-token", "c4", "c128", "V4-Flash", "DeepSeek-V4",
         "DeepSeek-V4-Flash", "V4", "Gemma-3-27B"}  # fmt: skip


def plain(text: str) -> str:
    """Without line breaks and marks."""
    return re.sub(r"\s+", " ", re.sub(r"[`*]", "", text))


def layout_of(name: str) -> Layout:
    return open_source(ROOT / "tests" / "configs" / f"{name}.json").plan(PlanOptions()).layout


@pytest.fixture(scope="module")
def flash() -> Layout:
    return layout_of("deepseek-v4-flash")


def layers(layout: Layout, name: str) -> int:
    return sum(memory.name == name for memory in layout.memories)


def row(layout: Layout, name: str) -> int:
    """Bytes of an entry or a state."""
    memory = next(one for one in layout.memories if one.name == name)
    parts = memory.block_parts(layout.block_tokens) or memory.slot_parts(0)
    return sum(part.field.nbytes for part in parts)


def section_1(flash: Layout) -> Iterator[str]:
    windows, entry = layers(flash, "window"), row(flash, "window")
    slot = bytes_by_memory(flash.slot_spans)
    block = bytes_by_memory(flash.block_spans)
    yield f"list of V4-Flash, {windows} layers"
    yield f"| window | window of 128 | {windows} | {entry} | | {windows} x 128 x {entry} = {slot['window']:,} |"
    for name, stride in (("c4", 4), ("index", 4), ("c128", 128)):
        count, size = layers(flash, name), row(flash, name)
        per_token = f"{block[name] / flash.block_tokens:,.2f}".removesuffix(".00")
        yield f"| {name} | log, stride {stride} | {count} | {size} | {count} x {size} / {stride} = {per_token} | |"
    for name, words in (("c4_fold", "4, with a carry"), ("index_fold", "4, with a carry"), ("c128_fold", "128")):
        count, size = layers(flash, name), row(flash, name)
        yield f"| {name} | fold of {words} | {count} | {size:,} | | {count} x {size:,} = {slot[name]:,} |"
    yield f"| hidden | the last token's final vector | | {slot[HIDDEN]:,} | | {slot[HIDDEN]:,} |"
    yield f"| together | | | | {sum(block.values()) / flash.block_tokens:,.2f} | {sum(slot.values()):,} |"
    fields = [part.field for part in next(m for m in flash.memories if m.name == "c4").block_parts(256)]
    data, rope, scale = fields
    assert (data.nbytes, rope.nbytes) == (data.shape[0], 2 * rope.shape[0])
    parts = f"{data.shape[0]} one-byte numbers, {rope.shape[0]} two-byte numbers that carry the position"
    yield f"An entry of {entry} bytes is {parts}, and {scale.nbytes} bytes of scales."
    yield "each of its layers has a window of 128 tokens"
    yield "one compressed entry for 4 tokens"
    yield "others one for 128 tokens"


def section_2(flash: Layout) -> Iterator[str]:
    size, page = flash.block_tokens, flash.page_bytes
    yield f"A block is {size} tokens of all logs of all layers"
    yield f"is in block floor(j x s / {size})"
    yield f"A block of {size} tokens has {size // 4} entries of each c4 layer and {size // 128} of each c128 layer"
    yield "arrays begin at multiples of 128 bytes"
    pair = 64 * (row(flash, "c4") + row(flash, "index"))
    assert pair % 128 == 0
    yield f"64 x ({row(flash, 'c4')} + {row(flash, 'index')}) = {pair:,} bytes, already a multiple of 128"
    one = [span for span in flash.block_spans if span.memory == "c128"][:3]
    together = sum(aligned(span.nbytes) for span in one)
    yield (
        f"2 x {one[0].row_bytes} = {one[0].nbytes}, 2 x {one[1].row_bytes} = {one[1].nbytes}, and 2 x {one[2].row_bytes} = "
        f"{one[2].nbytes}, which takes {aligned(one[2].nbytes)}: together {together:,} bytes"
    )
    padding = page - sum(span.nbytes for span in flash.block_spans)
    yield f"21 x {pair:,} + 20 x {together:,} = {page:,} bytes, of which {padding:,} are alignment"
    assert 21 * pair + 20 * together == page
    slot = sum(bytes_by_memory(flash.slot_spans).values())
    assert (flash.slot_pages - 1) * page < slot <= flash.slot_pages * page and flash.slot_pages == 5
    yield f"The slot of {slot:,} bytes does not fit four such pages, so it has {flash.slot_pages}."
    yield f"takes ceil(p / {size}) + {flash.slot_pages} pages"
    for tokens in (1024, 32_768, 1_048_576):
        blocks, pages = tokens // size, flash.pages_for(tokens)
        yield (
            f"| {tokens:,} | {blocks:,} + {flash.slot_pages} = {pages:,} pages | {format_bytes(pages * page)} | "
            f"{100 * waste_of(flash, tokens):.1f} % |"
        )
    yield f"twice the largest one (2 x 128 = {size})"
    yield f"the smallest power of two from 16 up whose page has at least {MIN_PAGE_BYTES // 1024} KiB, or up to 16 times that"
    live = flash.live_bytes(1000)
    rows = 127 * row(flash, "window") * 43
    carry = [part.field.nbytes for part in next(m for m in flash.memories if m.name == "c4_fold").slot_parts(0)][1]
    index = [part.field.nbytes for part in next(m for m in flash.memories if m.name == "index_fold").slot_parts(0)][1]
    carries = 21 * (carry + index)
    assert (rows, carries) == (live["window"], live["c4_fold"] + live["index_fold"])
    in_slot = sum(live[name] for name in ("window", "c4_fold", "index_fold", "c128_fold", HIDDEN))
    yield f"After 1,000 tokens those are 127 rows of each window, 43 x 127 x {row(flash, 'window')} = {rows:,} bytes"
    yield f"21 x ({carry:,} + {index:,}) = {carries:,} (1,000 is a multiple of 4, so their sums are empty)"
    yield f"the 128-token folds, {live['c128_fold']:,}; and the hidden vector, {live[HIDDEN]:,}"
    yield f"Together {in_slot:,} bytes: {flash.checkpoint_pages(1000)} pages."
    after = flash.live_bytes(1001)
    more = after["c4_fold"] + after["index_fold"] - carries
    yield f"{more:,} bytes more, and the checkpoint has {flash.checkpoint_pages(1001)} pages"


def sections_3_to_5(flash: Layout) -> Iterator[str]:
    yield f"a new block every {flash.block_tokens} tokens"
    yield "under a 128-bit key"
    yield f"43 x (128 - 1) = {int(flash.replay):,} tokens"
    yield f"Replay starts at a multiple of {prefix.REPLAY_ALIGNMENT}"
    ledger = Ledger(flash, 400)
    stored = list(range(8000))
    second, third = ([*stored[:7000], *range(first, first + 600)] for first in (100_000, 200_000))
    for tokens, position, log_tokens in ((stored, 0, 0), (second, 1408, 6912), (third, 7000, 7000)):
        lease = ledger.admit(tokens, 1)
        assert isinstance(lease, Lease)
        assert (lease.hit.position, lease.hit.log_tokens) == (position, log_tokens)
        for stop in sorted({lease.junction or len(tokens), len(tokens)}):
            start = lease.position
            assert ledger.extend(lease, stop - start)
            ledger.checkpoint(lease)
            ledger.commit(lease, tokens[start:stop])
        ledger.finish(lease)
    size, replay = flash.block_tokens, int(flash.replay)
    resident = 7000 // size
    yield "The second request above shares 7,000 tokens with the stored prompt"
    yield f"{resident} full blocks are resident: {resident} x {size} = {resident * size:,} tokens"
    start = resident * size - replay - 1
    yield "and one more for the final hidden vector"
    yield f"{resident * size:,} - {replay:,} - 1 = {start:,}, rounded down to {start // 128 * 128:,}"
    yield f"It saves {start // 128 * 128:,} tokens of compute and {resident} blocks of memory"
    yield "the token where it leaves the known path, 7,000, is a junction"
    yield "reuses all 7,000 tokens"
    yield f"if it saves at least {ledger.min_checkpoint_gain} tokens"
    yield f"A block saves its {size} tokens"
    classes = len(eviction.ReturnRates().rates)
    assert classes == 3 * 4
    yield f"for {classes} classes: blocks, checkpoints, and checkpoints that a later one"
    score = f"score = (steps since last use + {eviction._AGE:.0f}) / (tokens saved per page x return rate of its kind)"
    yield score
    assert score in plain(eviction.__doc__ or "")


def section_6() -> Iterator[str]:
    gemma = layout_of("gemma-3-27b")
    (tail,) = gemma.tails
    window = tail.windows[0]
    kept, rows = window.most_tail_rows
    assert not kept
    fields = [part.field for part in window.tail_parts(1)]
    heads, width = fields[0].shape
    token = sum(field.nbytes for field in fields)
    count, most = len(tail.windows), tail.most_blocks(131_072)
    block = count * tail.tokens * token
    yield "A window of 128 tokens fits a slot."
    yield f"Gemma-3-27B has {count} layers with a window of {rows:,} tokens, and in each {heads} heads x {width} keys and values"
    yield f"2 x {heads} x {width} x 2 = {token:,} bytes a token"
    product = f"{count} x {tail.tokens} x {token:,} = {block:,} bytes"
    yield f"A block of {tail.tokens} tokens of all {count} takes {product}, in {tail.pages} pages"
    pages = most * tail.pages
    each, together = format_bytes(gemma.page_bytes), format_bytes(pages * gemma.page_bytes)
    yield f"At most {most} blocks are needed at once: {most} x {tail.pages} = {pages} pages of {each}, {together}"
    assert gemma.tail_pages(2100) == pages and gemma.most_tail_pages(131_072) == pages
    everything = format_bytes(count * 131_072 * token)
    yield f"what the windows cost at 2,100 tokens, and at 131,072 tokens too, where keeping everything would cost {everything}"


def sentences(flash: Layout) -> list[str]:
    return [*section_1(flash), *section_2(flash), *sections_3_to_5(flash), *section_6()]


def test_every_sentence_with_a_number_is_what_the_code_says(flash: Layout) -> None:
    page = plain(PAGE)
    missing = [sentence for sentence in sentences(flash) if plain(sentence) not in page]
    assert missing == []


def test_no_other_number_is_on_the_page(flash: Layout) -> None:
    rest = plain(PAGE)
    for sentence in sorted(sentences(flash), key=len, reverse=True):
        rest = rest.replace(plain(sentence), " ")
    rest = re.sub(r"\(?[\w./-]+\.(?:md|py|svg|json)\)?", " ", rest)  # file names
    words = [word.strip(".,:;()|") for word in rest.split()]
    numbers = [word for word in words if re.search(r"\d", word) and word not in NAMES and not re.fullmatch(r"\d", word)]
    assert numbers == []


def test_the_pictures_and_links_of_the_page_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
    for name in re.findall(r"`((?:lamina|tests|tools)/[\w/.-]+)`", PAGE):
        assert (ROOT / name).exists(), name
