"""What a simulated workload did, as tables for people and as one JSON object."""

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from lamina.base.sizes import format_bytes
from lamina.plan.simulation import Moment, SimulationReport

#: rows of the table of moments
_MOMENTS = 12


def table(report: SimulationReport) -> list[Table]:
    """The figures of the whole run, why lookups ended where they did, and the pool over time."""
    return [_summary(report), _misses(report), _moments(report)]


def report_json(report: SimulationReport) -> dict[str, object]:
    """Everything but the single requests; times in seconds, rates from 0 to 1."""
    return {
        "num_pages": report.num_pages,
        "page_bytes": report.page_bytes,
        "requests": report.requests,
        "finished": report.finished,
        "refused": report.refused,
        "seconds": report.seconds,
        "steps": report.steps,
        "peak_concurrency": report.peak_running,
        "mean_concurrency": report.mean_running,
        "preemptions": report.preemptions,
        "recomputed_tokens": report.recomputed_tokens,
        "waits": {
            "requests": report.waited,
            "mean_s": _mean(report.wait_s),
            "p50_s": quantile(report.wait_s, 0.5),
            "p95_s": quantile(report.wait_s, 0.95),
            "max_s": max(report.wait_s, default=0.0),
        },
        "prompt_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "reusable_tokens": report.reusable_tokens,
        "hit_tokens": report.hit_tokens,
        "hit_rate": report.hit_rate,
        "request_hits": report.hits,
        "request_hit_rate": report.request_hit_rate,
        "misses": [{"reason": miss.reason, "requests": miss.requests, "tokens": miss.tokens} for miss in report.misses],
        "evicted_blocks": report.evicted_blocks,
        "evicted_checkpoints": report.evicted_checkpoints,
        "checkpoints": report.checkpoints,
        "skipped_checkpoints": report.skipped_checkpoints,
        "twins": report.twins,
        "padding_fraction": report.padding,
        "peak_pages": {
            "used": report.peaks.used,
            "held": report.peaks.held,
            "blocks": report.peaks.blocks,
            "windows": report.peaks.tails,
            "slots": report.peaks.slots,
            "cached": report.peaks.cached,
            "checkpoints": report.peaks.checkpoints,
        },
        "moments": [_moment(moment) for moment in report.moments],
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _moment(moment: Moment) -> dict[str, object]:
    pages = moment.pages
    return {
        "time_s": moment.time,
        "running": moment.running,
        "waiting": moment.waiting,
        "blocks": pages.blocks,
        "windows": pages.tails,
        "slots": pages.slots,
        "cached": pages.cached,
        "checkpoints": pages.checkpoints,
        "free": pages.free,
        "padding_fraction": moment.padding,
    }


def _summary(report: SimulationReport) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="workload", title_justify="left", title_style="bold", show_header=False)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    pool = report.num_pages * report.page_bytes
    peaks = report.peaks
    refused = f"{report.refused:,} can never fit" if report.refused else ""
    rows = [
        ("requests served", f"{report.finished:,} of {report.requests:,}", refused),
        ("simulated", f"{report.seconds:,.0f} s", f"{report.steps:,} steps"),
        ("most at once", f"{report.peak_running:,}", f"{report.mean_running:.1f} on average"),
        ("prompt tokens reused", f"{100 * report.hit_rate:.2f} %", _reuse(report)),
        ("requests that reused any", f"{100 * report.request_hit_rate:.2f} %", ""),
        ("waited for room", f"{report.waited:,}", _waits(report)),
        ("preempted", f"{report.preemptions:,}", f"{report.recomputed_tokens:,} tokens computed twice"),
        ("evicted", f"{report.evicted_blocks:,} blocks", f"{report.evicted_checkpoints:,} checkpoints"),
        ("checkpoints made", f"{report.checkpoints:,}", f"{report.skipped_checkpoints:,} skipped for want of a page"),
        ("padding of running requests", f"{100 * report.padding:.1f} %", "bytes of their pages that hold nothing, on average"),
        ("pool", f"{report.num_pages:,} pages", format_bytes(pool)),
        ("most in use", f"{peaks.used:,}", f"running requests at most {peaks.held:,}, checkpoints {peaks.checkpoints:,}"),
    ]
    for row in rows:
        grid.add_row(*row)
    return grid


def _reuse(report: SimulationReport) -> str:
    return f"{report.hit_tokens:,} of {report.prompt_tokens:,}; {report.reusable_tokens:,} had been said before"


def _waits(report: SimulationReport) -> str:
    if not report.waited:
        return ""
    typical, most = quantile(report.wait_s, 0.95), max(report.wait_s)
    return f"95 % of all waited at most {typical:,.1f} s, the longest {most:,.1f} s"


def _misses(report: SimulationReport) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="why prompts were computed", title_justify="left", title_style="bold")
    grid.add_column("the lookup ended with")
    grid.add_column("requests", justify="right")
    grid.add_column("tokens computed", justify="right")
    grid.add_column("of all prompt tokens", justify="right")
    for miss in report.misses:
        share = 100 * miss.tokens / report.prompt_tokens if report.prompt_tokens else 0.0
        grid.add_row(miss.reason, f"{miss.requests:,}", f"{miss.tokens:,}", f"{share:.2f} %")
    return grid


def _moments(report: SimulationReport) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="the pool over time, in pages", title_justify="left", title_style="bold")
    names = ["time", "running", "waiting", "blocks", "windows", "slots", "cached", "checkpoints", "free", "padding"]
    has_windows = any(moment.pages.tails for moment in report.moments)
    for name in names:
        if name != "windows" or has_windows:
            grid.add_column(name, justify="right")
    count = len(report.moments)
    shown = sorted({i * (count - 1) // max(1, _MOMENTS - 1) for i in range(_MOMENTS)}) if count else []
    for moment in (report.moments[index] for index in shown):
        pages = moment.pages
        windows = [f"{pages.tails:,}"] if has_windows else []
        grid.add_row(
            f"{moment.time:,.1f} s", f"{moment.running:,}", f"{moment.waiting:,}", f"{pages.blocks:,}", *windows,
            f"{pages.slots:,}", f"{pages.cached:,}", f"{pages.checkpoints:,}", f"{pages.free:,}", f"{100 * moment.padding:.1f} %",
        )  # fmt: skip
    return grid
