"""The pictures of docs/memory.md, drawn from real layouts and by running the real ledger: every number comes from the code.

python tools/memory_pictures.py [FOLDER]        writes FOLDER/*.svg, docs/pictures by default
"""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from lamina.base.sizes import format_bytes
from lamina.memory.kinds import EntryFormat, Field, Fold, Log, Memory, Snapshot, Window
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease
from lamina.memory.ledger import Ledger
from lamina.memory.orders import CopyPage, Order, RestoreSlot
from lamina.memory.prefix import Checkpoint, Node
from lamina.memory.tokens import encode
from lamina.plan.charts import memory_names
from lamina.plan.drawing import GUTTER, elements, make_map
from lamina.plan.palette import colours_of
from lamina.plan.records import PlanOptions
from lamina.plan.source import open_source
from lamina.plan.svg import HATCH, Picture

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
FLASH, LARGE_WINDOWS = "deepseek-v4-flash", "gemma-3-27b"
WIDTH = 960
#: colours by number, as in lamina/plan/palette.py
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, VIOLET = (f"m{n}" for n in range(8))


def layout_of(name: str) -> Layout:
    """The layout of a model whose config is among the tests'."""
    return open_source(ROOT / "tests" / "configs" / f"{name}.json").plan(PlanOptions()).layout


# The four kinds ------------------------------------------------------------------------------------------------------

SEEN, STRIDE, SIZE = 18, 4, 8
ENTRY = EntryFormat("entry", (Field("entry", "u8", (584,)),))
STATE = (Field("open", "fp32", (1536,)), Field("carry", "fp32", (1536,)))
KINDS: tuple[Memory, ...] = (
    Log("log", 0, ENTRY, STRIDE),
    Window("window", 0, ENTRY, SIZE),
    Fold("fold", 0, STATE, STRIDE, ("carry",)),
    Snapshot("snapshot", 0, (Field("state", "fp32", (64, 128)),)),
)


def kinds() -> Picture:
    """What each kind of memory holds after 18 tokens."""
    words = f"After {SEEN} tokens, what a log, a window, a fold and a snapshot still hold, over an axis of tokens"
    picture = Picture(WIDTH, "The four kinds of memory", words)
    left, cell, total = 226.0, 28.0, SEEN + 2

    def x(token: float) -> float:
        return left + token * cell

    log, window, fold, snapshot = KINDS
    picture.words_at(20, 30, "The four kinds of memory", "big")
    picture.words_at(20, 55, f"{SEEN} tokens seen", "soft")
    for token in range(total):
        picture.box(x(token) + 1, 40, cell - 2, 22, "edge" if token < SEEN else "dash")
        picture.words_at(x(token) + cell / 2, 55, str(token), "" if token < SEEN else "soft", "middle")
    picture.words_at(x(total) + 14, 55, "live bytes", "bold")

    def row(number: int, memory: Memory, about: str) -> float:
        y = 92 + 66 * number
        picture.words_at(20, y + 8, memory.name, "bold")
        picture.words_at(20, y + 24, about, "soft")
        picture.words_at(x(total) + 14, y + 14, f"{memory.live_bytes(SEEN):,}")
        return y

    y = row(0, log, f"an entry per {STRIDE} tokens, for ever")
    count = log.log_rows(SEEN)
    for entry in range(count):
        picture.box(x(entry * STRIDE) + 1, y, STRIDE * cell - 2, 26, BLUE)
        picture.words_at(x((entry + 0.5) * STRIDE), y + 17, f"entry {entry}", "on0", "middle")
    picture.words_at(x(count * STRIDE) + 4, y + 17, "not closed", "soft")
    picture.words_at(x(total) + 14, y + 30, f"{count} x {ENTRY.nbytes}", "soft")

    y = row(1, window, f"the last {SIZE} tokens")
    ((first, live),) = window.tail_live(SEEN)
    for token in range(SEEN):
        picture.box(x(token) + 1, y, cell - 2, 26, ORANGE, faint=not first <= token < first + live)
    picture.words_at(x(first / 2), y + 17, "overwritten", "soft", "middle")
    picture.words_at(x(total) + 14, y + 30, f"{live} x {ENTRY.nbytes}", "soft")

    y = row(2, fold, f"the open group of {STRIDE}")
    opened = SEEN - SEEN % STRIDE
    picture.box(x(opened - STRIDE) + 1, y, STRIDE * cell - 2, 26, "dash")
    picture.words_at(x(opened - STRIDE / 2), y + 17, "half of it: carry", "soft", "middle")
    picture.box(x(opened) + 1, y, (SEEN - opened) * cell - 2, 26, GREEN)
    picture.words_at(x((opened + SEEN) / 2), y + 17, "sums", "on2", "middle")
    picture.words_at(x(total) + 14, y + 30, " + ".join(f"{part.nbytes:,}" for part in STATE), "soft")

    y = row(3, snapshot, "one state of all tokens")
    picture.box(x(0) + 1, y, SEEN * cell - 2, 26, "dash")
    picture.words_at(x(SEEN / 2), y + 17, "every token seen, in one state that each token overwrites", "soft", "middle")
    picture.box(x(SEEN) - 9, y, 16, 26, PINK)
    picture.words_at(x(total) + 14, y + 30, "64 x 128 x 4", "soft")
    return picture


