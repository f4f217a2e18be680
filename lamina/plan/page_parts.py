"""Words and tables of the plan's page. Everything here returns HTML; texts from configs are escaped."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lamina.base.sizes import GiB, KiB, format_bytes
from lamina.memory.kinds import Field
from lamina.memory.layout import Layout
from lamina.plan.charts import UNUSED, Figure, request_bytes, waste_around
from lamina.plan.page_maps import count_words, swatch
from lamina.plan.palette import Colours
from lamina.plan.report import MemoryLine, Plan
from lamina.plan.request_lines import format_tokens

#: the pool that capacity is shown for where no memory is named, or none is left
_NOMINAL = 32 * GiB


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages of one replica's pool that the page counts with, and what pool that is, in words."""

    pages: int
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page: its id, heading, what to see in it, the plotly figure, and the same numbers as a table."""

    identity: str
    heading: str
    words: str
    figure: Figure
    table: str


def pool_of(plan: Plan) -> Pool:
    """The pool of the plan, or a nominal one that says so."""
    replicas = f" on each of {plan.mesh.dp} replicas" if plan.mesh.dp > 1 else ""
    if plan.pool_bytes is not None and plan.pages:
        return Pool(plan.pages, f"the pool of {format_bytes(plan.pool_bytes)}{replicas}")
    why = "the weights leave no room" if plan.pool_bytes is not None else "no GPU was named"
    pages = max(1, _NOMINAL // plan.page_bytes)
    return Pool(pages, f"a pool of {format_bytes(_NOMINAL)}{replicas}, taken as an example because {why}")


def subtitle(plan: Plan) -> str:
    """The choices that this plan was made with, in one line."""
    mesh, options, description = plan.mesh, plan.options, plan.description
    index = f", {description.index_format} index keys" if description.index_format else ""
    drafts = f" · {options.draft_tokens} draft tokens" if options.draft_tokens else ""
    where = options.gpu or (format_bytes(options.memory_bytes) if options.memory_bytes else "")
    ways = (("tp", mesh.tp), ("ep", mesh.ep), ("dp", mesh.dp))
    parallel = ", ".join(f"{name} {count}" for name, count in ways if count and count > 1)
    gpus = f" · {mesh.gpus} x {where}" if where else f" · {count_words(mesh.gpus, 'GPU')}"
    layers = len({memory.layer for memory in description.memories if not memory.lag})  # a draft block is no layer
    return (
        f"Memory plan · {layers} layers · {description.cache_format} entries{index} · blocks of {plan.block_tokens} tokens"
        f"{drafts}{gpus}{f' ({parallel})' if parallel else ''}"
    )


def cards(plan: Plan) -> str:
    """The headline numbers."""
    per_token = sum(line.bytes_per_token for line in plan.memories)
    longest = max(plan.workloads, key=lambda line: line.context)
    shown = [
        (format_bytes(round(per_token)), "for each token, all logs together" if per_token else "for each token: nothing grows"),
        (format_bytes(plan.slot_pages * plan.page_bytes), f"slot of a running request, {count_words(plan.slot_pages, 'page')}"),
        (
            format_bytes(longest.bytes_per_request),
            f"a request of {format_tokens(longest.context)} tokens; {longest.padding_fraction:.1%} holds nothing",
        ),
    ]
    if not plan.slot_pages:
        shown[1] = (
            "no slot",
            "a request has nothing but its logs" if not plan.layout.tails else "windows are in pages of their own",
        )
    if plan.checkpoint_pages:
        low, high = plan.checkpoint_range
        pages = f"{low} to {high} pages" if low != high else count_words(high, "page")
        shown.append((format_bytes(high * plan.page_bytes), f"a checkpoint past the windows: {pages}"))
    if plan.pool_bytes is not None:
        words = "pool" if plan.budget.memory_bytes is None else "pool of a GPU after weights and workspace"
        shown.append((format_bytes(plan.pool_bytes), words))
    fitting = [line for line in plan.workloads if line.fits is not None]
    if fitting:
        middle = min(fitting, key=lambda line: abs(line.context - 32 * KiB))
        shown.append((f"{middle.fits:,}", f"requests of {format_tokens(middle.context)} tokens fit at once"))
    boxes = "".join(f'<div class="card"><b>{escape(value)}</b><span>{escape(words)}</span></div>' for value, words in shown)
    return f'<div class="cards">{boxes}</div>'


def memory_table(plan: Plan, colours: Colours) -> str:
    """What each memory is, a line each."""
    rows = "".join(_memory_row(line, colours) for line in plan.memories)
    per_token = sum(line.bytes_per_token for line in plan.memories)
    fixed = sum(line.fixed_bytes_per_request for line in plan.memories)
    return table(
        [
            "memory",
            "kind",
            "#layers",
            "one entry or state",
            "#bytes",
            "#tokens each",
            "#bytes per token",
            "#fixed per request",
            "lives",
        ],
        rows,
        f"<tr><td>together</td><td></td><td></td><td></td><td></td><td></td><td class=n>{_number(per_token)}</td>"
        f"<td class=n>{format_bytes(fixed)}</td><td></td></tr>",
    )


def workload_table(plan: Plan) -> str:
    """Requests by length: what they take and how many fit."""
    rows = []
    for line in plan.workloads:
        asked = f"{line.requests:,} x " if line.requests is not None else ""
        cells = [
            f"{asked}{format_tokens(line.context)}", f"{line.pages:,}", format_bytes(line.bytes_per_request),
            format_bytes(line.log_bytes), format_bytes(line.slot_bytes), f"{line.padding_fraction:.1%}",
            format_bytes(line.checkpoint_bytes), "-" if line.fits is None else f"{line.fits:,}",
            "-" if line.fits_with_checkpoint is None else f"{line.fits_with_checkpoint:,}", escape(line.binds),
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td{' class=n' if at < 9 else ''}>{cell}</td>" for at, cell in enumerate(cells)) + "</tr>")
    names = ["#tokens", "#pages", "#one request", "#logs", "#slot", "#holds nothing", "#a checkpoint", "#fit at once",
             "#with a checkpoint each", "more is in the"]  # fmt: skip
    verdict = ""
    if plan.together is not None and plan.together.fits is not None:
        fits = "fit at once" if plan.together.fits else "do not fit at once"
        verdict = f"<p>All of the requests named together need {plan.together.pages:,} pages: they {fits}.</p>"
    return "<h3>Requests by length</h3>" + table(names, "".join(rows)) + verdict


def budget_html(plan: Plan) -> str:
    """A bar of one GPU's memory, and its parts in words."""
    budget = plan.budget
    if budget.memory_bytes is None or budget.usable_bytes is None:
        words = "No GPU was named, so only what requests need is shown: name one with --gpu, or its memory with --memory."
        if plan.pool_bytes is not None:
            words = f"The pool was given as {format_bytes(plan.pool_bytes)}; weights and workspace are not counted."
        return f"<p>{words}</p>"
    parts = [
        ("weights", budget.weights_bytes or 0, "#8c7cc0"), ("workspace", budget.workspace_bytes or 0, "#e69f00"),
        ("pool for requests", budget.pool_bytes or 0, "#009e73"),
        (f"left to others (use {plan.options.gpu_memory_utilization:g})", budget.memory_bytes - budget.usable_bytes, "#9aa0a6"),
    ]  # fmt: skip
    total = sum(size for _, size, _ in parts)
    words = "; ".join(f"{name} {format_bytes(size)}" for name, size, _ in parts)
    bar = "".join(
        f'<div style="flex:{size / total:.5f};background:{fill}" title="{name}"></div>' for name, size, fill in parts if size
    )
    legend = "".join(
        f'<li><span class="swatch" style="background:{fill}"></span>{name} <span class=soft>{format_bytes(size)}</span></li>'
        for name, size, fill in parts
    )
    short = ""
    if budget.missing_bytes:
        more = f"; {budget.gpus_needed} GPUs would do" if budget.gpus_needed else ""
        short = f"<p><b>It does not fit: {format_bytes(budget.missing_bytes)} short{more}.</b></p>"
    return f'{short}<div class="budget" role="img" aria-label="{escape(words)}">{bar}</div><ul class="legend">{legend}</ul>'


