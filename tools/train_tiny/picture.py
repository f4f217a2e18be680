"""Exact answers by depth and length as an SVG: `python -m tools.train_tiny.picture RESULTS OUT`; evaluate.py's lines."""

import json
import sys
from html import escape
from pathlib import Path

CELL, TALL, LEFT, TOP = 92, 34, 150, 66
_STYLE = (
    ":root{--paper:#ffffff;--ink:#1b1f24;--soft:#57606a;--good:#1f7a4d;--bad:#b3362b}"
    "@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8eaed;--soft:#a3acb6;--good:#3fae78;--bad:#d9635a}}"
    "text{fill:var(--ink)}.soft{fill:var(--soft)}.paper{fill:var(--paper)}.good{fill:var(--good)}.bad{fill:var(--bad)}"
)


def picture(lines: list[dict[str, object]]) -> str:
    """The file: a column for each length, a row for each fifth of the text, in each cell right/asked; recall, 16 facts a text.

    Raises ValueError if no line is of that setting.
    """
    columns: dict[int, list[list[int]]] = {}
    for line in lines:
        shown = ("recall", "train", 16, "fp8", "fp4")
        if tuple(line.get(key) for key in ("kind", "split", "facts", "cache_format", "index_format")) == shown:
            columns[int(str(line["length"]))] = [[int(n) for n in pair] for pair in line["fifths"]]  # type: ignore[attr-defined]
    if not columns:
        raise ValueError("no line of recall with 16 facts, fp8 entries and fp4 keys")
    width, height = LEFT + CELL * len(columns) + 16, TOP + 5 * TALL + 40
    title = "What lamina-tiny finds, by the length of the text and by where in it the fact was told"
    sums = {length: [sum(of) for of in zip(*fifths, strict=True)] for length, fifths in sorted(columns.items())}
    words = "; ".join(f"{length:,} tokens: {right} of {asked}" for length, (right, asked) in sums.items())
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'aria-labelledby="title words" font-family="system-ui, sans-serif" font-size="12">',
        f'<title id="title">{escape(title)}</title><desc id="words">{escape(words)}</desc><style>{_STYLE}</style>',
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
        '<text x="16" y="24" font-weight="600">Exact answers: right / asked</text>',
        '<text class="soft" x="16" y="42">16 facts in each text, greedy, fp8 entries, fp4 index keys</text>',
    ]
    for row in range(5):
        out.append(f'<text class="soft" x="16" y="{TOP + row * TALL + 22}">told at {20 * row}-{20 * row + 20} %</text>')
    for column, (length, fifths) in enumerate(sorted(columns.items())):
        x = LEFT + column * CELL
        for row, (right, asked) in enumerate(fifths):
            y = TOP + row * TALL
            share = right / asked if asked else 0.0
            if asked:
                kind = "good" if share >= 0.98 else "bad"
                depth = 0.55 if kind == "good" else 0.3 + 0.5 * (1 - share)
                place = f'x="{x}" y="{y}" width="{CELL - 4}" height="{TALL - 4}"'
                out.append(f'<rect class="{kind}" {place} rx="3" opacity="{depth:.2f}"/>')
            out.append(f'<text x="{x + (CELL - 4) / 2:g}" y="{y + 19}" text-anchor="middle">{right}/{asked}</text>')
        out.append(f'<text x="{x + (CELL - 4) / 2:g}" y="{TOP + 5 * TALL + 18}" text-anchor="middle">{length:,}</text>')
    out.append(f'<text class="soft" x="16" y="{TOP + 5 * TALL + 18}">tokens of the prompt</text></svg>\n')
    return "\n".join(out)


def main() -> int:
    """Reads argv[1], writes argv[2]."""
    if len(sys.argv) != 3:
        print("usage: python -m tools.train_tiny.picture RESULTS.jsonl OUT.svg", file=sys.stderr)
        return 2
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    Path(sys.argv[2]).write_text(picture(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
