"""A headless Chromium that can reach no network: what it draws, what it logs, and the document that its scripts leave."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: a line of the log that a page's script or a blocked request caused
_CONSOLE = re.compile(r"CONSOLE[(:]\d+\)?\] (.*)")
#: appended to a copy of a page: writes down where each chart and map is
_PROBE = """
<script id="probe">document.querySelectorAll(".plotly-graph-div, svg.map").forEach((one) => {
  const box = one.getBoundingClientRect();
  one.setAttribute("data-box", [box.left, box.top + scrollY, box.width, box.height].map(Math.round).join(" "));
});
%s
</script>"""


def find() -> str | None:
    """The browser's path, or None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@dataclass(frozen=True, slots=True)
class Seen:
    """One view of a page: its pixels [height, width, 3] and every line on its console."""

    pixels: np.ndarray
    console: tuple[str, ...]

    def cut(self, box: tuple[int, int, int, int]) -> np.ndarray:
        """The pixels of (left, top, width, height)."""
        left, top, width, height = box
        return self.pixels[max(top, 0) : top + height, max(left, 0) : left + width]


class Browser:
    """Views pages at one width. `folder` is where it keeps its profile and files."""

    def __init__(self, program: str, folder: Path, width: int = 1280, height: int = 8000) -> None:
        self.program = program
        self.folder = folder
        self.width = width
        self.height = height

    def look(self, page: Path, is_dark: bool = False) -> Seen:
        """The page as it is drawn once its scripts have run."""
        picture = self.folder / f"{page.stem}-{'dark' if is_dark else 'light'}.png"
        theme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
        ran = self._run([*theme, f"--screenshot={picture}", page.as_uri()])
        with Image.open(picture) as image:
            pixels = np.asarray(image.convert("RGB"))
        return Seen(pixels, tuple(match.group(1) for match in _CONSOLE.finditer(ran.stderr)))

    def document(self, page: Path, script: str = "") -> str:
        """The document after the page's scripts, a probe that notes the boxes of charts and maps, and then `script`."""
        probed = self.folder / f"{page.stem}-probed.html"
        probed.write_text(page.read_text(encoding="utf-8").replace("</body>", _PROBE % script + "</body>"), encoding="utf-8")
        return self._run(["--dump-dom", probed.as_uri()]).stdout

    def _run(self, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
        fixed = [
            self.program, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder / 'profile'}",
            "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--no-first-run", "--disable-background-networking", "--hide-scrollbars", "--force-device-scale-factor=1",
            "--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000", f"--window-size={self.width},{self.height}",
        ]  # fmt: skip
        ran = subprocess.run([*fixed, *arguments], capture_output=True, text=True, errors="replace", timeout=240, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran


def boxes(document: str) -> dict[str, tuple[int, int, int, int]]:
    """(left, top, width, height) of each chart and map by its id."""
    found = {}
    for tag in re.findall(r"<(?:div|svg)[^>]*data-box=[^>]*>", document):
        left, top, width, height = re.search(r'data-box="([^"]*)"', tag).group(1).split()  # type: ignore[union-attr]
        name = re.search(r' id="([^"]*)"', tag).group(1)  # type: ignore[union-attr]
        found[unescape(name)] = (int(left), int(top), int(width), int(height))
    return found


def num_colours(pixels: np.ndarray) -> int:
    """Distinct colours."""
    return int(np.count_nonzero(_counts(pixels)))


def ink(pixels: np.ndarray) -> float:
    """Share of the pixels that have not the most frequent colour."""
    counts = _counts(pixels)
    return float(1 - counts.max() / counts.sum())


def _counts(pixels: np.ndarray) -> np.ndarray:
    """How often each of the 2 ** 24 colours occurs."""
    codes = pixels.reshape(-1, 3).astype(np.int32) @ np.array([65536, 256, 1], dtype=np.int32)
    return np.bincount(codes)


def share_of(pixels: np.ndarray, colour: str) -> float:
    """Share of the pixels that have exactly this colour, #rrggbb."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return float((pixels == np.array(wanted, dtype=pixels.dtype)).all(axis=2).mean())
