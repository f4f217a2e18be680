"""What can be reused: a tree of full blocks with checkpoints hanging on it.

A node is one block of `block_tokens` tokens; its key is a 128-bit BLAKE2b over the tokens, keyed by the parent's key, and
it is believed only after its tokens have been compared. A checkpoint at position p hangs on the node at depth
p // block_tokens and is found by its tail, the p mod block_tokens tokens after that node. A root per cache_salt:

    root --- block 0 --- block 1 --- block 2          resident: 3 blocks
               |           `- checkpoint, tail of 17 tokens, with its open block page
               `- checkpoint, tail of 0 tokens
"""

import hashlib
import heapq
import itertools
import json
import sys
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.base.errors import ConfigError
from lamina.memory.arena import Arena
from lamina.memory.layout import Layout

TOKEN_BYTES = 4
KEY_BYTES = 16

#: reasons a lookup can give
FULL_HIT = "full hit"
DIFFERS = "first differing token"
NEVER_STORED = "never stored"
EVICTED = "evicted"
NO_CHECKPOINT = "no checkpoint"
PROMPT_LOGPROBS = "prompt log-probs wanted"

#: how many evicted blocks, and nodes with evicted checkpoints, are remembered to explain later misses
REMEMBERED = 4096
REMEMBERED_PER_NODE = 8


def checked_ids(tokens: Sequence[int], name: str = "tokens") -> list[int]:
    """The token ids as a list of int. Raises ConfigError naming `name` for anything but whole numbers in [0, 2**31)."""
    try:
        ids = array("i", list(tokens)).tolist()
    except (OverflowError, TypeError) as error:
        raise ConfigError(name, type(tokens).__name__, "token ids, whole numbers from 0 to 2147483647") from error
    if ids and min(ids) < 0:
        raise ConfigError(name, min(ids), "token ids, whole numbers from 0 to 2147483647")
    return ids


def encode(tokens: Sequence[int]) -> bytes:
    """Checked token ids as little-endian int32."""
    ids = array("i", tokens)
    assert ids.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def block_key(parent: bytes, block: bytes) -> bytes:
    """The 128-bit key of a block below `parent`."""
    return hashlib.blake2b(block, digest_size=KEY_BYTES, key=parent).digest()


class Node:
    """One resident full block, or a root (depth 0). Only the index writes it.

    tokens  the block, encoded.   page  its page; None for a root and in models without logs.
    pins    leases whose published path ends here; everything above a pinned node is safe, as it has a child.
    edges   sorted token bytes of all children and checkpoint tails: neighbours share the longest prefix.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "depth",
        "edges",
        "key",
        "page",
        "parent",
        "pins",
        "queued",
        "resident",
        "stamp",
        "tokens",
    )

    def __init__(self, parent: "Node | None", key: bytes, tokens: bytes, page: int | None) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = 0
        self.checkpoints: dict[int, dict[bytes, Checkpoint]] = {}  # by tail length in tokens, then by tail
        self.edges: list[bytes] = []
        self.pins = 0
        self.stamp = 0
        self.queued = False
        self.resident = True

    @property
    def evictable(self) -> bool:
        """Whether nothing hangs on the node and nobody stands on it."""
        return self.resident and self.parent is not None and not (self.pins or self.children or self.checkpoints)


class Checkpoint:
    """A frozen slot at `position`. Only the index and the ledger write it.

    tail       tokens after the node, encoded; unknown (empty) while pending.
    pages      pages of the frozen slot.   open_page  the page of the open block, None where position is a block border.
    state      "pending" (ordered, its tokens not yet accepted), "resident" (can be hit), "gone".
    pins       > 0 while a lookup's result is being used: not to be evicted.
    was_read   an order that reads it has been given, so the order that writes it must stay.
    """

    __slots__ = ("node", "open_page", "pages", "pins", "position", "queued", "stamp", "state", "tail", "was_read")

    def __init__(self, position: int, pages: tuple[int, ...], open_page: int | None, stamp: int) -> None:
        self.position = position
        self.pages = pages
        self.open_page = open_page
        self.stamp = stamp
        self.tail = b""
        self.node: Node | None = None
        self.state = "pending"
        self.pins = 0
        self.queued = False
        self.was_read = False

    @property
    def evictable(self) -> bool:
        """Whether nobody is using it right now."""
        return self.state != "gone" and not self.pins


_Evictable: TypeAlias = Node | Checkpoint


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found.

    position    tokens that need not be computed.   resident  full blocks of these tokens that are in the index.
    differs_at  tokens that are known: position of the first one that differs from everything stored on the path.
    reason      why position is not larger: one of the texts above; evicted_at and evicted_for belong to "evicted".
    """

    position: int
    resident: int
    differs_at: int
    reason: str
    evicted_at: int | None = None
    evicted_for: str = ""
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    node: Node | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> str:
        """The reason as a sentence with its numbers."""
        tail = {
            DIFFERS: f" at position {self.differs_at}",
            EVICTED: f" at step {self.evicted_at} for {self.evicted_for or 'a request without a name'}",
            NO_CHECKPOINT: f" after position {self.position}, though the tokens are known up to {self.differs_at}",
        }
        return f"{self.position} tokens reused: {self.reason}{tail.get(self.reason, '')}"


