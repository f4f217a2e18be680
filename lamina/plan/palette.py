"""Colours that tell memories apart, also for readers who do not see all colours, on light and on dark paper."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: class of bytes that store nothing
#: Okabe and Ito's set without black, then quieter ones for models with more memories
FILLS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c7cc0", "#7f9a3f", "#a0785a", "#9aa0a6")
#: bytes that store nothing
GAP_FILL = "#b9bec5"


@dataclass(frozen=True, slots=True)
class Colours:
    """A number for each memory's name: its place in FILLS, the same in every picture of one page."""

    numbers: Mapping[str, int]

    def number(self, name: str) -> int:
        """The number of a name; the last colour for one that was not known."""
        return self.numbers.get(name, len(FILLS) - 1)

    def fill(self, name: str) -> str:
        """The colour of a name."""
        return FILLS[self.number(name)]


def colours_of(names: Iterable[str]) -> Colours:
    """Colours for these names in their order; where there are too many, the last colours are shared."""
    return Colours({name: min(number, len(FILLS) - 1) for number, name in enumerate(dict.fromkeys(names))})


def css() -> str:
    """Rules for the classes of the maps. `--ink`, `--gap` and `--hatch` are the page's own."""
    rules = [f".m{n}{{fill:{fill}}}.on{n}{{fill:{_on(fill)}}}" for n, fill in enumerate(FILLS)]
    return "".join(rules) + ".map .odd{fill-opacity:.78}.map text{pointer-events:none}"


def _on(fill: str) -> str:
    """Black or white, whichever reads better on a colour (WCAG's contrast)."""
    red, green, blue = (_linear(int(fill[at : at + 2], 16) / 255) for at in (1, 3, 5))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#111111"


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
