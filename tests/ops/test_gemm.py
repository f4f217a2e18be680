"""Products: right values, and bits of a row that do not depend on how many others there are."""

import pytest
import torch

from lamina.ops.gemm import linear, padded_rows, prepared, stable_row_multiple

#: (in, out) as real and tiny models have them; `in` is a multiple of 4 everywhere
SHAPES = [
    (64, 8),
    (64, 4),
    (64, 128),
    (256, 24),
    (256, 4),
    (128, 257),
    (24, 128),
    (16, 64),
    (64, 16),
    (1024, 24),
    (512, 96),
    (128, 1024),
]


def test_padded_rows() -> None:
    assert [padded_rows(num, 8) for num in (0, 1, 7, 8, 9, 16, 17)] == [8, 8, 8, 8, 16, 16, 24]
    assert [padded_rows(num, 1) for num in (0, 1, 7)] == [1, 1, 7]


@pytest.mark.parametrize(("width_in", "width_out"), SHAPES)
def test_values(width_in: int, width_out: int) -> None:
    generator = torch.Generator().manual_seed(width_in + width_out)
    x, weight = torch.randn(40, width_in, generator=generator), torch.randn(width_out, width_in, generator=generator)
    expected = x.double() @ weight.double().T
    for stored in (weight, prepared(weight)):
        torch.testing.assert_close(linear(x, stored).double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(prepared(weight), weight) and linear(x.bfloat16(), weight).dtype == torch.float32
    torch.testing.assert_close(linear(x.bfloat16(), weight), linear(x.bfloat16().float(), weight), rtol=0, atol=0)


@pytest.mark.parametrize(("width_in", "width_out"), SHAPES)
def test_bits_do_not_depend_on_the_number_of_rows(width_in: int, width_out: int) -> None:
    """With the multiple that start-up finds on this machine, at other counts and places than it tried."""
    multiple = stable_row_multiple([(width_in, width_out)])
    assert multiple is not None
    generator = torch.Generator().manual_seed(width_in * width_out)
    x, weight = torch.randn(304, width_in, generator=generator), prepared(torch.randn(width_out, width_in, generator=generator))
    whole = linear(x, weight)
    for start in (0, 1, 8, 31, 200):
        for count in (1, 2, 3, 4, 6, 7, 11, 16, 25, 37):
            if start + count * multiple <= 304:
                rows = slice(start, start + count * multiple)
                assert torch.equal(linear(x[rows].clone(), weight), whole[rows]), (start, count)


def test_start_up_sees_what_is_not_stable() -> None:
    """Any multiple that it offers holds; where it offers none it says so, and never guesses."""
    for shape in ((33, 4), (15, 6), (6, 9), (40, 6), (64, 10), (7, 300), (640, 24)):
        multiple = stable_row_multiple([shape])
        if multiple is None:
            continue
        generator = torch.Generator().manual_seed(sum(shape))
        x, weight = (
            torch.randn(160, shape[0], generator=generator),
            prepared(torch.randn(shape[1], shape[0], generator=generator)),
        )
        whole = linear(x, weight)
        for count in range(1, 160 // multiple):
            assert torch.equal(linear(x[3 : 3 + count * multiple].clone(), weight), whole[3 : 3 + count * multiple])
