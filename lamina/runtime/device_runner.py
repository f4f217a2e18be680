"""Executes steps on a GPU: it launches a step and goes on; the result is waited for when it is asked for. It decides nothing.

copies before -> upload -> decodes, one graph -> other rows -> head and draws -> copies after          all on one stream

Decodes and other rows are two forward passes with a fixed order of sums each, so that a request's bits depend neither on who else
runs nor on padding. In mode "strict" all rows take the order of prefill, in one pass; in mode False they share a pass whenever
there is any prefill. Rows that check guesses take the order of decodes too, in a pass of their own.

Where the model's own blocks draft, a step is run to its end: what was drawn says how far their memories go.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from lamina.ops.rows import Rows
from lamina.ops.sample import token_logprobs
from lamina.ops.store import Store
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_inputs import Batch, StepInputs, has_unknown
from lamina.runtime.drafting import settled
from lamina.runtime.graphs import DecodeGraphs, sizes_up_to
from lamina.schedule.step import Decodes, LaunchedStep, Sample, Slice, Step, StepResult, TokenLogprobs

Order: TypeAlias = Literal["decode", "prefill"]
Mode: TypeAlias = bool | Literal["strict"]

_LOGPROB_ROWS = 256  # prompt rows whose logits exist at once


class DeviceModel(Protocol):
    """What the runner needs of a model. All of it is launched without waiting; with decode order it can be captured."""

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """tokens [T] int32 -> final hidden vectors [T, D] fp32. max_context: no request has more tokens after the step."""
        ...

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """hidden [S, D] fp32 -> [S, V] fp32."""
        ...


class DeviceDrafter(Protocol):
    """The draft blocks of a model, as in `drafting.Drafter`; all of it is launched without waiting.

    least_likely  a draft ends where all of it would be less likely than this.
    """

    most_tokens: int
    keeps_features: bool
    least_likely: float

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor,
        num_tokens: int, order: Order, max_context: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """counts, following int32 [R] -> drafts int32 [R, num_tokens], and how likely each is, fp32."""
        ...


@runtime_checkable
class DraftingDeviceModel(Protocol):
    """A model whose drafter is to be fed."""

    drafter: DeviceDrafter

    def forward_with_features(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> tuple[Tensor, Tensor]:
        """As `DeviceModel.forward`, and what the drafter reads of each row [T, F]."""
        ...


class PendingDraws(Protocol):
    """Draws that have been launched."""

    def result(self) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        """Waits for them: a token a sample (None: scores not finite), and its log-probs where they were asked for."""
        ...


class Sampler(Protocol):
    """What draws.

    last_tokens  int32 [max_requests], the token drawn last for each table row; always an id.
    """

    last_tokens: Tensor

    def warm_up(self) -> None:
        """Compiles what any request may need."""
        ...

    def launch(self, samples: Sequence[Sample], logits: Tensor, table_rows: Sequence[int]) -> PendingDraws:
        """Draws a token for each row of logits [S, V] and keeps it in `last_tokens`."""
        ...

    def launch_decodes(self, decodes: Decodes, logits: Tensor) -> PendingDraws:
        """The same for a step of nothing but decodes, row i of `logits` being of member i."""
        ...


class _Draws(NamedTuple):
    """The samples of a step in the order in which they are drawn: from decodes, from other rows, from vectors that were kept.

    places       where each of the step's samples is in this order; None where it is the step's own.
    num_decodes  the first so many decode rows are drawn from, unless `decode_rows` says which.
    decode_rows, other_rows, pages  int32 on the device, or None.   page_rows  of the pages, which vector.
    """

    samples: Sequence[Sample]
    places: list[int] | None
    num_decodes: int
    decode_rows: Tensor | None
    other_rows: Tensor | None
    pages: Tensor | None
    page_rows: Tensor | None = None


class _Scores(NamedTuple):
    """Log-probabilities of prompt tokens on the device, some rows at a time: tokens, values, ranks, top ids, top values."""

    parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Waits for them."""
        found: list[TokenLogprobs] = []
        for part in self.parts:
            for token, value, rank, ids, tops in zip(*(column.tolist() for column in part), strict=True):
                found.append(TokenLogprobs(token, value, rank, tuple(ids), tuple(tops)))
        return tuple(found)


