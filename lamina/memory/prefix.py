"""What can be reused: a tree of full blocks with checkpoints hanging on it.

A node is one block of `block_tokens` tokens; its key is a 128-bit BLAKE2b over the tokens, keyed by the parent's key, and
it is believed only after its tokens have been compared. A checkpoint at position p hangs on the node at depth
p // block_tokens and is found by its tail, the p mod block_tokens tokens after that node. A root per cache_salt:

    root --- block 0 --- block 1 --- block 2          resident: 3 blocks
               |           `- checkpoint, tail of 17 tokens, with its open block page
               `- checkpoint, tail of 0 tokens
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lamina.memory.arena import Arena
from lamina.memory.edges import common_tokens, with_edge, without_edge
from lamina.memory.eviction import EvictionQueue
from lamina.memory.layout import Layout
from lamina.memory.nodes import Checkpoint, Node, TailPages
from lamina.memory.tokens import TOKEN_BYTES, Prompt, block_key, root_key

__all__ = ["Checkpoint", "Hit", "Node", "PrefixIndex", "TailPages"]

#: reasons a lookup can give
FULL_HIT = "full hit"
WHOLE_BLOCKS = "only whole blocks are kept"
DIFFERS = "first differing token"
NEVER_STORED = "never stored"
EVICTED = "evicted"
NO_CHECKPOINT = "no checkpoint"
PROMPT_LOGPROBS = "prompt log-probs wanted"

#: how many evicted blocks, and nodes with evicted checkpoints, are remembered to explain later misses
REMEMBERED = 8192
REMEMBERED_PER_NODE = 8
#: replays start at multiples of this many tokens, where the bits of a prefill do not depend on the cut
REPLAY_ALIGNMENT = 128
#: a checkpoint that so many went on from stays useful beside a later one
_JUNCTION_USES = 2


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found.

    position    tokens that need not be computed.   resident  full blocks of these tokens that are in the index.
    log_tokens  tokens whose log need not be written: those of the resident blocks that the hit stands on, or `position` if more.
    replayed    whether the request starts with an empty slot, some way before log_tokens, and rebuilds it from there.
    differs_at  tokens that are known: position of the first one that differs from everything stored on the path.
    seen_before differs_at, or if no replay is possible also tokens that were stored once, not long ago.
    reason      why position is not larger: one of the texts above; evicted_at and evicted_for belong to "evicted".
    whole_blocks  tokens of a block, where nothing but whole blocks can be reused (a model of logs alone); else 0.
    is_first    nothing has been stored yet under this cache_salt.
    """

    position: int
    resident: int
    log_tokens: int
    replayed: bool
    differs_at: int
    reason: str
    evicted_at: int | None = None
    evicted_for: str = ""
    replay_tokens: float = 0
    seen_before: int = 0
    whole_blocks: int = 0
    is_first: bool = False
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    node: Node | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> str:
        """The reason as a sentence with its numbers."""
        near = "" if math.isinf(self.replay_tokens) else f" within {self.replay_tokens:.0f} tokens (the replay distance)"
        tail = {
            WHOLE_BLOCKS: f" ({self.whole_blocks} tokens each)",
            DIFFERS: f" at position {self.differs_at}" + self._lost,
            EVICTED: f" at step {self.evicted_at} for {self.evicted_for or 'a request without a name'}",
            NO_CHECKPOINT: f"{near} after position {self.position}, though the tokens are known up to {self.differs_at}",
        }
        rebuilt = f" ({self.log_tokens - self.position} more only to rebuild the state)" if self.replayed else ""
        reason = self.reason
        if reason == NEVER_STORED:
            reason = (
                "nothing was stored yet" if self.is_first else f"{'the rest' if self.position else 'this prompt'} was {reason}"
            )
        elif reason == FULL_HIT and not self.position:
            reason = "the only token is always computed"
        return f"{self.position} tokens reused{rebuilt}: {reason}{tail.get(self.reason, '')}"

    @property
    def _lost(self) -> str:
        """Why known tokens before the first differing one are not reused."""
        if self.differs_at <= self.position:
            return ""
        if self.whole_blocks:
            return f"; of the {self.differs_at} known tokens only whole blocks of {self.whole_blocks} can be reused"
        return f"; the {self.differs_at} tokens before it are known, but no checkpoint lies after position {self.position}"


