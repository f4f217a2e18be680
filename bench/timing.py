"""How benchmarks time kernels: medians of replays of a captured graph."""

import statistics
from collections.abc import Callable, Sequence

import torch

#: what a copy reads and writes in a second on an H200, measured
COPY_BYTES_S = 4.26e12


def time_us(launches: Sequence[Callable[[], object]], replays: int = 15) -> tuple[float, float, float]:
    """Median, least and most us of one launch: the list is captured in one graph, which is replayed."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times), min(times), max(times)
