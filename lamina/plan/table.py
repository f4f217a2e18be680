"""A plan as tables for people: what a request remembers, one GPU's memory from the whole to the pool, and what fits in it."""

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lamina.base.sizes import format_bytes
from lamina.memory.kinds import Field
from lamina.plan.budget import UNUSED
from lamina.plan.records import MemoryLine, Plan, WeightLine, WorkloadLine
from lamina.plan.request_lines import format_tokens

#: columns of a printed page that is no terminal
_WIDTH = 100
_BAD, _GOOD = "bold red", "bold green"


def make_console(out: TextIO) -> Console:
    """A console as wide as the terminal, or 100 columns where there is none."""
    return Console(file=out, highlight=False, markup=False, width=None if out.isatty() else _WIDTH)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the whole plan, from what a layer remembers to how many requests fit."""
    console.print(Text.assemble((plan.model, "bold"), f": {heading(plan)}"), soft_wrap=True)
    console.print()
    console.print(memory_table(plan))
    console.print()
    _say(console, [(line, "dim") for line in format_lines(plan)])
    console.print()
    _say(console, [(line, "") for line in layout_lines(plan)])
    console.print()
    console.print(budget_table(plan))
    _say(console, budget_words(plan))
    console.print()
    console.print(workload_table(plan))
    _say(console, workload_words(plan))
    if plan.notes:
        console.print()
        _say(console, [(f"note: {note}", "dim") for note in plan.notes])


def _say(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=not line.startswith("note: "))


def heading(plan: Plan) -> str:
    """Family, formats, drafts and GPUs in one line."""
    known, mesh = plan.description, plan.mesh
    parts = [known.model_type, f"{known.cache_format} entries"]
    if known.index_format is not None:
        parts.append(f"{known.index_format} index keys")
    if plan.options.draft_tokens:
        parts.append(f"{plan.options.draft_tokens} draft tokens")
    if mesh.gpus > 1:
        ways = [f"tp {mesh.tp}", *([f"ep {mesh.ep}"] if mesh.ep else []), *([f"dp {mesh.dp}"] if mesh.dp > 1 else [])]
        parts.append(f"{mesh.gpus} GPUs ({', '.join(ways)})")
    return ", ".join(parts)


# Memories ------------------------------------------------------------------------------------------------------------


def memory_table(plan: Plan) -> Table:
    """One row for each memory: who has it, what an entry costs, how long it lives."""
    grid = _grid("what a request remembers" + (", on each GPU" if plan.mesh.tp > 1 else ""))
    grid.add_column("memory", no_wrap=True)
    for name in ("layers", "one entry", "stands for", "per token", "per request"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("lifetime")
    for line in plan.memories:
        tokens = f"{line.tokens_per_entry} token{'s' * (line.tokens_per_entry != 1)}" if line.bytes_per_token else "-"
        grid.add_row(
            line.name, f"{line.layers:,}", f"{line.entry_bytes:,} B" if line.fields else "-", tokens, _per_token(line),
            format_bytes(line.fixed_bytes_per_request) if line.fixed_bytes_per_request else "-", line.lifetime,
        )  # fmt: skip
    per_token = sum(line.bytes_per_token for line in plan.memories)
    fixed = sum(line.fixed_bytes_per_request for line in plan.memories)
    grid.add_section()
    grid.add_row(
        "all layers", "", "", "", f"{_number(per_token)} B" if per_token else "-", format_bytes(fixed) if fixed else "-", "",
        style="bold",
    )  # fmt: skip
    return grid


def format_lines(plan: Plan) -> list[str]:
    """What entries consist of, each format once: `584 B  fp8: 448 e4m3 nope + 64 bf16 rope + 8 e8m0 scale (window, c4)`."""
    names: dict[tuple[int, str], list[str]] = {}
    for line in plan.memories:
        if line.fields:
            names.setdefault((line.entry_bytes, f"{line.format}: {fields_words(line.fields)}"), []).append(line.name)
    width = max((len(f"{size:,}") for size, _ in names), default=0)
    return [f"{size:>{width},} B  {words}  ({', '.join(dict.fromkeys(owners))})" for (size, words), owners in names.items()]


def fields_words(fields: Sequence[Field]) -> str:
    """`448 e4m3 nope + 64 bf16 rope`; fields of one shape and type together: `2 x 8x128 bf16 k, v`."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for field in fields:
        alike.setdefault((field.dtype, field.shape), []).append(field.name)
    return " + ".join(
        f"{f'{len(names)} x ' if len(names) > 1 else ''}{'x'.join(map(str, shape))} {dtype} {', '.join(names)}"
        for (dtype, shape), names in alike.items()
    )