# Where bytes lie -----------------------------------------------------------------------------------------------------

CHECKPOINT_AT = 1000


def places() -> Picture:
    """One block page, a slot and a checkpoint of V4-Flash, to scale."""
    layout = layout_of(FLASH)
    colours = colours_of(memory_names(layout))
    page = layout.page_bytes
    picture = Picture(
        int(WIDTH), "A block, a slot and a checkpoint of V4-Flash",
        f"Every array of a block page of {page:,} bytes, of a slot of {layout.slot_pages} pages and of a checkpoint, to scale",
    )  # fmt: skip
    width, y = WIDTH - GUTTER - 40, 28.0
    pages = layout.checkpoint_pages(CHECKPOINT_AT)
    shown = (
        (f"One block page: {layout.block_tokens} tokens of every log, {format_bytes(page)}", layout.block_spans, 1, 8),
        (f"One slot: {layout.slot_pages} pages, {format_bytes(layout.slot_pages * page)}",
         layout.slot_spans, layout.slot_pages, 3),
        (f"A checkpoint at token {CHECKPOINT_AT:,}: {pages} pages, {format_bytes(pages * page)}",
         layout.checkpoint_spans(CHECKPOINT_AT), pages, 3),
    )  # fmt: skip
    for heading, spans, num_pages, lines in shown:
        drawn = make_map(heading, spans, page, num_pages, num_pages * lines, 15, width)
        picture.words_at(20, y, heading, "big")
        each = (
            f"a full line is {format_bytes(drawn.line_bytes)}; what is thinner than a pixel is drawn together; hatched: nothing"
        )
        picture.words_at(20, y + 17, each, "soft")
        sizes: dict[str, int] = {}
        for span in spans:
            sizes[span.memory] = sizes.get(span.memory, 0) + span.nbytes
        names = [(f"m{colours.number(name)}", f"{name} {format_bytes(size)}") for name, size in sizes.items() if size]
        rest = page * num_pages - sum(sizes.values())
        picture.legend(20, y + 37, [*names, (HATCH, f"padding {format_bytes(rest)}")])
        picture.group(16, y + 48, drawn.height, elements(drawn, colours, HATCH))
        y += 48 + drawn.height + 44
    return picture


# A request's life ----------------------------------------------------------------------------------------------------

POOL, PROMPT, STEP, ANSWER = 16, 600, 512, 172
COLUMN = 157
_STATES = ((ORANGE, "slot of a running request"), (BLUE, "block in use"), (GREEN, "checkpoint"), (SKY, "block kept for reuse"),
           ("edge", "free page"))  # fmt: skip


