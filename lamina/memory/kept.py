"""What is kept for reuse, as users see it: prefixes with age, hits and owner; pinning and dropping them; bytes by memory.

A prefix is an end of a path through the index: a block that nothing follows, or a checkpoint inside a block that no other
continues. Its key is the block's 128-bit key, or one over that key and the tokens after it. Neither names the cache_salt.
Nothing here reads tokens of a path, and a lookup with another salt starts from another root, so it never meets what is listed.

A realm narrows all of it to the prefixes whose cache_salt begins with it; "" is everything. What lies outside is not there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lamina.base.errors import ConfigError, MissingError
from lamina.memory.edges import edges_below, next_edge
from lamina.memory.ledger import Ledger
from lamina.memory.pins import Pin
from lamina.memory.plan import tabulate
from lamina.memory.prefix import Checkpoint, Node
from lamina.memory.tokens import KEY_BYTES, TOKEN_BYTES

_ALLOWED = "the key of a prefix that is kept, 32 hexadecimal digits"


@dataclass(frozen=True, slots=True)
class Shared:
    """The first `tokens` tokens of a path: `hits` requests went on from there or from further on, on this path or another."""

    tokens: int
    hits: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """One kept path.

    key         hexadecimal.   tokens  its length.   age_s  seconds since its end was last used.
    hits        requests that went on from its last block, or from the one of its checkpoints that most did.
    owner       of the request that stored its end.   is_pinned  by a user.   is_running  a request stands on its last block.
    pages       that would be free if it were dropped and nobody used it.   checkpoints  positions on the path, ascending.
    shared      beginnings of the path with more hits than that, ascending: the blocks that it has in common with others.
    """

    key: str
    tokens: int
    age_s: float
    hits: int
    owner: str
    is_pinned: bool
    is_running: bool
    pages: int
    checkpoints: tuple[int, ...]
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """Bytes of one memory (or of `padding`, `checkpoints`): held by running requests, and kept for reuse."""

    name: str
    held_bytes: int
    cached_bytes: int


# -- looking


def prefixes(ledger: Ledger, limit: int = 256, realm: str = "") -> list[Prefix]:
    """The prefixes used last, the latest first; pinned ones always, also where others go on from them.

    O(listed, and their blocks, and ends of paths outside the realm).
    """
    index, now = ledger.index, ledger.index.clock()
    known: dict[Node, list[Checkpoint]] = {}
    used: dict[Node, tuple[Shared, ...]] = {}
    pinned = [item for item in map(_item_of, ledger.pins.all) if _salt_of(item).startswith(realm)]
    found: dict[Node | Checkpoint, float] = {item: index.recent.get(item, now) for item in pinned}
    for item, used_at in reversed(index.recent.items()):
        if len(found) >= limit:
            break
        if item not in found and _is_end(item) and _salt_of(item).startswith(realm):
            found[item] = used_at
    rows = [_row(ledger, item, max(0.0, now - used_at), known, used) for item, used_at in found.items()]
    return sorted(rows, key=lambda row: row.age_s)[:limit]


def num_prefixes(ledger: Ledger, realm: str = "") -> int:
    """How many ends of paths there are. O(all of them)."""
    return sum(1 for item in ledger.index.recent if _is_end(item) and _salt_of(item).startswith(realm))


def page_states(ledger: Ledger) -> list[tuple[str, int]]:
    """Run lengths over the page ids: (f free, h held, c cached, p pinned and not held; count). O(pages)."""
    state = ledger.arena.state
    return [(letter, sum(1 for _ in run)) for letter, run in groupby(map(state, range(ledger.num_pages)))]


def memory_states(ledger: Ledger) -> list[MemoryBytes]:
    """Bytes by memory; those held add up to the held pages, those cached to the cached and pinned ones.

    O(memories); O(pages) for a model with windows larger than a page.
    """
    layout, counts = ledger.layout, ledger.pages()
    read = ledger.index.num_pinned_checkpoint_pages  # by movers
    held_tails, cached_tails = _tails(ledger) if layout.tails else ([], [])
    window_pages = sum(tail.pages * count for tail, count in zip(layout.tails, cached_tails, strict=True))
    held = tabulate(layout, counts.blocks, held_tails, counts.slots, read)
    cached = tabulate(layout, counts.cached - window_pages, cached_tails, 0, counts.checkpoints - read)
    return [MemoryBytes(one.name, one.nbytes, other.nbytes) for one, other in zip(held.rows, cached.rows, strict=True)]


# -- changing


def pin(ledger: Ledger, key: str, realm: str = "") -> None:
    """Keeps a path, and the deepest checkpoint on it, from eviction; nothing happens where it is pinned.

    Pins give way, oldest first and with a log line, to a request that could not run although nothing else does.
    Raises MissingError for a key that is not there, CapacityError where more than half of the pages would be pinned, or pages
    that running requests may need.
    """
    item = _find(ledger, key, realm)
    if bytes.fromhex(key) in ledger.pins:
        return
    node = item if isinstance(item, Node) else item.node
    assert node is not None
    if isinstance(item, Node):
        checkpoint = item.checkpoints.get(0, {}).get(b"") or next(iter(_checkpoints_above(item)), None)
    else:
        checkpoint = item
    ledger.pins.add(Pin(bytes.fromhex(key), node, checkpoint), ledger.room_to_admit)
    ledger.recount()
    if ledger.room_to_admit < 0:  # windows that running requests share with it do not come back any more
        ledger.pins.remove(bytes.fromhex(key))
        ledger.recount()
        ledger.pins.refuse(bytes.fromhex(key), 0, 0)


def unpin(ledger: Ledger, key: str, realm: str = "") -> None:
    """Lets a pinned path be evicted again. Raises MissingError for a key that is not there, ConfigError for one without a pin."""
    pinned = {pin.key: _item_of(pin) for pin in ledger.pins.all}.get(_key(key))
    if pinned is None or not _salt_of(pinned).startswith(realm):
        _find(ledger, key, realm)
        raise ConfigError("key", key, "the key of a pinned prefix")
    ledger.tick()
    ledger.pins.remove(_key(key))
    ledger.recount()


def drop(ledger: Ledger, key: str, realm: str = "") -> int:
    """Evicts the checkpoints and blocks that only this prefix holds and nobody uses, from its end upwards; the pages freed.

    Raises MissingError for a key that is not there, ConfigError for one that is pinned.
    """
    item = _find(ledger, key, realm)
    if item.kept:
        raise ConfigError("key", key, "a prefix that is not pinned; unpin it first")
    before = ledger.free_pages
    _drop(ledger, item, ledger.tick())
    return ledger.free_pages - before


def drop_all(ledger: Ledger, realm: str = "") -> int:
    """Evicts everything that nobody uses or has pinned; the pages freed."""
    before = ledger.free_pages
    if realm:
        now = ledger.tick()
        for item in [item for item in ledger.index.recent if _is_end(item) and _salt_of(item).startswith(realm)]:
            _drop(ledger, item, now)
    else:
        ledger.drop_index()
    return ledger.free_pages - before


def drop_path(ledger: Ledger, tokens: Sequence[int], salt: str) -> None:
    """Evicts what was stored of these tokens: checkpoints that nobody uses, blocks from the end up to where others go on."""
    index, prompt = ledger.index, ledger.prompt(tokens, salt)
    node: Node | None = index.root(prompt)
    assert node is not None
    while (below := index.child(node, prompt.block(node.depth), prompt.key(node.depth + 1))) is not None:
        node = below
    now, path = ledger.tick(), prompt.block(node.depth)
    while node is not None:
        for made in _on(node, path):
            if made.evictable:  # others may go on from it: its open page may be one that this path has filled
                index.evict(made, now, "scores that were not finite")
        if node.parent is None or node.edges or not node.evictable:
            return
        parent, path = node.parent, node.tokens
        index.evict(node, now, "scores that were not finite")
        node = parent


def _drop(ledger: Ledger, item: Node | Checkpoint, now: int) -> None:
    """Evicts what only this path holds, from its end up to what is in use."""
    for own in list(_own(item)) if _is_end(item) else ():
        if not own.evictable:
            break
        ledger.index.evict(own, now, "a user who dropped it")


# -- parts


def _key(key: str) -> bytes:
    try:
        found = bytes.fromhex(key)
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise ConfigError("key", key, _ALLOWED)
    return found


def _find(ledger: Ledger, key: str, realm: str) -> Node | Checkpoint:
    item = ledger.index.by_key(_key(key))
    if item is None or not _salt_of(item).startswith(realm):
        raise MissingError("key", key, _ALLOWED)
    return item


def _salt_of(item: Node | Checkpoint) -> str:
    node = item if isinstance(item, Node) else item.node
    return "" if node is None else node.salt


def _item_of(pin: Pin) -> Node | Checkpoint:
    """What the pin's key names."""
    return pin.node if pin.checkpoint is None or pin.checkpoint.key != pin.key or pin.key == pin.node.key else pin.checkpoint


