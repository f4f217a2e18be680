"""A step's rows on their way to a GPU: everything that it needs is written into one pinned buffer and goes up in one copy.

words of the buffer (int32)     | decode rows, padded | other rows | rows and pages to sample from | block table updates |

The device's buffer stays where it is, so that a captured graph finds a decode section of its size at its beginning. Two pinned
buffers take turns: the host writes one while the copy out of the other may still wait for the step before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.ops.rows import Rows
from lamina.schedule.step import UNKNOWN, Decodes, Member, Slice

Words: TypeAlias = NDArray[np.int32]

_ALIGNED_WORDS = 32  # a kernel is compiled for pointers that are multiples of 16 bytes
_UPDATES = 8192  # block table entries that go up with a step; more take a copy of their own


@dataclass(frozen=True, slots=True)
class Section:
    """Where the arrays of T rows and R requests lie in a buffer that begins at `first`; each starts at an aligned word.

    tokens T | positions T | owners T | starts R | stops R | first_rows R | valid_from R | write_from R | table_rows R
    | drafts R | slots
    """

    first: int
    num_rows: int
    num_requests: int
    slot_pages: int

    @property
    def places(self) -> list[tuple[int, int]]:
        """(first word, words) of each array."""
        found, at = [], self.first
        for size in (*[self.num_rows] * 3, *[self.num_requests] * 7, self.num_requests * self.slot_pages):
            found.append((at, size))
            at += _aligned(size)
        return found

    @property
    def stop(self) -> int:
        """One past the last word."""
        return self.first + 3 * _aligned(self.num_rows) + 7 * _aligned(self.num_requests) + self._slots

    @property
    def _slots(self) -> int:
        return _aligned(self.num_requests * self.slot_pages)

    def host(self, buffer: Words) -> tuple[Words, ...]:
        """The arrays in a buffer of the host; slots [R, slot pages]."""
        found = [buffer[at : at + size] for at, size in self.places]
        return (*found[:-1], found[-1].reshape(self.num_requests, self.slot_pages))

    def device(
        self, buffer: Tensor, tables: Tensor, is_single: bool, windows: tuple[Tensor, ...] = (), has_guesses: bool = False
    ) -> "Batch":
        """The arrays in the device's buffer, as the model reads them."""
        tokens, positions, owners, starts, stops, first_rows, valid_from, write_from, table_rows, drafts, slots = (
            buffer[at : at + size] for at, size in self.places
        )
        rows = Rows(
            positions, owners, starts, stops, first_rows, valid_from, write_from, table_rows, tables,
            slots.view(self.num_requests, self.slot_pages), is_single, drafts=drafts if has_guesses else None, windows=windows,
        )  # fmt: skip
        return Batch(tokens, rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens  [T] int32, UNKNOWN where the device has to look the last drawn one up.   rows  whose they are."""

    tokens: Tensor
    rows: Rows

    def filled(self, last_tokens: Tensor) -> Tensor:
        """The tokens, with those that are not known here taken from `last_tokens` [table rows]."""
        rows = self.rows
        last = last_tokens[rows.table_rows[rows.owners.clamp(min=0)]]
        return torch.where(self.tokens < 0, last, self.tokens).clamp_(min=0)


class _Fields(Protocol):
    """What decodes have for good, as columns."""

    row: Sequence[int]
    slot: Sequence[tuple[int, ...]]
    valid_from: Sequence[int]
    write_from: Sequence[int]


class StepInputs:
    """The buffers of one runner.

    buckets   padded numbers of requests of a decode section, ascending.
    tables    int32 [max_requests, blocks], the page of each block of each running request; kept from step to step.
    windows   of each group of large windows the same for each page of a block, [pages, max_requests, blocks]; -1 where a request
              holds none. `window_sizes` are the (blocks, pages) of each group.
    checks    rows of a request, of each kind of section that is padded for requests with guesses.
    """

    def __init__(
        self, slot_pages: int, buckets: Sequence[int], max_requests: int, max_step_tokens: int, num_blocks: int,
        device: torch.device, window_sizes: Sequence[tuple[int, int]] = (), checks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.slot_pages = slot_pages
        self.device = device
        widths = [(_aligned(blocks), pages) for blocks, pages in window_sizes]
        sizes = [_aligned(max_requests * max(1, num_blocks)), *(pages * max_requests * width for width, pages in widths)]
        self._entries = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)  # of all tables, one after another
        first, *others = self._entries.split(sizes)
        self.tables = first[: max_requests * max(1, num_blocks)].zero_().view(max_requests, max(1, num_blocks))
        self.windows = tuple(
            part.view(pages, max_requests, width) for part, (width, pages) in zip(others, widths, strict=True)
        )  # fmt: skip
        self._in_windows: list[list[dict[int, tuple[int, ...]]]] = [
            [{} for _ in widths] for _ in range(max_requests)
        ]  # what the tables hold of each row
        decode = {size: Section(0, size, size, slot_pages) for size in buckets}
        check = {(size, each): Section(0, size * each, size, slot_pages) for size in buckets for each in checks}
        most = max(max_step_tokens, max_requests)
        padded = max(section.stop for section in (*decode.values(), *check.values()))
        capacity = Section(padded, most, max_requests, slot_pages).stop
        capacity += 3 * _aligned(most) + 2 * _aligned(_UPDATES)
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        is_pinned = device.type == "cuda"
        self._pinned = [torch.zeros(capacity, dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)]
        self._host: list[Words] = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(2)] if is_pinned else []
        self._turn = 0
        self._decode_host = [{size: section.host(host) for size, section in decode.items()} for host in self._host]
        self._decode = {size: section.device(self._device, self.tables, True, self.windows) for size, section in decode.items()}
        self._decode_stop = {size: section.stop for size, section in decode.items()}
        self._check_host = [{size: section.host(host) for size, section in check.items()} for host in self._host]
        self._check = {
            size: section.device(self._device, self.tables, size[1] == 1, self.windows, size[1] > 1)
            for size, section in check.items()
        }
        self._check_stop = {size: section.stop for size, section in check.items()}
        self._counts = np.arange(max(buckets) + 1, dtype=np.int32)
        self._slots = np.zeros((max_requests, slot_pages), dtype=np.int32)  # of each table row, as last seen
        self._seen: list[tuple[int, ...]] = [()] * max_requests
        self._stop = 0
        self._held: list[tuple[Sequence[Member], int] | None] = [None, None]  # whose decodes each buffer has, and their bucket

    def begin(self) -> None:
        """Takes the buffer that the step before the last one was written in. Waits for its copy, which was long ago."""
        self._turn ^= 1
        if self._copied:
            self._copied[self._turn].synchronize()
        self._stop = 0

    def decode(self, bucket: int) -> Batch:
        """The decode section of `bucket` requests; the same tensors at every call."""
        return self._decode[bucket]

    def pad_decode(self, bucket: int) -> None:
        """Makes every row of the device's decode section padding."""
        self._device[: self._decode_stop[bucket]].zero_()
        self._decode[bucket].rows.owners.fill_(-1)

    def check(self, bucket: int, each: int) -> Batch:
        """The section of `bucket` requests with `each` rows on average; the same tensors at every call."""
        return self._check[bucket, each]

    def pad_check(self, bucket: int, each: int) -> None:
        """Makes every row of that section padding."""
        self._device[: self._check_stop[bucket, each]].zero_()
        self._check[bucket, each].rows.owners.fill_(-1)

    def put_check(self, parts: Sequence[Slice], bucket: int, each: int) -> Batch:
        """Writes up to `bucket` slices of up to `each` rows on average, and padding. First of a step's sections."""
        self._held[self._turn] = None
        host = self._check_host[self._turn][bucket, each]
        at = self._put_slices(parts, host)
        tokens, positions, owners, *by_request = host
        tokens[at:], positions[at:], owners[at:] = 0, 0, -1
        for array in by_request:
            array[len(parts) :] = 0
        self._stop = self._check_stop[bucket, each]
        return self._check[bucket, each]

    def put_decodes(self, parts: Sequence[Slice], bucket: int) -> None:
        """Writes single rows, padded to `bucket`; nothing is done per request but to read it. First of a step's sections."""
        by_field = Slice(*zip(*parts, strict=True))  # type: ignore[arg-type]  # of each field, those of all slices
        self._held[self._turn] = None
        self._put_owners(by_field, len(parts), bucket)  # type: ignore[arg-type]
        self._put_places(by_field.start, list(chain.from_iterable(by_field.tokens)), bucket)  # type: ignore[arg-type]

    def put_members(self, decodes: Decodes, bucket: int) -> None:
        """The same for decodes as columns. What the members have for good is written only into a buffer that has it not."""
        held = self._held[self._turn]
        if held is None or held[0] is not decodes.members or held[1] != bucket:
            by_field = Member(*zip(*decodes.members, strict=True))  # type: ignore[arg-type]
            self._put_owners(by_field, len(decodes.members), bucket)  # type: ignore[arg-type]
            self._held[self._turn] = decodes.members, bucket
        self._put_places(decodes.positions, decodes.tokens, bucket)

    def _put_owners(self, by_field: "_Fields", count: int, bucket: int) -> None:
        """Of a decode section, whose the rows are; its padding as well."""
        host = self._decode_host[self._turn][bucket]
        _, _, owners, _, _, first_rows, valid_from, write_from, table_rows, _, slots = host
        seen = self._seen
        for row, slot in zip(by_field.row, by_field.slot, strict=True):
            if slot is not seen[row]:
                self._slots[row] = seen[row] = slot
        valid_from[:count] = by_field.valid_from
        write_from[:count] = by_field.write_from
        table_rows[:count] = by_field.row
        owners[:count] = first_rows[:count] = self._counts[:count]
        np.take(self._slots, table_rows[:count], axis=0, out=slots[:count], mode="clip")
        owners[count:] = -1
        for array in host:
            if array is not owners:
                array[count:] = 0

    def _put_places(self, starts: Words | Sequence[int], tokens: Words | Sequence[int], bucket: int) -> None:
        """Of a decode section, where the rows are and what they hold."""
        count = len(starts)
        ids, positions, _, first, stops, *_ = self._decode_host[self._turn][bucket]
        ids[:count] = tokens
        positions[:count] = starts
        first[:count] = positions[:count]
        np.add(positions[:count], 1, out=stops[:count])
        self._stop = self._decode_stop[bucket]

    def put_rows(self, parts: Sequence[Slice]) -> Batch:
        """Writes slices of any length, not padded; their section as it will be on the device."""
        self._forget_members()
        num_rows = sum(part.stop - part.start for part in parts)
        section = Section(self._stop, num_rows, len(parts), self.slot_pages)
        self._put_slices(parts, section.host(self._host[self._turn]))
        self._stop = section.stop
        is_single, has_guesses = all(part.stop - part.start == 1 for part in parts), any(part.num_guesses for part in parts)
        return section.device(self._device, self.tables, is_single, self.windows, has_guesses)

    def _put_slices(self, parts: Sequence[Slice], host: tuple[Words, ...]) -> int:
        """Writes slices into the first rows and requests of a section; how many rows."""
        tokens, positions, owners, *by_request, slots = host
        at = 0
        numbers = []
        for number, part in enumerate(parts):
            stop = at + part.stop - part.start
            tokens[at:stop] = part.tokens
            positions[at:stop] = np.arange(part.start, part.stop, dtype=np.int32)
            owners[at:stop] = number
            slots[number] = part.slot
            numbers.append((part.start, part.stop, at, part.valid_from, part.write_from, part.row, part.num_guesses))
            at = stop
        for array, values in zip(by_request, zip(*numbers, strict=True), strict=True):
            array[: len(parts)] = values
        return at

    def put_numbers(self, numbers: Sequence[int]) -> Tensor:
        """Writes a few numbers; they as int32 on the device."""
        self._forget_members()
        first, stop = self._stop, self._stop + len(numbers)
        self._host[self._turn][first:stop] = numbers
        self._stop = first + _aligned(len(numbers))
        return self._device[first:stop]

    def upload(self, parts: Sequence[Slice]) -> None:
        """Sends everything up, and enters the new and changed blocks of all slices of the step into the tables."""
        tables = [(part.row, part.table_start, part.table) for part in parts if part.table]
        self.upload_with(tables, self._window_changes(parts) if self.windows else ())

    def _window_changes(self, parts: Sequence[Slice]) -> list[tuple[int, int]]:
        """(place among all entries, page or -1) of blocks of large windows that slices have gained or lost."""
        found: list[tuple[int, int]] = []
        for part in parts:
            for group, (table, blocks) in enumerate(zip(self.windows, part.windows, strict=True)):
                now, before = dict(blocks), self._in_windows[part.row][group]
                first, step = table.storage_offset() + part.row * table.stride(1), table.stride(0)
                for block in before.keys() - now.keys():
                    found += [(first + column * step + block, -1) for column in range(table.shape[0])]
                for block, pages in now.items():
                    if before.get(block) != pages:
                        found += [(first + column * step + block, page) for column, page in enumerate(pages)]
                self._in_windows[part.row][group] = now
        return found

    def upload_with(
        self, tables: Iterable[tuple[int, int, tuple[int, ...]]], changes: Sequence[tuple[int, int]] = ()
    ) -> None:  # fmt: skip
        """The same, for (table row, number of the first block, pages) of what is new, and other entries that change."""
        width = self.tables.shape[1]
        places: list[int] = [place for place, _ in changes]
        pages: list[int] = [page for _, page in changes]
        for row, first_block, new in tables:
            first = row * width + first_block
            places.extend(range(first, first + len(new)))
            pages.extend(new)
        if not places:
            self._send()
            return
        if len(places) <= _UPDATES:
            where, what = self.put_numbers(places), self.put_numbers(pages)
            self._send()
        else:
            self._send()
            updates = torch.tensor([places, pages], dtype=torch.int32)
            if self._copied:
                updates = updates.pin_memory()
            where, what = updates.to(self.device, non_blocking=True).unbind(0)
        self._entries.index_copy_(0, where.long(), what)

    def _forget_members(self) -> None:
        """What comes next may be written where a buffer's decode section was."""
        if not self._stop:
            self._held[self._turn] = None

    def _send(self) -> None:
        stop = self._stop
        self._device[:stop].copy_(self._pinned[self._turn][:stop], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


def has_unknown(parts: Sequence[Slice]) -> bool:
    """Whether any slice waits for a token that is being drawn."""
    return any(part.tokens[-1] == UNKNOWN for part in parts)


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS
