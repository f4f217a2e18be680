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
    generator = torch.Generator().manual_seed(width_in * width_out)
    x, weight = torch.randn(304, width_in, generator=generator), prepared(torch.randn(width_out, width_in, generator=generator))
    whole = linear(x, weight)
    multiple = stable_row_multiple([(width_in, width_out)])
    assert multiple is not None
    for start in (0, 1, 8, 31, 200):
        for count in (multiple, 3 * multiple, 32, 64, 96):
            if start + count <= 304:
                assert torch.equal(linear(x[start : start + count].clone(), weight), whole[start : start + count]), (start, count)


def test_no_multiple_is_promised_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose bits depend on the count of rows unless it is a multiple of 16 is found out."""
    exact = torch.nn.functional.linear

    def moody(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return exact(x, weight) * (1.0 if x.shape[0] % 16 == 0 else 1.0000001)

    monkeypatch.setattr("lamina.ops.gemm.ref.F.linear", moody)
    assert stable_row_multiple([(64, 32)]) == 16
