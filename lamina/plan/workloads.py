"""What requests of one length take, what of it is padding, and how many fit."""

from collections.abc import Sequence

from lamina.base.errors import ConfigError
from lamina.base.sizes import KiB, MiB
from lamina.memory.layout import Layout, bytes_by_memory
from lamina.memory.plan import CHECKPOINTS, Held, predict
from lamina.plan.records import PlanOptions, RequestLine, Together, WorkloadLine

#: shown where no length is asked for, as far as the model goes
_USUAL = (KiB, 4 * KiB, 32 * KiB, 128 * KiB, MiB)
LOG, SLOTS = "log", "slots"


def lengths(options: PlanOptions, max_positions: int) -> list[tuple[int, int | None]]:
    """(tokens, requests or None) of each line: contexts, then COUNT x TOKENS. Raises ConfigError past the model's maximum."""
    if not options.contexts and not options.requests:
        usual: list[tuple[int, int | None]] = [(tokens, None) for tokens in _USUAL if tokens <= max_positions]
        return usual or [(max_positions, None)]
    for field, tokens in [("context", n) for n in options.contexts] + [("requests", line.tokens) for line in options.requests]:
        if not 1 <= tokens <= max_positions:
            raise ConfigError(field, tokens, f"from 1 to {max_positions} tokens, the model's maximum")
    found: list[tuple[int, int | None]] = [(tokens, None) for tokens in options.contexts]
    return found + [(line.tokens, line.count) for line in options.requests]


def workload(layout: Layout, tokens: int, requests: int | None, pages: int | None, replicas: int) -> WorkloadLine:
    """The line of requests of `tokens` tokens. pages: of one replica's pool, None if unknown."""
    predicted = predict(layout, [Held(tokens)])
    slot_bytes = layout.slot_pages * layout.page_bytes
    log_bytes = predicted.total - slot_bytes
    live, in_slot = layout.live_bytes(tokens), bytes_by_memory(layout.slot_spans)
    live_bytes = sum(live.values())
    slot_padding = slot_bytes - _slot_live(layout, tokens)
    block_padding = predicted.nbytes("padding") - (slot_bytes - sum(in_slot.values()))
    checkpoint, peak = layout.checkpoint_pages(tokens), layout.peak_pages(tokens)
    return WorkloadLine(
        context=tokens, requests=requests, pages=predicted.pages, peak_pages=peak, log_bytes=log_bytes, slot_bytes=slot_bytes,
        bytes_per_request=predicted.total, live_bytes=live_bytes,
        open_bytes=predicted.total - live_bytes - slot_padding - block_padding, block_padding_bytes=block_padding,
        slot_padding_bytes=slot_padding, padding_fraction=1 - live_bytes / predicted.total if predicted.total else 0.0,
        checkpoint_bytes=checkpoint * layout.page_bytes, fits=_fits(pages, peak, replicas),
        fits_with_checkpoint=_fits(pages, peak + checkpoint, replicas),
        binds=LOG if log_bytes >= slot_bytes else SLOTS,
        rows=tuple((row.name, row.nbytes) for row in predicted.rows if row.name != CHECKPOINTS),
    )  # fmt: skip


def _slot_live(layout: Layout, tokens: int) -> int:
    """Live bytes in the slot's pages."""
    live = layout.slot_live(tokens)
    return sum(span.row_bytes * sum(n for _, n in rows) for span, rows in zip(layout.slot_spans, live, strict=True))


def _fits(pool_pages: int | None, each: int, replicas: int) -> int | None:
    return None if pool_pages is None or not each else pool_pages // each * replicas


def together(layout: Layout, lines: Sequence[RequestLine], pages: int | None, replicas: int) -> Together | None:
    """Whether all requests of all lines run at once: each whole on one replica, the largest placed first."""
    if not lines:
        return None
    sizes = sorted(((layout.peak_pages(line.tokens), line.count) for line in lines), reverse=True)
    needed = sum(size * count for size, count in sizes)
    if pages is None:
        return Together(needed, None, None)
    free, waiting = [pages] * replicas, 0
    for size, count in sizes:
        for replica in range(replicas):
            placed = min(count, free[replica] // size) if size else count
            free[replica] -= placed * size
            count -= placed
        waiting += count
    return Together(needed, pages * replicas, not waiting)


def checkpoint_range(layout: Layout) -> tuple[int, int]:
    """The fewest and the most pages of a checkpoint once every ring is full, without the open block."""
    if not layout.slot_pages and not layout.tails:
        return (0, 0)
    size = layout.block_tokens
    ring = max((span.rows for span in layout.slot_spans), default=1)
    stride = max((memory.log_stride for memory in layout.memories), default=1)
    first = -(-ring // size) * size
    found = [layout.checkpoint_pages(first + offset) for offset in {*range(stride + 2), size // 2, size - 1}]
    return min(found), max(found)
