"""What movers read: to another process, the host or disk. It stays where it is until they say that they are done."""

from lamina.base.errors import ConfigError
from lamina.memory.arena import Arena
from lamina.memory.lease import Hold
from lamina.memory.prefix import Hit, PrefixIndex


class Movers:
    """The holds of one ledger; only the ledger calls it."""

    def __init__(self, arena: Arena, index: PrefixIndex) -> None:
        self.arena = arena
        self.index = index
        self._holds: dict[Hold, None] = {}

    @property
    def holds(self) -> tuple[Hold, ...]:
        """What is being read, oldest first."""
        return tuple(self._holds)

    def hold(self, found: Hit) -> Hold | None:
        """References all pages of a hit; None for one that needs a replay, or is empty."""
        source, node, position, layout = found.checkpoint, found.node, found.position, self.index.layout
        if found.replayed or not position or node is None or (source is None and layout.has_state):
            return None
        while node.depth * layout.block_tokens > position:
            assert node.parent is not None
            node = node.parent
        blocks = self.index.path_pages(node)
        for page in blocks:
            self.arena.ref_lease(page)
        self.index.pin(node)
        if source is not None:
            self.index.pin_checkpoint(source)
            if source.open_page is not None:
                blocks.append(source.open_page)
        held = Hold(position, tuple(blocks), source.pages if source else (), source.tails if source else (), node, source)
        self._holds[held] = None
        return held

    def release(self, held: Hold, now: int) -> None:
        """Drops the references. Raises ConfigError for a hold that is not held."""
        if held not in self._holds:
            raise ConfigError("held", held.position, "a hold of this ledger that has not been released")
        del self._holds[held]
        if held._source is not None:
            self.index.unpin_checkpoint(held._source, now)
        assert held._node is not None
        for page in reversed(self.index.path_pages(held._node)):
            self.arena.unref_lease(page)
        self.index.unpin(held._node, now)
