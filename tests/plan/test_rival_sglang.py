"""The SGLang calculator reproduces that engine's pools: bytes of a full token, of a window token, of a slot, and the split.

Expected figures come from the published table for SGLang 0.5.23 and from arithmetic done by hand beside each of them. Pro has
30 layers with c4 and index, 31 with c128 and 61 windows; Flash 21, 20 and 43. Entries have 584 B, index keys 68 or 132 B.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.base.sizes import GiB, KiB, MiB
from lamina.plan.kept import Kept, NotModelled
from lamina.plan.rival_sglang import SglangPools, sglang_pools

PRO, FLASH = (30, 31, 61), (21, 20, 43)
POOL = int(26.09 * GiB)


def compressed(c4: int, c128: int, windows: int, key: int) -> list[Kept]:
    """What the layers keep in fp8, with index keys of `key` bytes."""
    found = [Kept("window", "window", layer, 584, size=128) for layer in range(windows)]
    for layer in range(c4):
        found += [
            Kept("c4", "log", layer, 584, stride=4), Kept("index", "log", layer, key, stride=4),
            Kept("c4_fold", "fold", layer, 2 * 6_144, period=4, fold_tokens=8),
            Kept("index_fold", "fold", layer, 2 * 1_536, period=4, fold_tokens=8),
        ]  # fmt: skip
    for layer in range(c4, c4 + c128):
        found += [
            Kept("c128", "log", layer, 584, stride=128), Kept("c128_fold", "fold", layer, 6_144, period=128, fold_tokens=128)
        ]  # fmt: skip
    return found


def pools_of(shape: tuple[int, int, int], key: int) -> SglangPools:
    pools = sglang_pools(compressed(*shape, key))
    assert isinstance(pools, SglangPools)
    return pools


@pytest.mark.parametrize(
    ("shape", "key", "expected"),
    [
        # a page of 256 tokens: 30 x (37,440 + 64 x 132) + 31 x 1,728 B = 1,430,208; / 256 = 5,586.75
        (PRO, 132, 5_586.8),
        # 30 x (37,440 + 64 x 68) + 31 x 1,728 = 1,307,328; / 256
        (PRO, 68, 5_106.8),
        # 21 x (37,440 + 8,448) + 20 x 1,728 = 998,208; / 256
        (FLASH, 132, 3_899.2),
        (FLASH, 68, 3_563.2),
    ],
)
def test_bytes_of_a_full_token(shape: tuple[int, int, int], key: int, expected: float) -> None:
    assert pools_of(shape, key).full_token_bytes == pytest.approx(expected, abs=0.051)


def test_a_full_page_in_bytes() -> None:
    assert pools_of(PRO, 132).full_page_bytes == 30 * (65 * 576 + 8_448) + 31 * 3 * 576 == 1_430_208
    assert pools_of(FLASH, 132).full_page_bytes == 998_208


def test_bytes_of_a_window_token() -> None:
    """256 x 584 = 149,504 -> 260 x 576 = 149,760 = 256 x 585 B a layer; and 8 raw rows of 8,192 + 2,048 B for 256 tokens in
    each c4 layer: Pro 61 x 585 + 30 x 8 x 10,240 / 256 = 35,685 + 9,600; Flash 43 x 585 + 21 x 320 = 25,155 + 6,720."""
    assert pools_of(PRO, 68).swa_token_bytes == 35_685 + 9_600 == 45_285
    assert pools_of(FLASH, 132).swa_token_bytes == 25_155 + 6_720 == 31_875


@pytest.mark.parametrize(("shape", "key", "percent"), [(PRO, 132, 44.8), (PRO, 68, 47.0), (FLASH, 132, 45.0), (FLASH, 68, 47.2)])
def test_the_windows_share_of_the_pool(shape: tuple[int, int, int], key: int, percent: float) -> None:
    """At the default ratio: 4,528.5 / (5,586.75 + 4,528.5) = 0.4477 for Pro with fp8 keys."""
    assert 100 * pools_of(shape, key).swa_share() == pytest.approx(percent, abs=0.05)


def test_a_pool_for_1m_full_tokens() -> None:
    """2^20 x 10,115.25 B = 9.88 GiB, of which 5.4 GiB are payload; Flash 2^20 x 7,086.75 B."""
    assert pools_of(PRO, 132).pool_bytes(MiB) / GiB == pytest.approx(9.88, abs=0.005)
    assert pools_of(FLASH, 132).pool_bytes(MiB) / GiB == pytest.approx(6.92, abs=0.005)
    assert pools_of(PRO, 132).payload_bytes(MiB) / GiB == pytest.approx(5.4, abs=0.05)
    assert pools_of(FLASH, 132).payload_bytes(MiB) / GiB == pytest.approx(3.8, abs=0.05)


def test_slots() -> None:
    """128 raw rows of 2 x 512 x 4 B: 31 x 512 KiB = 15.5 MiB, Flash 20 x 512 KiB; 256 requests and one spare slot: x 257.
    Online: 3 x 512 x 4 B: 31 x 6 KiB = 186 KiB."""
    pro, flash = pools_of(PRO, 68), pools_of(FLASH, 68)
    assert (pro.slot_bytes, flash.slot_bytes) == (15.5 * MiB, 10 * MiB)
    assert round(pro.slots_bytes(256) / GiB, 2) == 3.89 and round(flash.slots_bytes(256) / GiB, 2) == 2.51
    assert (pro.online_slot_bytes, flash.online_slot_bytes) == (186 * KiB, 120 * KiB)
    assert round(257 * pro.online_slot_bytes / MiB, 1) == 46.7 and round(257 * flash.online_slot_bytes / MiB, 1) == 30.1


def test_bytes_of_a_request() -> None:
    """1,000 tokens: 4 full pages of 1,307,328 B, 2 window pages (128 + 256 + 128 tokens) of 256 x 45,285 B, one slot."""
    pools = pools_of(PRO, 68)
    assert (pools.full_tokens(1000), pools.swa_tokens(1000), pools.swa_tokens(200)) == (1024, 512, 256)
    assert pools.held_bytes(1000) == 4 * 1_307_328 + 2 * 256 * 45_285 + 15.5 * MiB
    # payload: 250 and 7 entries, 127 window rows, 5.5 and 63.5 raw rows
    payload = 250 * 652 * 30 + 7 * 584 * 31 + 127 * 584 * 61 + 1_689_600 + 8_062_976
    assert pools.payload_bytes(1000) == payload
    assert pools.waste(1000) == 1 - payload / pools.held_bytes(1000)


def test_window_tokens_of_a_request() -> None:
    """Window, an open page of 256 and 128 that wait for eviction, in whole pages: 192 + 384 = 576 -> 768, 128 + 384 -> 512."""
    memories = [replace(one, size=192) if one.kind == "window" else one for one in compressed(*PRO, 68)]
    pools = sglang_pools(memories)
    assert isinstance(pools, SglangPools)
    assert (pools.swa_tokens(10_000), pools.swa_tokens(513), pools.swa_tokens(512)) == (768, 768, 512)
    assert pools_of(PRO, 68).swa_tokens(10_000) == 512


def test_requests_that_fit() -> None:
    """1K tokens, Pro, fp4 keys, 26.09 GiB = 28,013,924,188 B: n requests need 10 x 512 x n full tokens (the windows bind) of
    9,635.25 B each with their share, and n + 1 slots of 16,252,928 B: n = (28,013,924,188 - 16,252,928) / (5,120 x 9,635.25 +
    16,252,928) = 426.8. At 32K the log binds: n x 32,768 x 9,635.25 + slots: 27,997,671,260 / 331,980,800 = 84.3."""
    pools = pools_of(PRO, 68)
    assert pools.requests_that_fit(POOL, 1024) == 426
    assert pools.requests_that_fit(POOL, 32 * KiB) == 84
    # with a ratio that fits short requests the windows do not bind so early
    assert pools.requests_that_fit(POOL, 1024, ratio=0.5) > 426
    assert pools.requests_that_fit(MiB, 1024) == 0


@given(st.integers(1, 2**21), st.integers(1, 2**38), st.sampled_from([PRO, FLASH]), st.sampled_from([68, 132]))
def test_what_fits_is_the_most_that_fits(tokens: int, total: int, shape: tuple[int, int, int], key: int) -> None:
    """Checked with the split done in full: n fit, n + 1 do not, and neither takes more bytes than there are."""
    pools = pools_of(shape, key)
    found = pools.requests_that_fit(total, tokens)

    def fits(requests: int) -> bool:
        full = (total - (requests + 1) * pools.slot_bytes) / (pools.full_page_bytes + 0.1 * pools.swa_page_bytes)  # pages
        return requests * -(-tokens // 256) <= full and requests * min(2, -(-tokens // 256)) <= 0.1 * full

    assert found == 0 or fits(found)
    assert not fits(found + 1)
    assert found * pools.held_bytes(tokens) <= total


@pytest.mark.parametrize(
    ("memories", "word"),
    [
        ([Kept("kv", "log", 0, 8, stride=1)], "without compressor states"),
        ([*compressed(1, 1, 2, 68), Kept("state", "snapshot", 3, 8)], "other memories"),
        ([*compressed(1, 1, 2, 68), Kept("c3", "log", 3, 8, stride=3)], "do not divide"),
    ],
)
def test_what_is_not_known_is_said(memories: list[Kept], word: str) -> None:
    found = sglang_pools(memories)
    assert isinstance(found, NotModelled) and word in found.reason
