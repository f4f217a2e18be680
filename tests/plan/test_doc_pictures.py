"""The pictures of docs/: what is committed is what the code draws now, to scale, and its numbers follow by hand."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from lamina.plan.svg import Picture

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
NAMES = ("kinds", "places", "life", "hit", "large_window", "eviction")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/memory_pictures.py"""
    spec = importlib.util.spec_from_file_location("lamina_tools_memory_pictures", ROOT / "tools" / "memory_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(tool: ModuleType) -> dict[str, str]:
    return {name: draw().text for name, draw in tool.PICTURES.items()}


def words_of(text: str) -> list[str]:
    """The lines of text that a picture shows."""
    return [element.text or "" for element in ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_the_committed_pictures_are_those_that_the_code_draws(drawn: dict[str, str]) -> None:
    assert tuple(drawn) == NAMES
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{name}.svg" for name in NAMES)
    for name, text in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == text, f"{name}.svg is out of date: make pictures"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_a_file_of_its_own(drawn: dict[str, str], name: str) -> None:
    root = ElementTree.fromstring(drawn[name])
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title") is not None and root.find(f"{SVG}desc") is not None
    assert not re.search(r"(?:href|src)=|url\((?!#nothing)|@import", drawn[name])
    assert "prefers-color-scheme:dark" in drawn[name]
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for text in root.iter(f"{SVG}text"):  # nothing is written outside: about 6.7 pixels a character at the common size
        x, y, length = float(text.get("x", "0")), float(text.get("y", "0")), 6.7 * len(text.text or "")
        left = x - {None: 0.0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert left >= 0 and y <= height and left + length <= width * 1.02, text.text


def test_places_are_to_scale(drawn: dict[str, str]) -> None:
    root = ElementTree.fromstring(drawn["places"])
    maps = [group for group in root.iter(f"{SVG}g") if group.get("class") == "map"]
    totals = []
    for group in maps:
        sizes = [(float(box.get("width", "0")), int(box.get("data-bytes", "0"))) for box in group.iter(f"{SVG}rect")]
        scale = sum(nbytes for _, nbytes in sizes) / sum(width for width, _ in sizes)
        for width, nbytes in sizes:
            assert width == pytest.approx(nbytes / scale, abs=0.02)
        totals.append(sum(nbytes for _, nbytes in sizes))
    # Flash's page: 21 layers of c4 and index, 64 x (584 + 68) B; 20 layers of c128, 2 rows of 448 + 128 B and, with alignment,
    # 128 B of scales: 21 x 41,728 + 20 x 1,280 = 901,888 B. The slot has 5 of them, a checkpoint at 1,000 tokens 4.
    page = 21 * 64 * (584 + 68) + 20 * (896 + 256 + 128)
    assert page == 901_888
    assert totals == [page, 5 * page, 4 * page]


def test_a_blocks_share_is_its_share_of_the_page(drawn: dict[str, str]) -> None:
    # c4: 21 x 64 x 584 B = 766.5 KiB; index: 21 x 64 x 68 B = 89.25 KiB; c128: 20 x 2 x 584 B = 22.81 KiB
    said = " ".join(words_of(drawn["places"]))
    assert "c4 766.50 KiB" in said and "index 89.25 KiB" in said and "c128 22.81 KiB" in said


def test_the_numbers_of_the_kinds(drawn: dict[str, str]) -> None:
    # 18 tokens: floor(18 / 4) = 4 entries of 584 B; min(18, 8 - 1) = 7 rows of 584 B; the open group and its carry, 2 x 6,144 B
    # (1,536 fp32 each); a state of 64 x 128 fp32
    assert {"2,336", "4 x 584", "4,088", "7 x 584", "12,288", "6,144 + 6,144", "32,768"} <= set(words_of(drawn["kinds"]))


def test_the_numbers_of_a_life(drawn: dict[str, str]) -> None:
    # 600 tokens: 2 full blocks of 256 and an open one; 772 = 600 + 172 tokens: 3 full and an open one. 772 is a multiple of 4,
    # so a checkpoint there has 4 pages (see docs/memory.md), one less than the slot.
    said = words_of(drawn["life"])
    for line in ("5 slot pages", "3 blocks in use", "4 blocks in use", "772 tokens in", "4 blocks, 3 of", "place: 4 pages of 5;"):
        assert line in said
    counts = re.findall(r'class="(m\d|edge)" x="[\d.]+" y="(?:120|142|164|186)"', drawn["life"])
    assert len(counts) == 6 * 16  # every page of the pool is one square, at each of the six moments


def test_the_numbers_of_the_hits(drawn: dict[str, str]) -> None:
    # 7,000 shared tokens: 27 full blocks = 6,912. Replay needs 43 x 127 = 5,461 tokens before that: 1,451, and starts at the
    # multiple of 128 below, 1,408. The third request finds the checkpoint that the second left at 7,000.
    said = words_of(drawn["hit"])
    assert "27 blocks: 6,912" in said and "start at 1,408" in said and "checkpoint at 7,000" in said
    assert "1,408 reused, 5,504 replayed, 688 computed" in said
    assert "8,000 reused, 0 replayed, 400 computed" in said and "7,000 reused, 0 replayed, 600 computed" in said


def test_the_numbers_of_a_large_window(drawn: dict[str, str]) -> None:
    # 52 windows of 1,024 tokens, keys and values of 16 heads x 128 in bf16 = 8,192 B a token and layer. A block of 32 tokens:
    # 52 x 32 x 8,192 B = 13 MiB, in 11 pages of 1.25 MiB = 13.75 MiB. At token 2,100 tokens 1,077 to 2,099 are live: blocks
    # 33 (from 1,056) to 65 (to 2,112), 33 of them.
    said = words_of(drawn["large_window"])
    assert "52 layers together, 11 pages of 1.25 MiB a block (13.75 MiB), token 2,100" in said
    assert "33 blocks, 363 pages, 453.75 MiB for 1,023 live tokens" in said and "left edge 1,077" in said
    # block 33 is needed until token 1,087 has left the window: 1,088 + 1,023
    assert "The oldest block goes when token 2,111 has been seen." in said


def test_everything_is_evicted_once_and_leaves_first(tool: ModuleType, drawn: dict[str, str]) -> None:
    numbers = [int(word) for word in words_of(drawn["eviction"]) if word.isdigit()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    blocks = tool.SYSTEM // 256
    shared = numbers[:blocks]
    assert shared == sorted(shared, reverse=True)  # the path of the system prompt goes from its end
    one_off = numbers[-3:]  # 700 tokens: two full blocks and a checkpoint
    assert max(one_off) < min(numbers[: blocks + 1])  # what nobody repeats goes before what four chats share


def test_a_picture_escapes_its_words() -> None:
    picture = Picture(100, "<t>", "a & b")
    picture.words_at(0, 10, "</text><script>")
    root = ElementTree.fromstring(picture.text)
    assert [element.text for element in root.iter(f"{SVG}text")] == ["</text><script>"]
