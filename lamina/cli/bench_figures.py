"""What a benchmark's answers add up to, under the names that `vllm bench serve` prints and writes."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina.base.errors import ConfigError
from lamina.cli.bench_client import Result

PERCENTILES = (50, 90, 95, 99)
_LIMIT = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)(ms|s|)")


def parse_goodput(text: str | None) -> dict[str, float]:
    """Seconds by name from `ttft:500ms,tpot:50ms,e2el:2s`; a number alone is ms, as vLLM's. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(",") if text else ():
        found = _LIMIT.fullmatch(part.strip())
        if found is None:
            raise ConfigError("goodput", text, "limits such as ttft:500ms,tpot:50ms,e2el:2s")
        limits[found[1]] = float(found[2]) * (1.0 if found[3] == "s" else 1e-3)
    return limits


def ttft(result: Result) -> float | None:
    """Seconds to the first text."""
    return result.first_s


def tpot(result: Result) -> float | None:
    """Seconds a token after the first; None for an answer of one token."""
    tokens = 0 if result.usage is None else result.usage.completion_tokens
    return None if result.first_s is None or tokens < 2 else (result.total_s - result.first_s) / (tokens - 1)


def e2el(result: Result) -> float | None:
    """Seconds from the request to the end of the answer."""
    return result.total_s


TIMES: dict[str, Callable[[Result], float | None]] = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"), "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"), "e2el": ("E2EL", "End-to-end Latency"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """Times in seconds: how they are distributed."""

    mean: float
    std: float
    percentiles: dict[int, float]

    @staticmethod
    def of(values: Sequence[float]) -> "Spread | None":
        """None for no values."""
        if not values:
            return None
        ordered = sorted(values)
        return Spread(statistics.fmean(values), statistics.pstdev(values), {p: percentile(ordered, p) for p in PERCENTILES})


def percentile(ordered: Sequence[float], p: float) -> float:
    """Linear between the two nearest of sorted values, as numpy's."""
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that is printed. errors  count by kind; first_errors  a message of each."""

    duration_s: float
    completed: int
    failed: int
    good: int | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    spreads: dict[str, Spread | None]
    errors: dict[str, int]
    first_errors: dict[str, str]


def figures_of(results: Sequence[Result], duration_s: float, limits: dict[str, float]) -> Figures:
    """Adds up. limits  of goodput, in seconds; none: it is not counted."""
    whole = [result for result in results if result.is_good]
    usages = [result.usage for result in whole if result.usage is not None]
    spreads: dict[str, Spread | None] = {
        name: Spread.of([value for result in whole if (value := time_of(result)) is not None]) for name, time_of in TIMES.items()
    }
    spreads["itl"] = Spread.of([gap for result in whole for gap in result.gaps])
    failed = [result for result in results if not result.is_good]
    first_errors: dict[str, str] = {}
    for result in failed:
        first_errors.setdefault(result.error, result.message)
    return Figures(
        duration_s, len(whole), len(failed), sum(_is_good(result, limits) for result in whole) if limits else None,
        sum(usage.prompt_tokens for usage in usages), sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages), spreads, dict(Counter(result.error for result in failed)), first_errors,
    )  # fmt: skip


def _is_good(result: Result, limits: dict[str, float]) -> bool:
    return all((value := TIMES[name](result)) is None or value <= most for name, most in limits.items())


def lines_of(figures: Figures, rate: float, concurrency: int | None) -> list[str]:
    """What is printed."""
    seconds = figures.duration_s or math.inf
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def line(name: str, value: float, digits: int | None = None) -> None:
        lines.append(f"{name:<40} {value:<10.{digits}f}" if digits is not None else f"{name:<40} {value:<10}")

    line("Successful requests:", figures.completed)
    line("Failed requests:", figures.failed)
    if concurrency is not None:
        line("Maximum request concurrency:", concurrency)
    if math.isfinite(rate):
        line("Request rate configured (RPS):", rate, 2)
    line("Benchmark duration (s):", figures.duration_s, 2)
    line("Total input tokens:", figures.input_tokens)
    line("Total cached input tokens:", figures.cached_tokens)
    line("Total generated tokens:", figures.output_tokens)
    line("Request throughput (req/s):", figures.completed / seconds, 2)
    if figures.good is not None:
        line("Request goodput (req/s):", figures.good / seconds, 2)
    line("Output token throughput (tok/s):", figures.output_tokens / seconds, 2)
    line("Total token throughput (tok/s):", (figures.input_tokens + figures.output_tokens) / seconds, 2)
    for name, (short, title) in _TITLES.items():
        spread = figures.spreads[name]
        if spread is None:
            continue
        lines.append(f"{title:-^50}")
        line(f"Mean {short} (ms):", spread.mean * 1e3, 2)
        for p, value in spread.percentiles.items():
            line(f"{'Median' if p == 50 else f'P{p}'} {short} (ms):", value * 1e3, 2)
    if figures.errors:
        lines.append(f"{'Errors':-^50}")
        for kind, count in figures.errors.items():
            lines.append(f"{kind}: {count} (the first: {figures.first_errors[kind][:200]})")
    lines.append("=" * 50)
    return [text.rstrip() for text in lines]


def to_json(figures: Figures) -> dict[str, object]:
    """The keys of vLLM's result files, and our own beside them."""
    seconds = figures.duration_s or math.inf
    found: dict[str, object] = {
        "duration": figures.duration_s, "completed": figures.completed, "failed": figures.failed,
        "total_input_tokens": figures.input_tokens, "total_cached_tokens": figures.cached_tokens,
        "total_output_tokens": figures.output_tokens, "request_throughput": figures.completed / seconds,
        "request_goodput": None if figures.good is None else figures.good / seconds,
        "output_throughput": figures.output_tokens / seconds,
        "total_token_throughput": (figures.input_tokens + figures.output_tokens) / seconds,
        "errors": figures.errors,
    }  # fmt: skip
    for name, spread in figures.spreads.items():
        if spread is None:
            continue
        found |= {f"mean_{name}_ms": spread.mean * 1e3, f"std_{name}_ms": spread.std * 1e3}
        found[f"median_{name}_ms"] = spread.percentiles[50] * 1e3
        found |= {f"p{p}_{name}_ms": value * 1e3 for p, value in spread.percentiles.items()}
    return found
