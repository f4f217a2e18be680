"""The one allocation that holds everything requests remember, its typed views, and the copies the ledger orders."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lamina.base.errors import CapacityError
from lamina.base.sizes import format_bytes
from lamina.layers.entries import StoreKey
from lamina.memory.layout import HIDDEN, Layout, Span
from lamina.memory.orders import CopyPage, Order, RestoreSlot, SaveSlot
from lamina.ops.store import EntryCodec, Place, StateCodec, Store
from lamina.runtime.copies import CopyPlanner, Mover, run_waves, warm_up

_VIEWS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.uint8,
    "e8m0": torch.uint8,
    "e2m1": torch.uint8,
    "u8": torch.uint8,
}


def _matching(key: StoreKey, spans: Sequence[Span]) -> list[Span]:
    """The arrays of the key's fields, in its order; all of them or none."""
    by_name = {span.field.name: span for span in spans if (span.layer, span.memory) == (key.layer, key.memory)}
    found = [by_name[name] for name in key.fields if name in by_name]
    assert len(found) in (0, len(key.fields)), key
    return found


class DeviceArena:
    """`num_pages` pages of a layout, as one tensor of bytes."""

    def __init__(self, layout: Layout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        need = num_pages * layout.page_bytes
        try:
            self.bytes = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CapacityError(f"cache_bytes={need} ({format_bytes(need)}) cannot be allocated: ask for less") from error
        self._planner = CopyPlanner(layout)
        self._mover: Mover | None = None
        if device.type == "cuda":
            from lamina.ops.move.triton import move  # needs Triton

            self._mover = move
        self.stores: dict[StoreKey, Store] = {}
        self.hidden: Store | None = None
        if layout.hidden is not None:
            codec = StateCodec(layout.hidden.nbytes // 4)
            self.hidden = self._store([span for span in layout.slot_spans if span.memory == HIDDEN], codec, "slot")

    def store(self, key: StoreKey, codec: EntryCodec) -> Store:
        """The store of some fields of a memory; made once a key."""
        if key not in self.stores:
            layout = self.layout
            found = _matching(key, layout.block_spans), _matching(key, layout.slot_spans)
            windows = [_matching(key, tail.spans) for tail in layout.tails]
            if found[0]:
                self.stores[key] = self._store(found[0], codec, "block")
            elif found[1]:
                self.stores[key] = self._store(found[1], codec, "slot")
            else:
                group = next((number for number, spans in enumerate(windows) if spans), None)
                assert group is not None, key
                self.stores[key] = self._store(windows[group], codec, "window", group)
        return self.stores[key]

    def _store(self, spans: list[Span], codec: EntryCodec, kind: Literal["block", "slot", "window"], group: int = 0) -> Store:
        assert len({span.page for span in spans}) == 1
        return Store(codec, tuple(self._view(span) for span in spans), spans[0].page, Place(kind, spans[0].page, group))

    def _view(self, span: Span) -> Tensor:
        """[pages, rows, elements] of one span in every page."""
        dtype = _VIEWS[span.field.dtype]
        typed = self.bytes.view(dtype)
        size = typed.element_size()
        width = span.row_bytes // size
        return typed.as_strided(
            (self.num_pages, span.rows, width), (self.layout.page_bytes // size, width, 1), span.offset // size
        )

    def run(self, orders: tuple[Order, ...]) -> None:
        """Carries out copies in order; on a GPU all at once, as far as none needs what another has written."""
        if self._mover is not None:
            run_waves(self.bytes.view(-1), self._planner.waves(orders), self._mover)
            return
        for order in orders:
            if isinstance(order, CopyPage):
                self.bytes[order.target] = self.bytes[order.source]
            elif isinstance(order, SaveSlot):
                self._save(order)
            else:
                self._restore(order)

    def read_page(self, page: int) -> memoryview:
        """The bytes of a page: on a CPU themselves, else a copy, after all that has been launched."""
        return memoryview(self.bytes[page].cpu().numpy())

    def write_page(self, page: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Writes (offset, bytes) into a page that nothing launched uses; what lies between them is lost."""
        if self.bytes.device.type == "cpu":
            view = memoryview(self.bytes[page].numpy())
            for offset, data in parts:
                view[offset : offset + len(data)] = data
            return
        whole = bytearray(self.layout.page_bytes)
        for offset, data in parts:
            whole[offset : offset + len(data)] = data
        self.bytes[page].copy_(torch.frombuffer(whole, dtype=torch.uint8))

    def warm_up(self) -> None:
        """Compiles what any copies may need; nothing on a CPU."""
        if self._mover is not None:
            warm_up(self.bytes.view(-1), self._mover)

    def _save(self, order: SaveSlot) -> None:
        """Slot to checkpoint: live rows, oldest first. Everything is read before anything is written: pages may overlap."""
        live, spans = self.layout.slot_live(order.position), self.layout.checkpoint_spans(order.position)
        moved = []
        for source, target, ranges in zip(self.layout.slot_spans, spans, live, strict=True):
            if target.rows:
                page, size = self.bytes[order.slot[source.page]], source.row_bytes
                parts = [page[source.offset + first * size : source.offset + (first + count) * size] for first, count in ranges]
                moved.append((target, torch.cat(parts)))
        for target, data in moved:
            self.bytes[order.checkpoint[target.page], target.offset : target.offset + target.nbytes] = data

    def _restore(self, order: RestoreSlot) -> None:
        """Checkpoint to slot: each live row back to its place."""
        live, spans = self.layout.slot_live(order.position), self.layout.checkpoint_spans(order.position)
        moved = []
        for source, target, ranges in zip(spans, self.layout.slot_spans, live, strict=True):
            if source.rows:
                data = self.bytes[order.checkpoint[source.page], source.offset : source.offset + source.nbytes].clone()
                moved.append((target, ranges, data))
        for target, ranges, data in moved:
            page, size, done = self.bytes[order.slot[target.page]], target.row_bytes, 0
            for first, count in ranges:
                start = target.offset + first * size
                page[start : start + count * size] = data[done : done + count * size]
                done += count * size

    def bytes_written(self) -> dict[str, int]:
        """Bytes written by the store ops so far, by memory name."""
        totals: dict[str, int] = {}
        for key, store in self.stores.items():
            totals[key.memory] = totals.get(key.memory, 0) + store.bytes_written
        if self.hidden is not None:
            totals[HIDDEN] = self.hidden.bytes_written
        return totals
