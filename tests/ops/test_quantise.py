"""Golden values of the reference's section 9, exhaustive round trips, and the promise that a row's bits are its own."""

import math
from fractions import Fraction

import pytest
import torch

from lamina.ops import quantise as q

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NAN, INF = math.nan, math.inf


def e4m3_values() -> torch.Tensor:
    """The 127 finite non-negative e4m3 numbers by code, from the format's definition."""
    values = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        values.append((fraction / 8 if exponent == 0 else 1 + fraction / 8) * 2.0 ** (max(exponent, 1) - 7))
    return torch.tensor(values)


def exact_byte(amax: float, limit: int, floor: float) -> int:
    """e8m0 byte of the smallest power of two s with amax <= limit * s, in exact arithmetic."""
    amax, exponent = max(Fraction(amax), Fraction(floor)), -126
    while amax > limit * Fraction(2) ** exponent:
        exponent += 1
    return exponent + 127


def test_e4m3_reads_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = q.dequantise_fp8(codes, torch.full((4,), 127, dtype=torch.uint8))
    assert torch.equal(values[:127], e4m3_values())
    assert torch.equal(values[128:255], -e4m3_values()) and values[128].signbit()
    assert values[[127, 255]].isnan().all()


def test_e4m3_rounds_to_nearest_even() -> None:
    values = e4m3_values().double()
    middle = ((values[1:] + values[:-1]) / 2).float()  # exact in fp32
    below, above = middle.nextafter(torch.tensor(-INF)), middle.nextafter(torch.tensor(INF))
    low, high = torch.arange(126), torch.arange(1, 127)
    even = torch.where(low % 2 == 0, low, high)
    for probe, expected in ((below, low), (middle, even), (above, high)):
        row = torch.cat([torch.tensor([448.0]), probe, -probe])  # 448 fixes the scale to 1
        codes, scale = q.quantise_fp8_row(row)
        assert scale == 1.0
        assert torch.equal(codes.view(torch.uint8)[1:127].long(), expected)
        assert torch.equal(codes.view(torch.uint8)[127:].long(), expected + 128)


def test_e4m3_round_trip_is_exact() -> None:
    values = torch.cat([e4m3_values(), -e4m3_values()])
    codes, _ = q.quantise_fp8_row(values)
    assert codes.view(torch.uint8).tolist() == [*range(127), *range(128, 255)]


@pytest.mark.parametrize(
    ("amax", "byte"), [(448.0, 127), (449.0, 128), (0.0, 105), (1e-4, 105), (447.9, 127), (896.0, 128), (896.1, 129)]
)
def test_fp8_scale_examples(amax: float, byte: int) -> None:
    x = torch.zeros(3, 64)
    x[1, 17] = -amax
    codes, scales = q.quantise_fp8(x)
    assert scales.tolist() == [[105], [byte], [105]]
    assert scales.dtype == torch.uint8 and codes.dtype == torch.float8_e4m3fn
    _, row_scale = q.quantise_fp8_row(x)
    assert row_scale.tolist() == [2.0**-22, 2.0 ** (byte - 127), 2.0**-22]


def test_scales_are_exact_next_to_every_power_of_two() -> None:
    for limit, floor, quantise in ((448, float(torch.tensor(1e-4)), q.quantise_fp8), (6, 6 * 2.0**-126, q.quantise_fp4)):
        edges = torch.tensor([limit * 2.0**e for e in range(-133, 120)], dtype=torch.float32)
        for amax in (edges, edges.nextafter(torch.tensor(INF)), edges.nextafter(torch.tensor(0.0)), torch.rand(64) * edges[200]):
            x = torch.zeros(len(amax), 2)
            x[:, 1] = amax
            _, scales = quantise(x)
            assert scales.flatten().tolist() == [exact_byte(value, limit, floor) for value in amax.tolist()]


def test_fp4_ties() -> None:
    tie = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for sign in (1.0, -1.0):
        x = sign * torch.tensor([*tie, 6.0])
        packed, scales = q.quantise_fp4(x)
        assert scales.tolist() == [127]
        assert torch.equal(q.dequantise_fp4(packed, scales), sign * torch.tensor([*expected, 6.0]))
        for direction, codes in ((0.0, [0, 1, 2, 3, 4, 5, 6]), (INF, [1, 2, 3, 4, 5, 6, 7])):
            moved = torch.tensor(tie).nextafter(torch.tensor(direction))
            packed, _ = q.quantise_fp4(sign * torch.cat([moved, torch.tensor([6.0])]))
            found = torch.stack([packed & 15, packed >> 4], dim=-1).flatten()[:7]
            assert found.tolist() == [code + (8 if sign < 0 else 0) for code in codes]


def test_fp4_packs_the_even_index_low() -> None:
    packed, scales = q.quantise_fp4(torch.tensor([1.0, -6.0, -0.0, 0.5]))
    assert packed.tolist() == [0x02 | 0xF0, 0x08 | 0x10] and scales.tolist() == [127]
    assert q.dequantise_fp4(packed.view(torch.int8), scales).tolist() == [1.0, -6.0, -0.0, 0.5]