def weights_table(plan: Plan) -> str:
    """Weights by component."""
    rows = "".join(
        f"<tr><td>{escape(line.component)}</td><td class=n>{line.num_params:,}</td><td class=n>{format_bytes(line.nbytes)}</td>"
        f"<td class=n>{format_bytes(line.gpu_bytes)}</td></tr>"
        for line in plan.weights
    )
    source = "read from the checkpoint's headers" if plan.exact_weights else "calculated from the config"
    total = sum(line.num_params for line in plan.weights)
    foot = f"<tr><td>together ({source})</td><td class=n>{total:,}</td><td class=n>{format_bytes(plan.weights_bytes)}</td>"
    foot += f"<td class=n>{format_bytes(sum(line.gpu_bytes for line in plan.weights))}</td></tr>"
    return table(["weights", "#parameters", "#checkpoint", "#on the fullest GPU"], rows, foot) if plan.weights else ""


# Charts --------------------------------------------------------------------------------------------------------------


def chart_html(chart: Chart, drawn: str) -> str:
    """A section with a chart, what to see in it, and its numbers as a table."""
    label = f'role="group" aria-label="{escape(f"{chart.heading}: {chart.words}")}"'
    return (
        f'<section id="{chart.identity}"><h2>{escape(chart.heading)}</h2><p>{escape(chart.words)}</p>'
        f"<figure {label}>{drawn}</figure><details><summary>The numbers</summary>{chart.table}</details></section>"
    )


