"""I8: what replay rebuilds is what was there. A slot that is lost, over a log that is not, costs `layout.replay` tokens.

Steps are written by hand and given to a worker. A cold run of some tokens pauses at q and goes on to an answer. Then its slot is
filled with NaN, and so is every row of its blocks that was not final at q; the tokens from s = q - distance to q run again, with
nothing before s (valid_from = s) and without writing the log (write_from = q). From there on all must be as it was, bit for bit:
the live bytes of the slot, hidden vectors, scores and tokens; and no byte of the log below q may have changed.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.watch import Watch
from lamina.ops.attend import ref as attend_ref
from lamina.schedule.step import Sample, Slice, Step

POISON, HIDDEN = 255, "hidden"
LONGEST, COMPANY, ANSWER = 1100, 300, 6
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
Bytes: TypeAlias = dict[tuple[int, str, str], bytes]  # by layer, memory, field
Formats: TypeAlias = tuple[str, str, str]  # cache, index, dtype


@dataclass(slots=True, eq=False)
class Run:
    """One request driven by hand.

    row, slot, blocks  where it lies.   position  tokens computed.   tabled  blocks that the runtime knows.
    hidden, logits     what was computed, by position.
    """

    tokens: list[int]
    row: int
    slot: tuple[int, ...]
    blocks: tuple[int, ...]
    position: int = 0
    valid_from: int = 0
    write_from: int = 0
    tabled: int = 0
    hidden: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cold:
    """A cold run that paused at q: its slot, log and block pages there; its vectors, scores, tokens and log at its end."""

    slot: Bytes
    log: Bytes
    pages: Tensor
    hidden: dict[int, Tensor]
    logits: dict[int, Tensor]
    tokens: list[int]
    whole_log: Bytes


class Stage:
    """A worker whose pages are dealt out by hand: to one request, and to another that keeps it company."""

    def __init__(self, driving: ModuleType, directory: Path, formats: Formats) -> None:
        cache, index, dtype = formats
        settings = {"cache_format": cache, "index_format": index, "cache_bytes": "16MiB", "max_requests": 4}
        engine = LLM(str(directory), dtype=dtype, **settings).engine
        self.worker, self.layout, self.arena = engine.worker, engine.layout, engine.worker.arena
        assert self.layout.replay < LONGEST
        self.same_bits: Callable[[Tensor, Tensor], bool] = driving.same_bits
        self.spy = driving.Spy(self.worker.runner.model)
        self.worker.runner.model = self.spy
        self.draw = random.Random(5)
        self.ids = [self.draw.randrange(2, 257) for _ in range(LONGEST)]
        pages = self.draw.sample(range(engine.num_pages), engine.num_pages)
        slots, blocks = self.layout.slot_pages, self.layout.blocks_for(LONGEST)
        self.slots = [tuple(pages[number * slots :][:slots]) for number in range(2)]
        self.blocks = [tuple(pages[2 * slots + number * blocks :][:blocks]) for number in range(2)]
        self.steps = 0
        self.known: dict[tuple[int, int], Cold] = {}

    def run(self, length: int, number: int = 0, position: int = 0, valid_from: int = 0, write_from: int = 0) -> Run:
        """The request itself, or its company (number 1), in a row of the tables that another may have used."""
        tokens = self.ids[::-1] if number else self.ids
        row = 2 * number + self.draw.randrange(2)
        return Run(tokens[:length], row, self.slots[number], self.blocks[number], position, valid_from, write_from)

    # -- steps

    def step(self, parts: Sequence[tuple[Run, int]], drawing: Sequence[Run] = ()) -> None:
        """Computes the next `count` tokens of each run in one step, and draws a token for some of them."""
        slices, samples = [], []
        for number, (run, count) in enumerate(parts):
            start, stop, known = run.position, run.position + count, self.layout.blocks_for(run.position + count)
            slices.append(
                Slice(
                    request_id=number, start=start, stop=stop, tokens=tuple(run.tokens[start:stop]), slot=run.slot, row=run.row,
                    table_start=run.tabled, table=run.blocks[run.tabled : known], write_from=run.write_from,
                    valid_from=run.valid_from,
                )
            )  # fmt: skip
            run.position, run.tabled = stop, known
            if run in drawing:
                samples.append(Sample(number, number, run.slot, GREEDY, 0, 0, (), (), 0, ()))
        self.steps += 1
        self.spy.products.clear()
        result = self.worker.execute(Step(self.steps, (), tuple(slices), tuple(samples), ()))
        row = 0
        for run, count in parts:
            for position in range(run.position - count, run.position):
                run.hidden[position] = self.spy.hidden[row].clone()
                row += 1
        for number, (item, token) in enumerate(zip(samples, result.tokens, strict=True)):
            run = parts[item.request_id][0]
            assert token is not None, "scores are not finite"
            run.logits[run.position - 1] = self.spy.products[-1][number].clone()
            run.tokens.append(token)

    def advance(self, run: Run, stop: int, cuts: Sequence[int], company: Run | None = None) -> None:
        """Computes up to `stop` in slices of these lengths in turn; the company computes about as much, then draws on and on."""
        turn = 0
        while run.position < stop:
            count = min(cuts[turn % len(cuts)], stop - run.position)
            parts, drawing = [(run, count)], []
            if company is not None:
                more = max(1, min(count, COMPANY - company.position))
                parts.insert(turn % 2, (company, more))
                drawing += [company] if company.position + more >= COMPANY else []
            self.step(parts, drawing)
            turn += 1

    def answer(self, run: Run) -> None:
        """Computes the last token of the prompt, then the answer, a token a step."""
        for _ in range(ANSWER):
            self.step([(run, 1)], [run])

    # -- bytes

    def slot_bytes(self, run: Run) -> Bytes:
        """The live rows of the run's slot, oldest first."""
        found: Bytes = {}
        for span, ranges in zip(self.layout.slot_spans, self.layout.slot_live(run.position), strict=True):
            page, size = self.arena.bytes[run.slot[span.page]], span.row_bytes
            rows = [page[span.offset + first * size : span.offset + (first + count) * size] for first, count in ranges]
            found[span.layer, span.memory, span.field.name] = b"".join(part.numpy().tobytes() for part in rows)
        return found

    def log_bytes(self, run: Run, position: int) -> Bytes:
        """The entries that are final at `position`."""
        found: Bytes = {}
        for block in range(self.layout.blocks_for(position)):
            page = self.arena.bytes[run.blocks[block]]
            for span, rows in zip(self.layout.block_spans, self.layout.block_live(block, position), strict=True):
                key, data = (span.layer, span.memory, span.field.name), page[span.offset : span.offset + rows * span.row_bytes]
                found[key] = found.get(key, b"") + data.numpy().tobytes()
        return found

    # -- whole runs

    def cold(self, q: int, length: int) -> Cold:
        """`length` tokens from nothing, paused at q, and an answer."""
        if (q, length) not in self.known:
            run = self.run(length)
            self.arena.bytes[[*run.slot, *run.blocks]] = POISON
            self.advance(run, q, [q])
            slot, log, pages = self.slot_bytes(run), self.log_bytes(run, q), self.arena.bytes[list(run.blocks)].clone()
            assert all(any(byte != POISON for byte in data) for data in (*slot.values(), *log.values()) if data)
            self.advance(run, length - 1, [length])
            self.answer(run)
            whole = self.log_bytes(run, run.position)
            self.known[q, length] = Cold(slot, log, pages, run.hidden, run.logits, run.tokens, whole)
        return self.known[q, length]

    def begin(self, q: int, length: int, start: int, valid_from: int) -> Run:
        """A run that begins at `start` with the log below q, and NaN everywhere else."""
        cold, run = self.cold(q, length), self.run(length, 0, start, valid_from, q)
        self.arena.bytes[list(run.slot)] = POISON
        self.arena.bytes[list(run.blocks)] = cold.pages  # all that was not final at q is NaN there
        return run

    def rerun(self, q: int, length: int, distance: int, cuts: Sequence[int]) -> tuple[Run, Bytes]:
        """(run, slot at q) of a run that begins `distance` before q with nothing but the log, and stops at q."""
        run = self.begin(q, length, q - distance, q - distance)
        self.advance(run, q, cuts)
        return run, self.slot_bytes(run)

    def differing(self, q: int, length: int, slot: Bytes) -> set[tuple[int, str]]:
        """(layer, memory) of what a slot at q has that the cold run's had not."""
        cold = self.cold(q, length).slot
        assert slot.keys() == cold.keys()
        return {(layer, memory) for (layer, memory, name), data in slot.items() if data != cold[layer, memory, name]}

    def check(self, q: int, length: int, cuts: Sequence[int], start: int, valid_from: int, is_with_company: bool = False) -> None:
        """A run from `start` over the log below q has, from q on, everything that the cold run has."""
        cold, run = self.cold(q, length), self.begin(q, length, start, valid_from)
        company = self.run(COMPANY, 1) if is_with_company else None
        self.arena.bytes[[*self.slots[1], *self.blocks[1]]] = POISON
        self.advance(run, q, cuts, company)
        assert self.log_bytes(run, q) == cold.log, "the log below q has changed"
        assert self.differing(q, length, self.slot_bytes(run)) <= {(run_layer, HIDDEN) for run_layer, _, _ in cold.slot}
        self.advance(run, length - 1, cuts, company)
        self.answer(run)
        wrong = [at for at in range(q, length + ANSWER - 1) if not self.same_bits(run.hidden[at], cold.hidden[at])]
        assert not wrong, f"hidden vectors differ at {wrong[:5]}"
        assert sorted(run.logits) == sorted(cold.logits) == list(range(length - 1, length + ANSWER - 1))
        assert all(self.same_bits(run.logits[at], cold.logits[at]) for at in cold.logits)
        assert run.tokens == cold.tokens
        assert self.log_bytes(run, run.position) == cold.whole_log
        if company is not None:
            self.check_company(company)

    def check_company(self, company: Run) -> None:
        """The company has the bits it has alone."""
        alone = self.run(COMPANY, 1)
        alone.tokens = list(company.tokens)
        self.arena.bytes[[*alone.slot, *alone.blocks]] = POISON
        self.advance(alone, company.position, [company.position])
        assert all(self.same_bits(company.hidden[at], alone.hidden[at]) for at in alone.hidden)