def _per_token(line: MemoryLine) -> str:
    return f"{_number(line.bytes_per_token)} B" if line.bytes_per_token else "-"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def layout_lines(plan: Plan) -> list[str]:
    """Page, block, slot and checkpoint, a line each."""
    layout, (fewest, most) = plan.layout, plan.checkpoint_range
    holds = (
        f"one block of {plan.block_tokens} tokens, all logs of all layers"
        if layout.has_logs
        else f"a block of {plan.block_tokens} tokens needs none, as there is no log"
    )
    lines = [f"page        {format_bytes(plan.page_bytes)} ({plan.page_bytes:,} B): {holds}"]
    for tail in layout.tails:
        own, most_pages = _pages(tail.pages), tail.pages * tail.most_blocks(plan.description.max_positions)
        lines.append(
            f"window      {tail.tokens} tokens of {len(tail.windows)} layers' large windows in {own} of their own, "
            f"at most {most_pages:,} at once"
        )
    if plan.slot_pages:
        size = format_bytes(plan.slot_pages * plan.page_bytes)
        spread = f"{fewest}-{most} pages" if fewest != most else _pages(most)
        lines.append(f"slot        {_pages(plan.slot_pages)} ({size}) for each running request")
        lines.append(f"checkpoint  {spread}, and the open block: a point where a prefix can be taken up again")
    else:
        lines.append("slot        none: a prefix is taken up again where a whole block of it is stored")
    return [*lines, f"layout id   {plan.layout_id}"]


def _pages(count: int) -> str:
    return f"{count:,} page{'s' * (count != 1)}"


# One GPU -------------------------------------------------------------------------------------------------------------


def budget_table(plan: Plan) -> Table:
    """From the GPU's memory to blocks and slots; without a GPU the weights alone."""
    grid = _grid("memory of one GPU" if plan.budget.memory_bytes is not None else "weights and pool")
    grid.add_column("", no_wrap=True)
    grid.add_column("in the files", justify="right", no_wrap=True)
    grid.add_column("one GPU", justify="right", no_wrap=True)
    grid.add_column("", ratio=1)
    budget, options = plan.budget, plan.options
    if budget.memory_bytes is not None and budget.usable_bytes is not None:
        name = options.gpu or "GPU"
        grid.add_row(name, "", format_bytes(budget.memory_bytes), f"{budget.memory_bytes:,} B")
        share = f"{options.gpu_memory_utilization:.4g}"
        grid.add_row("usable", "", format_bytes(budget.usable_bytes), f"{share} of it (--gpu-memory-utilization)")
        grid.add_section()
    for line in plan.weights:
        grid.add_row(
            f"weights: {line.component}", format_bytes(line.nbytes), format_bytes(line.gpu_bytes), _split_words(line, plan)
        )
    on_gpu = sum(line.gpu_bytes for line in plan.weights)
    source = "from the headers of its files" if plan.exact_weights else "calculated from the config"
    grid.add_row("weights", format_bytes(plan.weights_bytes), format_bytes(on_gpu), source, style="bold")
    if budget.memory_bytes is not None:
        grid.add_section()
        for what, size in plan.workspace:
            grid.add_row(what, "", format_bytes(size), _workspace_words(what, plan))
        grid.add_row("workspace", "", format_bytes(budget.workspace_bytes or 0), "an estimate", style="bold")
    if budget.pool_bytes is not None and plan.pages is not None:
        grid.add_section()
        left = "left for requests" if budget.memory_bytes is not None else "as asked: GPU and weights do not count"
        style = "bold" if plan.pages else _BAD
        grid.add_row("pool", "", format_bytes(budget.pool_bytes), left, style=style)
        held = [
            *([f"{plan.blocks:,} blocks"] if plan.blocks else []),
            *([f"{plan.slots:,} slots"] if plan.slots else []),
        ]
        grid.add_row("", "", _pages(plan.pages), "= " + " or ".join(held) if held else "")
    return grid


