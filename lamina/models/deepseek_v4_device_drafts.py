"""DeepSeek-V4's draft blocks on a GPU. `deepseek_v4_drafts` is the definition; nothing is read on the host, and the shapes of all
launches follow from the step's numbers of rows and requests and from how many tokens are drafted.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lamina.layers.branch import Branch
from lamina.layers.device_attention import DeviceAttention, Turns
from lamina.models.deepseek_v4_blocks import rope_frequencies
from lamina.models.deepseek_v4_config import Config, Draft
from lamina.models.deepseek_v4_device_blocks import DeviceBlock, DeviceLoader, reads_fp8
from lamina.models.deepseek_v4_drafts import LEAST_CONFIDENT, LEAST_LIKELY, MOST_CHAINED
from lamina.ops.gemm.stored import Activation, StoredWeight
from lamina.ops.gemm.triton import Order, linear
from lamina.ops.hyper import Mixer, hyper_head
from lamina.ops.hyper.triton import boundary, end_with_streams
from lamina.ops.machine import portable_kernels
from lamina.ops.rope_norm.triton import norm_quantise, rotations
from lamina.ops.rows import Rows


class _Blocks:
    """What both kinds have: the blocks, what ends them, and the main model's embedding and head."""

    def __init__(self, loader: DeviceLoader, prefix: str, blocks: tuple[DeviceBlock, ...], embed: Tensor, head: StoredWeight):
        config = loader.config
        self.config = config
        self.only_portable = loader.only_portable
        self.dtype = loader.dtype
        self.has_fp8 = loader.has_fp8 and any(reads_fp8(block) for block in blocks)
        self.blocks = blocks
        self.embed = embed
        self.head = head
        self.mixer: Mixer = loader.mixer(prefix + "hc_head_", (config.streams,))
        self.norm = loader.take(prefix + "norm.weight", (config.hidden_size,))
        self.inv_freq = rope_frequencies(config, config.rope).to(embed.device)
        self._inline = Branch(embed.device, False)

    def turns(self, positions: Tensor) -> Turns:
        """The rows' turns."""
        return Turns(*rotations(positions, self.inv_freq), {})

    def run(
        self, streams: Tensor, tokens: Tensor, turns: Turns, rows: Rows, order: Order, max_context: int
    ) -> tuple[Tensor, Tensor]:
        """streams [T, S, D] -> hidden vectors [T, D] fp32, normed, and the last streams."""
        out = post = comb = None
        for block in self.blocks:
            at = boundary(streams, out, post, comb, block.attention_mixer, block.attention_norm, self.dtype, self.has_fp8)
            out = block.attention.forward(at.x, turns, rows, order, max_context, self._inline)
            at = boundary(at.streams, out, at.post, at.comb, block.ffn_mixer, block.ffn_norm, self.dtype, self.has_fp8)
            out = block.ffn.forward(at.x, tokens, rows, order, self._inline)
            streams, post, comb = at.streams, at.post, at.comb
        return end_with_streams(streams, out, post, comb, self.mixer, self.norm, self.dtype)

    def scores(self, hidden: Tensor, order: Order) -> Tensor:
        """[N, D] fp32 -> [N, V] fp32."""
        return linear(Activation(hidden.to(self.dtype)), self.head, torch.float32, order)

    def entering(self, x: Tensor, norm: Tensor, weight: StoredWeight, order: Order) -> Tensor:
        """x [N, D] normed, times a projection; both rounded."""
        has_fp8 = self.has_fp8 and weight.is_fp8
        return linear(norm_quantise(x, norm, self.config.norm_eps, self.dtype, has_fp8), weight, self.dtype, order)


