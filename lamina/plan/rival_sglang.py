"""SGLang 0.5.23's memory for compressed attention, computed from the rules of its pools. A calculator of a rival; the engine
never uses it.

How that engine stores what layers keep, in its own words:

* Full pool: entries and index keys of all tokens, addressed by arithmetic from the token's location, in pages of 256 tokens.
* Window (SWA) pool: the window's rows of every layer, in pages of 256 tokens; each page has a ring of 8 raw rows of the
  overlapping compressor states, so a page is also a checkpoint of them. The pool has a fixed share of the full pool's tokens.
* C128 ring: for each request slot, all 128 raw rows of the other compressor states, reserved for every slot up front.

All three are split when the engine starts. Only the fp8 pools are described; the rest is `NotModelled`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.plan.kept import Kept, NotModelled

VERSION = "0.5.23"
#: tokens of a page of the full and of the window pool; both are rounded up to multiples of this many bytes, index keys are not
PAGE_TOKENS, ALIGNMENT = 256, 576
#: tokens of the window pool for each token of the full pool, by default
SWA_RATIO = 0.1
#: tokens between two evictions of what has left the window
EVICTION_TOKENS = 128
#: raw rows of overlapping states in the ring of each window page
RING_ROWS = 8
#: slots kept besides those of running requests
SPARE_SLOTS = 1
#: a running softmax keeps three numbers a channel, a raw row two
_RAW_NUMBERS, _RUNNING_NUMBERS = 2, 3


@dataclass(frozen=True, slots=True)
class SglangPools:
    """Bytes of the three pools.

    full_page_bytes, swa_page_bytes  of 256 tokens, all layers.   slot_bytes  the raw C128 ring of one slot.
    online_slot_bytes  the same as running results ("online" mode, off by default).   window  tokens of the window.
    """

    full_page_bytes: int
    swa_page_bytes: int
    slot_bytes: int
    online_slot_bytes: int
    window: int
    kept: tuple[Kept, ...]

    @property
    def full_token_bytes(self) -> float:
        """Bytes of a token of the full pool."""
        return self.full_page_bytes / PAGE_TOKENS

    @property
    def swa_token_bytes(self) -> float:
        """Bytes of a token of the window pool."""
        return self.swa_page_bytes / PAGE_TOKENS

    def swa_share(self, ratio: float = SWA_RATIO) -> float:
        """Share of full and window pool together that the window pool takes."""
        return ratio * self.swa_token_bytes / (self.full_token_bytes + ratio * self.swa_token_bytes)

    def pool_bytes(self, full_tokens: int, ratio: float = SWA_RATIO) -> float:
        """Bytes of full and window pool for so many full tokens, slots not counted."""
        return full_tokens * (self.full_token_bytes + ratio * self.swa_token_bytes)

    def slots_bytes(self, requests: int) -> int:
        """Bytes reserved for the C128 rings of `requests` running requests, the spare slot included."""
        return (requests + SPARE_SLOTS) * self.slot_bytes

    def swa_tokens(self, num_tokens: int) -> int:
        """Window tokens of a running request at most, in whole pages: window, an open page, and what waits for eviction."""
        pages = math.ceil((self.window + PAGE_TOKENS + EVICTION_TOKENS) / PAGE_TOKENS)
        return min(pages, math.ceil(num_tokens / PAGE_TOKENS)) * PAGE_TOKENS

    def full_tokens(self, num_tokens: int) -> int:
        """Full tokens of a request, in whole pages."""
        return math.ceil(num_tokens / PAGE_TOKENS) * PAGE_TOKENS

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a running request in the three pools."""
        pages = self.full_tokens(num_tokens) // PAGE_TOKENS * self.full_page_bytes
        return pages + self.swa_tokens(num_tokens) // PAGE_TOKENS * self.swa_page_bytes + self.slot_bytes

    def payload_bytes(self, num_tokens: int) -> float:
        """Bytes of a request that matter: entries and windows exactly, states as raw rows averaged over their phases."""
        return sum(_payload(one, num_tokens) for one in self.kept)

    def waste(self, num_tokens: int) -> float:
        """Share of a running request's bytes that is not payload; what the static split leaves unused is not in it."""
        return 1 - self.payload_bytes(num_tokens) / self.held_bytes(num_tokens)

    def requests_that_fit(self, total_bytes: int, num_tokens: int, ratio: float = SWA_RATIO) -> int:
        """Running requests of one length where slots, full pool and window pool share `total_bytes`.

        The number of slots is chosen to be exactly what is needed, which favours the rival; the ratio is not.
        """
        low, high = 0, total_bytes // self.held_bytes(num_tokens) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._holds(total_bytes, num_tokens, middle, ratio) else (low, middle)
        return low

    def _holds(self, total_bytes: int, num_tokens: int, requests: int, ratio: float) -> bool:
        """Whether the pools that are left beside so many slots hold so many requests."""
        full_tokens = (total_bytes - self.slots_bytes(requests)) / (self.full_token_bytes + ratio * self.swa_token_bytes)
        return requests * self.full_tokens(num_tokens) <= full_tokens and (
            requests * self.swa_tokens(num_tokens) <= ratio * full_tokens
        )


def sglang_pools(kept: Sequence[Kept]) -> SglangPools | NotModelled:
    """The rival's pools for a compressed-attention model; `kept` must be in fp8, with fp4 or fp8 index keys."""
    if not any(one.kind == "fold" for one in kept):
        return NotModelled("models without compressor states: how its pools are rounded is not known here")
    if any(one.kind == "snapshot" or one.reset or one.keep_first for one in kept):
        return NotModelled("other memories beside compressor states")
    if any(PAGE_TOKENS % one.stride for one in kept if one.stride):
        return NotModelled("entries whose tokens do not divide a page")
    full = swa = slot = online = 0
    for one in kept:
        if one.kind == "log":
            exact = PAGE_TOKENS // one.stride * one.row_bytes
            full += exact if one.name == "index" else _aligned(exact)
        elif one.kind == "window":
            swa += _aligned(PAGE_TOKENS * one.row_bytes)
        elif one.fold_tokens > one.period:  # carried over: cached with the window's pages
            swa += RING_ROWS * _raw(one)
        else:
            slot += one.fold_tokens * _raw(one)
            online += one.row_bytes
    window = max((one.size for one in kept if one.kind == "window"), default=0)
    return SglangPools(full, swa, slot, online, window, tuple(kept))


def _raw(one: Kept) -> int:
    """Bytes of the raw row of one token of a compressor."""
    return one.row_bytes * _RAW_NUMBERS // _RUNNING_NUMBERS


def _payload(one: Kept, num_tokens: int) -> float:
    if one.kind == "log":
        return num_tokens // one.stride * one.row_bytes
    if one.kind == "window":
        return min(num_tokens, one.size - 1) * one.row_bytes
    return min(num_tokens, one.fold_tokens - one.period + (one.period - 1) / 2) * _raw(one)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