class PrefixIndex:
    """The tree, its eviction order and the memory of what was evicted. It takes and drops references in the arena."""

    def __init__(self, arena: Arena, layout: Layout, model_id: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.arena = arena
        self.clock = clock
        self.layout = layout
        self.model_id = model_id
        self.num_checkpoint_pages = 0  # of pending and resident checkpoints, open blocks not counted
        self.evictions = 0
        #: called with each block that has come (True) or gone
        self.on_block: Callable[[Node, bool], None] | None = None
        self.num_pinned_checkpoint_pages = 0  # of these, the ones that movers or a lookup hold
        self._block_bytes = layout.block_tokens * TOKEN_BYTES
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        #: nodes without children, and checkpoints with a tail: when each was last used, in seconds, the latest last
        self.recent: OrderedDict[Node | Checkpoint, float] = OrderedDict()
        self._tailed: dict[bytes, Checkpoint] = {}  # checkpoints with a tail, by key
        self._queue = EvictionQueue()
        self._dense_from = self._first_useful_depth()
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

    def by_key(self, key: bytes) -> Node | Checkpoint | None:
        """The node, or the checkpoint with a tail, of this key."""
        return self._nodes.get(key) or self._tailed.get(key)

    # -- lookup

    def prompt(self, tokens: Sequence[int], salt: str) -> Prompt:
        """The tokens, checked, with their keys. Raises ConfigError."""
        return Prompt(tokens, salt, root_key(self.model_id, self.layout.layout_id, salt), self.layout.block_tokens)

    def root(self, prompt: Prompt) -> Node:
        """The root of a prompt's cache_salt; a new one that is kept only once it is pinned or has something below it."""
        key = prompt.key(0)
        return self._roots.get(key) or Node(None, key, b"", None, 0.0, prompt.salt)

    def child(self, node: Node, block: bytes, key: bytes | None = None) -> Node | None:
        """The resident node of `block` below `node`, its tokens compared. `key` saves computing it."""
        found = self._nodes.get(key or block_key(node.key, block))
        return found if found is not None and found.parent is node and found.tokens == block else None

    def path_pages(self, node: Node) -> list[int]:
        """Pages of the blocks from the root down to `node`."""
        pages: list[int] = []
        step: Node | None = node
        while step is not None:
            if step.page is not None:
                pages.append(step.page)
            step = step.parent
        return pages[::-1]

    def find(self, node: Node, tail: bytes) -> Checkpoint | None:
        """The checkpoint that hangs on `node` with exactly this tail."""
        return node.checkpoints.get(len(tail) // TOKEN_BYTES, {}).get(tail)

    def longest(self, prompt: Prompt, limit: int, min_gain: int) -> Hit:
        """The deepest point of this prompt, at most `limit`, that can be restored. Changes nothing.

        min_gain  where fewer tokens than this are known past the hit, a missing checkpoint is not blamed for it.
        """
        size, tokens = self.layout.block_tokens, prompt.data
        node = self.root(prompt)
        for depth in range(1, prompt.num_blocks + 1):
            below = self.child(node, prompt.block(depth - 1), prompt.key(depth))
            if below is None:
                break
            node = below
        common, leaves = common_tokens(prompt.block(node.depth), node.edges)
        differs_at = node.depth * size + common
        tip = node
        while tip.depth * size > limit:
            assert tip.parent is not None
            tip = tip.parent
        position, found, replayed = tip.depth * size, None, False
        if self.layout.has_state:
            found = self._deepest_checkpoint(tokens, node, limit)
            position = 0 if found is None else found.position
            start = self._replay_start(tip.depth * size)
            if start > position:
                position, found, replayed = start, None, True
        log_tokens = max(position, tip.depth * size)
        reason, when, whom = self._why(tokens, node, position, limit, differs_at, leaves, min_gain)
        return Hit(
            position, node.depth, log_tokens, replayed, differs_at, reason, when, whom, self.layout.replay,
            self._seen_before(prompt, node, differs_at), 0 if self.layout.has_state else size,
            not (self.root(prompt).edges or self.evictions), found, tip,
        )  # fmt: skip

    def _seen_before(self, prompt: Prompt, node: Node, differs_at: int) -> int:
        """How far these tokens go along blocks that have been evicted, where a path is of no use without a checkpoint on it."""
        if math.isfinite(self.layout.replay):
            return differs_at
        depth = node.depth
        while depth < prompt.num_blocks and prompt.key(depth + 1) in self._gone_blocks:
            depth += 1
        return max(differs_at, depth * self.layout.block_tokens)

    def _deepest_checkpoint(self, tokens: bytes, node: Node, limit: int) -> Checkpoint | None:
        """The deepest one on the path to `node`, or in the open block after it, whose position is at most `limit`."""
        step: Node | None = node
        while step is not None:
            start = step.depth * self.layout.block_tokens
            for length in sorted(step.checkpoints, reverse=True):
                if start + length <= limit:
                    found = self.find(step, tokens[start * TOKEN_BYTES : (start + length) * TOKEN_BYTES])
                    if found is not None:
                        return found
            step = step.parent
        return None

    def _replay_start(self, log_tokens: int) -> int:
        """Where an empty slot must start so that all is exact at `log_tokens`; 0 if that is the beginning.

        One token more than the memories need, for the final hidden vector of the token before `log_tokens`.
        """
        if math.isinf(self.layout.replay):
            return 0
        step = min(REPLAY_ALIGNMENT, self.layout.block_tokens)
        return max(0, int(log_tokens - self.layout.replay) - 1) // step * step

    def _why(
        self, tokens: bytes, node: Node, position: int, limit: int, differs_at: int, leaves: bool, min_gain: int
    ) -> tuple[str, int | None, str]:
        """Why a hit ends at `position`, and for an eviction when and for whom.

        node    the deepest resident one.   leaves  whether something stored goes on differently at differs_at.
        """
        possible = limit if self.layout.has_state else limit - limit % self.layout.block_tokens
        if position >= possible and (possible or differs_at or not limit):
            return FULL_HIT if possible == limit else WHOLE_BLOCKS, None, ""
        evicted = self._evicted(tokens, node, position, possible)
        if evicted is not None:
            return EVICTED, *evicted
        if differs_at > position and self.layout.has_state and differs_at >= min(position + min_gain, possible):
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
        self._touch(node)
        self.offer(node)

    def use(self, node: Node, now: int) -> None:
        """A hit went through `node`: it and everything above were of use."""
        step, learned = node, self._queue.learned
        while step.parent is not None:
            uses, stamp, last, count = step.uses, step.stamp, step, 0
            while step.parent is not None and step.uses == uses and step.stamp == stamp:
                last, step, count = step, step.parent, count + 1
            learned.used(last, now, count)
        self._touch(node)
        step = node
        while step.parent is not None:
            step.uses += 1
            step.stamp = now
            step = step.parent

    def publish(
        self, parent: Node, block: bytes, page: int | None, now: int, key: bytes | None = None, owner: str = ""
    ) -> tuple[Node | None, bool]:
        """The node of a block that has filled, and whether it is new (it then holds `page`). `key` saves computing it.

        None where another block has the same key: the caller then stops publishing.
        """
        assert len(block) == self._block_bytes
        key = key or block_key(parent.key, block)
        if key in self._nodes:
            return self.child(parent, block, key), False
        density = self.layout.block_tokens if parent.depth + 1 >= self._dense_from else 0.0
        node = Node(parent, key, block, page, density)
        node.stamp = now
        node.uses = self._queue.learned.back(key, now)
        node.owner = owner
        self._nodes[key] = node
        self.recent[node] = self.clock()
        if not parent.children:
            self.recent.pop(parent, None)
        parent.children += 1
        parent.edges = with_edge(parent.edges, block)
        if page is not None:
            self.arena.ref_cache(page)
        self._gone_blocks.pop(key, None)
        if self.on_block is not None:
            self.on_block(node, True)
        return node, True

    def _first_useful_depth(self) -> float:
        """Blocks from this depth on save their tokens even if nothing but logs is left of their path."""
        if not self.layout.has_state:
            return 0
        return math.inf if math.isinf(self.layout.replay) else (self.layout.replay + 1) // self.layout.block_tokens + 1

    def share_page(self, parent: Node, block: bytes, page: int) -> None:
        """Lets the checkpoints inside a block that is now published use its page instead of copies of their own."""
        if not parent.checkpoints:
            return
        for length, tails in parent.checkpoints.items():
            found = tails.get(block[: length * TOKEN_BYTES])
            if found is not None:
                self.move_open_page(found, page)

    def move_open_page(self, checkpoint: Checkpoint, page: int) -> None:
        """Exchanges the open block page for one with the same bytes, unless someone is reading it."""
        if checkpoint.open_page is not None and checkpoint.open_page != page and not checkpoint.pins:
            self.arena.ref_cache(page)
            if checkpoint.kept:
                self.arena.pin(page)
                self.arena.unpin(checkpoint.open_page)
            self.arena.unref_cache(checkpoint.open_page)
            checkpoint.open_page = page

    # -- checkpoints

    def add_pending(
        self, position: int, pages: tuple[int, ...], open_page: int | None, now: int, tails: tuple[TailPages, ...] = ()
    ) -> Checkpoint:
        """A checkpoint that cannot be hit yet. The caller has taken `pages` for the cache; the others are referenced here."""
        checkpoint = Checkpoint(position, pages, open_page, tails, now)
        for page in checkpoint.shared_pages:
            self.arena.ref_cache(page)
        self.num_checkpoint_pages += len(pages)
        self.offer(checkpoint)
        return checkpoint

    def attach(self, checkpoint: Checkpoint, node: Node, tail: bytes) -> None:
        """Makes a pending checkpoint visible below `node`."""
        assert checkpoint.state == "pending" and self.find(node, tail) is None
        assert checkpoint.position == node.depth * self.layout.block_tokens + len(tail) // TOKEN_BYTES
        checkpoint.state, checkpoint.node, checkpoint.tail = "resident", node, tail
        checkpoint.key = block_key(node.key, tail) if tail else node.key
        checkpoint.uses = max(checkpoint.uses, self._queue.learned.back((node.key, tail), checkpoint.stamp))
        self._supersede(checkpoint, node)
        if not node.checkpoints:
            node.checkpoints = {}
        node.checkpoints.setdefault(len(tail) // TOKEN_BYTES, {})[tail] = checkpoint
        if tail:
            node.edges = with_edge(node.edges, tail)
            self.recent[checkpoint] = self.clock()
            self._tailed[checkpoint.key] = checkpoint
        gone = self._gone_checkpoints.get(node.key)
        if gone is not None:
            gone[:] = [entry for entry in gone if entry[0] != tail]

    def _supersede(self, checkpoint: Checkpoint, node: Node) -> None:
        """Says what a new checkpoint saves over the ones before it on its path, and that the last of these is replaced.

        That one counts no longer, unless several requests went on from it, or it was made to last and this one was not.
        """
        before = self._before(checkpoint, node, 0)
        base, least = before, max(0.0, checkpoint.position - self.layout.replay)  # what lies further back saves no more
        while base is not None and base.uses < _JUNCTION_USES:
            assert base.node is not None
            base = self._before(base, base.node, least)
        start = 0 if base is None else base.position
        checkpoint.saves = int(min(checkpoint.position - start, self.layout.replay))
        if math.isinf(self.layout.replay) and self.layout.has_logs:
            checkpoint.carries = node.depth - start // self.layout.block_tokens
        if before is not None and (checkpoint.is_lasting or not before.is_lasting):
            before.is_superseded = True
            if before.queued >= 0:
                self._queue.offer(before)
        if checkpoint.queued >= 0:
            self._queue.offer(checkpoint)

    def _before(self, checkpoint: Checkpoint, node: Node, least: float) -> Checkpoint | None:
        """The deepest checkpoint on the path before this one, not before position `least`."""
        size, tokens = self.layout.block_tokens, checkpoint.tail
        step: Node | None = node
        while step is not None and (step.depth + 1) * size > least:
            for length in sorted(step.checkpoints, reverse=True):
                found = self.find(step, tokens[: length * TOKEN_BYTES])
                if found is not None and found is not checkpoint:
                    return found
            tokens, step = step.tokens, step.parent
        return None

    def discard(self, checkpoint: Checkpoint) -> None:
        """Drops a checkpoint and its references, pending or resident."""
        self.take_over(checkpoint)
        for page in (*checkpoint.pages, *checkpoint.shared_pages):
            self.arena.unref_cache(page)

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Removes a checkpoint and leaves its references to the caller."""
        assert checkpoint.state != "gone", "a checkpoint is dropped twice"
        node, tail = checkpoint.node, checkpoint.tail
        if node is not None:
            tails = node.checkpoints[len(tail) // TOKEN_BYTES]
            del tails[tail]
            if not tails:
                del node.checkpoints[len(tail) // TOKEN_BYTES]
            if tail:
                node.edges = without_edge(node.edges, tail)
                del self.recent[checkpoint]
                if self._tailed.get(checkpoint.key) is checkpoint:
                    del self._tailed[checkpoint.key]
            node.stamp = max(node.stamp, checkpoint.stamp)
            self.offer(node)
        checkpoint.state, checkpoint.node = "gone", None
        self.num_checkpoint_pages -= len(checkpoint.pages)
        if checkpoint.pins:
            self.num_pinned_checkpoint_pages -= len(checkpoint.pages)

    def pin_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Its pages are held like a lease's until it is unpinned."""
        if not checkpoint.pins:
            self.num_pinned_checkpoint_pages += len(checkpoint.pages)
        checkpoint.pins += 1
        for page in (*checkpoint.pages, *checkpoint.shared_pages):
            self.arena.ref_lease(page)

    def unpin_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
        """Ends a pin; the checkpoint counts as used now."""
        assert checkpoint.pins > 0, "a checkpoint is unpinned that nobody pinned"
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self.num_pinned_checkpoint_pages -= len(checkpoint.pages)
        checkpoint.stamp = max(checkpoint.stamp, now)
        for page in (*checkpoint.pages, *checkpoint.shared_pages):
            self.arena.unref_lease(page)
        self.offer(checkpoint)

    def use_checkpoint(self, checkpoint: Checkpoint, now: int) -> None:
        """A request goes on from it."""
        self._queue.learned.used(checkpoint, now)
        checkpoint.uses += 1
        checkpoint.stamp = now
        self._touch(checkpoint)

    def _touch(self, item: Node | Checkpoint) -> None:
        """An end of a path is used now."""
        if item in self.recent:
            self.recent[item] = self.clock()
            self.recent.move_to_end(item)

    # -- what users keep

    def keep(self, node: Node, checkpoint: Checkpoint | None) -> None:
        """A user's pin on a path and a checkpoint on it: they, and their pages, are not evicted."""
        node.kept += 1
        for page in self.path_pages(node):
            self.arena.pin(page)
        if checkpoint is not None:
            checkpoint.kept += 1
            if checkpoint.kept == 1:
                for page in (*checkpoint.pages, *checkpoint.shared_pages):
                    self.arena.pin(page)

    def let_go(self, node: Node, checkpoint: Checkpoint | None) -> None:
        """Takes such a pin back."""
        assert node.kept > 0
        node.kept -= 1
        for page in self.path_pages(node):
            self.arena.unpin(page)
        if checkpoint is not None:
            assert checkpoint.kept > 0
            checkpoint.kept -= 1
            if not checkpoint.kept:
                for page in (*checkpoint.pages, *checkpoint.shared_pages):
                    self.arena.unpin(page)
                self.offer(checkpoint)
        self.offer(node)

    # -- eviction

    def make_free(self, num_pages: int, now: int, whom: str) -> None:
        """Evicts, leaves first and cheapest first, until that many pages are free; they must be free or evictable."""
        while self.arena.free < num_pages:
            assert self._evict_one(now, whom), "I1: pages count as evictable that cannot be evicted"

    def evict_all(self, now: int, whom: str) -> None:
        """Evicts everything that nobody stands on."""
        while self._evict_one(now, whom):
            pass

    def _evict_one(self, now: int, whom: str) -> bool:
        item = self._queue.pop(now)
        if item is None:
            return False
        assert isinstance(item, Node | Checkpoint)
        self.evict(item, now, whom)
        return True

    def evict(self, item: Node | Checkpoint, now: int, whom: str) -> None:
        """Gives up one that is evictable, and remembers that it was there."""
        assert item.evictable
        if isinstance(item, Node):
            self._evict_node(item, now, whom)
        else:
            if item.node is not None:
                self._remember_checkpoint(item.node.key, item.tail, now, whom)
                self._queue.learned.gone((item.node.key, item.tail), item, now)
            self.discard(item)
        self.evictions += 1

    def _evict_node(self, node: Node, now: int, whom: str) -> None:
        parent = node.parent
        assert parent is not None and node in self.recent, "I3: a block is evicted that others go on from"
        del self._nodes[node.key]
        self._queue.learned.gone(node.key, node, now)
        node.resident = False
        parent.children -= 1
        used_at = self.recent.pop(node)
        if not parent.children and parent.parent is not None:
            self.recent[parent] = used_at
            self.recent.move_to_end(parent, last=False)
        parent.edges = without_edge(parent.edges, node.tokens)
        parent.stamp = max(parent.stamp, node.stamp)
        if node.page is not None:
            self.arena.unref_cache(node.page)
        if self.on_block is not None:
            self.on_block(node, False)
        self._gone_blocks[node.key] = (now, whom)
        if len(self._gone_blocks) > REMEMBERED:
            self._gone_blocks.popitem(last=False)
        self.offer(parent)

    def _remember_checkpoint(self, key: bytes, tail: bytes, now: int, whom: str) -> None:
        gone = self._gone_checkpoints.setdefault(key, [])
        self._gone_checkpoints.move_to_end(key)
        gone.append((tail, now, whom))
        del gone[:-REMEMBERED_PER_NODE]
        if len(self._gone_checkpoints) > REMEMBERED:
            self._gone_checkpoints.popitem(last=False)

    def offer(self, item: Node | Checkpoint) -> None:
        """Queues what may now be evicted, once; a root that is empty is forgotten."""
        if isinstance(item, Node) and item.parent is None:
            if not (item.pins or item.kept or item.children or item.checkpoints):
                self._roots.pop(item.key, None)
        elif item.queued < 0 and item.evictable:
            self._queue.offer(item)
