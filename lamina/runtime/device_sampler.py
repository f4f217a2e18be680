"""Draws a step's tokens on the device and keeps there what the next step needs: of each row, the last token and the tokens seen.

upload (settings, edits, table rows) -> launches -> download (tokens, flags, log-probabilities), an event

A step of greedy rows uploads its table rows, and only if they are not the last step's. Settings are laid out once for a request;
a step copies them and puts in the position. Where the same requests decode step after step, all that a step brings is laid out
once, and only positions are put in. Tokens seen are kept by the device: only a request that starts in a row, or comes
back to one, brings its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.ops.sample import batch as words_of
from lamina.ops.sample.batch import IN_PROMPT, WORDS, Records
from lamina.ops.sample.triton import logprobs_into, picked_logprobs, sample_into, warm_up
from lamina.schedule.step import Decodes, Member, Sample, TokenLogprobs

Words = NDArray[np.int64]
_FIRST_STATES = 4
_ALIGNED_INTS, _ALIGNED_WORDS = 4, 2  # every part of a buffer starts at 16 bytes, so that one compiled kernel serves all


@dataclass(slots=True)
class _Row:
    """The request in a table row. num_seen: output tokens that its state counts, the one being drawn included; -1 before any.

    is_plain  the most likely token, as scored, is taken.   is_edited  scores are changed before, whatever is banned.
    """

    request_id: int
    has_penalties: bool
    is_plain: bool
    is_edited: bool
    num_logprobs: int | None
    bias: Words
    state_row: int = -1
    num_seen: int = -1


@dataclass(slots=True)
class _Batch:
    """What the samples of a step ask for, laid out.

    places   of samples that want log-probabilities.   counts  of the most likely tokens beside each.
    words    what goes up, None where nothing has to: records, edits up to `stop`, table rows from `first_row`, places.
    flags    of any row.   has_state  any row has penalties.
    """

    rows: tuple[int, ...]
    places: tuple[int, ...]
    counts: tuple[int, ...]
    top_k: int
    words: Words | None = None
    stop: int = 0
    first_row: int = 0
    first_place: int = 0
    flags: int = 0
    has_state: bool = False

    def put_num_outputs(self, numbers: Words | Sequence[int]) -> None:
        """Puts in how many tokens each row has drawn."""
        if self.words is not None:
            num = len(self.rows)
            self.words[: num * WORDS].reshape(num, WORDS)[:, words_of.POSITION] = numbers


class Pending:
    """Results on their way to the host."""

    __slots__ = ("_batch", "_event", "_words")

    def __init__(self, words: Tensor, event: torch.cuda.Event | None, batch: _Batch) -> None:
        self._words, self._event, self._batch = words, event, batch

    def result(self) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        """Waits, and gives the tokens (None: scores not finite) and log-probabilities of the samples, as in `StepResult`."""
        if self._event is not None:
            self._event.synchronize()
        batch, num = self._batch, len(self._batch.rows)
        words = self._words.numpy()
        drawn, flags = words[:num].tolist(), words[_aligned(num, _ALIGNED_INTS) :].view(np.uint8)[:num]
        tokens: tuple[int | None, ...] = tuple(drawn)
        if flags.any():
            tokens = tuple(None if flag else token for token, flag in zip(drawn, flags.tolist(), strict=True))
        if not batch.places:
            return tokens, (None,) * num
        found: list[TokenLogprobs | None] = [None] * num
        parts = _parts(self._words, num, len(batch.places), batch.top_k)
        columns = (parts.logprobs.tolist(), parts.ranks.tolist(), parts.top_ids.tolist(), parts.top_logprobs.tolist())
        for place, count, value, rank, ids, tops in zip(batch.places, batch.counts, *columns, strict=True):
            token = tokens[place]
            if token is not None:
                found[place] = TokenLogprobs(token, value, rank, tuple(ids[:count]), tuple(tops[:count]))
        return tokens, tuple(found)


class DeviceSampler:
    """Samples steps of up to `max_requests` rows of a table.

    last_tokens  [max_requests] int32 on the device: the token drawn last for each table row (0 after a bad row), in stream order.
    """

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self.max_requests, self.vocab_size, self.device = max_requests, vocab_size, device
        self.last_tokens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._is_pinned = device.type == "cuda"
        self._rows: list[_Row | None] = [None] * max_requests
        self._words: Words = np.zeros((max_requests, WORDS), np.int64)
        self._state: Tensor | None = None  # [rows, V] int32, see `IN_PROMPT`; made for the first request with penalties
        self._free_states: list[int] = []
        self._greedy_rows: tuple[tuple[int, ...], Tensor] | None = None
        self._decodes: tuple[Sequence[Member], _Batch, Words] | None = None  # the last ones; lengths of their prompts

    @property
    def state_bytes(self) -> int:
        """Memory of the tokens seen: 4 bytes a token of the vocabulary for each request with penalties, doubled as they come."""
        return 0 if self._state is None else self._state.nbytes

    def warm_up(self) -> None:
        """Compiles what any request may need; seconds at the first start on a machine, with Triton's cache hardly any later."""
        warm_up(self.vocab_size, torch.zeros(1, self.vocab_size, dtype=torch.int32, device=self.device))

    def launch(self, samples: Sequence[Sample], logits: Tensor, table_rows: Sequence[int]) -> Pending:
        """Launches everything on the current stream and returns at once.

        logits      [S or more, V] fp32 on the device, row i is of samples[i]; not changed.
        table_rows  the row below max_requests that each sample's request keeps while it runs.
        A sample with penalties is looked at for its tokens only where its row has not counted its `num_output` tokens already.
        """
        rows = tuple(table_rows)
        owners = [self._owner(row, item) for row, item in zip(rows, samples, strict=True)]
        for own, item in zip(owners, samples, strict=True):
            if own.has_penalties:
                if own.num_seen != item.num_output:
                    self._restore(own, item)
                own.num_seen = item.num_output + 1
        batch = self._lay_out(rows, owners, [item.banned for item in samples], [item.mask for item in samples])
        batch.put_num_outputs([item.num_output for item in samples])
        return self._launch(batch, logits)

    def launch_decodes(self, decodes: Decodes, logits: Tensor) -> Pending:
        """`launch` for a step of nothing but decodes, row i of `logits` being of member i."""
        members = decodes.members
        if self._decodes is None or self._decodes[0] is not members:
            owners = [self._owner(one.row, one) for one in members]
            batch = self._lay_out(tuple([one.row for one in members]), owners, ((),) * len(members), (None,) * len(members))
            self._decodes = members, batch, np.array([one.num_prompt for one in members], np.int64)
        _, batch, num_prompts = self._decodes
        batch.put_num_outputs(decodes.positions + 1 - num_prompts)
        return self._launch(batch, logits)

    def _launch(self, batch: _Batch, logits: Tensor) -> Pending:
        num, num_logprobs = len(batch.rows), len(batch.places)
        found = torch.empty(_parts_size(num, num_logprobs, batch.top_k), dtype=torch.int32, device=self.device)
        drawn, is_bad = _draws(found, num)
        if num and batch.words is None:
            sample_into(drawn, is_bad, logits[:num], None, self._upload_rows(batch.rows), self.last_tokens)
        elif num:
            records, at, chosen = self._upload(batch)
            sample_into(drawn, is_bad, logits[:num], records, at, self.last_tokens, batch.has_state)
            if num_logprobs:
                parts = _parts(found, num, num_logprobs, batch.top_k)
                tokens = drawn if num_logprobs == num else drawn[chosen]
                logprobs_into(parts.logprobs, parts.ranks, parts.top_ids, parts.top_logprobs, logits, chosen, tokens)
        on_host, event = found, None
        if self._is_pinned:
            on_host = torch.empty(found.shape, dtype=torch.int32, pin_memory=True)
            on_host.copy_(found, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Pending(on_host, event, batch)

    def _owner(self, row: int, item: Sample | Member) -> _Row:
        """The request as it is in its row."""
        own = self._rows[row]
        return self._enter(row, item) if own is None or own.request_id != item.request_id else own

    def _enter(self, row: int, item: Sample | Member) -> _Row:
        """Another request is in the row: its settings are laid out."""
        params, old = item.params, self._rows[row]
        record = self._words[row]
        reals = record.view(np.float64)
        is_filtered = 0 < params.top_k < self.vocab_size or params.top_p < 1.0
        flags = words_of.IS_SEEDED | (words_of.IS_NEGATIVE if item.seed < 0 else 0)
        if not params.is_greedy:
            flags |= words_of.IS_DRAWN | (words_of.IS_FILTERED if is_filtered else 0)
        record[:] = 0
        reals[words_of.TEMPERATURE] = np.float32(params.temperature)  # its precision is fp32, as that of the penalties
        reals[words_of.TOP_P], reals[words_of.MIN_P] = params.top_p, params.min_p
        reals[words_of.REPETITION] = np.float32(params.repetition_penalty)
        reals[words_of.PRESENCE] = np.float32(params.presence_penalty)
        reals[words_of.FREQUENCY] = np.float32(params.frequency_penalty)
        record[words_of.SEED] = item.seed - (1 << 64) if item.seed >= 1 << 63 else item.seed
        record[words_of.CHILD] = item.child
        record[words_of.TOP_K] = min(params.top_k, self.vocab_size)
        record[words_of.FLAGS] = flags
        is_edited = params.has_penalties or bool(params.logit_bias)
        is_plain = params.is_greedy and not is_edited
        bias = _edit_words([token for token, _ in params.logit_bias], [value for _, value in params.logit_bias])
        own = _Row(item.request_id, params.has_penalties, is_plain, is_edited, params.num_logprobs(self.vocab_size), bias)
        if old is not None and old.state_row >= 0:
            self._free_states.append(old.state_row)
        if own.has_penalties:
            own.state_row = self._take_state()
        record[words_of.STATE_ROW] = own.state_row
        self._rows[row] = own
        return own

    def _take_state(self) -> int:
        if not self._free_states:
            old = self._state
            num = 0 if old is None else old.shape[0]
            size = min(max(_FIRST_STATES, 2 * num), self.max_requests)
            self._state = torch.zeros(size, self.vocab_size, dtype=torch.int32, device=self.device)
            if old is not None:
                self._state[:num] = old
            self._free_states = list(range(size - 1, num - 1, -1))
        return self._free_states.pop()

    def _restore(self, own: _Row, item: Sample) -> None:
        """The state of a request that starts or comes back: what its prompt and its output hold."""
        assert len(item.output) == item.num_output, f"request {item.request_id} comes back without its output"
        assert self._state is not None
        prompt, output = np.asarray(item.prompt, np.int64), np.asarray(item.output, np.int64)
        ids = np.unique(np.concatenate([prompt, output]))
        seen = np.bincount(np.searchsorted(ids, output), minlength=ids.size)
        seen[np.searchsorted(ids, prompt)] |= IN_PROMPT
        uploaded = self._to_device((ids << 32) | (seen & 0xFFFFFFFF))
        state = self._state[own.state_row]
        state.zero_()
        state[uploaded >> 32] = uploaded.to(torch.int32)

    def _upload_rows(self, rows: tuple[int, ...]) -> Tensor:
        """Table rows [S] int64 on the device."""
        if self._greedy_rows is None or self._greedy_rows[0] != rows:
            self._greedy_rows = rows, self._to_device(np.array(rows, np.int64))
        return self._greedy_rows[1]

    def _lay_out(
        self, rows: tuple[int, ...], owners: Sequence[_Row], banned: Sequence[tuple[int, ...]], masks: Sequence[bytes | None],
    ) -> _Batch:  # fmt: skip
        """What a step asks for: by row, who is in it and what may be drawn. How many each has drawn is left open."""
        places = [place for place, own in enumerate(owners) if own.num_logprobs is not None]
        counts = tuple(owners[place].num_logprobs or 0 for place in places)
        batch = _Batch(rows, tuple(places), counts, picked_logprobs(max(counts, default=0), self.vocab_size))
        if places or any(banned) or any(masks) or not all(own.is_plain for own in owners):
            self._lay_out_words(batch, owners, banned, masks)
        return batch

    def _lay_out_words(
        self, batch: _Batch, owners: Sequence[_Row], banned: Sequence[tuple[int, ...]], masks: Sequence[bytes | None],
    ) -> None:  # fmt: skip
        """Records, edits, masks, table rows and places in one array."""
        num = len(owners)
        table = self._words[list(batch.rows)]  # a copy                                    # [S, WORDS]
        flags = table[:, words_of.FLAGS]
        edits: list[Words] = []
        at = num * WORDS
        for place, (own, bans, mask) in enumerate(zip(owners, banned, masks, strict=True)):
            if own.is_edited or bans or mask is not None:
                flags[place] |= words_of.IS_EDITED
                batch.has_state = batch.has_state or own.has_penalties
                words = own.bias if not bans else _merged(own.bias, bans)
                if words.size:
                    edits.append(words)
                    table[place, [words_of.EDIT_START, words_of.EDIT_STOP]] = at, at + words.size
                    at += words.size
                if mask is not None:
                    words = _mask_words(mask)
                    edits.append(words)
                    table[place, words_of.MASK] = at
                    at += words.size
        batch.stop, batch.first_row = at, _aligned(at, _ALIGNED_WORDS)
        batch.first_place = _aligned(batch.first_row + num, _ALIGNED_WORDS)
        batch.flags = int(np.bitwise_or.reduce(flags))
        batch.words = whole = np.empty(batch.first_place + len(batch.places), np.int64)
        whole[: table.size] = table.reshape(-1)
        if edits:
            whole[table.size : at] = np.concatenate(edits)
        whole[batch.first_row : batch.first_row + num] = batch.rows
        whole[batch.first_place :] = batch.places

    def _upload(self, batch: _Batch) -> tuple[Records, Tensor, Tensor]:
        """(records, table rows [S], `places`) on the device, in one upload."""
        assert batch.words is not None
        uploaded = self._to_device(batch.words)
        seen = batch.flags
        records = Records(
            uploaded[: batch.stop], self._state if batch.has_state else None, bool(seen & words_of.IS_DRAWN),
            bool(seen & words_of.IS_FILTERED), bool(seen & words_of.IS_EDITED),
        )  # fmt: skip
        return records, uploaded[batch.first_row : batch.first_row + len(batch.rows)], uploaded[batch.first_place :]

    def _to_device(self, words: Words) -> Tensor:
        """A copy on the device. The pinned memory is PyTorch's to keep until the copy is done."""
        staged = torch.empty(words.shape, dtype=torch.int64, pin_memory=self._is_pinned)
        staged.numpy()[:] = words
        return staged.to(self.device, non_blocking=True)


def _edit_words(ids: Sequence[int], values: Sequence[float]) -> Words:
    """Edits of logits as words; ids ascending."""
    bits = np.array(values, np.float32).view(np.uint32).astype(np.int64)
    return (np.array(ids, np.int64) << 32) | bits


def _mask_words(mask: bytes) -> Words:
    """A mask as words."""
    return np.frombuffer(mask + bytes(-len(mask) % 8), "<i8")


def _merged(bias: Words, banned: tuple[int, ...]) -> Words:
    """A row's edits with bans among them, ids ascending."""
    both = np.concatenate([bias, _edit_words(banned, [-np.inf] * len(banned))])
    return both[np.argsort(both >> 32, kind="stable")]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Views of one int32 buffer, of S samples, R with k log-probabilities; tokens [S] and flags [S] of one byte come first."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _part_sizes(num: int, num_logprobs: int, k: int) -> list[int]:
    sizes = (num, -(-num // 4), num_logprobs, num_logprobs, num_logprobs * k, num_logprobs * k)
    return [_aligned(size, _ALIGNED_INTS) for size in sizes]


def _parts_size(num: int, num_logprobs: int, k: int) -> int:
    return sum(_part_sizes(num, num_logprobs, k))


def _draws(whole: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """(tokens [S], flags [S] uint8) in the same buffer."""
    return whole[:num], whole[_aligned(num, _ALIGNED_INTS) :].view(torch.uint8)[:num]


def _parts(whole: Tensor, num: int, num_logprobs: int, k: int) -> _Parts:
    _, _, logprobs, ranks, top_ids, top_logprobs = whole.split(_part_sizes(num, num_logprobs, k))
    return _Parts(
        logprobs=logprobs.view(torch.float32)[:num_logprobs],
        ranks=ranks[:num_logprobs],
        top_ids=top_ids[: num_logprobs * k].view(num_logprobs, k),
        top_logprobs=top_logprobs.view(torch.float32)[: num_logprobs * k].view(num_logprobs, k),
    )