def life() -> Picture:
    """The pages of a small pool while one request comes, runs and goes, as the ledger counts them."""
    layout = layout_of(FLASH)
    ledger = Ledger(layout, POOL)
    size = layout.block_tokens
    words = f"{POOL} pages of V4-Flash while a request of {PROMPT} tokens is admitted, computed, checkpointed and finished"
    picture = Picture(WIDTH, "A request's life", words)
    picture.words_at(20, 30, f"A request's life in a pool of {POOL} pages", "big")
    about = f"{PROMPT} prompt tokens in steps of at most {STEP}, then {ANSWER} tokens of the answer; blocks of {size} tokens"
    picture.words_at(20, 48, about, "soft")
    picture.legend(20, 72, list(_STATES))
    column = 0

    def show(title: str, *lines: str) -> None:
        nonlocal column
        x, counts = 24.0 + COLUMN * column, ledger.pages()
        numbers = {"slot pages": counts.slots, "blocks in use": counts.blocks, "checkpoint pages": counts.checkpoints,
                   "blocks kept": counts.cached, "free": counts.free}  # fmt: skip
        boxes = [kind for (kind, _), count in zip(_STATES, numbers.values(), strict=True) for _ in range(count)]
        for number, kind in enumerate(boxes):
            picture.box(x + 22 * (number % 4), 120 + 22 * (number // 4), 19, 19, kind)
        picture.words_at(x, 108, title, "bold")
        for number, (name, count) in enumerate((name, count) for name, count in numbers.items() if count):
            picture.words_at(x, 224 + 15 * number, f"{count} {name}")
        for number, line in enumerate(lines):
            picture.words_at(x, 304 + 15 * number, line, "soft")
        column += 1

    tokens = list(range(PROMPT))
    lease = ledger.admit(tokens, ANSWER + 1, name="request")
    assert isinstance(lease, Lease)
    show("1 admit", "The slot is taken, the", "prompt's blocks are", "reserved.")
    assert ledger.extend(lease, STEP)
    ledger.commit(lease, tokens[:STEP])
    show(f"2 prefill {STEP}", f"{len(ledger.index)} full blocks are", "published: others may", "use them.")
    assert ledger.extend(lease, PROMPT - STEP) and ledger.checkpoint(lease)
    (order,) = ledger.take_orders()
    ledger.commit(lease, tokens[STEP:])
    show(f"3 prefill {PROMPT - STEP}", "The prompt's end: a", f"checkpoint, {_order_words(order)}", "of the slot.")
    for token in range(ANSWER):
        assert ledger.extend(lease, 1)
        ledger.commit(lease, [PROMPT + token])
    show(
        f"4 decode {ANSWER}",
        f"{lease.position} tokens in",
        f"{len(lease.blocks)} blocks, {len(ledger.index)} of",
        "them published.",
    )
    ledger.finish(lease)
    frozen = ledger.take_orders()[-1]
    show("5 finish", "The slot is frozen in", f"place: {_order_words(frozen)};", "the rest is free.")
    again = ledger.admit([*tokens, *range(PROMPT, PROMPT + ANSWER), 7, 7, 7], 8, name="again")
    assert isinstance(again, Lease)
    names = [_order_words(one) for one in ledger.take_orders()]
    show("6 the next turn", f"{again.position} tokens reused:", f"{names[0]},", f"{names[1]}.")
    ledger.check()
    return picture


def _order_words(order: Order) -> str:
    """A copy that the runtime is told to make, in short."""
    if isinstance(order, CopyPage):
        return "open block copied"
    if isinstance(order, RestoreSlot):
        return f"{len(order.checkpoint)} pages to the slot"
    return f"{len(order.checkpoint)} pages of {len(order.slot)}"


# A prefix hit --------------------------------------------------------------------------------------------------------

STORED, SHARED = 8000, 7000


def hit() -> Picture:
    """Three requests that share a stored prefix in full or in part: what is reused, replayed and computed."""
    layout = layout_of(FLASH)
    ledger = Ledger(layout, 400)
    first = list(range(STORED))
    _run(ledger, first, "first")
    picture = Picture(
        WIDTH, "Prefix hits", f"What later requests reuse of {STORED} stored tokens: log and checkpoint, replay, and a junction"
    )
    left, scale = 150.0, (WIDTH - 190.0) / (STORED + 400)

    def x(token: float) -> float:
        return left + token * scale

    def bar(y: float, kind: str, start: int, stop: int, height: float = 20) -> None:
        if stop > start:
            picture.box(x(start), y, (stop - start) * scale, height, kind)

    def mark(y: float, token: int, words: str, anchor: str = "middle") -> None:
        picture.line(x(token), y - 6, x(token), y + 28, "dash")
        picture.words_at(x(token) + (4 if anchor == "start" else -4 if anchor == "end" else 0), y - 10, words, "soft", anchor)

    picture.words_at(20, 30, "Prefix hits", "big")
    entries = [
        (SKY, "log by reference"),
        (YELLOW, "replayed: recomputed for windows and folds, log not written"),
        (BLUE, "computed"),
    ]
    picture.legend(150, 30, entries)

    def request(y: float, title: str, tokens: list[int]) -> None:
        lease = ledger.admit(tokens, 1, name=title)
        assert isinstance(lease, Lease)
        found = lease.hit
        picture.words_at(20, y + 14, title, "bold")
        start = found.position
        rebuilt = found.log_tokens if found.replayed else start
        bar(y, SKY, 0, start)
        bar(y, YELLOW, start, rebuilt)
        bar(y, BLUE, rebuilt, len(tokens))
        picture.words_at(left, y + 42, f"{start:,} reused, {rebuilt - start:,} replayed, {len(tokens) - rebuilt:,} computed")
        for number, line in enumerate(textwrap.wrap(f"The ledger says: {found.why}.", 120)):
            picture.words_at(left, y + 58 + 15 * number, line, "soft")
        if found.replayed:
            mark(y, start, f"start at {start:,}")
            mark(y, rebuilt, f"{found.resident} blocks: {rebuilt:,}")
        else:
            mark(y, start, f"checkpoint at {start:,}", "end")
        _finish(ledger, lease, tokens)

    y = 92.0
    picture.words_at(20, y + 14, "stored", "bold")
    full = STORED // layout.block_tokens
    for block in range(full):
        bar(y, SKY, block * layout.block_tokens + 8, (block + 1) * layout.block_tokens)
    bar(y, SKY, full * layout.block_tokens + 8, STORED)
    about = f"{full} full blocks of {layout.block_tokens} tokens, an open one, and a checkpoint at {STORED:,}"
    picture.words_at(left, y + 42, about, "soft")
    mark(y, STORED, f"checkpoint at {STORED:,}", "end")
    other = [*first[:SHARED], *range(100_000, 100_000 + 600)]
    request(190, "1: goes on", [*first, *range(50_000, 50_000 + 400)])
    request(306, "2: leaves it", other)
    request(438, "3: as the second", [*first[:SHARED], *range(200_000, 200_000 + 600)])
    ledger.check()
    return picture


def _run(ledger: Ledger, tokens: list[int], name: str) -> None:
    """A request that is computed in one go and finished."""
    lease = ledger.admit(tokens, 1, name=name)
    assert isinstance(lease, Lease)
    _finish(ledger, lease, tokens)


def _finish(ledger: Ledger, lease: Lease, tokens: list[int]) -> None:
    """Computes what is missing, with a checkpoint where the scheduler would make one, and finishes."""
    for stop in sorted({lease.write_from if lease.valid_from else 0, lease.junction or 0, len(tokens)}):
        if stop > lease.position:
            start = lease.position
            assert ledger.extend(lease, stop - start)
            if stop in (lease.junction, len(tokens)):
                ledger.checkpoint(lease)
            ledger.commit(lease, tokens[start:stop])
    ledger.finish(lease)
    ledger.take_orders()


# Large windows -------------------------------------------------------------------------------------------------------

WINDOW_AT = 2100


def large_window() -> Picture:
    """The blocks of a window that is larger than a page, and who holds them."""
    layout = layout_of(LARGE_WINDOWS)
    (tail,) = layout.tails
    (window, *_) = tail.windows
    (first, live), *_ = window.tail_live(WINDOW_AT)
    words = f"Blocks of {tail.tokens} tokens of a window at token {WINDOW_AT}: let go, live and open"
    picture = Picture(WIDTH, "A window larger than a page", words)
    ((low, stop),) = tail.live_blocks(WINDOW_AT)
    start = low - 6
    left, scale = 24.0, (WIDTH - 48) / ((stop - start + 1) * tail.tokens)

    def x(token: float) -> float:
        return left + (token - start * tail.tokens) * scale

    size = tail.pages * layout.page_bytes
    picture.words_at(20, 30, f"A window of {live + 1:,} tokens in blocks of {tail.tokens}", "big")
    each = f"{tail.pages} pages of {format_bytes(layout.page_bytes)} a block ({format_bytes(size)})"
    picture.words_at(20, 48, f"{len(tail.windows)} layers together, {each}, token {WINDOW_AT:,}", "soft")
    names = [("edge", "let go: its pages are free"), (BLUE, "held, shared by reference"), (ORANGE, "open: still written")]
    picture.legend(20, 72, names)
    for block in range(start, stop):
        is_open = (block + 1) * tail.tokens > WINDOW_AT
        kind = "edge" if block < low else ORANGE if is_open else BLUE
        picture.box(x(block * tail.tokens) + 1, 112, tail.tokens * scale - 2, 26, kind, nbytes=size)
    for token, words, anchor in ((first, f"left edge {first:,}", "start"), (WINDOW_AT, f"token {WINDOW_AT:,}", "end")):
        picture.line(x(token), 104, x(token), 146, "dash")
        picture.words_at(x(token), 100, words, "soft", anchor)
    held = stop - low
    about = f"{held} blocks, {held * tail.pages} pages, {format_bytes(held * size)} for {live:,} live tokens"
    picture.words_at(x(low * tail.tokens), 162, about)
    next_gone = low * tail.tokens + tail.tokens + live
    picture.words_at(x(low * tail.tokens), 179, f"The oldest block goes when token {next_gone:,} has been seen.", "soft")
    return picture


# Eviction ------------------------------------------------------------------------------------------------------------


POOL_PAGES, SYSTEM, CHATS, QUESTION, ONE_OFF = 48, 2048, 4, 300, 700


def eviction() -> Picture:
    """What a full pool holds, what each thing saves, and the order in which the ledger gives it up."""
    ledger = Ledger(layout_of(FLASH), POOL_PAGES)
    prompts = {f"chat {n}": [*range(SYSTEM), *range(10_000 * n, 10_000 * n + QUESTION)] for n in range(1, CHATS + 1)}
    prompts["one-off"] = list(range(900_000, 900_000 + ONE_OFF))
    rows: list[tuple[str, list[Node | Checkpoint]]] = [("shared", [])]
    for name, tokens in prompts.items():
        _run(ledger, tokens, name)
    for name, tokens in prompts.items():
        items = _path(ledger, tokens)
        new = [one for one in items if all(one not in before for _, before in rows)]
        is_shared = name == "chat 1"
        rows[0][1].extend(one for one in new if is_shared and _end(one, ledger) <= SYSTEM)
        rows.append((name, [one for one in new if not (is_shared and _end(one, ledger) <= SYSTEM)]))
    about = {id(one): _worth(one) for _, items in rows for one in items}
    order = _evicted_in_order(ledger, [one for _, items in rows for one in items])
    words = f"{CHATS} chats share {SYSTEM} tokens, then a prompt that nobody repeats; the order in which everything is evicted"
    picture = Picture(WIDTH, "What goes first", words)
    picture.words_at(20, 30, "What goes first", "big")
    scene = f"{CHATS} chats began with the same {SYSTEM:,} tokens, then came a prompt that nobody repeats. Now one long request"
    picture.words_at(20, 48, scene, "soft")
    picture.words_at(
        20, 64, f"needs all {POOL_PAGES} pages. The numbers say in which order the ledger gives things up for it.", "soft"
    )
    picture.legend(760, 30, [(SKY, "block"), (GREEN, "checkpoint")])
    for row, (name, items) in enumerate(rows):
        y, x = 84.0 + 40 * row, 100.0
        picture.words_at(20, y + 16, name, "bold")
        for one in items:
            is_block = isinstance(one, Node)
            width = 30.0 if is_block else 62.0
            picture.box(x, y, width - 3, 24, SKY if is_block else GREEN)
            picture.words_at(x + width / 2 - 1.5, y + 16, str(order.index(one) + 1), "on4" if is_block else "on2", "middle")
            x += width
        said = [about[id(one)] for one in items if isinstance(one, Checkpoint)]
        picture.words_at(max(x + 12, 210), y + 16, "; ".join(said), "soft")
    return picture


def _path(ledger: Ledger, tokens: list[int]) -> list[Node | Checkpoint]:
    """The resident blocks of a prompt from the root down, and the checkpoints that hang on them, by position."""
    index, prompt = ledger.index, ledger.prompt(tokens)
    node: Node | None = index.root(prompt)
    found: list[Node | Checkpoint] = []
    while node is not None:
        found += [node] if node.parent is not None else []
        at = node.depth * ledger.layout.block_tokens
        for length in sorted(node.checkpoints):
            kept = index.find(node, encode(prompt.ids[at : at + length]))
            found += [kept] if kept is not None else []
        node = index.child(node, prompt.block(node.depth))
    return found


def _end(item: Node | Checkpoint, ledger: Ledger) -> int:
    """Tokens up to which an item reaches."""
    return item.position if isinstance(item, Checkpoint) else item.depth * ledger.layout.block_tokens


def _worth(item: Node | Checkpoint) -> str:
    """What a checkpoint costs and saves, in words."""
    if isinstance(item, Node):
        return ""
    pages = len(item.pages) + len(item.shared_pages)
    times = {0: "never used", 1: "used once"}.get(item.uses, f"used {item.uses} times")
    return f"checkpoint at {item.position:,}: {pages} pages, saves {item.saves:,} tokens, {times}"


def _evicted_in_order(ledger: Ledger, items: list[Node | Checkpoint]) -> list[Node | Checkpoint]:
    """The items in the order in which a request that grows to fill the pool takes their pages."""
    size, gone = ledger.layout.block_tokens, []
    tokens = list(range(500_000, 500_000 + (ledger.num_pages - ledger.layout.slot_pages) * size))
    lease = ledger.admit(tokens, 1, name="newcomer")
    assert isinstance(lease, Lease)
    while lease.position < len(tokens):
        start = lease.position
        assert ledger.extend(lease, size)
        gone += [one for one in items if one not in gone and _is_gone(one)]
        ledger.commit(lease, tokens[start : lease.position])
    ledger.check()
    return gone


def _is_gone(item: Node | Checkpoint) -> bool:
    return item.state == "gone" if isinstance(item, Checkpoint) else not item.resident


PICTURES: dict[str, Callable[[], Picture]] = {
    "kinds": kinds, "places": places, "life": life, "hit": hit, "large_window": large_window,
    "eviction": eviction,
}  # fmt: skip


def main() -> None:
    """Writes all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().text, encoding="utf-8")


if __name__ == "__main__":
    main()
