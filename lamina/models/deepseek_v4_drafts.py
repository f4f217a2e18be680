"""DeepSeek-V4's draft blocks: one that is fed back its own streams (MTP), and stages that draft a block at once (DSpark).

MTP      row p joins the residual streams at p with the token at p + 1 and speaks of p + 2; its memory lags by one token.
DSpark   each stage remembers a projection of some layers' outputs at p; the block's rows stand for the tokens after the last one.

Embedding and head are the main model's. A row's bits depend neither on where a step is cut nor on what else is in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.layers.block_attention import BlockAttention
from lamina.layers.rounding import rounded
from lamina.models.deepseek_v4_blocks import Block, Loader, rope_frequencies
from lamina.models.deepseek_v4_config import Config, Draft
from lamina.ops.gemm import Weight, linear, packed, padded_rows
from lamina.ops.hyper import Mixer, hyper_head
from lamina.ops.rope_norm import rms_norm, rope_tables
from lamina.ops.sequences import Piece, Sequences, make_tails, make_tiles
from lamina.ops.store import Store

#: drafts that one block is asked for by being fed back its own streams
MOST_CHAINED = 7
#: a chain ends where it gives all of its tokens together less than this: the main model takes them more often than that
#: (measured with a trained block: 0.15 tokens for each one below 0.05, 0.4 for each one between that and 0.1)
LEAST_LIKELY = 0.02
#: a block is cut where its own judgement, which is trained for that, is that all of it is taken less often than this
LEAST_CONFIDENT = 0.2


@dataclass(frozen=True, slots=True)
class Ending:
    """What turns streams into scores: the mixer and norm of a last block, and the main model's head."""

    mixer: Mixer
    norm: Tensor
    head: Weight
    eps: float
    dtype: torch.dtype

    def collapse(self, streams: Tensor) -> Tensor:
        """[N, S, D] -> [N, D]."""
        return rounded(hyper_head(streams, self.mixer), self.dtype)

    def logits(self, collapsed: Tensor) -> Tensor:
        """[N, D] -> [N, V] fp32."""
        return linear(rms_norm(collapsed, self.norm, self.eps), self.head)


