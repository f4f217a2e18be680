"""A second stream of the device for work that does not depend on what the main one does meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """Between `fork` and `join` the side work runs beside the main stream's; captured, it becomes a branch of the graph.

    Tensors may cross in both directions if whoever made them keeps them until `join`: memory freed on a stream is used again by
    that stream alone, and the next fork waits for all that the main stream was given before it.
    is_on  False runs everything on the main stream, in the order of the program.
    """

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self.is_on = is_on and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_on else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Side work: starts when everything launched so far on the main stream is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What the main stream is given from here on starts when the side work is done."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
