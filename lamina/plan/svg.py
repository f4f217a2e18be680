"""A picture as plain SVG text: boxes, lines and words in a fixed place, legible on light and on dark paper."""

from html import escape

from lamina.plan.drawing import hatch
from lamina.plan.palette import css

_LIGHT = "--paper:#ffffff;--ink:#1b1f24;--soft:#57606a;--line:#b6bec7;--gap:#eceef1;--hatch:#a9b1ba"
_DARK = "--paper:#14171b;--ink:#e8eaed;--soft:#a3acb6;--line:#4a535e;--gap:#2a3038;--hatch:#66707c"
_STYLE = (
    f":root{{{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    "text{fill:var(--ink)}.soft,.ink{fill:var(--soft)}.big{font-size:15px;font-weight:600}.bold{font-weight:600}"
    ".paper{fill:var(--paper)}.gap{fill:var(--gap)}.hatch{stroke:var(--hatch);stroke-width:2}.edge{fill:none;stroke:var(--line)}"
    ".dash{fill:none;stroke:var(--soft);stroke-dasharray:4 3}.arrow{stroke:var(--soft);fill:none}.head{fill:var(--soft)}"
    ".map rect{stroke:var(--paper);stroke-width:.5}.map text{font-size:10px}"
)
#: the pattern of bytes that hold nothing
HATCH = "nothing"


class Picture:
    """Collects elements; `text` is the file. Numbers are pixels, x to the right and y down.

    title, words  what the picture shows, for readers who cannot see it.
    """

    def __init__(self, width: int, title: str, words: str) -> None:
        self.width = width
        self.title = title
        self.words = words
        self.height = 0.0
        self._elements: list[str] = []

    @property
    def text(self) -> str:
        """The whole file."""
        height = round(self.height + 12)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" width="{self.width}" '
                f'height="{height}" '
                'role="img" aria-labelledby="title words" font-family="system-ui, sans-serif" font-size="12">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="words">{escape(self.words)}</desc>',
                f"<style>{_STYLE}{css()}</style>",
                hatch(HATCH),
                f'<rect class="paper" width="{self.width}" height="{height}" rx="8"/>',
                *self._elements,
                "</svg>\n",
            ]
        )

    def words_at(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line of text, its baseline at y. kind: soft, bold, big, or onN for text on colour N."""
        self._grow(y)
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        style = f' class="{kind}"' if kind else ""
        self._elements.append(f'<text{style} x="{x:g}" y="{y:g}"{place}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, nbytes: int | None = None, faint: bool = False
    ) -> None:
        """A rectangle of class `kind`: mN for colour N, gap, edge, dash, or HATCH.

        nbytes  what its width stands for, written down for whoever checks the scale.   faint  as what is no longer there.
        """
        self._grow(y + height)
        style = f'fill="url(#{HATCH})"' if kind == HATCH else f'class="{kind}"'
        data = "" if nbytes is None else f' data-bytes="{nbytes}"'
        opacity = ' opacity="0.25"' if faint else ""
        self._elements.append(f'<rect {style} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"{data}{opacity}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "arrow") -> None:
        """A line of class `kind`: arrow, edge or dash."""
        self._grow(max(y1, y2))
        self._elements.append(f'<path class="{kind}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a head at its second end; straight down, up, left or right."""
        self.line(x1, y1, x2, y2)
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        left, right = (x2 - 6 * dx - 3 * dy, y2 - 6 * dy - 3 * dx), (x2 - 6 * dx + 3 * dy, y2 - 6 * dy + 3 * dx)
        self._elements.append(f'<path class="head" d="M{x2:g} {y2:g}L{left[0]:g} {left[1]:g}L{right[0]:g} {right[1]:g}Z"/>')

    def group(self, x: float, y: float, height: float, elements: list[str], kind: str = "map") -> None:
        """Ready-made elements, moved to (x, y)."""
        self._grow(y + height)
        self._elements += [f'<g class="{kind}" transform="translate({x:g} {y:g})">', *elements, "</g>"]

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Swatches in a row, each (class of its box, words)."""
        for kind, words in entries:
            self.box(x, y - 10, 12, 12, kind)
            self.words_at(x + 17, y, words, "soft")
            x += 17 + 6.7 * len(words) + 16

    def _grow(self, y: float) -> None:
        self.height = max(self.height, y)
