"""What the prefix index is made of: full blocks in a tree, and checkpoints that hang on them."""

from lamina.memory.edges import Edges

_NO_CHECKPOINTS: dict[int, dict[bytes, "Checkpoint"]] = {}

#: pages of the blocks of one large window, by block number
TailPages = dict[int, tuple[int, ...]]


class Node:
    """One resident full block, or a root (depth 0). Only the index writes it.

    tokens  the block, encoded.   page  its page; None for a root and in models without logs.
    pins    leases whose published path ends here; everything above a pinned node is safe, as it has a child.
    edges   sorted token bytes of all children and checkpoint tails.
    stamp   when it was last used; of a node with something below it, when that was last known.   uses  hits that went through.
    density tokens it saves a page.   queued  see EvictionQueue.
    owner   who published it first.   kept  pins of users that end here.   salt  the cache_salt of its root.
    """

    __slots__ = (
        "checkpoints", "children", "density", "depth", "edges", "kept", "key", "owner", "page", "parent", "pins", "queued",
        "resident", "salt", "stamp", "tokens", "uses",
    )  # fmt: skip

    def __init__(
        self, parent: "Node | None", key: bytes, tokens: bytes, page: int | None, density: float, salt: str = ""
    ) -> None:
        """salt  of a root; others have their parent's."""
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.page = page
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = 0
        self.checkpoints = _NO_CHECKPOINTS  # by tail length in tokens, then by tail; a dict of its own once there is one
        self.edges: Edges = ()
        self.pins = 0
        self.stamp = 0
        self.uses = 0
        self.density = density
        self.queued = -1
        self.resident = True
        self.owner = ""
        self.kept = 0
        self.salt: str = salt if parent is None else parent.salt

    @property
    def role(self) -> int:
        """A block, to the eviction queue."""
        return 0

    @property
    def evictable(self) -> bool:
        """Whether nothing hangs on the node and nobody stands on it."""
        return self.resident and self.parent is not None and not (self.pins or self.kept or self.children or self.checkpoints)


class Checkpoint:
    """A frozen slot at `position`. Only the index and the ledger write it.

    tail       tokens after the node, encoded; unknown (empty) while pending.
    pages      pages of the frozen slot.   open_page  the page of the open block, None where position is a block border.
    tails      the live blocks of each large window, shared by reference.
    state      "pending" (ordered, its tokens not yet accepted), "resident" (can be hit), "gone".
    pins       > 0 while a lookup's result is being used, or a mover reads it: not to be evicted.
    was_read   an order that reads it has been given, so the order that writes it must stay.
    saves      tokens that would be recomputed without it.   carries  pages of blocks that are of no use without it.
    is_superseded  a later one on its path has taken its place.
    is_lasting  it stands where the next turn of a chat will part from this one: only another such one takes its place.
    key        128 bits over the node's key and the tail.   owner  whose request made it.   kept  pins of users.
    """

    __slots__ = (
        "carries", "is_lasting", "is_superseded", "kept", "key", "node", "open_page", "owner", "pages", "pins", "position",
        "queued", "saves", "stamp", "state", "tail", "tails", "uses", "was_read",
    )  # fmt: skip

    def __init__(
        self, position: int, pages: tuple[int, ...], open_page: int | None, tails: tuple[TailPages, ...], stamp: int
    ) -> None:
        self.position = position
        self.pages = pages
        self.open_page = open_page
        self.tails = tails
        self.stamp = stamp
        self.tail = b""
        self.node: Node | None = None
        self.state = "pending"
        self.pins = 0
        self.queued = -1
        self.was_read = False
        self.uses = 0
        self.saves = position
        self.carries = 0
        self.is_superseded = False
        self.is_lasting = False
        self.key = b""
        self.owner = ""
        self.kept = 0

    @property
    def role(self) -> int:
        """A checkpoint, to the eviction queue, or one that has been replaced."""
        return 2 if self.is_superseded else 1

    @property
    def evictable(self) -> bool:
        """Whether nobody is using it right now."""
        return self.state != "gone" and not self.pins and not self.kept

    @property
    def shared_pages(self) -> list[int]:
        """Pages that it refers to and others may too: the open block's, and those of the large windows."""
        found = [page for blocks in self.tails for pages in blocks.values() for page in pages]
        return found if self.open_page is None else [self.open_page, *found]

    @property
    def density(self) -> float:
        """Tokens that one of its pages saves."""
        return self.saves / max(1, len(self.pages) + len(self.shared_pages) + self.carries)