StageOf: TypeAlias = Callable[[str, Formats], Stage]


MakeModel: TypeAlias = Callable[[str, tuple[int, ...], int], Path]


@pytest.fixture(scope="module")
def own_models(random_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The directory of a random model with this schedule and window."""
    made: dict[str, Path] = {}

    def find(name: str, ratios: tuple[int, ...], window: int) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            recipe = random_models.Recipe(ratios, 17, (("sliding_window", window),))
            random_models.build(recipe).save_pretrained(made[name])
        return made[name]

    return find


#: schedules and windows of models that are made here; the others are in random_models
OWN: dict[str, tuple[tuple[int, ...], int]] = {
    "small": ((0, 4, 128, 4), 4),
    "windows": ((0, 4, 0), 16),
    "late 128": ((0, 128), 4),
    "late 4": ((0, 0, 4), 3),
}


@pytest.fixture(scope="module")
def model_of(checkpoint_of: Callable[[str], Path], own_models: MakeModel) -> Callable[[str], Path]:
    """The directory of a model that is made here or in random_models."""
    return lambda name: own_models(name, *OWN[name]) if name in OWN else checkpoint_of(name)


@pytest.fixture(scope="module")
def stage_of(driving: ModuleType, model_of: Callable[[str], Path]) -> StageOf:
    made: dict[tuple[str, Formats], Stage] = {}

    def find(name: str, formats: Formats) -> Stage:
        if (name, formats) not in made:
            made[name, formats] = Stage(driving, model_of(name), formats)
        return made[name, formats]

    return find


EXACT: Formats = ("fp32", "fp32", "fp32")
SETUPS: list[tuple[str, Formats, int]] = [
    # Windows of 128: flash (0, 4, 128, 4, 128) 4 * 127 + 128 = 636, pro (128, 128, 4, 128, 4) 4 * 127 + 127 = 635.
    ("flash", ("fp8", "fp4", "fp32"), 636),
    ("pro", ("bf16", "fp8", "fp32"), 635),
    # (4, 0, 4, 128), window 16: 3 * 15 + 128.   (0, 4, 128, 4, 128), window 100: 4 * 99 + 128.
    ("narrow", EXACT, 173),
    ("blocks", ("fp8", "fp4", "bf16"), 524),
    # (0, 4, 128, 4), window 4: 2 * 3 + 128 at the layer of ratio 128; the last one needs 3 * 3 + 8.
    ("small", ("fp8", "bf16", "fp32"), 134),
]
names = pytest.mark.parametrize(("name", "formats", "replay"), SETUPS, ids=[name for name, _, _ in SETUPS])
#: the others are long: a schedule and formats of which another test has said that their state comes back
few_names = pytest.mark.parametrize(
    ("name", "formats", "replay"),
    [pytest.param(*setup, id=setup[0], marks=[] if setup[0] in ("flash", "small") else [pytest.mark.long]) for setup in SETUPS],
)


LONG_CUTS = [pytest.param(cuts, marks=pytest.mark.long) for cuts in ([128], [1])]


@names
@pytest.mark.parametrize("cuts", [[1000], [37, 1, 90, 3], *LONG_CUTS], ids=str)
def test_replay_is_the_state_that_was_lost(name: str, formats: Formats, replay: int, cuts: list[int], stage_of: StageOf) -> None:
    """At the end of a block, and inside one."""
    stage = stage_of(name, formats)
    assert stage.layout.replay == replay
    if cuts == [1] and replay > 200:
        cuts = [1] * 20 + [60] * 5  # single tokens while most of their windows do not exist
    for q, length in ((768, 790), (700, 720)):
        stage.check(q, length, cuts, q - replay, q - replay)


@names
def test_replay_in_company(name: str, formats: Formats, replay: int, stage_of: StageOf) -> None:
    """Slices without a past stand beside slices and single tokens that have theirs."""
    stage = stage_of(name, formats)
    for cuts in ([50], [1, 1, 64]):
        stage.check(768, 790, cuts, 768 - replay, 768 - replay, is_with_company=True)


@few_names
def test_a_longer_replay_is_as_good(name: str, formats: Formats, replay: int, stage_of: StageOf) -> None:
    stage = stage_of(name, formats)
    for more in (1, 5, 60):
        stage.check(768, 790, [100], 768 - replay - more, 768 - replay - more)


@names
def test_the_prompt_may_end_right_behind(name: str, formats: Formats, replay: int, stage_of: StageOf) -> None:
    """One token left to compute: its scores are the first thing that must be right."""
    stage_of(name, formats).check(768, 769, [200], 768 - replay, 768 - replay)


@few_names
@pytest.mark.parametrize("cuts", [[1000], [37, 1, 90, 3]], ids=str)
def test_a_whole_past_over_a_resident_log(name: str, formats: Formats, replay: int, cuts: list[int], stage_of: StageOf) -> None:
    """From the first token on, or with a slot that is whole (as from a checkpoint): the log is still not written."""
    stage = stage_of(name, formats)
    stage.check(512, 530, cuts, 0, 0)
    run = stage.begin(512, 530, 0, 0)
    stage.advance(run, 300, [300])
    written = stage.worker.bytes_written()
    stage.advance(run, 512, cuts)
    more = {memory: count - written[memory] for memory, count in stage.worker.bytes_written().items()}
    assert not any(more[memory] for memory in ("c4", "c128", "index") if memory in more) and more["window"]
    assert not stage.differing(512, 530, stage.slot_bytes(run))


def test_gathered_entries(stage_of: StageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts gather the chosen entries where short ones mask the others; here from the fifth tile on."""
    monkeypatch.setattr(attend_ref, "DENSE_ENTRIES", 64)
    stage = stage_of("flash", ("fp8", "fp8", "fp32"))
    for cuts in ([1000], [37, 1, 90, 3]):
        stage.check(768, 790, cuts, 768 - 636, 768 - 636)


#: model, q, the least distance that is enough, what is wrong with one token less
BORDERS: list[tuple[str, int, int, set[tuple[int, str]]]] = [
    # Three windows of 16: layer 2 needs the rows of 15 tokens before q; each of the two layers below it looks back 15 more.
    ("windows", 256, 45, {(2, "window")}),
    # q is inside the group [128, 256): 127 of its tokens must be folded, from outputs of a layer that looks back 3.
    ("late 128", 255, 130, {(1, "c128_fold")}),
    # q is inside the group [252, 256), which also covers [248, 252): 7 tokens, from outputs of two layers that look back 2 each.
    ("late 4", 255, 11, {(2, "c4_fold"), (2, "index_fold")}),
    # At the end of a group only what [252, 256) gives to the next is left: 4 tokens.
    ("late 4", 256, 8, {(2, "c4_fold"), (2, "index_fold")}),
]


@pytest.mark.parametrize(("name", "q", "least", "lost"), BORDERS, ids=[f"{name}-{q}" for name, q, _, _ in BORDERS])
def test_the_bound_is_the_least_that_is_enough(
    name: str, q: int, least: int, lost: set[tuple[int, str]], stage_of: StageOf
) -> None:
    """Every distance from it on gives the same bits, none below does; with one token less only the deepest memory is wrong."""
    stage = stage_of(name, EXACT)
    assert least <= stage.layout.replay <= least + 4, "the bound counts whole groups, whatever q is"
    for distance in range(1, int(stage.layout.replay) + 3):
        _, slot = stage.rerun(q, q + 20, distance, [40])
        wrong = {item for item in stage.differing(q, q + 20, slot) if item[1] != HIDDEN}
        assert bool(wrong) == (distance < least), (distance, wrong)
        if distance == least - 1:
            assert wrong == lost
    assert stage.layout.replay == least or name != "windows"


def test_the_hidden_vector_of_the_last_token_needs_one_token_more(stage_of: StageOf) -> None:
    """Token q - 1 looks back 15 in all three layers, so its vector is right from 45 + 1 tokens on: the windows, and itself.

    With 45 the first right vector is that of token q. A replay must therefore leave one token to compute.
    """
    stage = stage_of("windows", EXACT)
    for distance, is_right in ((44, False), (45, False), (46, True)):
        run, slot = stage.rerun(256, 276, distance, [40])
        cold = stage.cold(256, 276)
        assert stage.same_bits(run.hidden[255], cold.hidden[255]) == is_right
        assert any(memory == HIDDEN for _, memory in stage.differing(256, 276, slot)) != is_right
        stage.advance(run, 257, [1])
        assert stage.same_bits(run.hidden[256], cold.hidden[256]) == (distance >= 45)


@names
def test_too_short_a_replay_gives_another_answer(name: str, formats: Formats, replay: int, stage_of: StageOf) -> None:
    """The resident log alone does not make the answer right: windows and folds carry much of it."""
    stage = stage_of(name, formats)
    cold = stage.cold(768, 790)
    run, slot = stage.rerun(768, 790, 2, [40])
    assert {memory for _, memory in stage.differing(768, 790, slot)} >= {"window", HIDDEN}
    stage.advance(run, 789, [40])
    stage.answer(run)
    assert not torch.equal(run.hidden[768], cold.hidden[768]) and not torch.equal(run.logits[789], cold.logits[789])
    assert stage.log_bytes(run, 768) == cold.log, "the log below q has changed"


# -- through the engine


def lose_checkpoints(engine: Engine, spare: Callable[[int], bool] = lambda position: False) -> int:
    """Evicts the checkpoints alone, but those at positions to be spared; the blocks stay. Says how many went."""
    gone = [checkpoint for checkpoint in engine.ledger.all_checkpoints() if not spare(checkpoint.position)]
    for checkpoint in gone:
        engine.ledger.index.discard(checkpoint)
    engine.ledger.check()
    return len(gone)


def poison_free_pages(engine: Engine) -> None:
    """What nobody holds is NaN."""
    arena = engine.ledger.arena
    free = [page for page in range(engine.num_pages) if not arena.lease_refs(page) and not arena.cache_refs(page)]
    engine.worker.arena.bytes[free] = POISON


ASKED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("budget", [100, *(pytest.param(budget, marks=pytest.mark.long) for budget in (None, 7))])
@pytest.mark.parametrize(
    ("name", "formats", "start"),
    # 1,000 tokens fill 3 blocks of 256. The replay begins at the last multiple of 128 that is far enough before 768:
    # 768 - 636 = 132, 768 - 635 = 133, 768 - 173 = 595, 768 - 524 = 244, 768 - 134 = 634.
    [
        pytest.param(*setup[:2], start, id=setup[0], marks=[] if setup[0] in ("flash", "blocks") else [pytest.mark.long])
        for setup, start in zip(SETUPS, (128, 128, 512, 128, 512), strict=True)
    ],
)
def test_asked_again_after_the_checkpoints_are_lost(
    name: str, formats: Formats, start: int, budget: int | None, model_of: Callable[[str], Path], driving: ModuleType,
    random_models: ModuleType,
) -> None:  # fmt: skip
    """The same answer, to the bit; usage says how much was reused and how much was computed only to rebuild the state."""
    cache, index, dtype = formats
    engine = LLM(str(model_of(name)), dtype=dtype, cache_format=cache, index_format=index, cache_bytes="32MiB").engine
    prompt = random_models.token_ids(1000, 41)
    with driving.Recorder(engine) as recorder:
        (cold,) = driving.serve(engine, [prompt], ASKED)
        assert lose_checkpoints(engine) == 2  # at the ends of the prompt and of the answer
        poison_free_pages(engine)
        written = engine.worker.bytes_written()
        if budget is not None:
            engine.scheduler.max_step_tokens = budget
        (again,) = driving.serve(engine, [prompt], ASKED)
        assert again.output.usage.cached_tokens == start
        assert again.output.usage.prefix_stop.startswith(f"{start} tokens reused ({768 - start} more only to rebuild the state)")
        assert again.output.outputs[0].token_ids == cold.output.outputs[0].token_ids
        assert again.output.outputs[0].logprobs == cold.output.outputs[0].logprobs
        one, two = cold.requests[0].id, again.requests[0].id
        computed = sorted(position for owner, position in recorder.hidden if owner == two)
        assert computed == list(range(start, 1011))  # the last of the 12 drawn is never computed
        assert all(driving.same_bits(recorder.hidden[two, at], recorder.hidden[one, at]) for at in range(768, 1011))
        assert all(driving.same_bits(recorder.logits[two, at], recorder.logits[one, at]) for at in range(999, 1011))
        # entries that close after 768 and at or before 1,011 are written; the same number of the cold run's closed before 768
        more = {memory: count - written[memory] for memory, count in engine.worker.bytes_written().items()}
        for memory, stride in (("c4", 4), ("c128", 128), ("index", 4)):
            if memory in more:
                assert more[memory] * (1011 // stride) == written[memory] * (1011 // stride - 768 // stride), memory
        # what the replay left behind is as good as what was lost
        (full,) = driving.serve(engine, [prompt], ASKED)
        assert full.output.usage.cached_tokens == 1000
        assert full.output.outputs[0].logprobs == cold.output.outputs[0].logprobs
        longer = prompt + cold.output.outputs[0].token_ids + random_models.token_ids(30, 42)
        (warm,) = driving.serve(engine, [longer], ASKED)
        assert warm.output.usage.cached_tokens == 1011
        driving.wipe(engine)
        (fresh,) = driving.serve(engine, [longer], ASKED)
        assert fresh.output.usage.cached_tokens == 0
        assert warm.output.outputs[0].logprobs == fresh.output.outputs[0].logprobs


def test_a_prompt_that_ends_where_its_log_ends(own_models: MakeModel, driving: ModuleType, random_models: ModuleType) -> None:
    """512 tokens are two whole blocks, and nothing is left to compute but the state. The first scores come from token 511.

    Layers (0, 4) with windows of 65: the slot at 512 needs 64 + 64 = 128 tokens, the vector of token 511 needs 129.
    """
    engine = LLM(str(own_models("two of 65", (0, 4), 65)), cache_format="fp32", index_format="fp32", cache_bytes="16MiB").engine
    assert engine.layout.block_tokens == 256 and engine.layout.replay in (128, 129)
    prompt = random_models.token_ids(512, 43)
    (cold,) = driving.serve(engine, [prompt], ASKED)
    lose_checkpoints(engine)
    poison_free_pages(engine)
    for cached in (512 - 256, 512):  # 512 - 129 = 383, from a multiple of 128; then the checkpoint that the replay made
        (again,) = driving.serve(engine, [prompt], ASKED)
        assert again.output.outputs[0].logprobs == cold.output.outputs[0].logprobs
        assert again.output.usage.cached_tokens == cached


@pytest.mark.parametrize(
    ("seed", "size"),
    [(2, "160KiB"), *(pytest.param(*more, marks=pytest.mark.long) for more in [(0, "4MiB"), (1, "4MiB"), (3, "160KiB")])],
)
def test_whatever_is_lost_the_answers_stay(
    seed: int, size: str, model_of: Callable[[str], Path], driving: ModuleType, random_models: ModuleType
) -> None:
    """Prompts that share beginnings, together, in a large pool and a tight one; checkpoints vanish, requests are preempted.

    Each answer is that of an engine that does nothing else; at each step the memory table is what is held.
    """
    draw = random.Random(seed)
    llms = [LLM(str(model_of("narrow")), cache_bytes=each, max_step_tokens=150, max_requests=4) for each in (size, "16MiB")]
    engine, witness = (llm.engine for llm in llms)
    watch = Watch(engine)
    base = random_models.token_ids(900, 44)
    known = {}
    for _ in range(9):
        prompts = []
        for _ in range(draw.randrange(1, 4)):
            shared = draw.choice([0, 255, 256, 300, 512, 700, 768, 900])
            prompts.append(base[:shared] + random_models.token_ids(draw.choice([1, 20, 60]), draw.randrange(6)))
        groups = [engine.add(prompt, ASKED, number) for number, prompt in enumerate(prompts)]
        while not all(group.is_finished for group in groups):
            assert watch.step()
            report = watch.memory()
            assert report is not None and report.is_equal, report
            idle = [r for r in engine.scheduler.running if not r.awaits_result and r.lease is not None and not r.lease.in_flight]
            if idle and draw.random() < 0.1:
                engine.scheduler.preempt(draw.choice(idle))
            if draw.random() < 0.2:
                lose_checkpoints(engine, lambda position: position % 3 != 0)
        lose_checkpoints(engine, lambda position: draw.random() < 0.3)
        poison_free_pages(engine)
        for prompt, group in zip(prompts, groups, strict=True):
            if tuple(prompt) not in known:
                driving.wipe(witness)
                (alone,) = driving.serve(witness, [prompt], ASKED)
                known[tuple(prompt)] = alone.output.outputs[0].logprobs
            assert group.output.outputs[0].logprobs == known[tuple(prompt)]
    assert engine.ledger.stats.replays >= 3 and engine.ledger.stats.preempted >= 2
    assert (engine.ledger.evictions > 0) == size.endswith("KiB")
    driving.wipe(engine)
