# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""Number formats inside Triton kernels, bit for bit as `ref.py` defines them, by integer arithmetic: no fp8 unit is needed,
and Triton's interpreter, which rounds some casts wrongly, gives the same bits.

Codes are uint8 everywhere; kernels that feed e4m3 to tensor cores reinterpret them.
"""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def round_bf16(x):
    """fp32 rounded to the nearest bf16, ties to even, held in fp32. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    even = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + even) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def rounded(x, IS_BF16: tl.constexpr):
    """fp32 with the precision of the model's activations, held in fp32."""
    if IS_BF16:
        x = round_bf16(x)
    return x


@triton.jit
def largest_bits(x, AXIS: tl.constexpr):
    """The bits of the largest |x| along an axis; of an infinity or a NaN if there is one."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def fp8_scale_byte(bits):
    """e8m0 byte (int32) of the smallest 2^e with amax <= 448 * 2^e, from the bits of amax (floor 1e-4); 255 for inf and NaN."""
    bits = tl.maximum(bits, 0x38D1B717)
    exponent = bits >> 23
    byte = exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(exponent == 255, 255, byte)


@triton.jit
def fp4_scale_byte(bits):
    """The same for 6 * 2^e (floor 6 * 2^-126)."""
    bits = tl.maximum(bits, 0x01C00000)
    exponent = bits >> 23
    byte = exponent - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    return tl.where(exponent == 255, 255, byte)


@triton.jit
def power(byte):
    """fp32 2^(byte - 127) of int32 bytes 0..254; NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(byte):
    """fp32 2^(127 - byte), exact, of int32 bytes 1..253; NaN for 255."""
    return tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_e4m3(x):
    """Codes (uint8) of values already scaled; beyond 448 saturates, NaN gives 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # rounds to multiples of 2^-9
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(x == x, code, 0).to(tl.uint8)


@triton.jit
def e4m3_to_fp32(code):
    """Values of codes (uint8)."""
    wide = code.to(tl.int32)
    size = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return (size.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_e2m1(x):
    """Codes 0..15 (int32) of values already scaled, |x| <= 6; NaN gives 0. As `ref.py`: the lowest of three rounded lines."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.where(x == x, (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 0.0)
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer
    first = (2.0 * size + magic) - magic
    second = (size + magic) - magic + 2.0
    third = (0.5 * size + magic) - magic + 4.0
    code = tl.minimum(first, tl.minimum(second, third)).to(tl.int32)
    return tl.where(x == x, code | ((bits >> 28) & 8), 0)


@triton.jit
def e2m1_to_fp32(code):
    """Values of codes 0..15 (int32)."""
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (size.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def quantise_e4m3(x, AXIS: tl.constexpr):
    """x [..., n] fp32 -> (codes uint8 of the same shape, scale bytes int32 [...]): one scale along the last axis, AXIS."""
    byte = fp8_scale_byte(largest_bits(x, AXIS))
    return fp32_to_e4m3(x * tl.expand_dims(inverse_power(byte), AXIS)), byte
