"""What is said about a run: the table of its memory, the closing line, and everything as one JSON object."""

import math
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from lamina import CompletionOutput, Logprob, RequestOutput
from lamina.base.version import __version__
from lamina.cli.generation import Served
from lamina.engine.watch import MemoryReport

FOLDS = "folds"


def table(served: Served, out: TextIO) -> None:
    """Prints tokens, speed and, for each memory, predicted, held and written bytes: one table, and what it means."""
    console = Console(file=out, highlight=False)
    speed, memory = served.speed, served.memory
    grid = Table(show_header=False, title="tokens and memory", title_justify="left", title_style="bold")
    grid.add_column()
    for _ in range(3):
        grid.add_column(justify="right")
    prompt = sum(output.usage.prompt_tokens for output in served.outputs)
    cached = sum(output.usage.cached_tokens for output in served.outputs)
    drawn = sum(output.usage.completion_tokens for output in served.outputs)
    grid.add_row("tokens", "in", "out", "per second", style="bold")
    grid.add_row("prefill", f"{prompt:,}", "", _rate(speed.prefill_rate))
    grid.add_row("decode", "", f"{drawn:,}", _rate(speed.decode_rate))
    grid.add_section()
    grid.add_row("bytes of memory", "predicted", "held", "written", style="bold")
    lines = [] if memory is None else _by_name(memory)
    for name, predicted, held, written in lines:
        grid.add_row(name, f"{predicted:,}", f"{held:,}", f"{written:,}" if written else "-")
    if memory is not None:
        grid.add_section()
        pages = memory.held_pages
        grid.add_row(
            f"pool in use: {pages} pages",
            f"{memory.predicted_pages * memory.page_bytes:,}",
            f"{pages * memory.page_bytes:,}",
            f"{sum(line.written for line in memory.lines):,}",
        )
    console.print(grid)
    if cached:
        console.print(f"{cached:,} of the tokens in were not computed: they were reused.", soft_wrap=True)
    console.print(moment(memory), soft_wrap=True)


def moment(memory: MemoryReport | None) -> str:
    """When the figures were taken and where they come from, and the verdict."""
    if memory is None:
        return "No step was computed, so there is no memory to show."
    lengths = " and ".join(f"{position:,}" for position in memory.positions)
    frozen = " and ".join(f"{position:,}" for position in memory.checkpoints) or "none"
    ended = f"; {memory.num_ended} had ended or waited" if memory.num_ended else ""
    text = (
        f"Moment: the last step in which running requests held the most pages ({lengths} tokens; checkpoints at {frozen}"
        f"{ended}). "
        "Predicted from the layout and these lengths alone; "
        f"held = pages that have a holder x {memory.page_bytes:,} B; written = by the store ops in the whole run.\n"
    )
    if memory.is_equal:
        return text + "predicted = held: yes"
    why = f" ({memory.evictions} blocks or checkpoints had been evicted)" if memory.evictions else ""
    return text + f"predicted = held: NO{why}"


def closing_line(served: Served) -> str:
    """Tokens, speed and time in one line."""
    usage = [output.usage for output in served.outputs]
    cached, accepted = sum(one.cached_tokens for one in usage), sum(one.accepted_drafts for one in usage)
    drafted = accepted + sum(one.rejected_drafts for one in usage)
    parts = [
        f"{sum(one.prompt_tokens for one in usage):,} tokens in" + (f" ({cached:,} reused)" if cached else ""),
        f"{sum(one.completion_tokens for one in usage):,} out",
        f"prefill {_rate(served.speed.prefill_rate)} tokens/s",
        f"decode {_rate(served.speed.decode_rate)} tokens/s",
        *([f"{accepted:,} of {drafted:,} drafts accepted"] if drafted else []),
        f"load {served.load_s:.1f} s, first token {served.first_token_s:.2f} s, all {served.total_s:.1f} s",
    ]
    return " | ".join(parts)