class _Launched(NamedTuple):
    """A step on its way.

    places  where each of the step's samples is among the draws; None where they are in its order.
    scores  by number of the slice that asked for them.
    """

    draws: PendingDraws | None
    places: list[int] | None
    scores: dict[int, _Scores]
    num_slices: int

    def result(self) -> StepResult:
        """Waits for the draws."""
        prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ((),) * self.num_slices
        if self.scores:
            prompt_logprobs = tuple(self.scores[n].read() if n in self.scores else () for n in range(self.num_slices))
        if self.draws is None:
            return StepResult((), (), prompt_logprobs)
        tokens, logprobs = self.draws.result()
        if self.places is not None:
            tokens = tuple(tokens[place] for place in self.places)
            logprobs = tuple(logprobs[place] for place in self.places)
        return StepResult(tokens, logprobs, prompt_logprobs)


class _Pass(NamedTuple):
    """Slices that were computed together. features, before  what the drafter reads of them, None where there is none."""

    parts: Sequence[Slice]
    batch: Batch
    order: Order
    context: int
    hidden: Tensor
    features: Tensor | None
    before: Tensor | None


class DeviceRunner:
    """Runs steps of one model over one arena.

    max_requests     rows of the block tables: requests that run at once.   max_step_tokens  rows of a step.
    max_model_len    most tokens of a request.
    mode             EngineConfig.deterministic.
    drafting         the model, where its own blocks draft tokens.
    overlaps         whether a step may be launched before the one before has ended.
    """

    def __init__(
        self, model: DeviceModel, arena: DeviceArena, sampler: Sampler, max_requests: int, max_step_tokens: int,
        max_model_len: int, device: torch.device, mode: Mode, drafting: DraftingDeviceModel | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.drafting = drafting
        self.overlaps = drafting is None
        self.arena = arena
        self.sampler = sampler
        self.device = device
        self.mode = mode
        self.graphs = DecodeGraphs(self._decode, self._pad_decode, max_requests, max_model_len, device)
        self.inputs = StepInputs(
            arena.layout.slot_pages, self.graphs.requests, max_requests, max_step_tokens,
            arena.layout.blocks_for(max_model_len), device,
            [(-(-max_model_len // tail.tokens), tail.pages) for tail in arena.layout.tails],
        )  # fmt: skip
        self.max_requests = max_requests
        self.max_step_tokens = max_step_tokens
        self._keep_hidden, self._token_logprobs = _keep_hidden, token_logprobs
        if device.type == "cuda":
            from lamina.ops.sample import triton as sample_triton  # needs Triton
            from lamina.ops.store import triton as store_triton

            self._keep_hidden, self._token_logprobs = store_triton.keep_hidden, sample_triton.token_logprobs
        self._width = 0  # D
        self._hidden: Tensor | None = None  # [max_requests, D], what the last decodes gave

    @torch.inference_mode()
    def execute(self, step: Step) -> LaunchedStep:
        """Launches one step."""
        self._use_device()
        self.arena.run(step.copies_before)
        launched: LaunchedStep = _Launched(None, None, {}, 0)
        if step.slices or step.samples:
            launched = self._compute(step)
        self.arena.run(step.copies_after)
        return launched

    @property
    def num_graphs(self) -> int:
        """Graphs of decodes that have been captured."""
        return self.graphs.num_captured

    @torch.inference_mode()
    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Computes steps of padding of every size, the largest first, which compiles all kernels and takes their memory; then
        captures every decode step.

        progress  called with (done, total) steps.
        """
        self._use_device()
        self.sampler.warm_up()
        self.arena.warm_up()
        sizes, contexts = sizes_up_to(self.max_step_tokens), self.graphs.contexts
        every = [(size, context) for context in contexts[::-1] for size in sizes[::-1]]
        graphs = self.graphs.num_buckets if self.mode != "strict" and self.drafting is None else 0
        most_checked = self.max_requests * (1 + self.arena.layout.draft_tokens) if self.arena.layout.draft_tokens else 0
        for done, (size, context) in enumerate(every, start=1):
            self._compute_padding(size, context, False)
            if size <= self.max_requests:
                self._compute_padding(size, context, True)
            if size <= most_checked:
                self._compute_padding(size, context, False, "prefill" if self.mode == "strict" else "decode", True)
            if progress is not None:
                progress(done, len(every) + graphs)
        if self.max_requests <= self.max_step_tokens:
            for context in contexts:
                self._compute_padding(self.max_requests, context, True)
        for size in sizes_up_to(max(self.max_requests, _LOGPROB_ROWS)):
            hidden = torch.zeros(size, self._width, device=self.device)
            self.model.logits(hidden, self._head_order)
            self.model.logits(hidden, "prefill")
        if graphs:
            self.graphs.warmup(None if progress is None else lambda done, total: progress(len(every) + done, len(every) + total))

    def _compute_padding(
        self, rows: int, context: int, is_single: bool, order: Order = "prefill", has_guesses: bool = False
    ) -> None:
        """A step of rows of nobody, or as it would be if each were a request's only one."""
        tokens, positions = (torch.zeros(rows, dtype=torch.int32, device=self.device) for _ in range(2))
        owners = torch.full_like(positions, -1)
        num_requests = rows if is_single else 1
        starts, stops, first_rows, valid_from, write_from, table_rows = (
            torch.zeros(num_requests, dtype=torch.int32, device=self.device) for _ in range(6)
        )
        slots = torch.zeros(num_requests, self.inputs.slot_pages, dtype=torch.int32, device=self.device)
        nobody = Rows(
            positions, owners, starts, stops, first_rows, valid_from, write_from, table_rows, tables=self.inputs.tables,
            slots=slots, is_single=is_single, windows=self.inputs.windows, drafts=starts.clone() if has_guesses else None,
        )  # fmt: skip
        found = self._forward((), Batch(tokens, nobody), order, context)
        self._width = found.hidden.shape[1]
        if found.features is not None and self.drafting is not None:
            self.drafting.drafter.draft(
                found.features, found.before, tokens, nobody, starts, starts - 1, self.arena.layout.draft_tokens, order, context
            )

    def _use_device(self) -> None:
        """Kernels are launched on a thread's current device, and any thread may run a step."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def _compute(self, step: Step) -> LaunchedStep:
        if step.decodes is not None and self.mode != "strict":
            return self._compute_decodes(step.decodes)
        decodes, checked, others = self._split(step.slices)
        bucket = None
        if decodes:
            bucket = self.graphs.bucket(len(decodes), max(part.stop for part in decodes))
            self.graphs.prepare(bucket)
        self.inputs.begin()
        if bucket is not None:
            self.inputs.put_decodes(decodes, bucket[0])
        groups: list[tuple[list[Slice], Order]] = [(checked, "decode"), (others, "prefill")]
        batches = [(parts, self.inputs.put_rows(parts), order) for parts, order in groups if parts]
        draws = self._put_draws(step, decodes, [*checked, *others])
        self.inputs.upload(step.slices)
        if bucket is not None:
            self.graphs.run(bucket)
        passes = [self._pass(parts, batch, order) for parts, batch, order in batches]
        scores = self._prompt_scores(step.slices, others, passes[-1].hidden if others else None)
        pending = None
        if draws.samples:
            logits = self.model.logits(self._drawn_from(draws, [one.hidden for one in passes]), self._head_order)
            pending = self.sampler.launch(draws.samples, logits, [item.row for item in draws.samples])
        launched = _Launched(pending, draws.places, scores, len(step.slices))
        return launched if self.drafting is None else self._with_drafts(step, passes, launched.result(), self.drafting)

    def _with_drafts(self, step: Step, passes: Sequence[_Pass], result: StepResult, drafting: DraftingDeviceModel) -> StepResult:
        """The result of a step with what the draft blocks drafted, once their memories are up to what counts."""
        counts, following = settled(step, result.tokens)
        numbers = {part.request_id: number for number, part in enumerate(step.slices)}
        drafter = drafting.drafter
        drafts: list[tuple[int, ...]] = [()] * len(step.slices)
        for one in passes:
            places = [numbers[part.request_id] for part in one.parts]
            wanted = [part.num_wanted if following[at] >= 0 else 0 for part, at in zip(one.parts, places, strict=True)]
            both = torch.tensor([[counts[at] for at in places], [following[at] for at in places]], dtype=torch.int32)
            own_counts, own_following = both.to(self.device).unbind(0)
            assert one.features is not None
            found, chances = drafter.draft(
                one.features, one.before, one.batch.tokens, one.batch.rows, own_counts, own_following,
                min(max(wanted), drafter.most_tokens), one.order, one.context,
            )  # fmt: skip
            for at, most, ids, shares in zip(places, wanted, found.tolist(), chances.tolist(), strict=True):
                drafts[at] = tuple(ids[: _likely(shares[:most], drafter.least_likely)])
        return replace(result, drafts=tuple(drafts))

    def _compute_decodes(self, decodes: Decodes) -> _Launched:
        """A step of nothing else: no slice is looked at."""
        count = len(decodes.positions)
        bucket = self.graphs.bucket(count, int(decodes.positions.max()) + 1)
        self.graphs.prepare(bucket)
        self.inputs.begin()
        self.inputs.put_members(decodes, bucket[0])
        self.inputs.upload_with((decodes.members[place].row, first, pages) for place, first, pages in decodes.tables)
        self.graphs.run(bucket)
        assert self._hidden is not None
        logits = self.model.logits(self._hidden[:count], self._head_order)
        return _Launched(self.sampler.launch_decodes(decodes, logits), None, {}, count)

    @property
    def _head_order(self) -> Order:
        """The head's: the same for rows of this step and for hidden vectors that were kept."""
        return "prefill" if self.mode == "strict" else "decode"

    def _split(self, slices: Sequence[Slice]) -> tuple[list[Slice], list[Slice], list[Slice]]:
        """The slices that run as decodes, those with guesses, and the others. Draft blocks are fed by no graph."""
        decodes = [part for part in slices if part.is_decode]
        checked = [part for part in slices if part.num_guesses]
        others = [part for part in slices if not (part.is_decode or part.num_guesses)]
        if self.mode == "strict" or (self.mode is False and others):
            return [], [], list(slices)
        return (decodes, checked, others) if self.drafting is None else ([], [*decodes, *checked], others)

    def _decode(self, num_requests: int, context: int) -> None:
        """What a graph does: fills in the last tokens, runs the model, keeps hidden vectors."""
        batch = self.inputs.decode(num_requests)
        hidden = self.model.forward(batch.filled(self.sampler.last_tokens), batch.rows, "decode", context)
        if self._hidden is None:
            self._hidden = hidden.new_empty(self.graphs.requests[-1], hidden.shape[1])
        self._hidden[:num_requests].copy_(hidden)
        self._keep_hidden(hidden, self.arena.hidden, batch.rows)

    def _pad_decode(self, num_requests: int) -> None:
        self.inputs.pad_decode(num_requests)

    def _pass(self, parts: Sequence[Slice], batch: Batch, order: Order) -> _Pass:
        """Computes slices of any length."""
        if has_unknown(parts):
            batch = Batch(batch.filled(self.sampler.last_tokens), batch.rows)
        return self._forward(parts, batch, order, self.graphs.context(max(part.stop for part in parts)))

    def _forward(self, parts: Sequence[Slice], batch: Batch, order: Order, context: int) -> _Pass:
        rows, store, drafting = batch.rows, self.arena.hidden, self.drafting
        if drafting is None:
            hidden = self.model.forward(batch.tokens, rows, order, context)
            self._keep_hidden(hidden, store, rows)
            return _Pass(parts, batch, order, context, hidden, None, None)
        kept = None
        if drafting.drafter.keeps_features:
            assert store is not None
            kept = store.read(rows.slots[:, store.slot_column], rows.starts % store.rows_per_page)
        hidden, features = drafting.forward_with_features(batch.tokens, rows, order, context)
        self._width = hidden.shape[1]
        self._keep_hidden(hidden if kept is None else torch.cat([hidden, features.float()], dim=1), store, rows)
        return _Pass(parts, batch, order, context, hidden, features, None if kept is None else kept[:, hidden.shape[1] :])

    def _put_draws(self, step: Step, decodes: Sequence[Slice], others: Sequence[Slice]) -> _Draws:
        """Sorts the samples by where their hidden vectors are, and writes what the device needs to find these."""
        if not others and len(step.samples) == len(decodes):  # one a decode, in their order
            return _Draws(step.samples, None, len(decodes), None, None, None)
        decode_row = {part.request_id: row for row, part in enumerate(decodes)}
        last_row, at = {}, 0
        for part in others:
            at += part.stop - part.start
            last_row[part.request_id] = at - 1
        kinds: tuple[list[int], ...] = ([], [], [])
        picks: tuple[list[int], ...] = ([], [], [])
        page_rows: list[int] = []
        store = self.arena.hidden
        for number, item in enumerate(step.samples):
            if item.slice_index is None:
                assert store is not None
                kind, pick = 2, item.slot[store.slot_column]
                page_rows.append(item.position % store.rows_per_page)
            elif item.request_id in decode_row:
                kind, pick = 0, decode_row[item.request_id]
            else:
                kind, pick = 1, last_row[item.request_id] - item.rows_back
            kinds[kind].append(number)
            picks[kind].append(pick)
        order = [number for kind in kinds for number in kind]
        places = [0] * len(order)
        for place, number in enumerate(order):
            places[number] = place
        samples = tuple(step.samples[number] for number in order)
        every = picks[0] == list(range(len(decodes)))
        wanted = (() if every else picks[0], *picks[1:], page_rows)
        found = [self.inputs.put_numbers(each) if each else None for each in wanted]
        return _Draws(samples, places, len(decodes) if every else 0, *found)

    def _drawn_from(self, draws: _Draws, hidden: Sequence[Tensor]) -> Tensor:
        """The hidden vectors to draw from [S, D]. hidden  of the step's passes."""
        parts = []
        if draws.num_decodes or draws.decode_rows is not None:
            assert self._hidden is not None
            chosen = draws.decode_rows
            parts.append(self._hidden[: draws.num_decodes] if chosen is None else self._hidden.index_select(0, chosen))
        if draws.other_rows is not None:
            every = hidden[0] if len(hidden) == 1 else torch.cat(list(hidden))
            parts.append(every.index_select(0, draws.other_rows))
        if draws.pages is not None:
            assert self.arena.hidden is not None and draws.page_rows is not None
            kept = self.arena.hidden.read(draws.pages, draws.page_rows)
            parts.append(kept if self.drafting is None else kept[:, : self._width])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompt_scores(self, slices: Sequence[Slice], others: Sequence[Slice], hidden: Tensor | None) -> dict[int, _Scores]:
        """What was asked for of prompt tokens, by number of the slice. hidden  [T, D] of the rows of `others`."""
        if all(part.num_logprobs is None for part in others):
            return {}
        assert hidden is not None
        found, at = {}, 0
        numbers = {part.request_id: number for number, part in enumerate(slices)}
        for part in others:
            if part.num_logprobs is not None:
                found[numbers[part.request_id]] = self._scores(
                    hidden[at : at + len(part.targets)], part.targets, part.num_logprobs
                )
            at += part.stop - part.start
        return found

    def _scores(self, hidden: Tensor, targets: Sequence[int], count: int) -> _Scores:
        parts = []
        for start in range(0, len(targets), _LOGPROB_ROWS):
            tokens = torch.tensor(targets[start : start + _LOGPROB_ROWS], dtype=torch.int64)
            if self.device.type == "cuda":
                tokens = tokens.pin_memory().to(self.device, non_blocking=True)
            logits = self.model.logits(hidden[start : start + len(tokens)], "prefill")
            parts.append((tokens, *self._token_logprobs(logits, tokens, count)))
        return _Scores(parts)


def drafting_device_model(model: object) -> DraftingDeviceModel:
    """A model that was loaded with its draft blocks."""
    assert isinstance(model, DraftingDeviceModel)
    return model


def _likely(chances: Sequence[float], least: float) -> int:
    """How many of some drafts to keep: until all of them would be less likely than `least`."""
    likely, count = 1.0, 0
    for chance in chances:
        likely *= chance
        if likely < least:
            break
        count += 1
    return count


def _keep_hidden(hidden: Tensor, store: Store | None, rows: Rows) -> None:
    """Without a GPU: the last of each request's rows goes into its slot, and each that may turn out to be the last."""
    for back in range(0 if store is None else store.rows_per_page):
        assert store is not None
        has_it = rows.stops - rows.starts > back
        if back:
            has_it = has_it & (back <= rows.drafts) if rows.drafts is not None else torch.zeros_like(has_it)
        requests = has_it.nonzero().flatten()
        last = (rows.first_rows + rows.stops - rows.starts - 1 - back)[requests]
        pages, places = rows.slots[requests, store.slot_column].long(), (rows.stops[requests] - back) % store.rows_per_page
        store.write(pages, places.long(), store.codec.encode(hidden[last]))
