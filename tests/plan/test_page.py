"""`lamina plan --html`: the drawing is to scale, the charts have the layout's numbers, and a browser shows all of it offline."""

import importlib
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lamina.base.errors import ConfigError
from lamina.base.sizes import GiB
from lamina.memory.kinds import EntryFormat, Field, Log, Window
from lamina.memory.layout import Layout, make_layout
from lamina.plan import charts, drawing, page
from lamina.plan.page_maps import map_json, shown_maps
from lamina.plan.palette import FILLS, colours_of
from lamina.plan.records import Plan, PlanOptions
from lamina.plan.source import open_source

CONFIGS = Path(__file__).parents[1] / "configs"
#: compressed attention with folds; large windows in pages of their own; states and short windows
MODELS = ("deepseek-v4-pro", "gemma-3-27b", "jamba-1.5-mini")
HOSTILE = 'x</script><script>console.error("ran")</script><b id="pwned">&amp;%{x}'


@pytest.fixture(scope="module")
def browser() -> ModuleType:
    """tests/plan/browser.py"""
    spec = importlib.util.spec_from_file_location("lamina_tests_plan_browser", Path(__file__).with_name("browser.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan_of(name: str, **options: object) -> Plan:
    return open_source(CONFIGS / f"{name}.json").plan(replace(PlanOptions(cache_bytes=20 * GiB), **options))


def small_layout() -> Layout:
    """One log and one window, sizes that are easy to follow.

    A block of 16 tokens: 16 x 100 B = 1,600 B, up to the next multiple of 128: 1,664 B = a page.
    The slot: 5 rows of 60 B = 300 B (384 with alignment) and 4 fp32 = 16 B of hidden: one page.
    """
    entry, row = EntryFormat("e", (Field("x", "u8", (100,)),)), EntryFormat("r", (Field("y", "u8", (60,)),))
    return make_layout([Log("kv", 0, entry, 1), Window("window", 0, row, 5)], Field("hidden", "fp32", (4,)), block_tokens=16)


# Drawing -------------------------------------------------------------------------------------------------------------


def test_regions_of_a_small_page() -> None:
    layout = small_layout()
    found = drawing.regions(layout.block_spans, layout.page_bytes, 1)
    assert [(r.offset, r.nbytes, r.name) for r in found] == [(0, 1600, "layer 0 kv x"), (1600, 64, "unused end of the page")]
    slot = drawing.regions(layout.slot_spans, layout.page_bytes, 1)
    # window 300 B, alignment to 384, hidden 16 B, the rest of 1,664
    assert [(r.offset, r.nbytes, r.name) for r in slot] == [
        (0, 300, "layer 0 window y"), (300, 84, "alignment"), (384, 16, "hidden"), (400, 1264, "unused end of the page"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_is_drawn_once_and_to_scale(name: str) -> None:
    plan = plan_of(name)
    for shown in shown_maps(plan.layout, plan.description.max_positions):
        drawn = shown.drawn
        ends = 0
        for region, start in zip(drawn.regions, drawn.starts(), strict=True):
            assert start == ends
            ends += region.nbytes
        assert ends == drawn.page_bytes * drawn.num_pages
        by_line: dict[int, int] = {}
        for piece in drawing.pieces(drawn):
            assert piece.width * drawn.bytes_per_pixel == pytest.approx(piece.nbytes, abs=1e-6)
            assert piece.x * drawn.bytes_per_pixel == pytest.approx(by_line.get(piece.line, 0), abs=1e-3)  # no gap, no overlap
            by_line[piece.line] = by_line.get(piece.line, 0) + piece.nbytes
        assert [by_line[n] for n in range(len(drawn.lines))] == [stop - first for first, stop in drawn.lines]


def test_rectangles_of_the_svg_are_as_wide_as_their_bytes() -> None:
    plan = plan_of("deepseek-v4-pro")
    drawn = shown_maps(plan.layout, plan.description.max_positions)[0].drawn
    text = drawing.svg(drawn, colours_of(charts.memory_names(plan.layout)), "block")
    rects = [(float(w), int(n)) for w, n in re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*data-bytes="(\d+)"', text)]
    assert sum(nbytes for _, nbytes in rects) == plan.page_bytes
    for width, nbytes in rects:
        assert width == pytest.approx(nbytes / drawn.bytes_per_pixel, abs=0.006)


def test_thousands_of_thin_arrays_are_drawn_together_and_stay_findable() -> None:
    fields = tuple(Field(f"f{n}", "u8", (1,)) for n in range(40))
    layout = make_layout([Log("kv", layer, EntryFormat("e", fields), 1) for layer in range(100)], None, block_tokens=16)
    shown = shown_maps(layout, 1 << 20)[0].drawn
    assert len(shown.regions) == 2 * 100 * 40  # each array of 16 B, and 112 B of alignment after it
    pieces = list(drawing.pieces(shown))
    # 4,000 arrays of 128 B with alignment = 512,000 B in 16 lines or less: a pixel is about 31 B, an array 4 pixels
    assert len(pieces) < 2 * len(shown.regions)
    wide = drawing.make_map("x", layout.block_spans, layout.page_bytes, 1, max_lines=1, line_height=12)
    coarse = list(drawing.pieces(wide))
    assert len(coarse) < wide.width  # in one line, several arrays share a pixel
    assert sum(piece.nbytes for piece in coarse) == layout.page_bytes
    assert len(json.loads(map_json(wide))["regions"]) == len(wide.regions)


# Charts --------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_request_by_hand() -> None:
    # 100 tokens: 7 blocks (ceil 100 / 16) and a slot = 8 pages x 1,664 = 13,312 B. Live: 100 entries x 100 B, the last 4 rows
    # of the window (size - 1) x 60 B, hidden 16 B.
    expected = {"kv": 10_000, "window": 240, "hidden": 16, charts.UNUSED: 13_312 - 10_256}
    assert charts.request_bytes(small_layout(), 100) == expected


def test_shares_and_totals_of_the_stack_by_hand() -> None:
    layout = small_layout()
    figure = charts.stacked(layout, (100,), colours_of(charts.memory_names(layout)))
    bars = {(bar["name"], bar.get("yaxis", "y")): bar["y"] for bar in figure["data"] if bar["type"] == "bar"}
    assert bars["kv", "y"] == [pytest.approx(10_000 / 1024, abs=1e-6)]  # KiB
    assert bars["kv", "y2"] == [pytest.approx(100 * 10_000 / 13_312, abs=1e-4)]
    assert sum(y[0] for (_, axis), y in bars.items() if axis == "y2") == pytest.approx(100)
    (text,) = [trace["text"] for trace in figure["data"] if trace["type"] == "scatter"]
    assert text == ["13.00 KiB"]


def test_capacity_and_waste_by_hand() -> None:
    layout = small_layout()
    # 256 tokens: 16 blocks and a slot = 17 pages; 1,000 pages hold 58 of them, and with a page more each 55; two replicas
    figure = charts.capacity(layout, (256,), 1000, 2, 1, None)
    assert [trace["y"] for trace in figure["data"]] == [[116], [110]]
    # 17 pages x 1,664 = 28,288 B; live 25,600 + 240 + 16
    assert charts.waste_of(layout, 256) == pytest.approx(1 - 25_856 / 28_288)
    (inside, *_) = charts.waste_lengths(layout, 4096)
    assert inside == (257, 258, 260, 262, 264, 266, 268, 270, 272)  # the block after 256 tokens, in eighths
    band = charts.waste(layout, [inside], None)["data"]
    high, low, mean = (trace["y"][0] for trace in band)
    # one token in the 17th block: 18 pages hold 25,700 + 256 B; all 16 of it: 27,200 + 256 B
    assert high == pytest.approx(100 * (1 - 25_956 / 29_952), abs=1e-3) and low == pytest.approx(
        100 * (1 - 27_456 / 29_952), abs=1e-3
    )
    assert low < mean < high


def test_colours_of_different_memories_differ_until_there_are_too_many() -> None:
    names = [f"m{n}" for n in range(len(FILLS))]
    assert len({colours_of(names).fill(name) for name in names}) == len(FILLS)
    assert colours_of([*names, "more"]).fill("more") == FILLS[-1]


# The file ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_page_holds_everything_in_one_file(name: str, tmp_path: Path) -> None:
    plan = replace(plan_of(name), model=HOSTILE)
    path = tmp_path / "plan.html"
    page.write_page(plan, path, "vllm")
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 6_000_000
    assert text.count("plotly.js v") == 1
    assert "<script>console.error" not in text and "</script><b" not in text
    assert text.count("&lt;/script&gt;") >= 2  # title and heading
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', outside)
    for line in plan.memories:
        assert f"{line.name}</td>" in outside
    assert re.search(r"http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'", text)


@pytest.mark.parametrize("longest", [64, 300, 5000])
def test_models_with_short_contexts_have_a_page_too(longest: int, tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "llama-3.1-8b.json").read_text()) | {"max_position_embeddings": longest}
    (tmp_path / "config.json").write_text(json.dumps(values))
    plan = open_source(tmp_path).plan(PlanOptions())
    assert charts.bar_lengths(longest)[-1] == charts.curve_lengths(longest)[-1] == longest
    assert all(
        1 <= length <= max(longest, plan.block_tokens)
        for inside in charts.waste_lengths(plan.layout, longest)
        for length in inside
    )
    text = page.page_html(plan, "sglang")
    assert "taken as an example because no GPU was named" in text and f"{longest:,}" in text


def test_without_figures_of_the_rival_the_page_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.plan import page_rivals
    from lamina.plan.kept import NotModelled

    monkeypatch.setattr(page_rivals, "rival_of", lambda plan, engine: (NotModelled("its rule for <this> is not known"), ()))
    text = page.page_html(plan_of("jamba-1.5-mini"), "vllm")
    assert "is not shown: its rule for &lt;this&gt; is not known." in text
    assert 'id="rival"' not in text


def test_an_unknown_rival_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="against='nobody'"):
        page.write_page(plan_of("jamba-1.5-mini"), tmp_path / "plan.html", "nobody")
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(ConfigError, match=r"plotly is not installed.*lamina\[plot\]") as caught:
        page.write_page(plan_of("jamba-1.5-mini"), tmp_path / "plan.html", None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "page_html", lambda plan, rival: "new")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "replace", fail)
        page.write_page(plan_of("jamba-1.5-mini"), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    page.write_page(plan_of("jamba-1.5-mini"), path)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~page._umask()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in a directory that exists"):
        page.write_page(plan_of("jamba-1.5-mini"), tmp_path / "no" / "plan.html")


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="a regular one"):
            page.write_page(plan_of("jamba-1.5-mini"), place)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_a_link_keeps_pointing_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("old")
    (tmp_path / "link.html").symlink_to("there.html")
    page.write_page(plan_of("jamba-1.5-mini"), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "there.html").read_text().startswith("<!DOCTYPE html>")


# In a browser --------------------------------------------------------------------------------------------------------

#: opens every table, asks the first map for its last array with a key, and points at the middle of its first line
_USE = """
document.querySelectorAll("details").forEach((one) => { one.open = true; });
document.querySelectorAll("details").forEach((one) => { one.dispatchEvent(new Event("toggle")); });
const map = document.querySelector("svg.map");
map.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
const last = document.getElementById(map.id + "-readout").textContent;
map.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
const before = document.getElementById(map.id + "-readout").textContent;
const first = map.querySelector("rect[data-bytes]").getBoundingClientRect();
map.dispatchEvent(new PointerEvent("pointermove", { clientX: first.left + first.width / 2, clientY: first.top + 4 }));
document.body.setAttribute("data-said", [last, before, document.querySelector(".tip").textContent].join(" | "));
"""


def expected_areas(plan: Plan, height: int, width: int) -> dict[str, float]:
    """By colour, the share of the stack's pixels that a memory has, for those with at least 5 % of the average request.

    From the figure's own numbers: margins, the domains of the two axes (0.54 and 0.38 of the height), the range up to 1.09
    of the longest request, and bars that take 0.75 of their place.
    """
    lengths = charts.bar_lengths(plan.description.max_positions)
    parts = [charts.request_bytes(plan.layout, length) for length in lengths]
    totals = [sum(part.values()) for part in parts]
    plot = (width - 78 - 16) * (height - 44 - 56) / (width * height)
    colours = colours_of(charts.memory_names(plan.layout))
    found = {}
    for name in colours.numbers:
        sizes = [part.get(name, 0) for part in parts]
        share = sum(size / total for size, total in zip(sizes, totals, strict=True)) / len(lengths)
        heights = 0.38 * share + 0.54 * sum(sizes) / len(lengths) / (1.09 * max(totals))
        if share > 0.05:
            found[colours.fill(name)] = 0.75 * plot * heights
    return found


@pytest.fixture(scope="module")
def viewer(browser: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> object:
    program = browser.find()
    if program is None:
        pytest.skip("no Chromium on this machine: the page is not looked at (apt-get install chromium)")
    return browser.Browser(program, tmp_path_factory.mktemp("browser"))


#: layers that differ, and all that are alike; a browser takes seconds for each page
DRAWN = [MODELS[0], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[1:])]


@pytest.fixture(scope="module", params=DRAWN)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, Path]]:
    plan = replace(plan_of(request.param), model=HOSTILE)
    path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    page.write_page(plan, path, "vllm")
    yield plan, path


