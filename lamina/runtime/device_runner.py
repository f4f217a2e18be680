"""Executes steps on a GPU: it launches a step and goes on; the result is waited for when it is asked for. It decides nothing.

copies before -> upload -> decodes, one graph -> other rows -> head and draws -> copies after          all on one stream

Decodes and other rows are two forward passes with a fixed order of sums each, so that a request's bits depend neither on who else
runs nor on padding. In mode "strict" all rows take the order of prefill, in one pass; in mode False they share a pass whenever
there is any prefill. Rows that check guesses take the order of decodes too: with the decodes of their step they are one graph, a
request's rows padded on average to those of as many guesses as there may be.

Where the model's own blocks draft, a step is run to its end: what was drawn says how far their memories go.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.ops.rows import Rows
from lamina.ops.sample import token_logprobs
from lamina.ops.store import Store
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_contracts import (
    DeviceModel,
    DraftingDeviceModel,
    Mode,
    Order,
    PendingDraws,
    Sampler,
    drafting_device_model,
)
from lamina.runtime.device_inputs import Batch, StepInputs, has_unknown
from lamina.runtime.drafting import settled
from lamina.runtime.graphs import Bucket, DecodeGraphs, sizes_up_to
from lamina.schedule.step import Decodes, LaunchedStep, Sample, Slice, Step, StepResult, TokenLogprobs

__all__ = ["DeviceRunner", "Mode", "Order", "Sampler", "drafting_device_model"]

_LOGPROB_ROWS = 256  # prompt rows whose logits exist at once


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
    check: "_Check | None" = None


class _Check(NamedTuple):
    """Graphs for slices with guesses: which, with how many rows a request, and how many tokens are drafted after it."""

    bucket: Bucket
    rows: int
    num_drafts: int


class _Buffers(NamedTuple):
    """What the graphs of checking passes leave for whoever comes after, the most rows of any. tokens  as they were computed."""

    tokens: Tensor
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
        guesses = arena.layout.draft_tokens
        each = () if not guesses or mode == "strict" else (1 + guesses,) if drafting is None else (1, 1 + guesses)

        def graphs(rows: int, num_drafts: int | None = None) -> DecodeGraphs:
            """Of the pass that checks, or of the drafts that follow it."""
            compute = partial(self._check, rows) if num_drafts is None else partial(self._draft, rows, num_drafts)
            return DecodeGraphs(compute, lambda count: self.inputs.pad_check(count, rows), max_requests, max_model_len, device)

        self.checks = {rows: graphs(rows) for rows in each}
        self.drafts = {(rows, num): graphs(rows, num) for rows in each for num in range(1 + guesses)} if drafting else {}
        self.inputs = StepInputs(
            arena.layout.slot_pages, self.graphs.requests, max_requests, max_step_tokens,
            arena.layout.blocks_for(max_model_len), device,
            [(-(-max_model_len // tail.tokens), tail.pages) for tail in arena.layout.tails], each,
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
        self._checked: _Buffers | None = None
        self._counts = torch.zeros(2, max_requests, dtype=torch.int32, device=device)  # rows that count, tokens after them
        self._drafted = torch.zeros(max_requests, max(1, guesses), dtype=torch.int32, device=device)
        self._chances = torch.zeros(max_requests, max(1, guesses), device=device)

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
        return sum(some.num_captured for some in (self.graphs, *self.checks.values(), *self.drafts.values()))

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
        captured = self._warmed()
        graphs = sum(some.num_buckets for some in captured)
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
        before = len(every)
        for some in captured:
            some.warmup(None if progress is None else partial(_passed_on, progress, before, len(every) + graphs))
            before += some.num_buckets

    def _warmed(self) -> list[DecodeGraphs]:
        """The graphs that are captured before the first step: of decodes, and of checks with as many guesses as there may be.
        Those that draft fewer tokens, and checks without a guess, are captured when first needed."""
        if self.mode == "strict":
            return []
        found = [self.graphs] if self.drafting is None else []
        if self.checks:
            rows = max(self.checks)
            found.append(self.checks[rows])
            found += [self.drafts[rows, self._most_drafts]] if self.drafting is not None else []
        return found

    @property
    def _most_drafts(self) -> int:
        """Tokens drafted for a request, at most."""
        return 0 if self.drafting is None else min(self.arena.layout.draft_tokens, self.drafting.drafter.most_tokens)

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
                found.features, found.before, tokens, nobody, starts, starts - 1, self._most_drafts, order, context
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
        check = self._prepare_check(checked) if checked else None
        self.inputs.begin()
        if bucket is not None:
            self.inputs.put_decodes(decodes, bucket[0])
        if check is not None:
            self.inputs.put_check(checked, check.bucket[0], check.rows)
        batch = self.inputs.put_rows(others) if others else None
        draws = self._put_draws(step, decodes, [*checked, *others])
        self.inputs.upload(step.slices)
        if bucket is not None:
            self.graphs.run(bucket)
        passes = [self._run_check(check, checked)] if check is not None else []
        passes += [self._pass(others, batch, "prefill")] if batch is not None else []
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
            num = min(max(wanted), drafter.most_tokens)
            if one.check is None:
                own_counts, own_following = both.to(self.device).unbind(0)
                assert one.features is not None
                found, chances = drafter.draft(
                    one.features, one.before, one.batch.tokens, one.batch.rows, own_counts, own_following, num, one.order,
                    one.context,
                )  # fmt: skip
            else:
                self._counts[0].zero_()
                self._counts[1].fill_(-1)
                self._counts[:, : len(places)].copy_(both)
                graphs = self.drafts[one.check.rows, one.check.num_drafts]
                graphs.run(one.check.bucket)
                found, chances = self._drafted[: len(places), :num], self._chances[: len(places), :num]
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
        """The slices that run as decodes, those that run as checks of guesses, and the others. Draft blocks are fed by checks."""
        decodes = [part for part in slices if part.is_decode]
        checked = [part for part in slices if part.num_guesses]
        others = [part for part in slices if not (part.is_decode or part.num_guesses)]
        if self.mode == "strict" or (self.mode is False and others):
            return [], [], list(slices)
        return (decodes, [], others) if self.drafting is None and not checked else ([], [*decodes, *checked], others)

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

    def _prepare_check(self, parts: Sequence[Slice]) -> _Check:
        """Which graphs will check the guesses of `parts`, and draft after them."""
        rows = min(each for each in self.checks if any(part.num_guesses for part in parts) <= (each > 1))
        bucket = self.checks[rows].bucket(len(parts), max(part.stop for part in parts))
        num_drafts = 0 if self.drafting is None else min(max(p.num_wanted for p in parts), self.drafting.drafter.most_tokens)
        self.checks[rows].prepare(bucket)
        if self.drafting is not None:
            self.drafts[rows, num_drafts].prepare(bucket)
        return _Check(bucket, rows, num_drafts)

    def _run_check(self, check: _Check, parts: Sequence[Slice]) -> _Pass:
        """Computes what was put into the section of a check."""
        self.checks[check.rows].run(check.bucket)
        made = self._checked
        assert made is not None
        num = sum(part.stop - part.start for part in parts)
        batch = self.inputs.check(check.bucket[0], check.rows)
        return _Pass(parts, batch, "decode", check.bucket[1], made.hidden[:num], None, None, check)

    def _check(self, rows: int, num_requests: int, context: int) -> None:
        """What the graph of a checking pass does: as `_decode`, for slices of a few rows, with what a drafter reads."""
        batch = self.inputs.check(num_requests, rows)
        tokens = batch.filled(self.sampler.last_tokens)
        one = self._forward((), Batch(tokens, batch.rows), "decode", context)
        if self._checked is None:
            most = self.graphs.requests[-1]
            size = max(self.checks) * most
            self._checked = _Buffers(
                tokens.new_empty(size), one.hidden.new_empty(size, one.hidden.shape[1]),
                None if one.features is None else one.features.new_empty(size, one.features.shape[1]),
                None if one.before is None else one.before.new_empty(most, one.before.shape[1]),
            )  # fmt: skip
        for buffer, value in zip(self._checked, (tokens, one.hidden, one.features, one.before), strict=True):
            if buffer is not None and value is not None:
                buffer[: value.shape[0]].copy_(value)

    def _draft(self, rows: int, num_drafts: int, num_requests: int, context: int) -> None:
        """What the graph after it does: brings the draft blocks' memories up to what counts, and drafts."""
        batch, made = self.inputs.check(num_requests, rows), self._checked
        assert made is not None and made.features is not None and self.drafting is not None
        num_rows = batch.rows.num_rows
        counts, following = self._counts[:, :num_requests]
        found, chances = self.drafting.drafter.draft(
            made.features[:num_rows], None if made.before is None else made.before[:num_requests], made.tokens[:num_rows],
            batch.rows, counts, following, num_drafts, "decode", context,
        )  # fmt: skip
        self._drafted[:num_requests, :num_drafts].copy_(found)
        self._chances[:num_requests, :num_drafts].copy_(chances)

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
            parts.append(kept if self.drafting is None else kept[:, : self._width].contiguous())
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


def _passed_on(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    """Progress of a part of something, `before` which as much was done."""
    progress(before + done, total)


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