class PrefixIndex:
    """The tree, its eviction order and the memory of what was evicted. It takes and drops references in the arena."""

    def __init__(self, arena: Arena, layout: Layout, model_id: str = "") -> None:
        self.arena = arena
        self.layout = layout
        self.model_id = model_id
        self.num_checkpoint_pages = 0  # of pending and resident checkpoints, open blocks not counted
        self.evictions = 0
        self._block_bytes = layout.block_tokens * TOKEN_BYTES
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[int, int, _Evictable]] = []
        self._order = itertools.count()
        self._gone_blocks: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._gone_checkpoints: OrderedDict[bytes, list[tuple[bytes, int, str]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, roots first. O(nodes)."""
        return (*self._roots.values(), *self._nodes.values())

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that can be hit. O(nodes)."""
        return tuple(c for node in self.nodes for tails in node.checkpoints.values() for c in tails.values())

    # -- lookup

    def root(self, salt: str) -> Node:
        """The root of a cache_salt; a new one that is kept only once it is pinned or has something below it."""
        text = json.dumps([self.model_id, self.layout.layout_id, salt])
        key = hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
        return self._roots.get(key) or Node(None, key, b"", None)

    def child(self, node: Node, block: bytes) -> Node | None:
        """The resident node of `block` below `node`, its tokens compared."""
        found = self._nodes.get(block_key(node.key, block))
        return found if found is not None and found.parent is node and found.tokens == block else None

    def find(self, node: Node, tail: bytes) -> Checkpoint | None:
        """The checkpoint that hangs on `node` with exactly this tail."""
        return node.checkpoints.get(len(tail) // TOKEN_BYTES, {}).get(tail)

    def longest(self, tokens: bytes, salt: str, limit: int, min_gain: int) -> Hit:
        """The deepest point of these (encoded) tokens, at most `limit`, that can be restored. Changes nothing.

        min_gain  where fewer tokens than this are known past the hit, a missing checkpoint is not blamed for it.
        """
        size = self._block_bytes
        node = self.root(salt)
        while (node.depth + 1) * size <= len(tokens):
            below = self.child(node, tokens[node.depth * size : (node.depth + 1) * size])
            if below is None:
                break
            node = below
        open_block = tokens[node.depth * size : (node.depth + 1) * size]
        common, leaves = _common_tokens(open_block, node.edges)
        differs_at = node.depth * self.layout.block_tokens + common
        tip, found = self._restorable(tokens, node, limit)
        position = found.position if found is not None else tip.depth * self.layout.block_tokens
        reason, when, whom = self._why(tokens, node, position, limit, differs_at, leaves, min_gain)
        return Hit(position, node.depth, differs_at, reason, when, whom, found, tip)

    def _restorable(self, tokens: bytes, node: Node, limit: int) -> tuple[Node, Checkpoint | None]:
        """From the deepest resident node upwards: the first node, and its checkpoint, whose position is at most `limit`."""
        while True:
            start = node.depth * self.layout.block_tokens
            if not self.layout.slot_pages and start <= limit:  # nothing but logs: every resident block will do
                return node, None
            for length in sorted(node.checkpoints, reverse=True):
                if start + length <= limit:
                    found = self.find(node, tokens[start * TOKEN_BYTES : (start + length) * TOKEN_BYTES])
                    if found is not None:
                        return node, found
            if node.parent is None:
                return node, None
            node = node.parent

    def _why(
        self, tokens: bytes, node: Node, position: int, limit: int, differs_at: int, leaves: bool, min_gain: int
    ) -> tuple[str, int | None, str]:
        """Why a hit ends at `position`, and for an eviction when and for whom.

        node    the deepest resident one.   leaves  whether something stored goes on differently at differs_at.
        """
        possible = limit if self.layout.slot_pages else limit - limit % self.layout.block_tokens
        if position >= possible:
            return FULL_HIT, None, ""
        evicted = self._evicted(tokens, node, position, possible)
        if evicted is not None:
            return EVICTED, *evicted
        if differs_at > position and self.layout.slot_pages and differs_at >= min(position + min_gain, possible):
            return NO_CHECKPOINT, None, ""
        if leaves and differs_at:
            return DIFFERS, None, ""
        return NO_CHECKPOINT if differs_at > position else NEVER_STORED, None, ""

    def _evicted(self, tokens: bytes, node: Node, position: int, limit: int) -> tuple[int, str] | None:
        """When and for whom something was evicted that would have let these tokens go past `position`."""
        size = self._block_bytes
        block = tokens[node.depth * size : (node.depth + 1) * size]
        if len(block) == size and (node.depth + 1) * self.layout.block_tokens <= limit:
            gone = self._gone_blocks.get(block_key(node.key, block))
            if gone is not None:
                return gone
        tip: Node | None = node
        while tip is not None and (tip.depth + 1) * self.layout.block_tokens > position:
            for tail, when, whom in reversed(self._gone_checkpoints.get(tip.key, ())):
                end = tip.depth * size + len(tail)
                if position * TOKEN_BYTES < end <= limit * TOKEN_BYTES and tokens[tip.depth * size : end] == tail:
                    return when, whom
            tip = tip.parent
        return None

    # -- what leases do

    def pin(self, node: Node) -> None:
        """A lease's published path now ends at `node`."""
        if node.parent is None:
            assert self._roots.setdefault(node.key, node) is node
        node.pins += 1

    def unpin(self, node: Node, now: int) -> None:
        """A lease's published path no longer ends at `node`."""
        assert node.pins > 0, "a node is unpinned that nobody pinned"
        node.pins -= 1
        node.stamp = max(node.stamp, now)
        self._offer(node)

    def publish(self, parent: Node, block: bytes, page: int | None, now: int) -> tuple[Node | None, bool]:
        """The node of a block that has filled, and whether it is new (it then holds `page`).

        None where another block has the same key: the caller then stops publishing.
        """
        assert len(block) == self._block_bytes
        key = block_key(parent.key, block)
        if key in self._nodes:
            return self.child(parent, block), False
        node = Node(parent, key, block, page)
        node.stamp = now
        self._nodes[key] = node
        parent.children += 1
        insort(parent.edges, block)
        if page is not None:
            self.arena.ref_cache(page)
        self._gone_blocks.pop(key, None)
        self._offer(node)
        return node, True

    def share_page(self, parent: Node, block: bytes, page: int) -> None:
        """Lets the checkpoints inside a block that is now published use its page instead of copies of their own."""
        for length, tails in parent.checkpoints.items():
            found = tails.get(block[: length * TOKEN_BYTES])
            if found is not None:
                self.move_open_page(found, page)

    def move_open_page(self, checkpoint: Checkpoint, page: int) -> None:
        """Exchanges the open block page for one with the same bytes."""
        if checkpoint.open_page is not None and checkpoint.open_page != page:
            self.arena.ref_cache(page)
            self.arena.unref_cache(checkpoint.open_page)
            checkpoint.open_page = page

    # -- checkpoints

    def add_pending(self, position: int, pages: tuple[int, ...], open_page: int | None, now: int) -> Checkpoint:
        """A checkpoint that cannot be hit yet. The caller has taken `pages` for the cache; the open page is referenced here."""
        checkpoint = Checkpoint(position, pages, open_page, now)
        if open_page is not None:
            self.arena.ref_cache(open_page)
        self.num_checkpoint_pages += len(pages)
        self._offer(checkpoint)
        return checkpoint

    def attach(self, checkpoint: Checkpoint, node: Node, tail: bytes) -> None:
        """Makes a pending checkpoint visible below `node`."""
        assert checkpoint.state == "pending" and self.find(node, tail) is None
        assert checkpoint.position == node.depth * self.layout.block_tokens + len(tail) // TOKEN_BYTES
        checkpoint.state, checkpoint.node, checkpoint.tail = "resident", node, tail
        node.checkpoints.setdefault(len(tail) // TOKEN_BYTES, {})[tail] = checkpoint
        if tail:
            insort(node.edges, tail)
        gone = self._gone_checkpoints.get(node.key)
        if gone is not None:
            gone[:] = [entry for entry in gone if entry[0] != tail]

    def discard(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint and its references, pending or resident."""
        pages, open_page = self.take_over(checkpoint)
        for page in pages:
            self.arena.unref_cache(page)
        if open_page is not None:
            self.arena.unref_cache(open_page)

    def take_over(self, checkpoint: Checkpoint) -> tuple[tuple[int, ...], int | None]:
        """Removes a checkpoint and hands its references (pages, open page) to the caller."""
        assert checkpoint.state != "gone", "a checkpoint is dropped twice"
        node, tail = checkpoint.node, checkpoint.tail
        if node is not None:
            tails = node.checkpoints[len(tail) // TOKEN_BYTES]
            del tails[tail]
            if not tails:
                del node.checkpoints[len(tail) // TOKEN_BYTES]
            if tail:
                del node.edges[bisect_left(node.edges, tail)]
            node.stamp = max(node.stamp, checkpoint.stamp)
            self._offer(node)
        checkpoint.state, checkpoint.node = "gone", None
        self.num_checkpoint_pages -= len(checkpoint.pages)
        return checkpoint.pages, checkpoint.open_page

    def pin_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Its pages are held like a lease's until it is unpinned."""
        checkpoint.pins += 1
        for page in self._pages_of(checkpoint):
            self.arena.ref_lease(page)

    def unpin_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
        """Ends a pin; the checkpoint counts as used now."""
        assert checkpoint.pins > 0, "a checkpoint is unpinned that nobody pinned"
        checkpoint.pins -= 1
        checkpoint.stamp = max(checkpoint.stamp, now)
        for page in self._pages_of(checkpoint):
            self.arena.unref_lease(page)
        self._offer(checkpoint)

    # -- eviction

    def make_free(self, num_pages: int, now: int, whom: str) -> None:
        """Evicts, least recently used and leaves first, until that many pages are free; they must be free or evictable."""
        while self.arena.free < num_pages:
            assert self._evict_one(now, whom), "I1: pages count as evictable that cannot be evicted"

    def evict_all(self, now: int, whom: str) -> None:
        """Evicts everything that nobody stands on."""
        while self._evict_one(now, whom):
            pass

    def _evict_one(self, now: int, whom: str) -> bool:
        while self._heap:
            stamp, _, item = heapq.heappop(self._heap)
            item.queued = False
            if not item.evictable:
                continue  # offered again when it becomes evictable
            if item.stamp > stamp:
                self._offer(item)  # used since it was queued
                continue
            if isinstance(item, Node):
                self._evict_node(item, now, whom)
            else:
                if item.node is not None:
                    self._remember_checkpoint(item.node.key, item.tail, now, whom)
                self.discard(item)
            self.evictions += 1
            return True
        return False

    def _evict_node(self, node: Node, now: int, whom: str) -> None:
        parent = node.parent
        assert parent is not None
        del self._nodes[node.key]
        node.resident = False
        parent.children -= 1
        del parent.edges[bisect_left(parent.edges, node.tokens)]
        parent.stamp = max(parent.stamp, node.stamp)
        if node.page is not None:
            self.arena.unref_cache(node.page)
        self._gone_blocks[node.key] = (now, whom)
        if len(self._gone_blocks) > REMEMBERED:
            self._gone_blocks.popitem(last=False)
        self._offer(parent)

    def _remember_checkpoint(self, key: bytes, tail: bytes, now: int, whom: str) -> None:
        gone = self._gone_checkpoints.setdefault(key, [])
        self._gone_checkpoints.move_to_end(key)
        gone.append((tail, now, whom))
        del gone[:-REMEMBERED_PER_NODE]
        if len(self._gone_checkpoints) > REMEMBERED:
            self._gone_checkpoints.popitem(last=False)

    def _offer(self, item: _Evictable) -> None:
        """Queues what may now be evicted, once; a root that is empty is forgotten."""
        if isinstance(item, Node) and item.parent is None:
            if not (item.pins or item.children or item.checkpoints):
                self._roots.pop(item.key, None)
        elif item.evictable and not item.queued:
            item.queued = True
            heapq.heappush(self._heap, (item.stamp, next(self._order), item))

    def _pages_of(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        return checkpoint.pages if checkpoint.open_page is None else (*checkpoint.pages, checkpoint.open_page)


def _common_tokens(block: bytes, edges: Sequence[bytes]) -> tuple[int, bool]:
    """Tokens that `block` shares with the closest of the sorted edges, and whether one of these goes on after them."""
    at = bisect_left(edges, block)
    found = [(_common_prefix(block, edge), len(edge) // TOKEN_BYTES) for edge in edges[max(at - 1, 0) : at + 1]]
    longest = max((common for common, _ in found), default=0)
    return longest, any(common == longest < length for common, length in found)


def _common_prefix(one: bytes, other: bytes) -> int:
    """Leading tokens that are equal, by bisection."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
