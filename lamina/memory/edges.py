"""What goes on below a node: sorted token bytes of its children and of its checkpoints' tails.

Neighbours in the order share the longest prefix, so two of them say how far a new block is known. Most nodes have one
edge, a root may have hundreds of thousands.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from sortedcontainers import SortedList  # type: ignore[import-untyped]

TOKEN_BYTES = 4
#: up to so many edges are kept in a plain tuple
_FEW = 16

Edges: TypeAlias = tuple[bytes, ...] | SortedList


def with_edge(edges: Edges, edge: bytes) -> Edges:
    """The edges and one more."""
    if not isinstance(edges, tuple):
        edges.add(edge)
        return edges
    if len(edges) >= _FEW:
        return SortedList([*edges, edge])
    if not edges:
        return (edge,)
    found = list(edges)
    insort(found, edge)
    return tuple(found)


def without_edge(edges: Edges, edge: bytes) -> Edges:
    """The edges less one that is there."""
    if not isinstance(edges, tuple):
        edges.remove(edge)
        return tuple(edges) if len(edges) < _FEW // 2 else edges
    at = bisect_left(edges, edge)
    assert edges[at] == edge
    return (*edges[:at], *edges[at + 1 :])


def next_edge(edges: Edges, edge: bytes) -> bytes:
    """The edge that comes after one that is there; empty if none does."""
    at = (bisect_left(edges, edge) if isinstance(edges, tuple) else edges.bisect_left(edge)) + 1
    found: bytes = edges[at] if at < len(edges) else b""
    return found


def edges_below(edges: Edges, edge: bytes) -> Iterator[bytes]:
    """All edges that begin with `edge`, itself included if it is there."""
    at = bisect_left(edges, edge) if isinstance(edges, tuple) else edges.bisect_left(edge)
    while at < len(edges) and edges[at].startswith(edge):
        yield edges[at]
        at += 1


def common_tokens(block: bytes, edges: Edges) -> tuple[int, bool]:
    """Tokens that `block` shares with the closest edge, and whether one of the closest goes on after them."""
    at = bisect_left(edges, block) if isinstance(edges, tuple) else edges.bisect_left(block)
    near: Sequence[bytes] = [edges[i] for i in range(max(at - 1, 0), min(at + 1, len(edges)))]
    found = [(common_prefix(block, edge), len(edge) // TOKEN_BYTES) for edge in near]
    longest = max((common for common, _ in found), default=0)
    return longest, any(common == longest < length for common, length in found)


def common_prefix(one: bytes, other: bytes) -> int:
    """Leading tokens that are equal, by bisection."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