class DeviceChainDrafter:
    """One block that is fed the last residual streams, and then its own."""

    most_tokens = MOST_CHAINED
    keeps_features = True
    least_likely = LEAST_LIKELY
    taps: tuple[int, ...] = ()

    def __init__(self, loader: DeviceLoader, embed: Tensor, head: StoredWeight) -> None:
        width = loader.config.hidden_size
        block = loader.block("mtp.0.", loader.draft_attention(0), is_compressed=False, is_hash=False)
        self.blocks = _Blocks(loader, "mtp.0.", (block,), embed, head)
        self.token_norm = loader.take("mtp.0.enorm.weight", (width,))
        self.token_proj = loader.weight("mtp.0.e_proj.weight", (width, width))
        self.streams_norm = loader.take("mtp.0.hnorm.weight", (width,))
        self.streams_proj = loader.weight("mtp.0.h_proj.weight", (width, width))

    def features(self, streams: Tensor, tapped: dict[int, Tensor]) -> Tensor:
        """The last residual streams, flat [T, S * D]."""
        return streams.flatten(1)

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor,
        num_tokens: int, order: Order, max_context: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Brings the block's memory up to the rows that count, then drafts `num_tokens` (0 to 7) for every request.

        features   [T, F] of every row.   before  [R, F] of the position before each request's first row, as its slot keeps it.
        tokens     [T] int32, none of them unknown.   counts  [R] int32 rows that count.   following  [R] int32, -1 for none.
        Returns    int32 [R, num_tokens] and how likely each is, fp32; rows without a following token mean nothing.
        """
        assert before is not None
        blocks = self.blocks
        with portable_kernels(blocks.only_portable):
            own, source, ids = _shifted(tokens, rows, counts, following)
            every = torch.cat([features, before.to(features.dtype)])
            inputs = torch.where((own.owners >= 0)[:, None], every[source], 0.0)
            hidden, streams = self._forward(inputs, ids, own, order, max_context)
            last = (own.first_rows + own.stops - own.starts - 1).clamp_(0, own.num_rows - 1)
            hidden, streams = hidden[last], streams[last]
            found, chances = [], []
            number = torch.arange(rows.num_requests, dtype=torch.int32, device=tokens.device)
            owners = torch.where((following >= 0) & (rows.stops > rows.starts), number, -1)
            positions = torch.where(owners >= 0, own.stops, 0)
            for place in range(num_tokens):
                token, chance = _best(blocks.scores(hidden, order))
                found.append(token)
                chances.append(chance)
                if place + 1 < num_tokens:
                    step = replace(
                        own, positions=positions, owners=owners, starts=positions, stops=positions + (owners >= 0),
                        first_rows=number, is_single=True,
                    )  # fmt: skip
                    hidden, streams = self._forward(streams.flatten(1), token, step, order, max_context)
                    positions = positions + 1
            if not found:
                return tokens.new_empty(rows.num_requests, 0), hidden.new_empty(rows.num_requests, 0)
            return torch.stack(found, 1), torch.stack(chances, 1)

    def _forward(self, features: Tensor, following: Tensor, rows: Rows, order: Order, max_context: int) -> tuple[Tensor, Tensor]:
        """Streams [T, S * D] and the tokens after them [T] -> hidden vectors [T, D] and the block's streams [T, S, D]."""
        blocks, config = self.blocks, self.blocks.config
        embedded = blocks.embed[following] * (rows.positions != 0)[:, None]
        token = blocks.entering(embedded, self.token_norm, self.token_proj, order)
        flat = features.reshape(-1, config.hidden_size)
        streams = blocks.entering(flat, self.streams_norm, self.streams_proj, order).view(-1, config.streams, flat.shape[1])
        joined = (streams.float() + token.float()[:, None]).to(blocks.dtype)
        return blocks.run(joined, following, blocks.turns(rows.positions), rows, order, max_context)


