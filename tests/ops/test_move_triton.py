"""Moving pieces of memory by a kernel against the definition: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.memory.kinds import Field, Snapshot
from lamina.memory.layout import make_layout
from lamina.memory.orders import CopyPage, SaveSlot
from lamina.ops.machine import Machine
from lamina.ops.move import PIECE_BYTES, WORDS, word_of
from lamina.ops.move import move as definition
from lamina.runtime.copies import CopyPlanner, run_waves, warm_up
from tests.ops.kernel_tests import (
    DEVICE,
    HAS_GPU,
    compiles_kernels,
    machine_code,
    only_compiling,
    runs_kernels,
    starts_interpreter,
)

from lamina.ops.move import kernels  # isort: skip
from lamina.ops.move.triton import move, refuses  # isort: skip
from lamina.ops.triton import watch  # isort: skip

GiB = 1 << 30


def pieces_of(word: int, num: int, size: int, seed: int) -> Tensor:
    """Pieces at random places of `size` bytes, none written twice: empty ones, short ones, one of the greatest length."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (num,), generator=draw) * word
    lengths[0], lengths[-1] = PIECE_BYTES, 0
    gaps = torch.randint(0, 3, (num,), generator=draw) * word
    ends = torch.cumsum(lengths + gaps, 0)
    order = torch.randperm(num, generator=draw)
    first = torch.randint(0, (size - PIECE_BYTES) // word, (num,), generator=draw) * word
    return torch.stack([first, ends - lengths, lengths])[:, order].contiguous()


@runs_kernels
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("num", [1, 2, 37])
def test_the_definition(word: int, num: int) -> None:
    size = 1 << 16
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num))
    pieces = pieces_of(word, num, size, seed=10 * num + word)
    expected = torch.full((size,), 77, dtype=torch.uint8)
    definition(source, expected, pieces, word)
    found = torch.full((size,), 77, dtype=torch.uint8, device=DEVICE)
    move(source.to(DEVICE), found, pieces.to(DEVICE), word)
    assert torch.equal(found.cpu(), expected)


@runs_kernels
def test_nothing_and_within_one_memory() -> None:
    memory = torch.arange(4096, dtype=torch.int32, device=DEVICE).to(torch.uint8)
    expected = memory.clone()
    move(memory, memory, torch.zeros(3, 0, dtype=torch.int64, device=DEVICE), 8)
    assert torch.equal(memory, expected)
    move(memory, memory, torch.tensor([[0, 8], [2048, 4088], [64, 8]], device=DEVICE), 8)
    expected[2048:2112], expected[4088:] = expected[:64].clone(), expected[8:16].clone()
    assert torch.equal(memory, expected)


@pytest.mark.skipif(not HAS_GPU, reason="takes 5 GiB")
def test_beyond_four_gibibytes() -> None:
    memory = torch.zeros(5 * GiB, dtype=torch.uint8, device=DEVICE)
    memory[3 * GiB : 3 * GiB + 256] = 7
    move(memory, memory, torch.tensor([[3 * GiB], [5 * GiB - 256], [256]], device=DEVICE), 8)
    assert bool((memory[-256:] == 7).all()) and int(memory.count_nonzero()) == 512


def test_words() -> None:
    assert [word_of(number) for number in (0, 8, 24, 12, 6, 7)] == [8, 8, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("shape", "dtype", "word", "text"),
    [((2, 5), torch.int64, 8, r"\[3, N\]"), ((3, 5), torch.int32, 8, "int64"), ((3, 5), torch.int64, 3, "word_bytes=3")],
)
def test_wrong_calls_say_why(shape: tuple[int, int], dtype: torch.dtype, word: int, text: str) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=text):
        definition(memory, memory, torch.zeros(shape, dtype=dtype), word)
    with pytest.raises(ValueError, match="source"):
        definition(memory.view(8, 8), memory, torch.zeros(3, 1, dtype=torch.int64), 8)


@compiles_kernels
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code(capability: int) -> None:
    """Eight bytes a load, nothing kept in the thread's memory, addresses of 64 bits."""
    kinds = {"source": "*i64", "target": "*i64", "pieces": "*i64", "num_pieces": "i32"}
    code = machine_code(kernels.move, kinds, {"WORD": 8, "SIZE": PIECE_BYTES // 8}, capability)
    assert code.spills == 0 and code.count("LDG.E.64") + code.count("LDG.E.128") >= 8


@starts_interpreter
def test_nothing_compiles_after_the_warm_up() -> None:
    """Whatever the word, the number of pieces and the alignment of their table; a slot saved where it lies among the orders."""
    layout = make_layout([Snapshot("state", 0, (Field("s", "fp32", (9001,)),))], Field("hidden", "fp32", (32,)), 8)
    memory = torch.zeros(40 * layout.page_bytes, dtype=torch.uint8)
    with only_compiling(90), watch() as seen:
        warm_up(memory, move)
        assert len(seen) == len(WORDS)
        table = torch.zeros(3 * 64 + 2, dtype=torch.int64)
        for word in WORDS:
            for num in (1, 2, 3, 16, 17, 64):
                for first in (0, 1, 2):
                    move(memory, torch.empty(40, dtype=torch.uint8), table[first : first + 3 * num].view(3, num), word)
        pages = tuple(range(layout.slot_pages))
        for count in range(1, 4):
            orders = [SaveSlot(pages, pages[: layout.checkpoint_pages(5)], 5), *[CopyPage(30 + n, 33 + n) for n in range(count)]]
            run_waves(memory, CopyPlanner(layout).waves(orders), move)
        assert len(seen) == len(WORDS)


@compiles_kernels
def test_refusals() -> None:
    assert refuses(Machine("cuda", (8, 0), True)) is None
    assert "not on cpu" in (refuses(Machine("cpu", (0, 0), True)) or "")


@starts_interpreter
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted(__file__)
