# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
"""The kernel behind `triton.py`."""

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


# where a table of pieces begins depends on what was moved before it: its alignment must not choose a kernel
@triton.jit(do_not_specialize=["num_pieces"], do_not_specialize_on_alignment=["source", "target", "pieces"])
def move(source, target, pieces, num_pieces, WORD: tl.constexpr, SIZE: tl.constexpr):
    """One piece a program. source and target point to words of WORD bytes, SIZE of which are the longest piece."""
    piece = tl.program_id(0)
    first = tl.load(pieces + piece) // WORD
    to = tl.load(pieces + num_pieces + piece) // WORD
    count = tl.load(pieces + 2 * num_pieces + piece) // WORD
    at = tl.arange(0, SIZE)
    words = tl.load(source + first + at, mask=at < count)
    tl.store(target + to + at, words, mask=at < count)
