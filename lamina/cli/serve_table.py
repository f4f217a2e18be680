"""What `lamina serve` shows while it starts: a bar, then one table of what it decided."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from lamina.base.config import EngineConfig
from lamina.base.sizes import format_bytes
from lamina.engine.wire import Progress, Ready
from lamina.server.settings import ServerSettings


class LoadingBar:
    """A bar on a terminal that vanishes; elsewhere nothing."""

    def __init__(self, console: Console, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, transient=True, disable=quiet or not sys.stderr.isatty())
        self._task = self._bar.add_task("starting the engine", total=None)
        self._bar.start()

    def show(self, progress: Progress) -> None:
        """News of the engine's loading."""
        self._bar.update(self._task, description=progress.what, completed=progress.done, total=progress.total)

    def stop(self) -> None:
        """Takes the bar away."""
        self._bar.stop()


def start_table(
    console: Console, ready: Ready, settings: ServerSettings, config: EngineConfig, chat_format: str | None, about: str,
    sampling: str = "",
) -> None:  # fmt: skip
    """Prints the memory plan, what was chosen, and where to go.

    about  what the model is, if more is known than its type.   sampling  defaults that are the model's own.
    """
    lengths = ready.plan_lengths
    grid = Table(title="what a request remembers", title_justify="left", title_style="bold")
    grid.add_column("memory")
    grid.add_column("kind")
    grid.add_column("layers", justify="right")
    for length in lengths:
        grid.add_column(f"{_length(length)} tokens", justify="right")
    for row in ready.memories:
        grid.add_row(row.name, row.kind, str(row.layers) if row.layers else "", *(f"{size:,}" for size in row.request_bytes))
    grid.add_section()
    sums = [sum(row.request_bytes[place] for row in ready.memories) for place in range(len(lengths))]
    grid.add_row("bytes of a request", "", "", *(f"{size:,}" for size in sums), style="bold")
    pool = ready.num_pages * ready.page_bytes
    grid.add_row("requests that fit", "", "", *(f"{_capacity(ready, size):,}" for size in sums), style="bold")
    console.print(grid)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("model", f"{', '.join(settings.names)} ({ready.model_type})" + (f": {about}" if about else ""))
    facts.add_row("memory", f"{format_bytes(pool)} in {ready.num_pages:,} pages of {format_bytes(ready.page_bytes)}")
    facts.add_row("block, slot", f"{ready.block_tokens} tokens, {ready.slot_pages} pages a running request")
    facts.add_row("longest request", f"{ready.max_model_len:,} tokens, prompt and answer")
    facts.add_row("a step", f"{ready.max_step_tokens:,} tokens, {ready.max_requests:,} requests at most")
    facts.add_row("prefix hits", ready.hit_granularity)
    facts.add_row("formats", "cache {}, index {}, deterministic={}".format(*ready.formats, config.deterministic))
    if ready.draft_tokens:
        facts.add_row("drafts", f"{ready.drafter}, up to {ready.draft_tokens} tokens ahead; answers do not depend on them")
    facts.add_row("device, ops", f"{ready.device}: {_ops(ready)}")
    facts.add_row("chat format", chat_format or "none: only /v1/completions")
    if sampling:
        facts.add_row("sampling", f"{sampling} where a request does not say (generation_config.json)")
    facts.add_row("loaded in", f"{ready.load_s:.1f} s")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}"
    facts.add_row("address", f"{url}/v1" + ("" if settings.api_keys else "   (no API key is asked for)"))
    facts.add_row("look", (f"{url}/ui   " if settings.has_ui else "") + f"{url}/docs   {url}/metrics")
    console.print(facts, soft_wrap=True)


def _capacity(ready: Ready, request_bytes: int) -> int:
    """Requests of so many bytes that the memory holds."""
    pages = -(-request_bytes // ready.page_bytes)
    return ready.num_pages // pages if pages else 0


def _ops(ready: Ready) -> str:
    """The implementation of each op, those that are alike together."""
    by_choice: dict[str, list[str]] = {}
    for name, choice in ready.ops:
        op, _, what = name.partition(", ")
        by_choice.setdefault(choice, []).append(f"{op} ({what})" if what else op)
    return "; ".join(f"{choice} for {', '.join(names)}" for choice, names in by_choice.items())


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 and tokens else f"{tokens:,}"
