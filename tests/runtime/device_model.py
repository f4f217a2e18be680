"""A model whose scores say whether every token, position, block and slot that it was given was right.

It remembers the tokens themselves: all of them in a log, the last few in a window. The scores after a position are a function of
all tokens up to it, read back from the arena; so is the one answer of greedy decoding, which needs no memory to be known.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.layers.entries import StoreKey
from lamina.memory.kinds import EntryFormat, Field, Log, Window
from lamina.memory.layout import Layout, make_layout
from lamina.ops.rows import Rows
from lamina.ops.sample import sample
from lamina.ops.store import StateCodec
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_runner import Order
from lamina.runtime.runner import sample_batch
from lamina.schedule.step import Decodes, Sample, TokenLogprobs

VOCAB, WINDOW, WIDTH = 61, 5, 4
CPU = torch.device("cpu")


def layout(block_tokens: int = 4, draft_tokens: int = 0, features: int = 0) -> Layout:
    """A log of tokens and a window of tokens. features  kept beside the hidden vector."""
    row = EntryFormat("row", (Field("row", "fp32", (1,)),))
    wide = EntryFormat("wide", (Field("wide", "fp32", (60,)),))  # pages must hold a slot's parts
    memories = [Log("log", 0, row, 1), Window("window", 0, row, WINDOW), Log("other", 1, wide, 1)]
    return make_layout(memories, Field("hidden", "fp32", (WIDTH + features,)), block_tokens, draft_tokens, min_page_bytes=256)


def value(tokens: Sequence[int]) -> int:
    """What is left of all tokens, and of the last few once more."""
    every = sum(token * (1 + at % 97) for at, token in enumerate(tokens))
    return (every + 31 * sum(tokens[-WINDOW:]) + 7 * len(tokens)) % 9973


def answer(prompt: Sequence[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """The greedy answer."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(value(tokens) % VOCAB)
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class TokenModel:
    """calls: (order, rows, requests, greatest context) of each forward pass."""

    def __init__(self, arena: DeviceArena, seed: int = 0) -> None:
        self.drafter = TokenDrafter(self, seed)
        self.log = arena.store(StoreKey(0, "log", ("row",)), StateCodec(1))
        self.window = arena.store(StoreKey(0, "window", ("row",)), StateCodec(1))
        self.calls: list[tuple[Order, int, int, int]] = []

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """Row by row."""
        self.calls.append((order, rows.num_rows, rows.num_requests, max_context))
        hidden = torch.full((rows.num_rows, WIDTH), torch.nan)
        columns = (rows.starts, rows.stops, rows.first_rows, rows.valid_from, rows.write_from, rows.table_rows)
        owners, seen = rows.owners.tolist(), 0
        for number, (start, stop, first, valid_from, write_from, table_row) in enumerate(zip(*map(Tensor.tolist, columns))):
            assert stop <= max_context and (stop - start <= 1 or not rows.is_single)
            for position in range(start, stop):
                row = first + position - start
                token = int(tokens[row])
                assert owners[row] == number and int(rows.positions[row]) == position and 0 <= token < VOCAB
                self._remember(token, position, write_from, rows.tables[table_row], int(rows.slots[number, 0]))
                hidden[row] = self._value(position, valid_from, rows.tables[table_row], int(rows.slots[number, 0]))
                seen += 1
        assert sum(owner >= 0 for owner in owners) == seen, "padding has an owner"
        return hidden

    def forward_with_features(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> tuple[Tensor, Tensor]:
        """A row's feature is its value."""
        hidden = self.forward(tokens, rows, order, max_context)
        return hidden, hidden[:, :1].clone()

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """The greatest score has the value, modulo the vocabulary."""
        assert hidden.is_contiguous(), "kernels read rows one after another"
        ids = torch.arange(VOCAB)
        return -((ids - hidden[:, :1] % VOCAB).abs()) / 4

    def _remember(self, token: int, position: int, write_from: int, table: Tensor, slot: int) -> None:
        block, row = divmod(position, self.log.rows_per_page)
        if position + 1 > write_from:
            self.log.views[0][int(table[block]), row] = token
        else:
            assert int(self.log.views[0][int(table[block]), row]) == token, "the log that is there is another's"
        self.window.views[0][slot, position % self.window.rows_per_page] = token

    def _value(self, position: int, valid_from: int, table: Tensor, slot: int) -> float:
        size = self.log.rows_per_page
        blocks = table[: position // size + 1].long()
        logged = self.log.views[0][blocks, :, 0].flatten()[: position + 1]
        first = max(valid_from, position - WINDOW + 1)
        near = [int(self.window.views[0][slot, at % self.window.rows_per_page]) for at in range(first, position + 1)]
        weights = 1 + torch.arange(position + 1) % 97
        return (int((logged * weights).sum()) + 31 * sum(near) + 7 * (position + 1)) % 9973


class TokenDrafter:
    """Notices every wrong feature, count and token; its drafts are right until one that is not, whose chance is small or not.

    A row's feature is the value after it; what it remembers is how far each table row's text goes.
    """

    most_tokens, keeps_features, least_likely = 5, True, 0.5

    def __init__(self, model: "TokenModel", seed: int) -> None:
        self.model, self.draw = model, random.Random(seed)
        self.num_drafted = 0

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor,
        num_tokens: int, order: Order, max_context: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `DeviceDrafter`."""
        assert before is not None and num_tokens <= self.most_tokens
        drafts = torch.zeros(rows.num_requests, num_tokens, dtype=torch.int32)
        chances = torch.ones(rows.num_requests, num_tokens)
        columns = (rows.starts, rows.stops, rows.first_rows, rows.valid_from, rows.table_rows, counts, following)
        for number, numbers in enumerate(zip(*map(Tensor.tolist, columns), strict=True)):
            start, stop, first, low, table_row, count, after = numbers
            right = low + WINDOW if low else 0  # what is rebuilt is right from here on
            if stop == start:
                continue
            size = self.model.log.rows_per_page
            blocks = rows.tables[table_row][: (stop - 1) // size + 1].long()
            text = [int(token) for token in self.model.log.views[0][blocks, :, 0].flatten()[: start + count].tolist()]
            assert 1 <= count <= stop - start and tokens[first : first + count].tolist() == text[start:]
            assert start <= right or int(before[number, 0]) == value(text[:start])
            found = [int(feature) for feature in features[first : first + count, 0].tolist()]
            assert all(found[at - start] == value(text[: at + 1]) for at in range(max(start, right), start + count))
            assert after in (-1, value(text) % VOCAB)
            text.append(after)
            for place in range(num_tokens if after >= 0 else 0):
                text.append(value(text) % VOCAB)
                if self.draw.random() < 0.3:
                    text[-1] = (text[-1] + 1) % VOCAB
                    chances[number, place] = self.draw.choice([0.1, 0.9])
                drafts[number, place] = text[-1]
                self.num_drafted += 1
        return drafts, chances


class Draws:
    """Draws on their way."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def result(self) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        """Tokens, and no log-probs."""
        return tuple(self.tokens), (None,) * len(self.tokens)


class TokenSampler:
    """Draws by the definition; the last tokens are kept by table row."""

    def __init__(self, max_requests: int) -> None:
        self.last_tokens = torch.full((max_requests,), VOCAB - 1, dtype=torch.int32)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def launch(self, samples: Sequence[Sample], logits: Tensor, table_rows: Sequence[int]) -> Draws:
        """Draws at once."""
        assert torch.isfinite(logits).all() and [item.row for item in samples] == list(table_rows)
        tokens = sample(logits, sample_batch(samples, VOCAB, CPU)).tolist()
        self.last_tokens[list(table_rows)] = torch.tensor(tokens, dtype=torch.int32)
        return Draws(tokens)

    def launch_decodes(self, decodes: Decodes, logits: Tensor) -> Draws:
        """Draws at once."""
        return self.launch(decodes.samples(), logits, [one.row for one in decodes.members])