def _is_end(item: Node | Checkpoint) -> bool:
    """Whether nothing stored goes on from it."""
    if isinstance(item, Node):
        return not item.edges
    return item.node is not None and not next_edge(item.node.edges, item.tail).startswith(item.tail)


def _row(
    ledger: Ledger, item: Node | Checkpoint, age_s: float, known: dict[Node, list[Checkpoint]],
    used: dict[Node, tuple[Shared, ...]],
) -> Prefix:  # fmt: skip
    node, tail = (item, b"") if isinstance(item, Node) else (item.node, item.tail)
    assert node is not None
    made = [*_on(node, tail), *_above(node, known)]
    refs: Counter[int] = Counter()
    for own in _own(item) if _is_end(item) else ():
        if isinstance(own, Checkpoint):
            refs.update((*own.pages, *own.shared_pages))
        elif own.page is not None:
            refs[own.page] += 1
    hits = max([node.uses * (node.parent is not None), *(one.uses for one in made)])
    return Prefix(
        key=item.key.hex(), tokens=node.depth * ledger.layout.block_tokens + len(tail) // TOKEN_BYTES, age_s=age_s,
        hits=hits, owner=item.owner,
        is_pinned=item.key in ledger.pins, is_running=node.parent is not None and node.pins > 0,
        pages=sum(1 for page, count in refs.items() if ledger.arena.cache_refs(page) == count),
        checkpoints=tuple(sorted(one.position for one in made)),
        shared=tuple(one for one in _shared(node, ledger.layout.block_tokens, used) if one.hits > hits),
    )  # fmt: skip


