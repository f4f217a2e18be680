"""Decode steps as CUDA graphs: one a padded number of requests and a greatest context, captured when first needed or before.

All graphs share one pool of memory, the largest first: they run one after another, and what a graph leaves for others is copied
out of it. Without a GPU nothing is captured, and a step is computed as it comes.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

import torch

Bucket: TypeAlias = tuple[int, int]

_FEW = (1, 2, 4, 8, 16)
_FIRST_CONTEXT, _CONTEXT_FACTOR = 2048, 4


def sizes_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and `most`: kernels are chosen by such borders, so trying these tries all."""
    found = {1, most}
    size = 1
    while size < most:
        found |= {size, size + size // 2}
        size *= 2
    return tuple(sorted(number for number in found if number <= most))


def request_buckets(max_requests: int) -> tuple[int, ...]:
    """Padded numbers of requests: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... and the greatest."""
    found, size = list(_FEW), _FEW[-1]
    while found[-1] < max_requests:
        found += [size + size // 2, 2 * size]
        size *= 2
    return (*[bucket for bucket in found if bucket < max_requests], max_requests)


def context_buckets(max_context: int) -> tuple[int, ...]:
    """Greatest numbers of tokens of a request: 2,048, then four times as many each, and the greatest."""
    found = [_FIRST_CONTEXT]
    while found[-1] < max_context:
        found.append(found[-1] * _CONTEXT_FACTOR)
    return (*[bucket for bucket in found if bucket < max_context], max_context)


class DecodeGraphs:
    """Runs `compute(requests, context)`, which reads and writes fixed places on the device, as a graph.

    pad  called with the number of requests: makes the places hold padding, on which computing changes nothing that is kept.
    """

    def __init__(
        self, compute: Callable[[int, int], None], pad: Callable[[int], None], max_requests: int, max_context: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.compute = compute
        self.pad = pad
        self.requests = request_buckets(max_requests)
        self.contexts = context_buckets(max_context)
        self.captures = device.type == "cuda"
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    @property
    def num_captured(self) -> int:
        """Graphs there are."""
        return len(self._graphs)

    @property
    def num_buckets(self) -> int:
        """Graphs there can be."""
        return len(self.requests) * len(self.contexts)

    def bucket(self, num_requests: int, context: int) -> Bucket:
        """The smallest that holds so many requests, none of which has more than `context` tokens after the step."""
        return self.requests[bisect_left(self.requests, num_requests)], self.context(context)

    def context(self, context: int) -> int:
        """The smallest greatest context that is not exceeded."""
        return self.contexts[bisect_left(self.contexts, context)]

    def prepare(self, bucket: Bucket) -> None:
        """Captures the graph if there is none. The places must not hold a step yet: they are padded."""
        if not self.captures or bucket in self._graphs:
            return
        self.pad(bucket[0])
        self.compute(*bucket)  # compiles, and allocates what stays
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self.compute(*bucket)
        self._graphs[bucket] = graph

    def run(self, bucket: Bucket) -> None:
        """Computes what the places hold; `prepare` has been called."""
        if self.captures:
            self._graphs[bucket].replay()
        else:
            self.compute(*bucket)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures all graphs, the largest first. progress  called with (done, total)."""
        every = [(requests, context) for context in self.contexts[::-1] for requests in self.requests[::-1]]
        gc.collect()
        for done, bucket in enumerate(every, start=1):
            self.prepare(bucket)
            if progress is not None:
                progress(done, len(every))
