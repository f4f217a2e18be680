"""Several outputs on one stream of text: the first unfinished one live, the others kept until it is their turn."""

from collections.abc import Sequence
from typing import TextIO

_MAX_LABEL = 48
#: control characters other than tab and newline, shown as their pictures where they could command a terminal
PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class OutputStream:
    """Writes outputs one after the other, each as it comes; a heading above each if there are several.

    labels      the heading of each output, in the order of printing.
    pictures    whether control characters are shown as pictures (always on a terminal).
    """

    def __init__(self, out: TextIO, labels: Sequence[str], pictures: bool = False) -> None:
        self._out = out
        self._labels = labels
        self._waiting = [""] * len(labels)
        self._is_done = [False] * len(labels)
        self._now = -1
        self._ends_line = True
        self._is_terminal = out.isatty()
        self._pictures = pictures or self._is_terminal

    def feed(self, number: int, text: str, is_last: bool) -> None:
        """A piece of output `number`; `is_last` if it ends with it."""
        self._waiting[number] += text
        self._is_done[number] = self._is_done[number] or is_last
        if self._now < 0:
            self._begin()
        while self._now < len(self._labels):
            self._write(self._waiting[self._now])
            self._waiting[self._now] = ""
            if not self._is_done[self._now]:
                break
            self._end_line()
            self._begin()
        self._out.flush()

    def _begin(self) -> None:
        self._now += 1
        if len(self._labels) > 1 and self._now < len(self._labels):
            line = f"--- {self._labels[self._now]} ---"
            gap = "\n" if self._now else ""
            self._out.write(gap + (f"\033[1m{line}\033[0m" if self._is_terminal else line) + "\n")
        self._ends_line = len(self._labels) > 1

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text.translate(PICTURES) if self._pictures else text)
            self._ends_line = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._ends_line:
            self._out.write("\n")


def label(prompt_index: int, num_prompts: int, child: int, n: int, prompt: str | None, num_tokens: int) -> str:
    """A heading such as `prompt 1 of 2 (1,504 tokens): "The memory of..."`."""
    text = f"prompt {prompt_index + 1} of {num_prompts}" + (f", output {child + 1} of {n}" if n > 1 else "")
    text += f" ({num_tokens:,} token{'s' * (num_tokens != 1)})"
    if prompt is None:
        return text
    start = " ".join(prompt[: 4 * _MAX_LABEL].split()).translate(PICTURES)
    cut = start[:_MAX_LABEL] + "..." if len(start) > _MAX_LABEL or len(prompt) > 4 * _MAX_LABEL else start
    return f'{text}: "{cut}"'