def test_fp4_reads_every_byte_and_round_trips() -> None:
    packed = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    signed = E2M1 + [-value for value in E2M1]
    for byte in (1, 127, 250):
        scales = torch.full((256, 1), byte, dtype=torch.uint8)
        values = q.dequantise_fp4(packed, scales)
        expected = torch.tensor([[signed[b & 15], signed[b >> 4]] for b in range(256)]) * 2.0 ** (byte - 127)
        assert torch.equal(values, expected) and torch.equal(values.signbit(), expected.signbit())
        padded = torch.cat([values, torch.full((256, 2), 6 * 2.0 ** (byte - 127))], dim=-1)
        again, same = q.quantise_fp4(padded)
        assert torch.equal(again[:, :1], packed) and torch.equal(same, scales)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 100, 448])
def test_fp8_partial_blocks(n: int) -> None:
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 10
    codes, scales = q.quantise_fp8(x)
    assert codes.shape == x.shape and scales.shape == (5, -(-n // 64))
    back = q.dequantise_fp8(codes, scales)
    assert torch.equal(back, q.dequantise_fp8(codes.view(torch.uint8), scales))
    for start in range(0, n, 64):
        alone, scale = q.quantise_fp8(x[:, start : start + 64])
        assert torch.equal(back[:, start : start + 64], q.dequantise_fp8(alone, scale))
    assert ((back - x).abs() <= x.abs() / 16 + q.e8m0_to_fp32(scales).repeat_interleave(64, -1)[:, :n] * 2.0**-10).all()


@pytest.mark.parametrize("n", [2, 30, 32, 34, 128])
def test_fp4_partial_blocks(n: int) -> None:
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
    packed, scales = q.quantise_fp4(x)
    assert packed.shape == (5, n // 2) and scales.shape == (5, -(-n // 32))
    step = q.e8m0_to_fp32(scales).repeat_interleave(32, -1)[:, :n]
    assert ((q.dequantise_fp4(packed, scales) - x).abs() <= torch.maximum(x.abs() / 4, step / 4)).all()


def test_zero_and_subnormal_inputs() -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-40] * 16)
    codes, scales = q.quantise_fp8(x)
    assert scales.tolist() == [105] and codes.view(torch.uint8)[:4].tolist() == [0, 128, 0, 128]
    packed, scales = q.quantise_fp4(x)
    assert scales.tolist() == [1, 1] and packed[:2].tolist() == [0x80, 0x80]
    assert q.dequantise_fp4(packed, scales)[1].signbit()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_values_poison_their_block_only(bad: float) -> None:
    x = torch.ones(2, 128)
    x[1, 70] = bad
    codes, scales = q.quantise_fp8(x)
    assert scales[1].tolist() == [119, 255] and codes.view(torch.uint8)[1, 64:].eq(0).all()
    assert q.dequantise_fp8(codes, scales).isnan().sum() == 64
    codes, scale = q.quantise_fp8_row(x)
    assert scale[0] == 2.0**-8 and scale[1].isnan() and q.dequantise_fp8_row(codes, scale).isnan().sum() == 128
    packed, scales = q.quantise_fp4(x)
    assert scales[1].tolist() == [125, 125, 255, 125] and packed[1, 32:48].eq(0).all()
    assert q.dequantise_fp4(packed, scales).isnan().sum() == 32


def test_a_nan_is_one_however_its_block_lies_in_memory() -> None:
    """PyTorch's largest of columns that lie side by side, as after a Hadamard product, is a NaN with a sign."""
    x = torch.ones(32, 75).T
    x[11, 5] = NAN
    assert q.quantise_fp8_row(x)[1].isnan().nonzero().tolist() == [[11]]
    assert q.quantise_fp4(x)[1][11].tolist() == q.quantise_fp8(x)[1][11].tolist() == [255]


def test_the_largest_numbers() -> None:
    for quantise, dequantise in ((q.quantise_fp8, q.dequantise_fp8), (q.quantise_fp4, q.dequantise_fp4)):
        assert dequantise(*quantise(torch.full((1, 64), 3.0 * 2.0**126))).eq(3.0 * 2.0**126).all()
        assert dequantise(*quantise(torch.full((1, 64), torch.finfo(torch.float32).max))).isinf().all()  # rounds up to 2^128


def cases(n: int) -> dict[str, torch.Tensor]:
    x = torch.randn(37, n, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 30, 37).unsqueeze(-1)
    return {
        "rows": x,
        "none": x[:0],
        "strided": torch.stack([x, -x], dim=-1).flatten(-2)[:, ::2],
        "transposed": x.t().contiguous().t(),
    }


CODECS = ["quantise_fp8", "quantise_fp8_row", "quantise_fp4"]
# a Hadamard matrix has a power of two rows
COMPANY = [(name, n) for name in CODECS for n in (64, 96, 128)] + [("hadamard", n) for n in (64, 128)]


@pytest.mark.parametrize(("name", "n"), COMPANY)
def test_rows_do_not_depend_on_their_company(name: str, n: int) -> None:
    one = {"quantise_fp8": q.quantise_fp8, "quantise_fp8_row": q.quantise_fp8_row, "quantise_fp4": q.quantise_fp4}.get(
        name, lambda x: (q.hadamard(x),)
    )
    everything = cases(n)
    whole = [part.contiguous().view(torch.uint8) for part in one(everything["rows"])]
    for kind, x in everything.items():
        before = x.clone()
        parts = [part.contiguous().view(torch.uint8) for part in one(x)]
        assert torch.equal(x, before), kind
        assert all(torch.equal(part, expected[: len(part)]) for part, expected in zip(parts, whole, strict=True)), kind
    for start, stop in ((0, 1), (5, 6), (3, 20), (36, 37)):
        parts = [part.contiguous().view(torch.uint8) for part in one(everything["rows"][start:stop])]
        if name == "quantise_fp8_row":
            parts, expected = [parts[0], parts[1].view(-1, 4)], [whole[0], whole[1].view(-1, 4)]
        else:
            expected = whole
        assert all(torch.equal(part, full[start:stop]) for part, full in zip(parts, expected, strict=True))


@pytest.mark.parametrize("n", [1, 2, 16, 64, 128])
def test_hadamard_is_the_sylvester_matrix(n: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(3, 5, n, generator=torch.Generator().manual_seed(0))
    y = q.hadamard(x)
    assert y.shape == x.shape and torch.allclose(y.double(), x.double() @ matrix * n**-0.5, atol=1e-6)
    assert torch.allclose(q.hadamard(y), x, atol=1e-6)
    row = x[0, :1].clone()
    q.hadamard(row)
    assert torch.equal(row, x[0, :1])


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 7), (300, 200)])
def test_fp8_weights(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    codes, scales = q.quantise_fp8_weight(w)
    assert codes.shape == shape and scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = q.dequantise_fp8_weight(codes, scales)
    assert torch.equal(back, q.dequantise_fp8_weight(codes, scales.view(torch.float8_e8m0fnu)))
    assert torch.equal(back, q.dequantise_fp8_weight(codes, q.e8m0_to_fp32(scales)))
    for o in range(scales.shape[0]):
        for i in range(scales.shape[1]):
            square = w[o * 128 : o * 128 + 128, i * 128 : i * 128 + 128]
            assert scales[o, i] == exact_byte(float(square.abs().max()), 448, 1e-4)
            assert torch.equal(
                back[o * 128 : o * 128 + 128, i * 128 : i * 128 + 128], q.dequantise_fp8_weight(*q.quantise_fp8_weight(square))
            )
    assert ((back - w).abs() <= w.abs() / 16 + 2.0**-10 * q.e8m0_to_fp32(scales).max()).all()
    assert torch.equal(q.dequantise_fp8_weight(*q.quantise_fp8_weight(back)), back)


def test_fp4_weights() -> None:
    w = torch.randn(6, 96, generator=torch.Generator().manual_seed(4))
    packed, scales = q.quantise_fp4_weight(w)
    assert packed.shape == (6, 48) and scales.shape == (6, 3)
    back = q.dequantise_fp4_weight(packed.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    assert torch.equal(back, q.dequantise_fp4_weight(packed, scales))
    assert ((back - w).abs() <= w.abs() / 4 + 0.25 * q.e8m0_to_fp32(scales).repeat_interleave(32, 1)).all()


def test_half_precision_input_is_widened() -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    for part, same in zip(q.quantise_fp8(x), q.quantise_fp8(x.float()), strict=True):
        assert torch.equal(part.view(torch.uint8), same.view(torch.uint8))


def test_what_is_refused() -> None:
    ones, byte = torch.ones(2, 64), torch.full((2, 1), 127, dtype=torch.uint8)
    for call in (
        lambda: q.quantise_fp4(torch.ones(2, 3)),
        lambda: q.quantise_fp4(torch.ones(2, 0)),
        lambda: q.quantise_fp8(torch.ones(2, 0)),
        lambda: q.quantise_fp8_row(torch.ones(2, 0)),
        lambda: q.quantise_fp8(torch.tensor(1.0)),
        lambda: q.quantise_fp8_row(torch.tensor(1.0)),
        lambda: q.quantise_fp8(ones, block=0),
        lambda: q.quantise_fp8(torch.ones(2, 64, dtype=torch.int32)),
        lambda: q.quantise_fp8(ones.to(torch.float8_e4m3fn)),
        lambda: q.dequantise_fp8(ones, byte),
        lambda: q.dequantise_fp8(ones.to(torch.float8_e4m3fn), byte[:, :0]),
        lambda: q.dequantise_fp8(ones.to(torch.float8_e4m3fn), byte.to(torch.int32)),
        lambda: q.dequantise_fp8_row(ones.to(torch.float8_e4m3fn), byte),
        lambda: q.dequantise_fp4(ones, byte),
        lambda: q.quantise_fp4_weight(torch.ones(2, 48)),
        lambda: q.quantise_fp8_weight(torch.ones(2)),
        lambda: q.dequantise_fp8_weight(ones.to(torch.float8_e4m3fn), byte),
        lambda: q.hadamard(torch.ones(2, 96)),
        lambda: q.hadamard(torch.ones(2, 0)),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            call()