class DeviceBlockDrafter:
    """Stages that draft `draft.length` tokens at once over a window of what they made of the main model's outputs."""

    keeps_features = False
    least_likely = LEAST_CONFIDENT

    def __init__(self, loader: DeviceLoader, draft: Draft, embed: Tensor, head: StoredWeight) -> None:
        config, last = loader.config, f"mtp.{draft.blocks - 1}."
        width, rank = config.hidden_size, draft.markov_rank
        self.most_tokens, self.noise, self.taps = draft.length, draft.noise, draft.layers
        self.contexts = tuple(loader.draft_attention(stage) for stage in range(draft.blocks))
        stages = tuple(
            loader.block(f"mtp.{stage}.", _all_seeing(context, config, draft), is_compressed=False, is_hash=False)
            for stage, context in enumerate(self.contexts)
        )
        self.blocks = _Blocks(loader, last, stages, embed, head)
        self.main_proj = loader.weight("mtp.0.main_proj.weight", (width, draft.taps * width))
        self.main_norm = loader.take("mtp.0.main_norm.weight", (width,))
        self.markov = loader.take(last + "markov_head.markov_w1.weight", (config.vocab_size, rank)).to(loader.dtype)
        self.markov_head = loader.weight(last + "markov_head.markov_w2.weight", (config.vocab_size, rank))
        self.confidence = loader.take(last + "confidence_head.proj.weight", (1, width + rank))[0]

    def features(self, streams: Tensor, tapped: dict[int, Tensor]) -> Tensor:
        """The mean stream after each tapped layer, [T, taps * D]."""
        return torch.cat([tapped[layer].float().mean(1).to(self.blocks.dtype) for layer in self.taps], dim=-1)

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor,
        num_tokens: int, order: Order, max_context: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `DeviceChainDrafter.draft`, up to `most_tokens`; chances are what the stages say of them."""
        blocks = self.blocks
        with portable_kernels(blocks.only_portable):
            self._keep(features, rows, counts, order)
            if not num_tokens:
                return tokens.new_empty(rows.num_requests, 0), features.new_empty(rows.num_requests, 0, dtype=torch.float32)
            length, num = self.most_tokens, rows.num_requests
            number = torch.arange(num, dtype=torch.int32, device=tokens.device)
            is_drafting = (following >= 0) & (rows.stops > rows.starts)
            starts = torch.where(is_drafting, rows.starts + counts, 0)
            ids = torch.full((num, length), self.noise, dtype=torch.int32, device=tokens.device)
            ids[:, 0] = following.clamp(min=0)
            each = torch.arange(length, dtype=torch.int32, device=tokens.device)
            # for attention all rows are at the block's last position: each then sees the block and the window before it
            step = replace(
                rows, positions=_each(starts + length - 1, length), owners=_each(torch.where(is_drafting, number, -1), length),
                starts=starts,
                stops=torch.where(is_drafting, starts + length, 0), first_rows=number * length, is_single=False, drafts=None,
            )  # fmt: skip
            turns = blocks.turns((starts[:, None] + each).flatten())
            streams = blocks.embed[ids.flatten()][:, None].repeat(1, blocks.config.streams, 1)
            hidden, streams = blocks.run(streams, ids.flatten(), turns, step, order, max_context)
            collapsed = hyper_head(streams.float(), blocks.mixer).to(blocks.dtype).view(num, length, -1)
            scores = blocks.scores(hidden, order).view(num, length, -1)
            return self._chosen(scores, collapsed, ids[:, 0], num_tokens, order)

    def _chosen(self, scores: Tensor, collapsed: Tensor, anchors: Tensor, num_tokens: int, order: Order) -> tuple[Tensor, Tensor]:
        found, chances, last = [], [], anchors
        for place in range(num_tokens):
            embedded = self.markov[last]
            biased = scores[:, place] + linear(Activation(embedded), self.markov_head, torch.float32, order)
            both = torch.cat([collapsed[:, place], embedded], dim=-1).float()
            chances.append(torch.sigmoid((both * self.confidence).sum(-1)))
            last = biased.argmax(-1).to(torch.int32)
            found.append(last)
        return torch.stack(found, 1), torch.stack(chances, 1)

    def _keep(self, features: Tensor, rows: Rows, counts: Tensor, order: Order) -> None:
        """Writes the context of the last rows that count of each request."""
        blocks = self.blocks
        stops = torch.where(rows.stops > rows.starts, rows.starts + counts, rows.stops)
        owner = rows.owners.clamp(min=0)
        is_kept = (rows.owners >= 0) & (rows.positions < stops[owner])
        kept = replace(rows, owners=torch.where(is_kept, rows.owners, -1), stops=stops, is_single=False)
        projected = linear(Activation(features), self.main_proj, blocks.dtype, order)
        context = norm_quantise(projected, self.main_norm, blocks.config.norm_eps, blocks.dtype, blocks.has_fp8)
        turns = blocks.turns(rows.positions)
        for attention in self.contexts:
            attention.keep(context, turns, kept, order)


def _all_seeing(attention: DeviceAttention, config: Config, draft: Draft) -> DeviceAttention:
    """The attention of a block whose rows see the window before it and all of themselves; the window gets none of them."""
    return replace(attention, window=config.window + draft.length, keeps=False)


def _each(x: Tensor, times: int) -> Tensor:
    """[N] -> [N * times], each element so many times."""
    return x[:, None].expand(-1, times).reshape(-1)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of [R, V] the best token, int32, and its share of the softmax."""
    peak, token = logits.max(-1)
    return token.to(torch.int32), torch.exp(peak - logits.logsumexp(-1))