def test_the_browser_helper_sees_errors_and_blank_pages(browser: ModuleType, viewer: object, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!DOCTYPE html><html><body><script>console.error('first'); undefined_function();</script></body></html>")
    seen = viewer.look(bad)  # type: ignore[attr-defined]
    assert any("first" in line for line in seen.console) and any("undefined_function" in line for line in seen.console)
    assert browser.num_colours(seen.pixels) == 1 and browser.ink(seen.pixels) == 0


def test_a_browser_without_a_network_draws_everything(browser: ModuleType, viewer: object, written: tuple[Plan, Path]) -> None:
    plan, path = written
    document = viewer.document(path, _USE)  # type: ignore[attr-defined]
    where = browser.boxes(document)  # measured before anything was opened
    shown = shown_maps(plan.layout, plan.description.max_positions)
    assert set(where) == {"bytes-chart", "capacity-chart", "waste-chart", *(one.identity for one in shown)}
    for is_dark in (True, False):
        seen = viewer.look(path, is_dark)  # type: ignore[attr-defined]
        assert seen.console == ()
        assert browser.num_colours(seen.pixels) > 100
        paper = seen.pixels[5, 5].mean()
        assert paper < 40 if is_dark else paper > 240
        for name, box in where.items():
            pixels = seen.cut(box)
            assert box[2] > 1000 and box[3] > 100 and sum(box[1::2]) <= viewer.height, f"{name} is out of view: {box}"  # type: ignore[attr-defined]
            assert browser.num_colours(pixels) > 8 and browser.ink(pixels) > 0.01, f"{name} is blank"
            text = seen.pixels[box[1] : box[1] + box[3], box[0] : box[0] + 70]  # the left edge: offsets, or an axis's numbers
            assert browser.ink(text) > 0.005, f"{name} has no numbers at its left"
    stack = seen.cut(where["bytes-chart"])
    for name, expected in expected_areas(plan, *stack.shape[:2]).items():
        assert browser.share_of(stack, name) == pytest.approx(expected, rel=0.15), f"{name} has not its area in the stack"
    said = re.search(r'data-said="([^"]*)"', document)
    assert said is not None
    last, before, tip = said.group(1).split(" | ")
    drawn = shown[0].drawn
    assert f"{drawn.regions[-1].nbytes:,} bytes" in last and f"{drawn.regions[-2].nbytes:,} bytes" in before
    assert f"{drawn.regions[0].nbytes:,} bytes" in tip
    for one in shown:  # the tables, filled by the page's script, name every array and gap
        table = document[document.index(f'id="{one.identity}-table"') :].split("</table>", 1)[0]
        rows = [re.sub(r"<[^>]*>", "|", row) for row in table.split("<tr>")[2:]]
        assert len(rows) == len(one.drawn.regions)
        for row, region in zip(rows, one.drawn.regions, strict=True):
            assert f"|{region.nbytes:,}|" in row and f"|{region.memory}|" in row and f"|{region.field}|" in row
    assert '<b id="pwned"' not in document
