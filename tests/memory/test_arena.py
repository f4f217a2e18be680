"""The two reference counts of a page."""

import pytest

from lamina.memory.arena import Arena


def counts(arena: Arena) -> tuple[int, int, int]:
    arena.check()
    return arena.free, arena.held, arena.evictable


def test_a_page_is_free_when_nobody_holds_it() -> None:
    arena = Arena(3)
    assert counts(arena) == (3, 0, 0)
    page = arena.take_for_lease()
    assert counts(arena) == (2, 1, 0)
    arena.ref_cache(page)
    arena.ref_lease(page)
    arena.unref_lease(page)
    assert counts(arena) == (2, 1, 0) and arena.lease_refs(page) == arena.cache_refs(page) == 1
    arena.unref_lease(page)
    assert counts(arena) == (2, 0, 1)
    arena.ref_lease(page)
    assert counts(arena) == (2, 1, 0)
    arena.unref_cache(page)
    arena.unref_lease(page)
    assert counts(arena) == (3, 0, 0)


def test_cache_pages_are_evictable() -> None:
    arena = Arena(2)
    page = arena.take_for_cache()
    assert counts(arena) == (1, 0, 1)
    arena.ref_cache(page)
    arena.unref_cache(page)
    assert counts(arena) == (1, 0, 1)
    arena.unref_cache(page)
    assert counts(arena) == (2, 0, 0)


def test_pages_are_distinct_and_finite() -> None:
    arena = Arena(5)
    assert sorted(arena.take_for_lease() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="free"):
        arena.take_for_cache()


@pytest.mark.parametrize("call", ["unref_lease", "unref_cache", "ref_lease", "ref_cache"])
@pytest.mark.parametrize("page", [0, -1, 2])
def test_wrong_use_fails(call: str, page: int) -> None:
    arena = Arena(2)
    uses = {
        "unref_lease": arena.unref_lease,
        "unref_cache": arena.unref_cache,
        "ref_lease": arena.ref_lease,
        "ref_cache": arena.ref_cache,
    }
    with pytest.raises(AssertionError):
        uses[call](page)
    assert counts(arena) == (2, 0, 0)


def test_double_free_fails() -> None:
    arena = Arena(2)
    page = arena.take_for_lease()
    arena.unref_lease(page)
    with pytest.raises(AssertionError):
        arena.unref_lease(page)