def _shared(node: Node, block_tokens: int, used: dict[Node, tuple[Shared, ...]]) -> tuple[Shared, ...]:
    """The path to `node` by how often its blocks were used, the more often used first. `used`  what has been found so far."""
    new: list[Node] = []
    step = node
    while step.parent is not None and step not in used:
        new.append(step)
        step = step.parent
    found = used.get(step, ())
    for below in reversed(new):
        more = [one for one in found if one.hits > below.uses]
        found = used[below] = (*more, Shared(below.depth * block_tokens, below.uses))
    return found


def _on(node: Node, path: bytes) -> list[Checkpoint]:
    """Checkpoints on `node` that lie on the path that goes on with `path`, the deepest first."""
    found = (node.checkpoints[length].get(path[: length * TOKEN_BYTES]) for length in sorted(node.checkpoints, reverse=True))
    return [one for one in found if one is not None]


def _checkpoints_above(node: Node) -> Iterator[Checkpoint]:
    """Those on the path to `node` and not on it, the deepest first."""
    while node.parent is not None:
        yield from _on(node.parent, node.tokens)
        node = node.parent


def _above(node: Node, known: dict[Node, list[Checkpoint]]) -> list[Checkpoint]:
    """The same, each part of a path looked at once. `known`  what has been found so far."""
    new: list[Node] = []
    step = node
    while step.parent is not None and step not in known:
        new.append(step)
        step = step.parent
    found = known.get(step, [])
    for below in reversed(new):
        assert below.parent is not None
        more = _on(below.parent, below.tokens) if below.parent.checkpoints else []
        found = known[below] = [*more, *found] if more else found
    return found


def _own(item: Node | Checkpoint) -> Iterator[Node | Checkpoint]:
    """What only the path that ends with `item` needs, in the order in which it could be evicted."""
    node, path = (item, b"") if isinstance(item, Node) else (item.node, item.tail)
    while node is not None:
        for made in _on(node, path):
            if any(not path.startswith(edge) for edge in edges_below(node.edges, made.tail)):
                return  # another path goes on from it
            yield made
        if node.parent is None or any(not path.startswith(edge) for edge in node.edges):
            return
        yield node
        node, path = node.parent, node.tokens


def _tails(ledger: Ledger) -> tuple[list[int], list[int]]:
    """Blocks of each large window that running requests hold, and those that only checkpoints do."""
    held: list[set[tuple[int, ...]]] = [set() for _ in ledger.layout.tails]
    kept: list[set[tuple[int, ...]]] = [set() for _ in ledger.layout.tails]
    for sets, holders in ((held, [lease.tails for lease in ledger.leases]), (kept, [c.tails for c in ledger.all_checkpoints()])):
        for windows in holders:
            for group, blocks in enumerate(windows):
                sets[group].update(blocks.values())
    return [len(group) for group in held], [len(other - group) for group, other in zip(held, kept, strict=True)]
