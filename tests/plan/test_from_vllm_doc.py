"""docs/from-vllm.md: every figure on the page is recomputed, so none can go stale.

Tables that hold figures are introduced by `<!-- figures: NAME -->` and compared cell by cell with NAME's rows below.
Calculations in backticks, such as `64 x 584 B = 37,376 B` (with a proper times sign), are evaluated. Every other number on the
page must be one that a table or a calculation has shown, or a fact of FACTS, taken from the code.
"""

import ast
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from lamina.base.sizes import GiB, KiB, MiB
from lamina.cli import main
from lamina.memory.layout import ALIGNMENT, Layout, bytes_by_memory, make_layout
from lamina.memory.ledger import Ledger
from lamina.memory.prefix import REPLAY_ALIGNMENT
from lamina.models.description import Choices, Description
from lamina.models.families import describe
from lamina.plan.kept import kept
from lamina.plan.request_lines import format_tokens
from lamina.plan.rival_vllm import (
    BATCHED_TOKENS,
    ENTRY_BLOCK,
    STATE_BLOCKS,
    VERSION,
    WINDOW_BLOCK,
    VllmLayout,
    formats_for,
    vllm_layout,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
POOL = int(26.09 * GiB)
TIMES, CEIL, FLOOR = "\u00d7", "\u2308", "\u2309"


@cache
def description(name: str, choices: Choices = Choices()) -> Description:  # noqa: B008
    return describe(json.loads((ROOT / "tests" / "configs" / f"{name}.json").read_text()), choices)


@cache
def ours(name: str, block_tokens: int | None = None) -> Layout:
    known = description(name)
    return make_layout(known.memories, known.hidden, block_tokens)


@cache
def theirs(name: str, chunked: bool = False) -> VllmLayout:
    memories = kept(description(name).memories)
    is_compressed = any(one.kind == "fold" for one in memories)
    found = vllm_layout(memories, formats_for(memories, "ds_mla", "fp4") if is_compressed else None, chunked)
    assert isinstance(found, VllmLayout)
    return found


PRO, FLASH = "deepseek-v4-pro", "deepseek-v4-flash"
#: tokens of the requests of other families: no multiples of anything
LENGTHS = (1_000, 30_000)


# Figures in words ------------------------------------------------------------------------------------------------------


def size(nbytes: float) -> str:
    """GiB with three digits, MiB with two, KiB and bytes whole."""
    if nbytes >= GiB:
        return f"{nbytes / GiB:.3f} GiB"
    if nbytes >= MiB:
        return f"{nbytes / MiB:.2f} MiB"
    return f"{nbytes / KiB:.0f} KiB" if nbytes >= KiB else f"{nbytes:.0f} B"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def live(layout: Layout, tokens: int) -> int:
    return sum(layout.live_bytes(tokens).values())


def waste(layout: Layout, tokens: int) -> float:
    return 1 - live(layout, tokens) / (layout.pages_for(tokens) * layout.page_bytes)


# Tables ----------------------------------------------------------------------------------------------------------------

Rows = list[list[str]]


def groups() -> Rows:
    """vLLM's groups for Pro, the log first."""
    layout = theirs(PRO)
    rows = []
    for group in sorted(layout.groups, key=lambda one: (-one.block_tokens, -one.layers)):
        pages = " + ".join(f"{page.layers} {TIMES} {page.nbytes:,}" for page in group.pages)
        window = f"{group.window}" if group.window else "-"
        rows.append([f"{group.block_tokens}", window, pages, f"{group.used_bytes:,}", percent(layout.idle_fraction(group))])
    return rows


def pages() -> Rows:
    """What a page of a block and the pages of a slot hold in Pro."""
    layout = ours(PRO)
    rows = []
    for where, spans, count in (("block", layout.block_spans, 1), ("slot", layout.slot_spans, layout.slot_pages)):
        arrays = bytes_by_memory(spans)
        rows += [[where, f"`{name}`", f"{nbytes:,}"] for name, nbytes in arrays.items()]
        rest = count * layout.page_bytes - sum(arrays.values())
        rows.append([where, "alignment, rest of the page" if count == 1 else "rest of the pages", f"{rest:,}"])
        rows.append([where, f"{count} page" if count == 1 else f"{count} pages", f"{count * layout.page_bytes:,}"])
    return rows


def requests() -> Rows:
    rows = []
    for name, shown in ((PRO, "Pro"), (FLASH, "Flash")):
        rival, layout = theirs(name), ours(name)
        for tokens in (20, 1024, 4096, 32768, 131072, MiB):
            pages_held = layout.pages_for(tokens)
            rows.append([
                shown, format_tokens(tokens), f"{rival.held_rows(tokens):,}", size(rival.held_bytes(tokens)),
                percent(rival.waste(tokens)), f"{pages_held:,}", size(pages_held * layout.page_bytes),
                percent(waste(layout, tokens)), f"{rival.requests_that_fit(POOL, tokens):,}",
                f"{POOL // layout.page_bytes // pages_held:,}",
            ])  # fmt: skip
    return rows


def reserves() -> Rows:
    rival, layout = theirs(PRO), ours(PRO)
    rows = []
    for tokens in (1024, 32768, MiB):
        asked, needed = rival.reserve_rows(tokens) * rival.row_bytes, layout.peak_pages(tokens) * layout.page_bytes
        share, times = percent(rival.window_share(tokens)), f"{asked / needed:.1f}"
        rows.append([format_tokens(tokens), f"{rival.reserve_rows(tokens):,}", size(asked), share, size(needed), times])
    return rows


def hits() -> Rows:
    """Points to hit in Pro: at a multiple of 256, of 128, of 4, and anywhere."""
    rival, layout = theirs(PRO), ours(PRO)
    rows = []
    for position in (4096, 4224, 4100, 4099):
        own = layout.checkpoint_pages(position)
        open_block = int(position % layout.block_tokens != 0)
        slot = sum(span.nbytes for span in layout.checkpoint_spans(position))
        is_there = position % rival.scheduler_block == 0
        rows.append([
            f"{position:,}", f"{rival.hit_rows(position)}" if is_there else "none",
            size(rival.hit_rows(position) * rival.row_bytes) if is_there else "-",
            f"{own} + {open_block}", size((own + open_block) * layout.page_bytes), size(slot),
        ])  # fmt: skip
    return rows


def kept_points() -> Rows:
    """Requests of 1K tokens of Pro, alone and with a point to hit each."""
    rival, layout = theirs(PRO), ours(PRO)
    sides = (
        ("vLLM", rival.row_bytes, rival.held_rows(1024), rival.hit_rows(1024)),
        ("Lamina", layout.page_bytes, layout.pages_for(1024), layout.checkpoint_pages(1024)),
    )
    rows = []
    for name, unit, alone, point in sides:
        both, units = alone + point, POOL // unit
        rows.append([name, size(alone * unit), f"{units // alone:,}", size(both * unit), f"{units // both:,}"])
    return rows


def tables() -> Rows:
    rival, layout = theirs(PRO), ours(PRO)
    return [
        [format_tokens(n), f"{rival.table_entries(n):,}", size(rival.table_bytes(n)), f"{layout.blocks_for(n):,}",
         size(4 * layout.blocks_for(n)), f"{rival.hashes(n):,}", f"{layout.blocks_for(n):,}"]
        for n in (131072, MiB)
    ]  # fmt: skip


def moves() -> Rows:
    rival, layout = theirs(PRO), ours(PRO)
    return [[format_tokens(n), size(rival.held_bytes(n)), size(live(layout, n))] for n in (1024, 4096, 32768, MiB)]


def families() -> Rows:
    """Other families at LENGTHS, and a point to hit after the longer one."""
    rows = []
    for name, is_on in (
        ("llama-3.1-8b", False), ("deepseek-v3.2", False), ("gemma-3-27b", False), ("gpt-oss-120b", False),
        ("llama-4-scout", False), ("llama-4-scout", True), ("qwen3-next-80b", False), ("jamba-1.5-mini", False),
    ):  # fmt: skip
        rival, layout = theirs(name, is_on), ours(name)
        point = LENGTHS[1] // rival.scheduler_block * rival.scheduler_block
        hit = rival.hit_rows(point) * rival.row_bytes
        checkpoint = (layout.checkpoint_pages(point) + layout.tail_pages(point)) * layout.page_bytes
        held = [(size(rival.held_bytes(n)), size(layout.pages_for(n) * layout.page_bytes)) for n in LENGTHS]
        rows.append([
            name + (" (manager on)" if is_on else ""), f"{len(rival.groups)}", f"{rival.groups[0].block_tokens:,}",
            f"{layout.block_tokens:,}", *held[0], *held[1], size(hit) if hit else "-", size(checkpoint) if checkpoint else "-",
        ])  # fmt: skip
    return rows


def short() -> Rows:
    """Requests of 20 tokens at two block sizes."""
    rows = []
    for block in (256, 128):
        layout = ours(PRO, block)
        held = layout.pages_for(20)
        rows.append([f"{block}", f"{layout.page_bytes:,}", f"{layout.slot_pages}", f"{held}", size(held * layout.page_bytes),
                     percent(waste(layout, 20))])  # fmt: skip
    rival = theirs(PRO)
    held, lost = rival.held_rows(20), percent(rival.waste(20))
    return [*rows, ["vLLM", f"{rival.row_bytes:,}", "-", f"{held}", size(rival.held_bytes(20)), lost]]


def stacks() -> Rows:
    """61 layers of MLA and DSA beside V4 at 1M tokens, entries and whole windows alone."""
    rows = []
    for name, shown in ((PRO, "Pro"), (FLASH, "Flash")):
        for cache_format, index_format, latent, key in (("bf16", "bf16", 1152, 256), ("fp8", "fp4", 656, 132)):
            memories = kept(description(name, Choices(cache_format, index_format)).memories)
            entries = sum(
                (MiB // one.stride if one.kind == "log" else one.size) * one.row_bytes for one in memories if one.kind != "fold"
            )
            stack = 61 * (latent + key) * MiB
            rows.append([shown, f"{cache_format} and {index_format}", size(stack), size(entries), f"{stack / entries:.1f}"])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "groups": groups, "pages": pages, "requests": requests, "reserves": reserves, "hits": hits, "kept": kept_points,
    "tables": tables, "moves": moves, "families": families, "short": short, "stacks": stacks,
}  # fmt: skip


def facts() -> set[str]:
    """Numbers that the page may use without deriving them: constants of the code, and shapes of the models."""
    pro = ours(PRO)
    found: set[float | str] = {
        VERSION, ENTRY_BLOCK, WINDOW_BLOCK, *STATE_BLOCKS, *STATE_BLOCKS.values(), BATCHED_TOKENS, ALIGNMENT, pro.block_tokens,
        int(pro.replay), int(ours(FLASH).replay), REPLAY_ALIGNMENT, Ledger(pro, 100).min_checkpoint_gain,
        sum(memory.name == "window" for memory in pro.memories), *LENGTHS, "26.09",
    }  # fmt: skip
    return {one if isinstance(one, str) else f"{one:,}" for one in found}


# The page --------------------------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def figure_tables() -> dict[str, Rows]:
    """The tables with figures by name, without their two heading lines."""
    found = {}
    for name, body in re.findall(r"<!-- figures: (\w+) -->\n((?:\|.*\n)+)", PAGE):
        assert name not in found, name
        found[name] = [cells(line) for line in body.splitlines()[2:]]
    return found


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_gives(name: str) -> None:
    assert figure_tables()[name] == TABLES[name]()


def test_every_table_with_figures_is_checked() -> None:
    assert set(figure_tables()) == set(TABLES)


def commands() -> list[list[str]]:
    """Arguments of the page's commands, without the program's name."""
    return [shlex.split(line)[1:] for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def test_the_commands_print_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes, waste and how many fit of each length of Pro, in the table of one command and in the JSON of the other."""
    config = str(ROOT / "tests" / "configs" / f"{PRO}.json")
    printed, as_json = commands()
    assert main([config if part == "config.json" else part for part in printed]) == 0
    words = capsys.readouterr().out.split("beside vLLM", 1)[1]
    for name, tokens, _, held, lost, _, own, _, fit, own_fit in requests():
        if name != "Pro" or tokens == "20":
            continue
        part = words.split(f"one request of {tokens} tokens", 1)[1]
        for figure in (held, lost.replace(" %", "%"), own, fit, own_fit):
            assert figure in part, (tokens, figure)
    assert main([config if part == "config.json" else part for part in as_json]) == 0
    rows = json.loads(capsys.readouterr().out)["against"]["rows"]
    found = [[size(row["theirs"]), size(row["ours"])] for row in rows if row["title"].startswith("one request of")]
    assert found == [[row[3], row[6]] for row in requests() if row[0] == "Pro"]


# Calculations ----------------------------------------------------------------------------------------------------------

UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
CALCULATION = re.compile(r"`([^`]* = [^`]*)`")


def calculations() -> list[str]:
    """Spans that equate numbers; settings such as `x = None` are none."""
    return [span for span in CALCULATION.findall(PAGE) if NUMBER.search(span) and not re.search(r"[a-z_]{3,} =", span)]


def evaluate(text: str) -> float:
    """The value of one side: + - x / and rounding up, with at most one unit, at the end."""
    words = text.split()
    unit = UNITS.get(words[-1], 1) if words else 1
    plain = text.removesuffix(words[-1]) if words[-1] in UNITS else text
    plain = plain.replace(",", "").replace(TIMES, "*").replace(CEIL, "ceil(").replace(FLOOR, ")").replace("\u2212", "-")
    tree = ast.parse(plain.strip(), mode="eval")
    return unit * value(tree.body)


def value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return value(left) + value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return value(left) - value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return value(left) * value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return value(left) / value(right)
        case ast.Call(args=[argument]):
            return math.ceil(value(argument))
    raise AssertionError(ast.dump(node))


def half_digit(text: str) -> float:
    """Half of the last digit shown, in bytes if there is a unit; whole bytes are rounded, other whole numbers exact."""
    number = NUMBER.search(text)
    assert number is not None
    decimals = len(number.group().partition(".")[2])
    unit = UNITS.get(text.split()[-1])
    return (unit or 1) * 0.5 * 10**-decimals if decimals or unit else 0.0


@pytest.mark.parametrize("text", calculations())
def test_a_calculation_is_right(text: str) -> None:
    first, *others = text.split(" = ")
    for other in others:
        assert evaluate(other) == pytest.approx(evaluate(first), abs=half_digit(other) + 1e-9), text


def test_calculations_are_found_and_can_be_wrong() -> None:
    assert len(calculations()) > 10
    samples = (
        (f"64 {TIMES} 584 B = 37,376 B = 36.5 KiB", True), ("22 + 4 = 27", False), (f"{CEIL}127 / 64{FLOOR} + 1 = 3", True),
        ("3 / 7 = 0.43", True), ("3 / 7 = 0.42", False),
    )  # fmt: skip
    for text, is_right in samples:
        first, *others = text.split(" = ")
        assert all(abs(evaluate(one) - evaluate(first)) <= half_digit(one) + 1e-9 for one in others) == is_right, text


# All other numbers -----------------------------------------------------------------------------------------------------


def prose() -> Iterator[tuple[int, str]]:
    """(line number, text) without tables with figures, fenced code, calculations, and names in backticks."""
    text = re.sub(r"<!-- figures: \w+ -->\n\|.*\n\|.*\n(?:\|.*\n)+", lambda found: "\n" * found.group().count("\n"), PAGE)
    text = re.sub(r"```.*?```", lambda found: "\n" * found.group().count("\n"), text, flags=re.S)
    for number, line in enumerate(text.splitlines(), 1):
        yield number, re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", line))


def test_every_other_number_is_shown_or_a_fact() -> None:
    shown = {number for rows in figure_tables().values() for row in rows for cell in row for number in NUMBER.findall(cell)}
    shown |= {number for text in calculations() for number in NUMBER.findall(text)}
    shown |= facts() | {str(number) for number in range(11)}
    unknown = []
    for line, text in prose():
        words = re.sub(r"\b[A-Za-z]+[-.]?\d[\w.-]*", "", text)  # names: V4, c128, int32, H200, fp8
        unknown += [(line, number) for number in NUMBER.findall(words) if number.rstrip(",") not in shown]
    assert not unknown