class ChainDrafter:
    """One block that is fed the last residual streams, and then its own.

    Its row of a position needs the token after it: a step's rows [s, e) give it rows s - 1 .. e - 2, and e - 1 once a token was
    drawn. That last row is computed again in the next step, with the same bits.

    least_likely  a draft ends where all of it would be less likely than this to be taken.
    """

    most_tokens = MOST_CHAINED
    keeps_features = True
    taps: tuple[int, ...] = ()

    def __init__(
        self, config: Config, dtype: torch.dtype, embed: Tensor, block: Block, window: Store, token_norm: Tensor,
        token_proj: Weight, streams_norm: Tensor, streams_proj: Weight, ending: Ending,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.embed = embed
        self.block = block
        self.window = window
        self.token_norm = token_norm
        self.token_proj = token_proj
        self.streams_norm = streams_norm
        self.streams_proj = streams_proj
        self.ending = ending
        self.least_likely = LEAST_LIKELY
        self.inv_freq = rope_frequencies(config, config.rope)

    @property
    def products(self) -> list[Weight]:
        """Weights of its products; the head is the main model's."""
        return [*self.block.products, self.token_proj, self.streams_proj, self.ending.mixer.fn]

    def features(self, streams: Tensor, tapped: dict[int, Tensor]) -> Tensor:
        """The last residual streams, flat [T, S * D]."""
        return streams.flatten(1)

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, sequences: Sequences, counts: Sequence[int],
        following: Sequence[int], wanted: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """See `runtime.drafting.Drafter`."""
        assert before is not None
        drafts: list[list[int]] = [[] for _ in counts]
        owners: list[int] = []
        pieces: list[Piece] = []
        parts, ids, row = [], [], 0
        for number, (piece, count, after) in enumerate(zip(sequences.pieces, counts, following, strict=True)):
            has_before = piece.start > piece.valid_from
            first, stop = piece.start - has_before, piece.start + count - (after < 0)
            if first >= stop:
                continue
            shift = piece.first_row - piece.start
            if has_before:
                parts.append(before[number : number + 1])
            parts.append(features[piece.first_row : shift + stop])
            ids.append(tokens[shift + first + 1 : shift + piece.start + count])
            if after >= 0:
                ids.append(tokens.new_tensor([after]))
            owners.append(number)
            pieces.append(Piece(first, stop, row, piece.table_row, piece.valid_from))
            row += stop - first
        if not pieces:
            return drafts
        step = _step(sequences, owners, pieces, self.window.rows_per_page)
        streams = self._forward(_padded(parts, step), _padded(ids, step), step)
        self._chain(sequences, step, owners, streams, following, wanted, drafts)
        return drafts

    def _chain(
        self, sequences: Sequences, step: Sequences, owners: list[int], streams: Tensor, following: Sequence[int],
        wanted: Sequence[int], drafts: list[list[int]],
    ) -> None:  # fmt: skip
        """Drafts from the last row of each piece of `step`, and goes on with the streams of the drafts' own rows."""
        likely = [1.0] * len(wanted)
        going = list(zip(owners, step.pieces, strict=True))
        while True:
            going = [(owner, piece) for owner, piece in going if len(drafts[owner]) < wanted[owner] and following[owner] >= 0]
            if not going:
                return
            last = streams[[piece.rows.stop - 1 for _, piece in going]]
            num = len(going)
            collapsed = self.ending.collapse(_at_least(last, padded_rows(num, sequences.row_multiple)))
            logits = self.ending.logits(collapsed)[:num]
            best = logits.argmax(-1)
            chances = (logits.gather(1, best[:, None])[:, 0] - logits.logsumexp(-1)).exp_().tolist()
            kept = []
            for place, ((owner, piece), token, chance) in enumerate(zip(going, best.tolist(), chances, strict=True)):
                likely[owner] *= chance
                if likely[owner] >= self.least_likely:
                    drafts[owner].append(token)
                    if len(drafts[owner]) < wanted[owner]:
                        kept.append((place, owner, piece))
            if not kept:
                return
            places, owned = [place for place, _, _ in kept], [owner for _, owner, _ in kept]
            pieces = [
                Piece(piece.stop, piece.stop + 1, number, piece.table_row, piece.valid_from)
                for number, (_, _, piece) in enumerate(kept)
            ]
            step = _step(sequences, owned, pieces, self.window.rows_per_page)
            streams = self._forward(_padded([last[places].flatten(1)], step), _padded([best[places]], step), step)
            going = list(zip(owned, pieces, strict=True))

    def _forward(self, features: Tensor, following: Tensor, step: Sequences) -> Tensor:
        """Streams [T, S * D] and the tokens after them [T] -> the block's streams [T, S, D]."""
        eps, num = self.config.norm_eps, self.config.streams
        embedded = self.embed[following] * (step.positions != 0)[:, None]
        token = linear(rounded(rms_norm(embedded, self.token_norm, eps), self.dtype), self.token_proj)
        flat = features.view(-1, self.config.hidden_size)
        streams = linear(rounded(rms_norm(flat, self.streams_norm, eps), self.dtype), self.streams_proj)
        joined = rounded(
            rounded(streams, self.dtype).view(-1, num, flat.shape[1]) + rounded(token, self.dtype)[:, None], self.dtype
        )
        cos, sin = rope_tables(step.positions, self.inv_freq)
        return self.block.forward(joined, following, cos, sin, step)


class BlockDrafter:
    """Stages that draft `draft.length` tokens at once over a window of what they made of the main model's outputs.

    The scores of each drafted token are then biased by the one before it; a draft is cut where the stages' own judgement of it
    falls. Context is written for accepted rows alone.

    least_likely  as in ChainDrafter.
    """

    keeps_features = False

    def __init__(
        self, config: Config, draft: Draft, dtype: torch.dtype, embed: Tensor, stages: tuple[Block, ...],
        attentions: tuple[BlockAttention, ...], main_proj: Weight, main_norm: Tensor, ending: Ending, markov: Tensor,
        markov_head: Weight, confidence: Tensor,
    ) -> None:  # fmt: skip
        self.config = config
        self.dtype = dtype
        self.embed = embed
        self.stages = stages
        self.attentions = attentions
        self.main_proj = main_proj
        self.main_norm = main_norm
        self.ending = ending
        self.markov = markov
        self.markov_head = markov_head
        self.confidence = confidence
        self.least_likely = LEAST_CONFIDENT
        self.most_tokens = draft.length
        self.noise = draft.noise
        self.taps = draft.layers
        self.inv_freq = rope_frequencies(config, config.rope)

    @property
    def products(self) -> list[Weight]:
        """Weights of its products; the head is the main model's."""
        own = [weight for stage in self.stages for weight in stage.products]
        return [*own, self.main_proj, self.ending.mixer.fn, self.markov_head]

    def features(self, streams: Tensor, tapped: dict[int, Tensor]) -> Tensor:
        """The mean stream after each tapped layer, [T, taps * D]."""
        return torch.cat([rounded(tapped[layer].mean(1), self.dtype) for layer in self.taps], dim=-1)

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, sequences: Sequences, counts: Sequence[int],
        following: Sequence[int], wanted: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """See `runtime.drafting.Drafter`."""
        self._keep(features, sequences, counts)
        drafts: list[list[int]] = [[] for _ in counts]
        owners = [number for number, most in enumerate(wanted) if most > 0 and following[number] >= 0]
        if not owners:
            return drafts
        length, anchors = self.most_tokens, [following[number] for number in owners]
        pieces = []
        for row, number in enumerate(owners):
            piece = sequences.pieces[number]
            start = piece.start + counts[number]
            pieces.append(Piece(start, start + length, row * length, piece.table_row, piece.valid_from))
        step = _step(sequences, owners, pieces, 0)
        block = tokens.new_full((len(owners), length), self.noise)
        block[:, 0] = tokens.new_tensor(anchors)
        collapsed = self._collapsed(_padded([block.flatten()], step), step)
        logits = self.ending.logits(collapsed)
        num = len(owners) * length
        found, chances = self._chosen(
            logits[:num].view(len(owners), length, -1), collapsed[:num].view(len(owners), length, -1), block[:, 0],
            sequences.row_multiple,
        )  # fmt: skip
        for number, ids, own in zip(owners, found.tolist(), chances.tolist(), strict=True):
            likely = 1.0
            for token, chance in zip(ids[: wanted[number]], own, strict=False):
                likely *= chance
                if likely < self.least_likely:
                    break
                drafts[number].append(token)
        return drafts

    def _keep(self, features: Tensor, sequences: Sequences, counts: Sequence[int]) -> None:
        """Writes the context of the last accepted rows of each sequence."""
        pieces = tuple(
            Piece(piece.start, piece.start + count, piece.first_row, piece.table_row, piece.valid_from)
            for piece, count in zip(sequences.pieces, counts, strict=True)
        )
        window = self.attentions[0].inner.stores.window
        rows, owner, where = make_tails(pieces, window.rows_per_page, features.device)
        padding = padded_rows(rows.shape[0], sequences.row_multiple)
        taps = _at_least(features[rows], padding)
        context = rms_norm(rounded(linear(taps, self.main_proj), self.dtype), self.main_norm, self.config.norm_eps)
        cos, sin = rope_tables(_at_least(sequences.positions[rows], padding), self.inv_freq)
        for attention in self.attentions:
            pages = sequences.slots[owner, attention.inner.stores.window.slot_column]
            attention.keep(rounded(context, self.dtype), cos, sin, pages, where)

    def _collapsed(self, ids: Tensor, step: Sequences) -> Tensor:
        """The block's tokens [T] -> the collapsed streams of the last stage [T, D]."""
        cos, sin = rope_tables(step.positions, self.inv_freq)
        streams = self.embed[ids][:, None].repeat(1, self.config.streams, 1)
        for stage in self.stages:
            streams = stage.forward(streams, ids, cos, sin, step)
        return self.ending.collapse(streams)

    def _chosen(self, logits: Tensor, collapsed: Tensor, anchors: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
        """Scores [R, N, V] and vectors [R, N, D] of a block -> its tokens [R, N], and how likely each is taken [R, N]."""
        tokens, chances = [], []
        last, num = anchors, anchors.shape[0]
        for n in range(logits.shape[1]):
            embedded = _at_least(self.markov[last], padded_rows(num, multiple))
            scores = logits[:, n] + linear(embedded, self.markov_head)[:num]
            both = torch.cat([collapsed[:, n], embedded[:num]], dim=-1)
            chances.append(torch.sigmoid((both * self.confidence).sum(-1)))
            last = scores.argmax(-1)
            tokens.append(last)
        return torch.stack(tokens, 1), torch.stack(chances, 1)


def _step(sequences: Sequences, owners: list[int], pieces: list[Piece], ring: int) -> Sequences:
    """Rows of some of the sequences as a step of their own; `ring`  length of the ring they are written to, 0 for none."""
    device, own = sequences.positions.device, tuple(pieces)
    num = own[-1].rows.stop
    spans = [torch.arange(piece.start, piece.stop, device=device) for piece in own]
    padding = torch.zeros(padded_rows(num, sequences.row_multiple) - num, dtype=torch.int64, device=device)
    return Sequences(
        positions=torch.cat([*spans, padding]), num_rows=num, row_multiple=sequences.row_multiple, pieces=own,
        tables=sequences.tables, slots=sequences.slots[owners], slot_pages=tuple(sequences.slot_pages[owner] for owner in owners),
        longer=make_tiles(own), singles={}, groups={}, tails={ring: make_tails(own, ring, device)} if ring else {},
    )  # fmt: skip


def _at_least(x: Tensor, rows: int) -> Tensor:
    """x [N, ...] with zeros behind it, [rows, ...]."""
    return x if x.shape[0] >= rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _padded(parts: Sequence[Tensor], step: Sequences) -> Tensor:
    """The parts one after another, with zeros for the step's rows of padding."""
    return _at_least(torch.cat([*parts]), step.positions.shape[0])


def load_drafter(loader: Loader, draft: Draft, embed: Tensor, head: Weight) -> ChainDrafter | BlockDrafter:
    """The draft blocks of a checkpoint, every tensor of theirs taken once; embedding and head are the main model's."""
    return _block_drafter(loader, draft, embed, head) if draft.taps else _chain_drafter(loader, embed, head)


def _ending(loader: Loader, prefix: str, head: Weight) -> Ending:
    config = loader.config
    mixer = loader.mixer(prefix + "hc_head_", (config.streams,))
    return Ending(mixer, loader.take(prefix + "norm.weight", (config.hidden_size,)), head, config.norm_eps, loader.dtype)


def _chain_drafter(loader: Loader, embed: Tensor, head: Weight) -> ChainDrafter:
    width = loader.config.hidden_size
    attention = loader.draft_attention(0)
    return ChainDrafter(
        loader.config, loader.dtype, embed,
        block=loader.block("mtp.0.", attention, is_compressed=False, is_hash=False),
        window=attention.stores.window,
        token_norm=loader.take("mtp.0.enorm.weight", (width,)),
        token_proj=packed(loader.take("mtp.0.e_proj.weight", (width, width))),
        streams_norm=loader.take("mtp.0.hnorm.weight", (width,)),
        streams_proj=packed(loader.take("mtp.0.h_proj.weight", (width, width))),
        ending=_ending(loader, "mtp.0.", head),
    )  # fmt: skip


def _block_drafter(loader: Loader, draft: Draft, embed: Tensor, head: Weight) -> BlockDrafter:
    config, last = loader.config, f"mtp.{draft.blocks - 1}."
    width, rank = config.hidden_size, draft.markov_rank
    attentions = tuple(BlockAttention(loader.draft_attention(stage)) for stage in range(draft.blocks))
    stages = [
        loader.block(f"mtp.{stage}.", attention, is_compressed=False, is_hash=False) for stage, attention in enumerate(attentions)
    ]
    return BlockDrafter(
        config, draft, loader.dtype, embed, tuple(stages), attentions,
        main_proj=packed(loader.take("mtp.0.main_proj.weight", (width, draft.taps * width))),
        main_norm=loader.take("mtp.0.main_norm.weight", (width,)),
        ending=_ending(loader, last, head),
        markov=loader.take(last + "markov_head.markov_w1.weight", (config.vocab_size, rank)),
        markov_head=packed(loader.take(last + "markov_head.markov_w2.weight", (config.vocab_size, rank))),
        confidence=loader.take(last + "confidence_head.proj.weight", (1, width + rank))[0],
    )  # fmt: skip