def growth_words(layout: Layout, lengths: Sequence[int]) -> str:
    """From which length on the tokens, not the request, are what costs."""
    live = {name for length in lengths for name, size in request_bytes(layout, length).items() if size}
    empty = [name for name in layout.live_bytes(lengths[-1]) if name not in live]
    parts = "The bars are pages: what is live in them by memory, and what holds nothing."
    parts += f" Empty at exactly these lengths: {', '.join(empty)}." if empty else ""
    fixed = layout.slot_pages
    growing = [length for length in lengths if layout.block_pages(length) > fixed]
    if not layout.has_logs:
        return f"Nothing grows without end: a request of any length has the same fixed parts. {parts}"
    if not fixed or growing[:1] == list(lengths[:1]):
        return f"What grows with the tokens is most of a request at every length. {parts}"
    if not growing:
        return f"The fixed slot is most of a request up to the longest context. {parts}"
    slot = count_words(fixed, "page")
    return f"From {format_tokens(growing[0])} tokens on, the blocks of the logs are more than the fixed slot of {slot}. {parts}"


def capacity_words(plan: Plan, pool: Pool) -> str:
    """How many requests fit at some lengths."""
    picked = [line.context for line in plan.workloads][:5]
    counts = "; ".join(f"{_fit(plan, pool, tokens):,} of {format_tokens(tokens)}" for tokens in dict.fromkeys(picked))
    return f"In {pool.words}: {counts} tokens, running at once and sharing nothing."


def waste_words(layout: Layout, lengths: Sequence[Sequence[int]]) -> str:
    """What is wasted at the shortest and the longest length, and why."""
    first, last = waste_around(layout, lengths[0]), waste_around(layout, lengths[-1])
    return (
        "The share of a request's pages without a live byte: alignment, pages rounded up, empty rows of the open block. The line "
        f"is the mean over the lengths of a block, the band has all of them: {first.low:.1%} to {first.high:.1%} up to "
        f"{format_tokens(lengths[0][-1])} tokens, {last.low:.2%} to {last.high:.2%} at {format_tokens(lengths[-1][-1])}."
    )


def bytes_table(layout: Layout, lengths: Sequence[int]) -> str:
    """Bytes by memory at each length."""
    parts = [request_bytes(layout, length) for length in lengths]
    names = [*layout.live_bytes(lengths[-1]), UNUSED]
    rows = []
    for length, part in zip(lengths, parts, strict=True):
        cells = [format_tokens(length), *(f"{part.get(name, 0):,}" for name in names), f"{sum(part.values()):,}"]
        rows.append(_number_row(cells))
    return table(["#tokens", *(f"#{name}" for name in names), "#all"], "".join(rows))


