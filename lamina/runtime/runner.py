"""Executes a step: copies, the model, samples, copies. It decides nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lamina.ops import native
from lamina.ops.gemm import padded_rows
from lamina.ops.sample import SampleBatch, allowed_tokens, most_likely, sample, token_logprobs
from lamina.ops.sample.draws import uniform
from lamina.ops.sequences import Sequences
from lamina.runtime.arena import DeviceArena
from lamina.runtime.drafting import DraftingModel, settled
from lamina.runtime.inputs import BlockTables, step_arrays
from lamina.schedule.step import Sample, Slice, Step, StepResult, TokenLogprobs

_ONE_THREAD_TOKENS = 16
_LOGPROB_ROWS = 256  # prompt rows whose logits exist at once


class ForwardModel(Protocol):
    """What the runner needs of a model."""

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios whose groups a step must plan."""
        ...

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """tokens [T] -> final hidden vectors [T, D] fp32."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> [S, V] fp32."""
        ...


class Runner:
    """Runs steps of one model over one arena.

    rings         ring lengths of the model's windows.
    max_requests  rows of the block tables: requests that run at once.
    row_multiple  products get a multiple of so many rows, which keeps a row's bits independent of the others; 1 pads nothing.
    drafting      the model, where its own blocks draft tokens.
    overlaps      a step is run to its end before another may be planned.
    """

    overlaps = False
    num_graphs = 0

    def __init__(
        self, model: ForwardModel, arena: DeviceArena, rings: tuple[int, ...], max_requests: int, device: torch.device,
        row_multiple: int = 1, drafting: DraftingModel | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.drafting = drafting
        self.arena = arena
        self.rings = rings
        self.tables = BlockTables(max_requests, device)
        self.device = device
        self.multiple = row_multiple

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing is compiled on a CPU."""

    def execute(self, step: Step) -> StepResult:
        """Runs one step to its end. A small one runs on one thread: the bits are the same, and waking others costs more."""
        threads = torch.get_num_threads()
        native.use_threads(threads)
        torch.set_num_threads(1 if step.num_tokens <= _ONE_THREAD_TOKENS else threads)
        try:
            return self._execute(step)
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def _execute(self, step: Step) -> StepResult:
        self.arena.run(step.copies_before)
        hidden = features = before = None
        prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ((),) * len(step.slices)
        if step.slices:
            tokens, sequences = step_arrays(step.slices, self.tables, self.model.ratios, self.rings, self.multiple, self.device)
            if self.drafting is None:
                hidden = self.model.forward(tokens, sequences)
                self._keep_hidden(hidden, sequences)
            else:
                before = self._features_before(sequences)
                hidden, features = self.drafting.forward_with_features(tokens, sequences)
                kept = torch.cat([hidden, features], dim=-1) if self.drafting.drafter.keeps_features else hidden
                self._keep_hidden(kept, sequences)
            prompt_logprobs = tuple(
                self._target_logprobs(hidden[piece.rows], part) if part.num_logprobs is not None else ()
                for piece, part in zip(sequences.pieces, step.slices, strict=True)
            )
        drawn, logprobs = self._sample(step, hidden)
        drafts: tuple[tuple[int, ...], ...] = ()
        if features is not None and self.drafting is not None:
            counts, following = settled(step, drawn)
            wanted = [part.num_wanted if token >= 0 else 0 for part, token in zip(step.slices, following, strict=True)]
            found = self.drafting.drafter.draft(features, before, tokens, sequences, counts, following, wanted)
            drafts = tuple(map(tuple, found))
        self.arena.run(step.copies_after)
        return StepResult(drawn, logprobs, prompt_logprobs, drafts)

    def _keep_hidden(self, hidden: Tensor, sequences: Sequences) -> None:
        """The final hidden vector of each sequence's last row goes into its slot, and of each row that may become the last."""
        store = self.arena.hidden
        if store is not None:
            found = [
                (piece.rows.stop - 1 - back, number, (piece.stop - back) % store.rows_per_page)
                for number, piece in enumerate(sequences.pieces)
                for back in range(1 + piece.drafts)
            ]
            rows, owners, places = torch.tensor(found, dtype=torch.int64, device=self.device).unbind(1)
            store.write(sequences.slots[owners, store.slot_column], places, store.codec.encode(hidden[rows]))

    def _features_before(self, sequences: Sequences) -> Tensor | None:
        """[R, F] what the drafter reads of the position before each sequence, as its slot keeps it; None where it keeps none."""
        store, drafting = self.arena.hidden, self.drafting
        if store is None or drafting is None or not drafting.drafter.keeps_features:
            return None
        places = torch.tensor([piece.start % store.rows_per_page for piece in sequences.pieces], device=self.device)
        return store.read(sequences.slots[:, store.slot_column], places)[:, drafting.hidden_size :]

    def _padded_logits(self, rows: Tensor) -> Tensor:
        """[S, D] -> [S, V]; the product sees a padded number of rows."""
        num = padded_rows(rows.shape[0], self.multiple)
        if num != rows.shape[0]:
            rows = torch.cat([rows, rows.new_zeros(num - rows.shape[0], rows.shape[1])])
        return self.model.logits(rows)

    def _target_logprobs(self, hidden: Tensor, part: Slice) -> tuple[TokenLogprobs, ...]:
        found: list[TokenLogprobs] = []
        assert part.num_logprobs is not None
        for start in range(0, len(part.targets), _LOGPROB_ROWS):
            targets = part.targets[start : start + _LOGPROB_ROWS]
            logits = self._padded_logits(hidden[start : start + len(targets)])[: len(targets)]
            is_bad = ~logits.amax(dim=-1).isfinite()  # NaN if any is: no other request's step ends for them
            if bool(is_bad.any()):
                logits = logits.masked_fill(is_bad[:, None], 0.0)
            rows = _report(logits, targets, part.num_logprobs)
            found.extend(replace(row, logprob=math.nan) if bad else row for row, bad in zip(rows, is_bad.tolist(), strict=True))
        return tuple(found)

    def _sample(self, step: Step, hidden: Tensor | None) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        if not step.samples:
            return (), ()
        stops: list[int] = []
        for part in step.slices:
            stops.append((stops[-1] if stops else 0) + part.stop - part.start)
        logits = self._padded_logits(self._sampled_rows(step.samples, stops, hidden))[: len(step.samples)]
        if all(_takes_best(item) for item in step.samples):
            best, peaks = most_likely(logits)
            if all(map(math.isfinite, peaks)):
                return tuple(best), self._logprobs(step.samples, logits, best)
        batch = sample_batch(step.samples, logits.shape[1], self.device)
        is_bad = ~logits.amax(dim=-1).isfinite()  # NaN if any is
        if batch.mask_rows is not None and batch.mask_words is not None:
            allowed = allowed_tokens(batch.mask_words, logits.shape[1])
            is_bad[batch.mask_rows] |= ~logits[batch.mask_rows].masked_fill(~allowed, -torch.inf).amax(dim=-1).isfinite()
        if bool(is_bad.any()):
            logits[is_bad] = 0  # such a row fails alone
        tokens = sample(logits, batch).tolist()
        logprobs = self._logprobs(step.samples, logits, tokens)
        return tuple(None if bad else token for bad, token in zip(is_bad.tolist(), tokens, strict=True)), logprobs

    def _sampled_rows(self, samples: Sequence[Sample], stops: Sequence[int], hidden: Tensor | None) -> Tensor:
        """[S, D] final hidden vectors; `stops`: of each slice, the row after its last."""
        lasts = [stops[item.slice_index] - 1 - item.rows_back for item in samples if item.slice_index is not None]
        if len(lasts) == len(samples):
            assert hidden is not None
            if lasts == list(range(len(lasts))):
                return hidden[: len(lasts)]
            return hidden.index_select(0, torch.tensor(lasts, dtype=torch.int64, device=self.device))
        rows = []
        for item in samples:
            if item.slice_index is not None:
                assert hidden is not None
                rows.append(hidden[stops[item.slice_index] - 1 - item.rows_back])
            else:
                store = self.arena.hidden
                assert store is not None
                page, place = torch.tensor([[item.slot[store.slot_column]], [item.position % store.rows_per_page]])
                kept = store.read(page, place)[0]
                rows.append(kept if self.drafting is None else kept[: self.drafting.hidden_size])
        return torch.stack(rows)

    def _logprobs(self, samples: Sequence[Sample], logits: Tensor, tokens: Sequence[int]) -> tuple[TokenLogprobs | None, ...]:
        found: list[TokenLogprobs | None] = [None] * len(samples)
        for row, item in enumerate(samples):
            count = item.params.num_logprobs(logits.shape[1])
            if count is not None:
                found[row] = _report(logits[row : row + 1], tokens[row : row + 1], count)[0]
        return tuple(found)


def _report(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """logits [S, V] and S tokens -> their log-probabilities with the `count` most likely tokens beside each."""
    values, ranks, top_ids, top_values = token_logprobs(
        logits, torch.tensor(tokens, dtype=torch.int64, device=logits.device), count
    )
    columns = zip(tokens, values.tolist(), ranks.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    return [TokenLogprobs(token, value, rank, tuple(ids), tuple(tops)) for token, value, rank, ids, tops in columns]


def _takes_best(item: Sample) -> bool:
    """Whether the token is the most likely one of the logits as they are."""
    params = item.params
    return not (params.temperature or params.has_penalties or params.logit_bias or item.banned or item.mask is not None)


def sample_batch(samples: Sequence[Sample], vocab_size: int, device: torch.device) -> SampleBatch:
    """The samples' settings as arrays; [S, V] tables only where a penalty asks for them."""
    params = [item.params for item in samples]
    if all(_takes_best(item) for item in samples):
        return SampleBatch.greedy(len(samples), device)

    def reals(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    needs_counts = any(p.has_penalties for p in params)
    prompt_seen = output_counts = None
    if needs_counts:
        prompt_seen = torch.zeros(len(samples), vocab_size, dtype=torch.bool, device=device)
        output_counts = torch.zeros(len(samples), vocab_size, dtype=torch.int32, device=device)
        for row, item in enumerate(samples):
            if item.params.has_penalties:
                prompt_seen[row, list(set(item.prompt))] = True
                counts = torch.bincount(torch.tensor(item.output, dtype=torch.int64), minlength=vocab_size)
                output_counts[row] = counts.to(device=device, dtype=torch.int32)
    bias = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias]
    banned = [(row, token) for row, item in enumerate(samples) for token in item.banned]
    bias_index = torch.tensor([(row, token) for row, token, _ in bias], dtype=torch.int64, device=device).reshape(-1, 2)
    banned_index = torch.tensor(banned, dtype=torch.int64, device=device).reshape(-1, 2)
    mask_rows, mask_words = _masks(samples, vocab_size, device)
    draws = [0.5 if item.params.is_greedy else uniform(item.seed, item.child, item.num_output) for item in samples]
    return SampleBatch(
        temperature=reals([p.temperature for p in params]),
        top_k=torch.tensor([min(p.top_k, vocab_size) for p in params], dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
        repetition=reals([p.repetition_penalty for p in params]),
        presence=reals([p.presence_penalty for p in params]),
        frequency=reals([p.frequency_penalty for p in params]),
        uniforms=torch.tensor(draws, dtype=torch.float64, device=device),
        prompt_seen=prompt_seen,
        output_counts=output_counts,
        bias_rows=bias_index[:, 0] if bias else None,
        bias_ids=bias_index[:, 1] if bias else None,
        bias_values=reals([value for _, _, value in bias]) if bias else None,
        banned_rows=banned_index[:, 0] if banned else None,
        banned_ids=banned_index[:, 1] if banned else None,
        mask_rows=mask_rows,
        mask_words=mask_words,
    )


def _masks(samples: Sequence[Sample], vocab_size: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(rows [M], words [M, W]) of the samples that have a mask; None if no sample has one."""
    found = [(row, item.mask) for row, item in enumerate(samples) if item.mask is not None]
    if not found:
        return None, None
    words = torch.frombuffer(bytearray(b"".join(mask for _, mask in found)), dtype=torch.int32)
    rows = torch.tensor([row for row, _ in found], dtype=torch.int64, device=device)
    return rows, words.reshape(len(found), -(-vocab_size // 32)).to(device)
