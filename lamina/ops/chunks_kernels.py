# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""What Triton kernels of ops that take in sequences chunk by chunk share. `chunks.py` says what a chunk is."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from lamina.ops.quantise.kernels import round_bf16
from lamina.ops.rope_norm.kernels import INTERPRETED

#: requests whose chunks are counted at a time
_COUNTED = tl.constexpr(64)


@triton.jit
def operand(x, EXACT: tl.constexpr):
    """As products take it: fp32 if EXACT, else bf16, which the interpreter holds in fp32."""
    x = x.to(tl.float32)
    if not EXACT:
        x = round_bf16(x) if INTERPRETED else x.to(tl.bfloat16)
    return x


@triton.jit
def chunk_of(number, starts, stops, first_rows, num_requests, CHUNK: tl.constexpr):
    """(request, rows, first row) of chunk `number` of all requests' chunks one after another.

    Request -1 past the last.
    """
    request, chunk, seen = -1, 0, 0
    for base in range(0, num_requests, _COUNTED):
        each = base + tl.arange(0, _COUNTED)
        is_one = each < num_requests
        start = tl.load(starts + each, mask=is_one, other=0)
        stop = tl.load(stops + each, mask=is_one, other=0)
        chunks = tl.where(stop > start, (stop + CHUNK - 1) // CHUNK - start // CHUNK, 0)
        before = seen + tl.cumsum(chunks, 0) - chunks
        is_here = (number >= before) & (number < before + chunks)
        request = tl.maximum(request, tl.max(tl.where(is_here, each, -1), 0))
        chunk = tl.maximum(chunk, tl.max(tl.where(is_here, start // CHUNK + number - before, 0), 0))
        seen += tl.sum(chunks, 0)
    known = tl.maximum(request, 0)
    start = tl.load(starts + known)
    first = tl.maximum(start, chunk * CHUNK)
    count = tl.minimum(tl.load(stops + known), (chunk + 1) * CHUNK) - first
    return request, count, (tl.load(first_rows + known) + first - start).to(tl.int64)
