"""Where a text ends: at the first of some stop strings."""

from collections import deque
from collections.abc import Sequence

from lamina.base.errors import ConfigError


class StopChecker:
    """Cuts the text of one output at the first stop string to be completed.

    Text that may still become part of a stop string is held back, and no more than that; so no part of one is ever
    emitted before it is known to be harmless. Of strings completed by the same character the longest counts. The result
    is the same however the text is split. With include_in_output nothing needs holding back.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False, min_tokens: int = 0) -> None:
        """min_tokens: stop strings completed by text of the first `min_tokens` pushes (one per token) are ignored."""
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held: deque[str] = deque()  # pieces, so that a long hold is not copied again for each token
        self._front = 0  # characters of the first piece that were shown
        self._num_held = 0
        self._node = 0
        self._stopped = False
        self.matched: str | None = None
        # One automaton for all strings: a node is the longest end of the text that begins some stop string.
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        self._depth: list[int] = [0]
        self._ends: list[str] = [""]
        for text in stop:
            self._add(text)
        self._link()

    def push(self, text: str, num_tokens: int = 1) -> tuple[str, bool]:
        """The text of one more token (or of `num_tokens`): (what may be shown now, whether the output ended)."""
        self._num_tokens += num_tokens
        return self._take(text)

    def finish(self, rest: str = "") -> str:
        """What may still be shown when the output ends for another reason; `rest` is text that no token of its own brings."""
        shown, _ = self._take(rest)
        if self._stopped:
            return shown
        self._node = 0
        return shown + self._cut("", 0)

    def _take(self, text: str) -> tuple[str, bool]:
        if self._stopped:
            return "", True
        if not self._next[0]:
            return text, False
        may_stop = self._num_tokens > self._min_tokens
        node = self._node
        for index, char in enumerate(text):
            node = self._step(node, char)
            if self._ends[node] and may_stop:
                self.matched = self._ends[node]
                self._stopped = True
                return self._cut(text[: index + 1], 0 if self._include else len(self.matched)), True
            while not self._next[node]:  # a whole stop string that is ignored can only go on as a shorter one
                node = self._shorter[node]
        self._node = node
        return self._cut(text, 0 if self._include else self._depth[node]), False

    def _cut(self, text: str, num_held: int) -> str:
        """What to show of the held text and `text` when the last `num_held` characters of both are kept back."""
        if text:
            self._held.append(text)
        to_show = self._num_held + len(text) - num_held
        self._num_held = num_held
        shown: list[str] = []
        while to_show > 0 and to_show >= len(self._held[0]) - self._front:
            piece = self._held.popleft()[self._front :]
            self._front = 0
            to_show -= len(piece)
            shown.append(piece)
        if to_show > 0:
            shown.append(self._held[0][self._front : self._front + to_show])
            self._front += to_show
        return "".join(shown)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._shorter[node]
        return self._next[node].get(char, 0)

    def _add(self, text: str) -> None:
        if not text:
            raise ConfigError("stop", text, "non-empty texts")
        node = 0
        for char in text:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._depth.append(self._depth[node] + 1)
                self._ends.append("")
            node = self._next[node][char]
        self._ends[node] = text

    def _link(self) -> None:
        """Breadth first: where to go on from a node whose next character fits nothing, and the longest string ending there."""
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                queue.append(child)
                if node:
                    self._shorter[child] = self._step(self._shorter[node], char)
                self._ends[child] = self._ends[child] or self._ends[self._shorter[child]]