def _shifted(tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor) -> tuple[Rows, Tensor, Tensor]:
    """A step's rows for a block that reads the token after each: its rows [T + R], where each one's features are among those of
    the step's rows and then those from before them [T + R], and the tokens [T + R].

    step     | 0: s .. | 1: s .. | padding           block   | 0: s - 1, s .. | 1: s - 1, s .. | padding
    The row before the first has no owner where nothing is there; so have those whose token is not known, or was rejected.
    """
    num_rows, num = rows.num_rows, rows.num_requests
    device = tokens.device
    number = torch.arange(num, device=device)
    is_real = rows.stops > rows.starts
    base = torch.where(is_real, rows.first_rows + number, num_rows + number)  # of the row before the first
    at = torch.arange(num_rows, device=device)
    owner = rows.owners.clamp(min=0).long()
    target = torch.where(rows.owners >= 0, at + owner + 1, at + is_real.sum())
    source = torch.empty(num_rows + num, dtype=torch.int64, device=device)
    source.scatter_(0, target, at)
    source.scatter_(0, base, num_rows + number)

    place = at - rows.first_rows[owner] + 1  # of the following row among the request's
    ids = torch.where(place < counts[owner], tokens.roll(-1), following[owner])
    ids = torch.cat([ids, tokens[rows.first_rows.long().clamp(max=num_rows - 1)]])[source]
    positions = torch.cat([rows.positions, rows.starts - 1])[source]
    owners = torch.cat([rows.owners, torch.where(is_real, number, -1).to(torch.int32)])[source]
    starts = rows.starts - (is_real & (rows.starts > rows.valid_from)).to(torch.int32)
    stops = torch.where(is_real, rows.starts + counts - (following < 0).to(torch.int32), starts)
    stops = torch.maximum(starts, stops)
    own = owners.clamp(min=0)
    is_there = (owners >= 0) & (positions >= starts[own]) & (positions < stops[own])
    first_rows = (base + starts - (rows.starts - 1)).to(torch.int32)
    shifted = replace(
        rows, positions=torch.where(is_there, positions, 0), owners=torch.where(is_there, owners, -1), starts=starts, stops=stops,
        first_rows=first_rows, is_single=False, drafts=None,
    )  # fmt: skip
    return shifted, source, torch.where(is_there, ids, 0)


def load_device_drafter(
    loader: DeviceLoader, draft: Draft, embed: Tensor, head: StoredWeight
) -> DeviceChainDrafter | DeviceBlockDrafter:
    """The draft blocks of a checkpoint, every tensor of theirs taken once; embedding and head are the main model's."""
    return DeviceBlockDrafter(loader, draft, embed, head) if draft.taps else DeviceChainDrafter(loader, embed, head)