def capacity_table(plan: Plan, pool: Pool, lengths: Sequence[int]) -> str:
    """Requests that fit at each length."""
    rows = []
    for length in lengths:
        pages, each = plan.layout.peak_pages(length), plan.checkpoint_pages
        fits, with_one = _fit(plan, pool, length), _fit(plan, pool, length, each)
        rows.append(_number_row([format_tokens(length), f"{pages:,}", f"{fits:,}", f"{with_one:,}"]))
    return table(["#tokens", "#pages", "#fit at once", "#with a checkpoint each"], "".join(rows))


def waste_table(layout: Layout, lengths: Sequence[Sequence[int]]) -> str:
    """Share of a request that holds nothing, over the lengths of a block."""
    rows = []
    for inside in lengths:
        shares = waste_around(layout, inside)
        cells = [f"{inside[0]:,} to {inside[-1]:,}", f"{shares.low:.3%}", f"{shares.mean:.3%}", f"{shares.high:.3%}"]
        rows.append(_number_row(cells))
    return table(["#tokens", "#least", "#mean", "#most"], "".join(rows))


def assumptions(plan: Plan, pool: Pool, remarks: Sequence[str]) -> str:
    """Everything that the numbers rest on, a sentence each."""
    said = [
        *plan.notes,
        f"Capacity counts running requests that share nothing, in {pool.words}.",
        f"Pages are {plan.page_bytes:,} B; every array starts at a multiple of 128 B.",
        "Bytes of a request are those of the engine's own layout; a test compares them with what the engine allocates.",
    ]
    if plan.budget.memory_bytes is not None:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.workspace)
        source = "read from the checkpoint's headers" if plan.exact_weights else "calculated from the config"
        said.append(f"The workspace is an estimate: {parts}. Weights are {source}.")
    said += [f"{one[:1].upper()}{one[1:]}{'' if one.endswith('.') else '.'}" for one in remarks]
    return '<ul class="assumptions">' + "".join(f"<li>{escape(one)}</li>" for one in said) + "</ul>"


def _fit(plan: Plan, pool: Pool, tokens: int, extra: int = 0) -> int:
    """Requests on all replicas, each with `extra` pages more than it needs on its way to that length."""
    return plan.mesh.dp * (pool.pages // max(1, plan.layout.peak_pages(tokens) + extra))


def _memory_row(line: MemoryLine, colours: Colours) -> str:
    fields = " + ".join(_field_words(field) for field in line.fields)
    fixed = format_bytes(line.fixed_bytes_per_request) if line.fixed_bytes_per_request else "-"
    kind = f"{line.kind}, in pages of its own" if line.in_pages else line.kind
    grows = line.bytes_per_token > 0
    return (
        f"<tr><td>{swatch(line.name, colours)}{escape(line.name)}</td><td>{escape(kind)}</td><td class=n>{line.layers}</td>"
        f"<td>{escape(fields) or '-'}</td><td class=n>{line.entry_bytes:,}</td>"
        f"<td class=n>{line.tokens_per_entry if grows else '-'}</td>"
        f"<td class=n>{_number(line.bytes_per_token) if grows else '-'}</td><td class=n>{fixed}</td>"
        f"<td>{escape(line.lifetime)}</td></tr>"
    )


def _number_row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td class=n>{cell}</td>" for cell in cells) + "</tr>"


def _field_words(field: Field) -> str:
    return f"{field.name} {'x'.join(str(size) for size in field.shape)} {field.dtype}"


def table(names: Sequence[str], rows: str, foot: str = "") -> str:
    """A table; names that begin with # head columns of numbers."""
    head = "".join(f"<th class=n>{escape(name[1:])}</th>" if name[:1] == "#" else f"<th>{escape(name)}</th>" for name in names)
    tail = f"<tfoot>{foot}</tfoot>" if foot else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{tail}</table></div>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
