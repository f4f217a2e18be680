"""The index by itself: keys, checkpoints, reasons, eviction."""

from array import array

import numpy as np
import pytest

from lamina.base.errors import ConfigError
from lamina.memory.arena import Arena
from lamina.memory.prefix import (
    DIFFERS,
    EVICTED,
    FULL_HIT,
    NEVER_STORED,
    NO_CHECKPOINT,
    WHOLE_BLOCKS,
    Checkpoint,
    Hit,
    Node,
    PrefixIndex,
)  # fmt: skip
from lamina.memory.tokens import block_key, checked_ids
from lamina.memory.tokens import encode as encode_array
from tests.memory.shapes import logs_only, scans_only, tiny


def encode(tokens: list[int]) -> bytes:
    return encode_array(array("i", tokens))


class Store:
    """An index over tiny blocks of 4 tokens, with a short way to put things in."""

    def __init__(self, num_pages: int = 40, layout: str = "tiny") -> None:
        self.layout = {"tiny": tiny, "logs": logs_only, "scans": scans_only}[layout]()
        self.arena = Arena(num_pages)
        self.index = PrefixIndex(self.arena, self.layout, "model")
        self.now = 0

    def put(self, tokens: list[int], salt: str = "", checkpoint: bool = True) -> Checkpoint | None:
        """Publishes the full blocks of these tokens and, at their end, a checkpoint."""
        self.now += 1
        node = self.index.root(self.index.prompt(tokens, salt))
        self.index.pin(node)
        for start in range(0, len(tokens) - 3, 4):
            page = self.arena.take_for_lease() if self.layout.has_logs else None
            below, _ = self.index.publish(node, encode(tokens[start : start + 4]), page, self.now)
            assert below is not None
            self.index.pin(below)
            self.index.unpin(node, self.now)
            if page is not None:
                self.arena.unref_lease(page)
            node = below
        made = None
        if checkpoint:
            inside = len(tokens) % 4
            opened = self.arena.take_for_lease() if inside and self.layout.has_logs else None
            pages = tuple(self.arena.take_for_cache() for _ in range(self.layout.checkpoint_pages(len(tokens))))
            made = self.index.add_pending(len(tokens), pages, opened, self.now)
            if opened is not None:
                self.arena.unref_lease(opened)
            self.index.attach(made, node, encode(tokens[len(tokens) - inside :]))
        self.index.unpin(node, self.now)
        return made

    def find(self, tokens: list[int], salt: str = "", limit: int | None = None, gain: int = 1) -> Hit:
        return self.index.longest(self.index.prompt(tokens, salt), len(tokens) if limit is None else limit, gain)


A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_keys_are_128_bit_and_chained() -> None:
    one, other = block_key(b"a" * 16, b"block"), block_key(b"b" * 16, b"block")
    assert len(one) == 16 and one != other != block_key(b"a" * 16, b"other")


def test_roots_differ_by_salt_and_model() -> None:
    store = Store()
    other = PrefixIndex(store.arena, store.layout, "another model")
    wide = PrefixIndex(store.arena, tiny(8), "model")
    roots = [store.index.prompt(A, ""), store.index.prompt(A, "x"), other.prompt(A, ""), wide.prompt(A, "")]
    assert len({prompt.key(0) for prompt in roots}) == 4


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [1.5], "ab", [None]])
def test_bad_ids_are_refused(tokens: list) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        checked_ids(tokens)


