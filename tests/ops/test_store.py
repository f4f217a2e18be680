"""Stored rows: sizes of the formats, what is read equals what was encoded, and bytes beside a row are never touched."""

from types import ModuleType

import pytest
import torch

from lamina.base.errors import ConfigError
from lamina.ops.store import EntryCodec, StateCodec, attention_codec, index_codec

CODECS: dict[str, EntryCodec] = {
    "fp32": attention_codec("fp32", 24, 8),
    "bf16": attention_codec("bf16", 24, 8),
    "fp8": attention_codec("fp8", 160, 32),
    "fp8 partial": attention_codec("fp8", 24, 8),
    "index fp4": index_codec("fp4", 64),
    "index fp4 short": index_codec("fp4", 16),
    "index fp8": index_codec("fp8", 32),
    "index bf16": index_codec("bf16", 20),
    "state": StateCodec(72),
}


def width_of(codec: EntryCodec) -> int:
    """Elements of a decoded row."""
    return sum(elements for name, _, elements in codec.fields if name in ("nope", "rope", "row", "code"))


@pytest.fixture(params=CODECS.values(), ids=CODECS.keys())
def codec(request: pytest.FixtureRequest) -> EntryCodec:
    return request.param


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        (attention_codec("fp8", 512, 64), 584),
        (attention_codec("bf16", 512, 64), 1024),
        (attention_codec("fp32", 512, 64), 2048),
        (index_codec("fp4", 128), 68),
        (index_codec("fp8", 128), 132),
        (index_codec("bf16", 128), 256),
        (index_codec("fp32", 128), 512),
    ],
)
def test_bytes_of_the_shipped_shapes(codec: EntryCodec, nbytes: int, rows: ModuleType) -> None:
    store = rows.poisoned_store(codec, 1, 1)
    assert store.row_bytes == nbytes
    stored = codec.encode(torch.randn(3, width_of(codec)))
    assert sum(field.shape[1] * field.element_size() for field in stored) == nbytes


def test_formats_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="index_format"):
        index_codec("fp4", 24)
    with pytest.raises(ConfigError, match="cache_format"):
        attention_codec("fp8", 16, 16)
    with pytest.raises(ConfigError, match="cache_format"):
        attention_codec("int8", 16, 8)
    with pytest.raises(ConfigError, match="index_format"):
        index_codec("int8", 16)


def test_an_entry_in_fp8_by_bytes() -> None:
    """Section 9.1: e4m3 codes, bf16 rotated dims, then 7 scale bytes and a pad, amax 448 -> 127, 449 -> 128, 0 -> 105."""
    codec = attention_codec("fp8", 512, 64)
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 64], x[0, 448] = 448, 449, 1.00390625  # the last one is half way in bf16
    codes, rope, scales = codec.encode(x)
    assert scales.tolist() == [[127, 128, 105, 105, 105, 105, 105, 0]]
    assert codes[0, 0] == 0x7E and rope.dtype == torch.bfloat16 and rope[0, 0] == 1.0
    found = codec.decode((codes, rope, scales))
    assert found[0, 0] == 448 and found[0, 64] == 448 and not found[0, 1:64].any()


def test_writing_and_reading(codec: EntryCodec, rows: ModuleType) -> None:
    """What is read is what decoding the codes gives; every other byte is still NaN; bytes are counted."""
    generator = torch.Generator().manual_seed(0)
    store = rows.poisoned_store(codec, 5, 7)
    stored = codec.encode(torch.randn(9, width_of(codec), generator=generator))
    pages, at = torch.tensor([0, 4, 4, 2, 2, 2, 0, 3, 4]), torch.tensor([0, 6, 0, 1, 2, 3, 6, 3, 5])
    before = rows.bytes_of(store)
    store.write(pages, at, stored)
    assert torch.equal(store.read(pages, at), codec.decode(stored))
    assert store.bytes_written == 9 * store.row_bytes
    order = torch.randperm(9, generator=generator)
    assert torch.equal(store.read(pages[order], at[order]), codec.decode(stored)[order])
    changed = int((rows.bytes_of(store) != before).sum())
    assert changed <= 9 * store.row_bytes
    for view in store.views:  # unwritten rows
        untouched = torch.ones(5, 7, dtype=torch.bool)
        untouched[pages, at] = False
        assert (view.contiguous().view(torch.uint8).unflatten(-1, (-1, 1))[untouched] == rows.POISON).all()
    store.write(pages[:0], at[:0], tuple(field[:0] for field in stored))
    assert store.bytes_written == 9 * store.row_bytes


def test_encoding_is_row_by_row(codec: EntryCodec) -> None:
    x = torch.randn(65, width_of(codec), generator=torch.Generator().manual_seed(1))
    whole = codec.encode(x)
    for part in (slice(0, 1), slice(7, 9), slice(3, 65)):
        for one, field in zip(codec.encode(x[part].clone()), whole, strict=True):
            assert torch.equal(one, field[part])
    again = codec.decode(whole)
    for part in (slice(0, 1), slice(7, 9), slice(3, 65)):
        assert torch.equal(codec.decode(tuple(field[part] for field in whole)), again[part])


def test_values_survive_a_second_time(codec: EntryCodec) -> None:
    """In the stored basis a value that has been rounded is not rounded again (index formats turn it first)."""
    if isinstance(codec, type(index_codec("fp4", 16))):
        x = torch.zeros(4, width_of(codec))
        x[1:, 0] = torch.tensor([1.0, -2.0, 4.0])  # turned into constant rows, which have exact codes
        scale = width_of(codec) ** -0.5
        expected = x[:, :1].expand(-1, x.shape[1]) * scale
        torch.testing.assert_close(codec.decode(codec.encode(x)), expected, rtol=0.13, atol=0)
        return
    once = codec.decode(codec.encode(torch.randn(20, width_of(codec))))
    assert torch.equal(codec.decode(codec.encode(once)), once)


def test_logs_are_read_up_to_their_counts(codec: EntryCodec, rows: ModuleType) -> None:
    """Blocks in any order, shared by two logs, padded tables; nothing but zeros beyond the count, whatever lies there."""
    store = rows.poisoned_store(codec, 6, 4)
    stored = codec.encode(torch.randn(11, width_of(codec), generator=torch.Generator().manual_seed(2)))
    values = codec.decode(stored)
    entry, table = torch.arange(11), torch.tensor([5, 1, 3])
    store.write(table[entry // 4], entry % 4, stored)
    tables = torch.tensor([[5, 1, 3], [5, 1, 0], [5, 0, 0], [0, 0, 0]])
    counts = (11, 8, 3, 0)
    for columns in (11, 12, 64):
        found = store.read_logs(tables, counts, columns)
        assert found.shape == (4, columns, width_of(codec))
        for row, count in enumerate(counts):
            assert torch.equal(found[row, :count], values[:count]) and not found[row, count:].any()
