"""One request of 64 K to 1 M tokens, and pages on both sides of 2 and 4 GiB, against fp64: index and attention as decode and
prefill call them, over random rows as they are stored."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lamina.base.sizes import GiB, MiB
from lamina.ops.rows import Rows, rows_of
from lamina.ops.sequences import Piece
from lamina.ops.store import EntryCodec, Store, attention_codec, index_codec

DEVICE = torch.device("cuda")
HEADS, DIM, ROPE, WINDOW = 64, 512, 64, 128
INDEX_HEADS, INDEX_DIM, TOP_K, RATIO = 64, 128, 512, 4
BLOCK_TOKENS, ROWS = 256, 64
PAGE_BYTES, NUM_PAGES = MiB, 6656  # 6.5 GiB
LENGTHS = [64 << 10, 96 << 10, 128 << 10, (128 << 10) + 5, 1 << 20]


class Pages:
    """An arena of 6.5 GiB, stores one after another in its pages, and a request whose blocks lie at both of its ends."""

    def __init__(self) -> None:
        self.bytes = torch.full((NUM_PAGES, PAGE_BYTES), 255, dtype=torch.uint8, device=DEVICE)
        self._used = 0
        generator = torch.Generator().manual_seed(1)
        low = torch.randperm(2100, generator=generator)
        high = NUM_PAGES - 1 - torch.randperm(2100, generator=generator)
        order = torch.stack([low, high], 1).flatten().to(DEVICE)  # low and high by turns
        self.slot, self.table = order[:1], order[1 : 1 + (1 << 20) // BLOCK_TOKENS]
        assert self.bytes.nbytes > 6 * GiB and int(self.table.max()) * PAGE_BYTES > 4 * GiB

    def store(self, codec: EntryCodec, rows: int) -> Store:
        """A store whose rows are NaN."""
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        views = []
        for _, dtype, elements in codec.fields:
            kind = types.get(dtype, torch.uint8)
            width = elements // 2 if dtype == "e2m1" else elements
            typed, at = self.bytes.view(kind), self._used // kind.itemsize
            views.append(typed.as_strided((NUM_PAGES, rows, width), (PAGE_BYTES // kind.itemsize, width, 1), at))
            self._used += -(-rows * width * kind.itemsize // 128) * 128
        assert self._used <= PAGE_BYTES
        return Store(codec, tuple(views), 0)

    def fill(self, store: Store, generator: torch.Generator) -> None:
        """Random vectors in every row of the request's log."""
        for pages in self.table.split(512):
            x = torch.randn(pages.numel() * ROWS, store.codec.width, device=DEVICE, generator=generator)
            where = torch.arange(ROWS, device=DEVICE).repeat(pages.numel())
            store.write(pages.repeat_interleave(ROWS), where, store.codec.encode(x))

    def rows(self, start: int, stop: int, padding: int) -> Rows:
        """A step over the request's positions [start, stop), its table in row 1 of 3."""
        tables = torch.zeros(3, self.table.numel(), dtype=torch.int32, device=DEVICE)
        tables[1] = self.table.int()
        piece = Piece(start, stop, 0, 1, 0, 0)
        return rows_of((piece,), ((int(self.slot),),), tables, stop - start + padding, 1 + padding)


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that attention reads."""

    pages: Pages
    window: Store
    entries: Store
    keys: Store


@pytest.fixture(scope="module", params=[("fp8", "fp4"), ("bf16", "fp8")], ids=str)
def memory(request: pytest.FixtureRequest) -> Memory:
    cache_format, index_format = request.param
    pages, generator = Pages(), torch.Generator(DEVICE).manual_seed(2)
    entry, index = attention_codec(cache_format, DIM, ROPE), index_codec(index_format, INDEX_DIM)
    found = Memory(pages, pages.store(entry, WINDOW), pages.store(entry, ROWS), pages.store(index, ROWS))
    pages.fill(found.entries, generator)
    pages.fill(found.keys, generator)
    ring = torch.randn(WINDOW, DIM, device=DEVICE, generator=generator)
    where = torch.arange(WINDOW, device=DEVICE)
    found.window.write(pages.slot.expand(WINDOW), where, entry.encode(ring))
    return found


def entries_of(memory: Memory, store: Store, entries: Tensor) -> Tensor:
    """fp64 rows of entry numbers."""
    pages = memory.pages.table[entries // ROWS]
    parts = [store.read(p, r) for p, r in zip(pages.split(1 << 16), (entries % ROWS).split(1 << 16), strict=True)]
    return torch.cat(parts).double()


def step_of(length: int, order: str) -> tuple[int, int]:
    """Positions of the step that ends a request of so many tokens."""
    return (length - 1, length) if order == "decode" else (length - 3, length)


@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_index_chooses_the_best_of_all(memory: Memory, length: int, order: str) -> None:
    from lamina.ops.index_topk.triton import index_topk

    generator = torch.Generator(DEVICE).manual_seed(length)
    start, stop = step_of(length, order)
    rows = memory.pages.rows(start, stop, padding=2)
    num = rows.num_rows
    queries = memory.keys.codec.encode(torch.randn(num * INDEX_HEADS, INDEX_DIM, device=DEVICE, generator=generator))
    weights = torch.randn(num, INDEX_HEADS, device=DEVICE, generator=generator)
    scale = (INDEX_DIM * INDEX_HEADS) ** -0.5
    places = index_topk(queries, weights, scale, memory.keys, rows, RATIO, TOP_K, stop // RATIO, order)
    every = torch.arange(stop // RATIO, device=DEVICE)
    keys = entries_of(memory, memory.keys, every)
    decoded = memory.keys.codec.decode(queries).double().view(num, INDEX_HEADS, INDEX_DIM)
    block_of = torch.full((NUM_PAGES,), -1, device=DEVICE)
    block_of[memory.pages.table] = torch.arange(memory.pages.table.numel(), device=DEVICE)
    for row in range(stop - start):
        found = places[row].long()
        entries = block_of[found // ROWS] * ROWS + found % ROWS
        visible = (start + row + 1) // RATIO
        assert (found >= 0).all() and (entries.diff() > 0).all() and int(entries[-1]) < visible
        scores = ((decoded[row] @ keys[:visible].t()).clamp(min=0) * weights[row, :, None].double()).sum(0) * scale
        is_chosen = torch.zeros(visible, dtype=torch.bool, device=DEVICE)
        is_chosen[entries] = True
        assert float(scores[~is_chosen].max() - scores[is_chosen].min()) <= 1e-5 * float(scores.abs().max())


@pytest.mark.parametrize("order", ["decode", "prefill"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scope", ["selected", "range"])
def test_attention_reads_what_lies_anywhere(memory: Memory, scope: str, length: int, order: str) -> None:
    """512 chosen entries, or all of a log with an entry every 128 tokens (the same pages, two rows of each)."""
    from lamina.ops.attend import Range, Selected
    from lamina.ops.attend.triton import attend

    generator = torch.Generator(DEVICE).manual_seed(length)
    start, stop = step_of(length, order)
    rows = memory.pages.rows(start, stop, padding=1)
    num, ratio = rows.num_rows, RATIO if scope == "selected" else 128
    log = memory.entries
    if scope == "range":
        log = Store(log.codec, tuple(view[:, : BLOCK_TOKENS // ratio] for view in log.views), 0)
    q = torch.randn(num, HEADS, DIM, device=DEVICE, generator=generator).bfloat16()
    own = memory.window.codec.encode(torch.randn(num, DIM, device=DEVICE, generator=generator))
    sink = torch.randn(HEADS, device=DEVICE, generator=generator)
    angles = torch.rand(num, ROPE // 2, device=DEVICE, generator=generator, dtype=torch.float64) * 6
    chosen = torch.stack([_some(stop // ratio - 1, TOP_K, generator) for _ in range(num)])
    per_page = log.rows_per_page
    places = (memory.pages.table[chosen // per_page] * per_page + chosen % per_page).int()
    arguments = Selected(log, ratio, places) if scope == "selected" else Range(log, ratio)
    scale = DIM**-0.5

    def run(padded: Rows, more: int) -> Tensor:
        def wide(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(more, *x.shape[1:])]) if more else x

        given = Selected(log, ratio, wide(places)) if scope == "selected" else arguments
        turns = (wide(angles.cos().float()), wide(angles.sin().float()))
        own_rows = tuple(wide(field) for field in own)
        return attend(wide(q), own_rows, memory.window, WINDOW, given, scale, sink, padded, *turns, False, order).values

    found = run(rows, 0)
    assert (found[stop - start :] == 0).all()
    assert torch.equal(run(memory.pages.rows(start, stop, padding=6), 5)[:num], found)
    own_values = memory.window.codec.decode(own).double()
    for row in range(stop - start):
        position = start + row
        past = torch.arange(max(0, position - WINDOW + 1), start, device=DEVICE)
        near = memory.window.read(memory.pages.slot.expand(past.numel()), past % WINDOW).double()
        entries = chosen[row] if scope == "selected" else torch.arange((position + 1) // ratio, device=DEVICE)
        pages = memory.pages.table[entries // per_page]
        far = log.read(pages, entries % per_page).double()
        keys = torch.cat([near, own_values[: row + 1], far])
        scores = torch.cat([q[row].double() @ keys.t() * scale, sink.double()[:, None]], 1)
        truth = scores.softmax(-1)[:, :-1] @ keys  # [H, d]
        even, odd = truth[:, -ROPE::2].clone(), truth[:, DIM - ROPE + 1 :: 2].clone()
        cos, sin = angles[row].cos(), angles[row].sin()
        truth[:, -ROPE::2], truth[:, DIM - ROPE + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
        error = (found[row].double().view(HEADS, DIM) - truth).norm() / truth.norm()
        assert float(error) < 1e-2, (row, float(error))


def _some(limit: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below limit, ascending, the first and the last of all among them."""
    drawn = torch.randperm(limit - 2, device=DEVICE, generator=generator)[: count - 2] + 1
    ends = torch.tensor([0, limit - 1], device=DEVICE)
    return torch.cat([drawn, ends]).sort().values


def test_an_engine_with_pages_everywhere_answers_alike(
    tiny_of: Callable[[str, str], object], words: Callable[[int, int], list[int]], serve: Callable[..., list[object]]
) -> None:
    """The same prompts in a small arena, and in one of 6.5 GiB that hands out its pages from both ends by turns."""
    from lamina import LLM

    directory = str(tiny_of("flash", "official"))
    prompts = [words(length, length) for length in (3, 300, 900)]
    settings = {"device": "cuda", "max_requests": 4, "max_model_len": 2048, "warmup": False}
    small = serve(LLM(directory, cache_bytes="64MiB", **settings), prompts)
    llm = LLM(directory, cache_bytes="6656MiB", **settings)
    free = llm.engine.ledger.arena._free
    ends = zip(sorted(free), sorted(free, reverse=True), strict=True)
    free[:] = list(dict.fromkeys(page for pair in ends for page in pair))[::-1]  # the last is taken first
    assert serve(llm, prompts) == small
    assert serve(llm, prompts, salt="warm or not") == small