def test_ids_of_any_whole_kind_are_taken() -> None:
    assert checked_ids(np.array([1, 2], np.int64)) == checked_ids((1, np.int32(2))) == array("i", [1, 2])
    assert encode([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_a_hit_needs_a_checkpoint_whose_tail_is_equal() -> None:
    store = Store()
    store.put(A)
    assert store.find(A).position == 10
    assert store.find([*A, 11, 12]).position == 10
    assert store.find(A[:9]).position == 0
    assert store.find([*A[:9], 0]).position == 0
    assert store.find(A, "x").position == 0


def test_the_deepest_checkpoint_up_to_the_limit_is_taken() -> None:
    store = Store()
    for length in (2, 4, 5, 8, 10):
        store.put(A[:length])
    assert [store.find(A, limit=limit).position for limit in range(11)] == [0, 0, 2, 2, 4, 5, 5, 5, 8, 8, 10]
    hit = store.find(A)
    assert (hit.resident, hit.differs_at) == (2, 10) and hit.node is not None and hit.node.depth == 2


def test_several_checkpoints_with_tails_of_one_length() -> None:
    store = Store()
    tails = [[9, 9], [9, 8], [1, 1]]
    for tail in tails:
        store.put([*A[:8], *tail])
    for tail in tails:
        assert store.find([*A[:8], *tail, 5]).position == 10


def test_where_tokens_first_differ() -> None:
    store = Store()
    store.put(A)
    store.put([1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert store.find([1, 2, 3, 4, 5, 6, 0, 9]).differs_at == 7
    assert store.find([1, 2, 3, 4, 5, 6, 7, 9]).differs_at == 7
    assert store.find([1, 2, 3, 4, 9]).differs_at == 4
    assert store.find([*A[:9], 0]).differs_at == 9
    assert store.find([7]).differs_at == 0
    assert store.find(A[:3]).differs_at == 3


def test_reasons() -> None:
    store = Store()
    assert store.find(A).reason == NEVER_STORED
    store.put(A)
    assert store.find(A).reason == FULL_HIT
    assert store.find([*A[:5], 0, 0]).reason == NO_CHECKPOINT
    differs = store.find([*A[:5], 0, 0], gain=100)
    known = "the 5 tokens before it are known, but no checkpoint lies after position 0"
    assert differs.reason == DIFFERS and differs.why == f"0 tokens reused: first differing token at position 5; {known}"
    store.put(A[:5])
    assert store.find([*A[:5], 0, 0]).reason == DIFFERS
    assert store.find(A[:8]).reason == NO_CHECKPOINT
    assert store.find([*A, 11]).reason == NEVER_STORED  # nothing is stored past the hit
    store.index.evict_all(77, "the other")
    hit = store.find(A)
    assert (hit.reason, hit.evicted_at, hit.evicted_for) == (EVICTED, 77, "the other")
    assert "77" in hit.why and "the other" in hit.why


def test_an_evicted_path_that_is_stored_again_is_no_longer_evicted() -> None:
    store = Store()
    store.put(A)
    store.index.evict_all(5, "x")
    store.put(A[:8], checkpoint=False)
    assert store.find(A[:8]).reason == NO_CHECKPOINT
    store.put(A)
    assert store.find(A).reason == FULL_HIT


def test_the_memory_of_evictions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.memory.prefix.REMEMBERED", 3)
    store = Store()
    for first in range(9):
        store.put([first, 2, 3, 4, 5])
        store.index.evict_all(first, "x")
    assert len(store.index._gone_blocks) == len(store.index._gone_checkpoints) == 3
    assert store.find([8, 2, 3, 4, 5]).reason == EVICTED
    assert store.find([0, 2, 3, 4, 5]).reason == NEVER_STORED


def test_eviction_is_least_recently_used_and_leaf_first() -> None:
    store = Store()
    old, new = store.put(A), store.put([9, *A[1:]])
    assert old is not None and new is not None
    store.now += 1
    store.index.pin_checkpoint(old)
    store.index.unpin_checkpoint(old, store.now)  # used again
    store.index.make_free(store.arena.free + 1, 9, "x")
    assert (old.state, new.state) == ("resident", "gone")
    store.index.evict_all(9, "x")
    assert store.arena.free == 40 and not store.index.nodes


def test_a_pinned_path_and_a_pinned_checkpoint_stay() -> None:
    store = Store()
    made = store.put(A)
    assert made is not None and made.node is not None
    tip = made.node
    store.index.pin(tip)
    store.index.evict_all(1, "x")
    assert made.state == "gone" and tip.resident and tip.parent is not None and tip.parent.resident
    store.index.unpin(tip, 2)
    again = store.put(A)
    assert again is not None
    store.index.pin_checkpoint(again)
    store.index.evict_all(3, "x")
    assert again.state == "resident" and store.find(A).checkpoint is again
    assert store.arena.evictable == len(store.index)  # the blocks below it cannot be had now
    store.index.unpin_checkpoint(again, 4)
    store.index.evict_all(5, "x")
    assert store.arena.free == 40


def test_a_block_shared_by_a_node_and_a_checkpoint_is_freed_last() -> None:
    store = Store()
    made = store.put(A[:6])
    assert made is not None and made.open_page is not None
    page = store.arena.take_for_lease()
    root = store.index.root(store.index.prompt(A, ""))
    parent = store.index.child(root, encode(A[:4]))
    assert parent is not None
    node, new = store.index.publish(parent, encode(A[4:8]), page, 2)
    assert node is not None and new
    store.index.pin(node)
    store.index.unpin(node, 2)
    store.index.share_page(parent, encode(A[4:8]), page)
    assert made.open_page == page and store.arena.cache_refs(page) == 2
    store.arena.unref_lease(page)
    store.index.evict_all(3, "x")
    assert store.arena.free == 40


def test_logs_alone_need_no_checkpoint() -> None:
    store = Store(layout="logs")
    store.put(A, checkpoint=False)
    assert [store.find(A, limit=limit).position for limit in (3, 4, 7, 8, 10)] == [0, 4, 4, 8, 8]
    assert store.find(A).reason == WHOLE_BLOCKS and store.find(A, limit=8).reason == FULL_HIT
    assert store.find([*A[:5], 0, 0, 0], limit=8).reason == DIFFERS


def test_a_model_of_logs_says_what_it_can_reuse() -> None:
    store = Store(layout="logs")
    empty = store.find(A[:3], limit=2)
    assert (empty.reason, empty.why) == (NEVER_STORED, "0 tokens reused: nothing was stored yet")
    assert store.find(A[:1], limit=0).why == "0 tokens reused: the only token is always computed"
    store.put(A, checkpoint=False)
    assert store.find([9, 9, 9], limit=2).why == "0 tokens reused: this prompt was never stored"
    assert store.find(A[:3], limit=2).why == "0 tokens reused: only whole blocks are kept (4 tokens each)"
    parts = "of the 7 known tokens only whole blocks of 4 can be reused"
    found = store.find([*A[:7], 99, 98, 97], limit=9)
    assert found.why == f"4 tokens reused: first differing token at position 7; {parts}"
    at_a_border = store.find([*A[:4], 99, 98, 97, 96], limit=8)
    assert at_a_border.why == "4 tokens reused: first differing token at position 4"


def test_blocks_without_pages_are_keys() -> None:
    store = Store(layout="scans")
    store.put(A)
    assert store.find([*A, 0]).position == 10
    assert all(node.page is None for node in store.index.nodes)
    assert store.arena.evictable == 1
    store.index.evict_all(1, "x")
    assert store.arena.free == 40


def test_empty_roots_are_forgotten() -> None:
    store = Store()
    for number in range(20):
        store.put(A, f"salt {number}")
        store.find(A, f"unknown {number}")
        store.index.evict_all(1, "x")
    assert not store.index.nodes


def test_an_equal_key_with_other_tokens_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("prefix", "tokens"):
        monkeypatch.setattr(f"lamina.memory.{module}.block_key", lambda parent, block: b"k" * 16)
    store = Store()
    root = store.index.root(store.index.prompt(A, ""))
    store.index.pin(root)
    page = store.arena.take_for_lease()
    node, new = store.index.publish(root, encode(A[:4]), page, 1)
    assert isinstance(node, Node) and new
    assert store.index.publish(root, encode(A[4:8]), page, 1) == (None, False)
    assert store.index.child(root, encode(A[4:8])) is None and store.index.child(root, encode(A[:4])) is node