def _split_words(line: WeightLine, plan: Plan) -> str:
    ways = {"tensor": plan.mesh.tp, "expert": plan.mesh.expert_ways}.get(line.split, 1)
    if line.split == UNUSED:
        return "in the files, not used without --draft"
    if plan.mesh.gpus == 1:
        return ""
    return f"over {ways} GPUs" if ways > 1 else "on every GPU"


def _workspace_words(what: str, plan: Plan) -> str:
    if what == "logits":
        return f"{plan.options.max_requests:,} samples (--max-requests)"
    return f"{plan.options.max_step_tokens:,} tokens (--max-step-tokens)"


def budget_words(plan: Plan) -> list[tuple[str, str]]:
    """What is wrong with the budget, or missing: (line, style)."""
    budget = plan.budget
    if budget.missing_bytes:
        way = (
            f"{budget.gpus_needed} GPUs of this kind would do (--tp {budget.gpus_needed})"
            if budget.gpus_needed is not None
            else "no number of them was found that would do"
        )
        return [(f"does not fit: {format_bytes(budget.missing_bytes)} are missing on each GPU; {way}", _BAD)]
    if budget.pool_bytes is None:
        return [("Name a GPU (--gpu h200, --memory 141GB) or a pool (--cache-bytes 8GiB) to see how much fits.", "")]
    return []


# Requests ------------------------------------------------------------------------------------------------------------


def workload_table(plan: Plan) -> Table:
    """One row for each length: what it takes, what of that is padding, how many fit and why not more."""
    grid = _grid("requests" + (f", on {plan.mesh.dp} replicas together" if plan.mesh.dp > 1 else ""))
    for name in ("tokens", "log", "slot", "in all", "padding", "= open", "+ slot", "+ rest", "fit", "with\nckpt"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("binds", no_wrap=True)
    for line in plan.workloads:
        grid.add_row(*_workload_cells(line), style=_BAD if line.fits == 0 else "")
    return grid


def _workload_cells(line: WorkloadLine) -> list[str]:
    tokens, total = format_tokens(line.context), line.bytes_per_request
    shares = [part / total if total else 0.0 for part in (line.open_bytes, line.slot_padding_bytes, line.block_padding_bytes)]
    return [
        tokens if line.requests is None else f"{line.requests:,} x {tokens}", format_bytes(line.log_bytes),
        format_bytes(line.slot_bytes), format_bytes(total), f"{line.padding_fraction:.1%}", *(f"{share:.1%}" for share in shares),
        _count(line.fits), _count(line.fits_with_checkpoint), line.binds,
    ]  # fmt: skip


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def workload_words(plan: Plan) -> list[tuple[str, str]]:
    """Sentences under the table: what the columns mean, why not more, and whether all lines fit together."""
    words = [
        (f"padding: share without a live byte = {_open_words(plan)} + of the slot + alignment.", "dim"),
        ("fit: running at once, without and with a checkpoint each. binds: what takes more of a request.", "dim"),
    ]
    short, long = plan.workloads[0], plan.workloads[-1]
    lines = [short] if short.context == long.context else [short, long]
    words += [(_why_words(line, plan), "") for line in lines]
    if plan.together is not None:
        words.append(_together_words(plan))
    return words


def _open_words(plan: Plan) -> str:
    return "rows empty or past a window" if plan.layout.tails else "empty rows of the open block"


def _why_words(line: WorkloadLine, plan: Plan) -> str:
    log = line.pages - plan.slot_pages
    parts = [*([f"{log:,} of log"] if log else []), *([f"{plan.slot_pages:,} of slot"] if plan.slot_pages else [])]
    words = f"A request of {format_tokens(line.context)} tokens takes {_pages(line.pages)}: {' and '.join(parts)}."
    if line.peak_pages > line.pages:
        words += f"\nOn its way there it needs up to {line.peak_pages:,}, and that has to fit."
    return words


def _together_words(plan: Plan) -> tuple[str, str]:
    whole = plan.together
    assert whole is not None
    need = f"{_pages(whole.pages)}, {format_bytes(whole.pages * plan.page_bytes)}"
    if whole.fits is None:
        return f"All lines together need {need}.", "bold"
    have = f"the pool has {_pages(whole.pool_pages or 0)}" if plan.mesh.dp == 1 else f"the pools have {whole.pool_pages:,}"
    verdict = "they fit" if whole.fits else "they do NOT fit"
    return f"All lines together need {need}; {have}: {verdict}.", _GOOD if whole.fits else _BAD


def _grid(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), header_style="bold",
    )  # fmt: skip
