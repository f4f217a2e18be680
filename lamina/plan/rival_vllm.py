"""vLLM 0.33's memory for a model, computed from the rules of its planner. A calculator of a rival; the engine never uses it.

How that engine stores what layers keep, in its own words:

* Every layer cache has a spec: block size in tokens, bytes of a page, and either the whole request or a window as lifetime.
  Compressor states count as windows of raw fp32 rows (score and value of every token).
* Layers of equal spec form groups. A group's block takes one block id; a block id owns one row of `row_bytes` bytes, as wide
  as the widest group, and every group is laid over the row from its first byte. One pool of rows, no other memory.
* A request holds, for each group, one row for every block of tokens that is live.

Worst alignment everywhere: a window of w tokens in blocks of b touches ceil((w - 1) / b) + 1 of them. The null block (one row
of the pool) is not counted, which favours the rival. What its rules are not known for is `NotModelled`, never guessed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lamina.plan.kept import Kept, NotModelled

VERSION = "0.33"
#: scheduling and freeing run this many batches apart: async scheduling
BATCHES = 2
#: most tokens of a batch, by default
BATCHED_TOKENS = 8192
#: tokens of a block where the planner has no reason to choose another size
BLOCK_TOKENS = 16
#: blocks chosen by hand for compressed attention: entries, windows, and states by the tokens their open group is made of
ENTRY_BLOCK, WINDOW_BLOCK, STATE_BLOCKS = 256, 64, {8: 4, 128: 8}
#: a table per group, kept on the GPU and copied for each step, of int32
TABLES, TABLE_ENTRY_BYTES = 2, 4
#: a running softmax keeps three numbers a channel, a raw row two
_RAW_NUMBERS, _RUNNING_NUMBERS = 2, 3
#: groups take the size of the largest set of layers if it has less than this many times the layers of the smallest
_LARGEST_OVER_SMALLEST = 1.5


@dataclass(frozen=True, slots=True)
class Formats:
    """How the rival stores compressed attention: bytes of an entry and of an index key, and what pages are rounded up to."""

    name: str
    entry_bytes: int
    index_bytes: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Pages:
    """`layers` layers with a page of `nbytes` bytes each, alignment included; `exact_bytes` without it."""

    name: str
    layers: int
    nbytes: int
    exact_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layer caches that share block ids.

    block_tokens  tokens of a block.   window  tokens a request can still read, 0: all of them.
    chunk         of chunked attention with the hybrid manager switched on.   is_state  one block for a request of any length.
    """

    pages: tuple[Pages, ...]
    block_tokens: int
    window: int = 0
    chunk: int = 0
    is_state: bool = False

    @property
    def used_bytes(self) -> int:
        """Bytes of a row that the group uses."""
        return sum(page.layers * page.nbytes for page in self.pages)

    @property
    def layers(self) -> int:
        """Layer caches in the group."""
        return sum(page.layers for page in self.pages)

    @property
    def is_log(self) -> bool:
        """Whether blocks live as long as the request."""
        return not (self.window or self.chunk or self.is_state)

    def held(self, num_tokens: int) -> int:
        """Blocks of a decoding request of `num_tokens` tokens, at the worst alignment."""
        if self.is_state:
            return 1
        blocks = math.ceil(num_tokens / self.block_tokens)
        if self.window:
            return min(blocks, math.ceil((self.window - 1) / self.block_tokens) + 1)
        return min(blocks, math.ceil(self.chunk / self.block_tokens)) if self.chunk else blocks

    def reserved(self, num_tokens: int, in_flight: int) -> int:
        """Blocks that admission asks for a request of `num_tokens` tokens in all."""
        if self.is_state:
            return 1
        if self.window:
            return math.ceil(min(self.window - 1 + in_flight, num_tokens) / self.block_tokens) + 1
        most = min(self.chunk + in_flight, num_tokens) if self.chunk else num_tokens
        return math.ceil(most / self.block_tokens)

    def hit(self, position: int) -> int:
        """Blocks besides those of the log that must be cached for a hit at `position`."""
        if self.is_state:
            return 1
        if self.window:
            return math.ceil(min(self.window - 1, position) / self.block_tokens)
        return math.ceil(position % self.chunk / self.block_tokens) if self.chunk else 0


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """The rival's groups and rows. kept: what layers keep, in the rival's formats.   notes: assumptions, a sentence each."""

    groups: tuple[Group, ...]
    kept: tuple[Kept, ...]
    notes: tuple[str, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a block id: the widest group."""
        return max(group.used_bytes for group in self.groups)

    def idle_fraction(self, group: Group) -> float:
        """Share of a row that a group's blocks leave unused."""
        return 1 - group.used_bytes / self.row_bytes

    @property
    def scheduler_block(self) -> int:
        """Hits end at multiples of this many tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def hash_block(self) -> int:
        """Tokens under one hash."""
        return math.gcd(*(group.block_tokens for group in self.groups))

    def hashes(self, num_tokens: int) -> int:
        """Hashes computed for a prompt."""
        return num_tokens // self.hash_block

    def held_rows(self, num_tokens: int) -> int:
        """Rows of a decoding request."""
        return sum(group.held(num_tokens) for group in self.groups)

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a decoding request."""
        return self.held_rows(num_tokens) * self.row_bytes

    def payload_bytes(self, num_tokens: int, raw: bool = True) -> float:
        """Bytes of a request that matter, exactly and without padding.

        raw  compressor states as rows of the open group, averaged over its phases; else as running results.
        """
        return sum(_payload(one, num_tokens, raw) for one in self.kept)

    def waste(self, num_tokens: int) -> float:
        """Share of a decoding request's bytes that is not payload."""
        return 1 - self.payload_bytes(num_tokens) / self.held_bytes(num_tokens)

    def requests_that_fit(self, pool_bytes: int, num_tokens: int) -> int:
        """Decoding requests of one length in a pool, without cached prefixes."""
        return pool_bytes // self.row_bytes // self.held_rows(num_tokens)

    @property
    def permanent_bytes_per_token(self) -> float:
        """What a token leaves behind for the rest of its request, in rows."""
        return self.row_bytes * sum(1 / group.block_tokens for group in self.groups if group.is_log)

    @property
    def in_flight_bytes_per_token(self) -> float:
        """What a token of a prefill takes until its step is done."""
        return self.row_bytes * sum(1 / group.block_tokens for group in self.groups if not group.is_state)

    def reserve_rows(self, num_tokens: int, batched_tokens: int = BATCHED_TOKENS, batches: int = BATCHES) -> int:
        """Rows that must be free to admit a request of `num_tokens` tokens."""
        return sum(group.reserved(num_tokens, batches * batched_tokens) for group in self.groups)

    def window_share(self, num_tokens: int, batched_tokens: int = BATCHED_TOKENS) -> float:
        """Share of that reserve that goes to windows and states."""
        kept = sum(group.reserved(num_tokens, 0) for group in self.groups if group.is_log)
        return 1 - kept / self.reserve_rows(num_tokens, batched_tokens)

    def hit_rows(self, position: int) -> int:
        """Rows, besides the log's, that keep a point where a prefix can be hit."""
        return sum(group.hit(position) for group in self.groups)

    def table_entries(self, num_tokens: int) -> int:
        """Entries of the block tables of one request: positions are absolute, so windows need all of theirs."""
        return sum(1 if group.is_state else math.ceil(num_tokens / group.block_tokens) for group in self.groups)

    def table_bytes(self, num_tokens: int) -> int:
        """Bytes of those tables, the copy for the step included."""
        return TABLES * TABLE_ENTRY_BYTES * self.table_entries(num_tokens)


def formats_for(kept: Sequence[Kept], cache: str, index: str) -> Formats:
    """The rival's formats at the widths of a compressed-attention model.

    cache  "ds_mla": the record that our fp8 format is too (`kept` must be in fp8); "fp8_row": a byte a channel; "bf16".
    index  "fp4": half a byte a channel and a scale byte for 32; "fp8": a byte a channel and one fp32 scale.
    """
    width = _width(kept, is_index=False)
    entry, alignment = {
        "ds_mla": (next((one.row_bytes for one in kept if one.kind == "window"), 0), 576),
        "fp8_row": (width, 512),
        "bf16": (2 * width, 512),
    }[cache]
    keys = _width(kept, is_index=True)
    return Formats(f"{cache} + {index} index", entry, {"fp4": keys // 2 + keys // 32, "fp8": keys + 4}[index], alignment)


def vllm_layout(kept: Sequence[Kept], formats: Formats | None = None, chunked: bool = False) -> VllmLayout | NotModelled:
    """The rival's layout of a model.

    formats  for models with compressor states; others are stored as `kept` says.
    chunked  switch on the hybrid manager for chunked local attention: it is off by default, and then these layers keep all.
    """
    if not kept:
        return NotModelled("a model that remembers nothing")
    if any(one.keep_first for one in kept):
        return NotModelled("windows that keep their first tokens")
    if any(one.kind == "fold" for one in kept):
        if formats is None:
            return NotModelled("compressor states without a format of the entries")
        return _packed(tuple(_in_formats(one, formats) for one in kept), formats.alignment)
    if any(one.stride > 1 for one in kept):
        return NotModelled("entries of several tokens without compressor states")
    if any(one.kind == "snapshot" for one in kept):
        return _with_states(tuple(kept))
    return _unified(tuple(kept), kept, BLOCK_TOKENS, (), chunked, ())


# Compressed attention: groups of different pages, laid over one row -----------------------------------------------------


def _packed(kept: tuple[Kept, ...], alignment: int) -> VllmLayout | NotModelled:
    """Buckets of equal block and window; balanced ones are cut into groups of about the same number of layers."""
    buckets: dict[tuple[int, int], list[Pages]] = {}
    for one in kept:
        if one.kind == "log":
            if ENTRY_BLOCK % one.stride:
                return NotModelled(f"entries of {one.stride} tokens")
            key, states = (ENTRY_BLOCK, 0), ENTRY_BLOCK // one.stride
        elif one.kind == "window" and not one.reset:
            key, states = (WINDOW_BLOCK, one.size), WINDOW_BLOCK
        elif one.kind == "fold" and one.fold_tokens in STATE_BLOCKS:
            block = STATE_BLOCKS[one.fold_tokens]
            key, states = (block, one.fold_tokens), block
        else:
            return NotModelled(f"{one.name} beside compressor states")
        exact = states * _stored_bytes(one)
        _count(buckets.setdefault(key, []), Pages(one.name, 1, _aligned(exact, alignment), exact))
    largest = _largest_group(list(buckets.values()))
    groups = []
    for (block, window), pages in buckets.items():
        parts = math.ceil(max(_repeats(pages)) / largest) if _is_balanced(pages) else 1
        groups += [Group(cut, block, window) for cut in _cut(pages, parts)]
    return VllmLayout(tuple(groups), kept)


def _stored_bytes(one: Kept) -> int:
    """One row of a layer's cache: entries as they are, states as raw rows."""
    return one.row_bytes * _RAW_NUMBERS // _RUNNING_NUMBERS if one.kind == "fold" else one.row_bytes


def _count(pages: list[Pages], page: Pages) -> None:
    """Adds a layer to the pages of its name and size."""
    for place, known in enumerate(pages):
        if (known.name, known.nbytes) == (page.name, page.nbytes):
            pages[place] = replace(known, layers=known.layers + 1)
            return
    pages.append(page)


def _repeats(pages: Sequence[Pages]) -> tuple[int, ...]:
    """How often each page size occurs."""
    sizes: dict[int, int] = {}
    for page in pages:
        sizes[page.nbytes] = sizes.get(page.nbytes, 0) + page.layers
    return tuple(sizes.values())


def _is_balanced(pages: Sequence[Pages]) -> bool:
    return len(set(_repeats(pages))) == 1


def _largest_group(buckets: Sequence[Sequence[Pages]]) -> int:
    """The number of repeats of a group that pads the balanced buckets least; buckets of several page sizes are not cut."""
    balanced = [pages for pages in buckets if _is_balanced(pages)]
    if not balanced:
        return 1
    least = max((max(_repeats(pages)) for pages in balanced if len(_repeats(pages)) > 1), default=1)
    least = least if least > 1 else min(max(_repeats(pages)) for pages in balanced)
    most = max(max(_repeats(pages)) for pages in balanced)

    def padding(size: int) -> int:
        total = 0
        for pages in balanced:
            repeats = max(_repeats(pages))
            missing = math.ceil(repeats / size) * size - repeats
            total += missing * sum(page.layers * page.nbytes for page in pages) // repeats
        return total

    return min(range(least, max(most, least) + 1), key=padding)


def _cut(pages: Sequence[Pages], parts: int) -> list[tuple[Pages, ...]]:
    """The pages in `parts` groups, the first ones one layer larger where it does not come out even."""
    groups = []
    for part in range(parts):
        cut = [replace(page, layers=(page.layers + parts - 1 - part) // parts) for page in pages]
        groups.append(tuple(page for page in cut if page.layers))
    return groups


# All others: one page size, groups of equal size, padded with missing layers ---------------------------------------------


def _unified(
    kept: tuple[Kept, ...], attention: Sequence[Kept], block: int, states: Sequence[Pages], chunked: bool, notes: tuple[str, ...]
) -> VllmLayout | NotModelled:
    """One group where all layers live equally long; else groups of as many layer caches each, all with the same page."""
    lifetimes: dict[tuple[int, int], dict[int, int]] = {}  # (window, chunk) -> bytes per token by layer
    for one in attention:
        key = (one.size, 0) if not one.reset else (0, one.reset if chunked else 0)
        layers = lifetimes.setdefault(key, {})
        layers[one.layer] = layers.get(one.layer, 0) + one.row_bytes
    if any(one.reset for one in attention) and not chunked:
        notes += ("the hybrid manager is off for chunked local attention, its default, so these layers keep every token",)
    if len(lifetimes) == 1 and not states:
        ((window, chunk), layers) = next(iter(lifetimes.items()))
        pages: list[Pages] = []
        for nbytes in layers.values():
            _count(pages, Pages("all layers", 1, block * nbytes, block * nbytes))
        return VllmLayout((Group(tuple(pages), block, window, chunk),), kept, notes)
    sizes = {nbytes for layers in lifetimes.values() for nbytes in layers.values()}
    if len(sizes) != 1:
        return NotModelled("layers of different lifetimes with different bytes per token")
    page = block * sizes.pop()
    counts = [len(layers) for layers in lifetimes.values()] + [state.layers for state in states]
    size = max(counts) if max(counts) < _LARGEST_OVER_SMALLEST * min(counts) else min(counts)
    groups = []
    for (window, chunk), layers in lifetimes.items():
        name = "window" if window else "chunk" if chunk else "full"
        groups += [Group((Pages(name, n, page, page),), block, window, chunk) for n in _in_groups(len(layers), size)]
    for state in states:
        groups += [Group((replace(state, layers=n),), block, is_state=True) for n in _in_groups(state.layers, size)]
    missing = sum(size - group.layers for group in groups)
    notes += (f"groups of {size} layers, {missing} places of them empty",) if missing else ()
    return VllmLayout(tuple(groups), kept, notes)


def _in_groups(layers: int, size: int) -> list[int]:
    """Layers of each group of at most `size`."""
    return [min(size, layers - first) for first in range(0, layers, size)]


def _with_states(kept: tuple[Kept, ...]) -> VllmLayout | NotModelled:
    """Blocks of attention are raised until a page holds a layer's state: scan state and convolution inputs together."""
    scans = {one.layer for one in kept if one.kind == "snapshot"}
    state: dict[int, int] = {}
    per_token: dict[int, int] = {}
    attention = []
    for one in kept:
        if one.kind == "snapshot":
            state[one.layer] = state.get(one.layer, 0) + one.row_bytes
        elif one.kind == "window" and one.layer in scans:  # a convolution of `size` taps reads the size - 1 inputs before its own
            state[one.layer] = state.get(one.layer, 0) + one.row_bytes * (one.size - 1)
        else:
            attention.append(one)
            per_token[one.layer] = per_token.get(one.layer, 0) + one.row_bytes
    if not attention:
        return NotModelled("a model of states alone")
    if len(set(state.values())) != 1 or len(set(per_token.values())) != 1:
        return NotModelled("states, or the attention beside them, of different sizes")
    exact, token = next(iter(state.values())), next(iter(per_token.values()))
    block = BLOCK_TOKENS * math.ceil(exact / token / BLOCK_TOKENS)
    note = f"blocks of {block:,} tokens, so that a page holds a state ({1 - exact / (block * token):.2%} of it padding)"
    states = [Pages("state", len(state), block * token, exact)]
    return _unified(kept, attention, block, states, False, (note, "one state for a request: no state is kept for reuse"))


# What is kept ------------------------------------------------------------------------------------------------------------


def _width(kept: Sequence[Kept], is_index: bool) -> int:
    """Channels of entries or of index keys, from their compressor's running state: three fp32 numbers a channel."""
    for one in kept:
        if one.kind == "fold" and (one.name == "index_fold") == is_index:
            return one.row_bytes // (4 * _RUNNING_NUMBERS * (one.fold_tokens // one.period))
    return 0


def _in_formats(one: Kept, formats: Formats) -> Kept:
    """The same memory with the rival's bytes."""
    if one.kind == "fold":
        return one
    return replace(one, row_bytes=formats.index_bytes if one.name == "index" else formats.entry_bytes)


def _payload(one: Kept, num_tokens: int, raw: bool) -> float:
    if one.kind == "log":
        return num_tokens // one.stride * one.row_bytes
    if one.kind == "window":
        return min(num_tokens % one.reset if one.reset else num_tokens, one.size - 1) * one.row_bytes
    if one.kind == "fold" and raw:
        # the group before, where it carries over, and of the open group 0 to period - 1 rows
        rows = one.fold_tokens - one.period + (one.period - 1) / 2
        return min(num_tokens, rows) * _stored_bytes(one)
    return one.row_bytes if num_tokens else 0


def _aligned(nbytes: int, alignment: int) -> int:
    return math.ceil(nbytes / alignment) * alignment