def reuse_lines(served: Served) -> list[str]:
    """One line for each of several prompts: how much of it was reused, and why not more."""
    outputs = served.outputs
    if len(outputs) < 2:
        return []
    lines, seen = [], dict[tuple[int, ...], int]()
    for number, output in enumerate(outputs, start=1):
        usage, first = output.usage, seen.setdefault(tuple(output.prompt_token_ids), number)
        beside = f" (prompt {first} is the same and ran beside it)" if first < number and not usage.cached_tokens else ""
        count = f"{usage.prompt_tokens:,} token{'s' * (usage.prompt_tokens != 1)}"
        lines.append(f"prompt {number} ({count}): {usage.prefix_stop}{beside}")
    return lines


def logprob_lines(output: CompletionOutput) -> list[str]:
    """One line a token: log-probability, rank, id and text, then the most likely tokens."""
    lines = []
    for token, found in zip(output.token_ids, output.logprobs or [], strict=False):
        others = [f"{_shown(other, one)} {one.logprob:.3f}" for other, one in found.items() if other != token]
        own = found[token]
        tail = f"   | {', '.join(others)}" if others else ""
        lines.append(f"{own.logprob:9.4f}  #{own.rank:<6} {token:>7}  {_shown(token, own)}{tail}")
    return lines


def to_json(served: Served, model: str) -> str:
    """Prompts, outputs, usage, timings and the memory table, as one JSON object on one line."""
    usage = [output.usage for output in served.outputs]
    speed = served.speed
    whole = {
        "lamina": __version__,
        "model": model,
        "prompts": [_prompt(output) for output in served.outputs],
        "usage": {
            "prompt_tokens": sum(one.prompt_tokens for one in usage),
            "cached_tokens": sum(one.cached_tokens for one in usage),
            "completion_tokens": sum(one.completion_tokens for one in usage),
            "accepted_drafts": sum(one.accepted_drafts for one in usage),
            "rejected_drafts": sum(one.rejected_drafts for one in usage),
        },
        "timings": {
            "load_s": served.load_s,
            "first_token_s": served.first_token_s,
            "total_s": served.total_s,
            "steps": speed.steps,
            "prefill_tokens": speed.prefill_tokens,
            "prefill_s": speed.prefill_s,
            "prefill_tokens_per_s": speed.prefill_rate,
            "decode_tokens": speed.decode_tokens,
            "decode_s": speed.decode_s,
            "decode_tokens_per_s": speed.decode_rate,
        },
        "memory": None if served.memory is None else _memory(served.memory),
    }
    return msgspec.json.encode(whole).decode()


def _prompt(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
                "cumulative_logprob": _finite(one.cumulative_logprob),
                "logprobs": None if one.logprobs is None else [_logprobs(found) for found in one.logprobs],
            }
            for one in output.outputs
        ],
        "usage": output.usage,
    }


def _logprobs(found: dict[int, Logprob]) -> dict[str, dict[str, object]]:
    return {
        str(token): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in found.items()
    }


def _memory(memory: MemoryReport) -> dict[str, object]:
    return {
        "is_equal": memory.is_equal,
        "rows": [
            {"name": x.name, "predicted_bytes": x.predicted, "held_bytes": x.held, "written_bytes": x.written}
            for x in memory.lines
        ],
        "predicted_bytes": memory.predicted_pages * memory.page_bytes,
        "held_bytes": memory.held_pages * memory.page_bytes,
        "held_pages": memory.held_pages,
        "pool_pages": memory.pool_pages,
        "page_bytes": memory.page_bytes,
        "positions": memory.positions,
        "checkpoints": memory.checkpoints,
        "evictions": memory.evictions,
    }


def _by_name(memory: MemoryReport) -> list[tuple[str, int, int, int]]:
    """The rows, the folds of all layers together, after the memories that hold entries."""
    folds = [line for line in memory.lines if line.name.endswith("_fold")]
    rows = [(line.name, line.predicted, line.held, line.written) for line in memory.lines if line not in folds]
    if folds:
        sums = (FOLDS, *(sum(column) for column in zip(*((x.predicted, x.held, x.written) for x in folds), strict=True)))
        place = next((i for i, row in enumerate(rows) if row[0] in ("hidden", "padding")), len(rows))
        rows.insert(place, (sums[0], sums[1], sums[2], sums[3]))
    return rows


def _shown(token: int, one: Logprob) -> str:
    return repr(one.decoded_token) if one.decoded_token is not None else str(token)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a probability of zero is null."""
    return value if value is not None and math.isfinite(value) else None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
