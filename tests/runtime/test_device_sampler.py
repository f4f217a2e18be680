"""The device's sampler against the definition, over steps that are launched before the last one is read.

On a GPU if there is one, else in Triton's interpreter, in its own process.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.ops.sample import sample, token_logprobs
from lamina.runtime.runner import sample_batch
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import Decodes, Member, Sample, TokenLogprobs

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.runtime import device_sampler
from lamina.runtime.device_sampler import DeviceSampler

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCAB = 5000 if HAS_GPU else 60
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")


@dataclass(slots=True)
class Running:
    """A request in a table row, as a scheduler would keep it."""

    id: int
    row: int
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 2, 7)
    seed: int = 0
    banned: tuple[int, ...] = ()
    mask: bytes | None = None
    output: list[int] = field(default_factory=list)

    def sample(self, brings_tokens: bool = True) -> Sample:
        prompt, output = (self.prompt, tuple(self.output)) if brings_tokens else ((), ())
        return Sample(self.id, 0, (), self.params, self.seed, 3, prompt, output, len(self.output), self.banned, 0, self.mask)


def params(**settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **settings)  # type: ignore[arg-type]


def some() -> list[Running]:
    """Requests of all kinds; table rows in no order."""
    return [
        Running(10, 3, params(temperature=0)),
        Running(11, 0, params(temperature=0.8, top_p=0.9), seed=-5),
        Running(12, 5, params(temperature=0, repetition_penalty=1.7, presence_penalty=0.5)),
        Running(13, 1, params(temperature=1.3, frequency_penalty=1.9, top_k=12), seed=(1 << 64) - 3),
        Running(14, 4, params(temperature=1, logit_bias={VOCAB - 1: 3.5, 4: -100}), banned=(4, 9), seed=8),
        Running(15, 7, params(temperature=0), banned=tuple(range(1, VOCAB))),
        Running(16, 6, params(temperature=1, min_p=0.1, logprobs=3, repetition_penalty=0.6), seed=1),
        Running(17, 2, params(temperature=0, logprobs=0)),
    ]


def scores(num: int, step: int) -> Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(step)) * 3


def truth(samples: list[Sample], logits: Tensor) -> list[int]:
    return sample(logits, sample_batch(samples, VOCAB, torch.device("cpu"))).tolist()


def launch(sampler: DeviceSampler, running: list[Running], logits: Tensor, brings_tokens: bool = True) -> device_sampler.Pending:
    wide = torch.cat([logits, torch.full((2, VOCAB), torch.nan)])  # padding
    return sampler.launch([one.sample(brings_tokens) for one in running], wide.to(DEVICE), [one.row for one in running])


def rows_of(running: list[Running]) -> list[int]:
    return [one.row for one in running]


@runs_kernels
def test_steps_of_requests_of_all_kinds() -> None:
    """Tokens are brought once; later steps are drawn from what the device has seen. Read one step late, as an engine does."""
    sampler, running = DeviceSampler(8, VOCAB, DEVICE), some()
    last: tuple[device_sampler.Pending, list[int]] | None = None
    for step in range(4):
        order = running if step % 2 else running[::-1]
        logits = scores(len(order), step)
        expected = truth([one.sample() for one in order], logits)
        pending = launch(sampler, order, logits, brings_tokens=step == 0)
        if last is not None:
            assert list(last[0].result()[0]) == last[1]
        last = pending, expected
        for one, token in zip(order, expected, strict=True):
            one.output.append(token)
        assert sampler.last_tokens[rows_of(order)].tolist() == expected
    assert last is not None and list(last[0].result()[0]) == last[1]
    assert sampler.state_bytes == 4 * VOCAB * 4  # three requests have penalties


@runs_kernels
def test_masks_change_from_step_to_step() -> None:
    """Of a greedy row, one with penalties and one with bans; the others draw what they would draw without them."""
    sampler, running = DeviceSampler(8, VOCAB, DEVICE), some()
    for step in range(3):
        logits = scores(len(running), step)
        free = truth([one.sample() for one in running], logits)
        for place, one in enumerate((running[0], running[2], running[4])):
            allowed = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
            allowed[(10 + 7 * step + place) % VOCAB :: 11] = 1
            one.mask = np.packbits(allowed, bitorder="little").tobytes() if step != 1 or place else None
        samples = [one.sample() for one in running]
        expected = truth(samples, logits)
        assert list(launch(sampler, running, logits, brings_tokens=step == 0).result()[0]) == expected
        for one, token, other in zip(running, expected, free, strict=True):
            one.output.append(token)
            if one.mask is None:
                assert token == other
            else:
                assert one.mask[token >> 3] >> (token & 7) & 1
            one.mask = None


@runs_kernels
def test_logprobs_of_those_that_want_them() -> None:
    sampler, running = DeviceSampler(8, VOCAB, DEVICE), some()
    running[0] = dataclasses.replace(running[0], params=params(temperature=0, logprobs=-1))
    logits = scores(len(running), 5)
    tokens, found = launch(sampler, running, logits).result()
    assert [report is not None for report in found] == [True, False, False, False, False, False, True, True]
    for place, count in ((0, VOCAB), (6, 3), (7, 0)):
        report, token = found[place], tokens[place]
        assert isinstance(report, TokenLogprobs) and token is not None and report.token == token
        value, rank, ids, tops = token_logprobs(logits[place : place + 1], torch.tensor([token]), count)
        assert report.rank == rank.item()
        if count < VOCAB:  # among thousands, one bit of the sum's logarithm may make two neighbours equal
            assert list(report.top_tokens) == ids[0].tolist()
        assert len(set(report.top_tokens)) == count
        assert [report.logprob, *report.top_logprobs] == pytest.approx([value.item(), *tops[0].tolist()], abs=2e-6)


@runs_kernels
def test_greedy_steps_upload_their_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DeviceSampler(8, VOCAB, DEVICE)
    running = [Running(number, row, params(temperature=0)) for number, row in enumerate((6, 1, 2))]
    uploads: list[int] = []
    upload = DeviceSampler._to_device

    def counted(self: DeviceSampler, words: device_sampler.Words) -> Tensor:
        uploads.append(words.size)
        return upload(self, words)

    monkeypatch.setattr(DeviceSampler, "_to_device", counted)
    for step in range(3):
        logits = scores(3, step)
        assert list(launch(sampler, running, logits).result()[0]) == logits.argmax(dim=1).tolist()
    assert uploads == [3]
    running[0].row = 5
    launch(sampler, running, scores(3, 9)).result()
    assert uploads == [3, 3]


@runs_kernels
@pytest.mark.parametrize("kinds", [(0, 1, 4, 7), (0, 1), (0,)], ids=["mixed", "drawn", "greedy"])
def test_decodes_as_columns(kinds: tuple[int, ...]) -> None:
    """The same members step after step, others in between, and then again: each drawn as its samples would be."""
    sampler, running = DeviceSampler(8, VOCAB, DEVICE), [dataclasses.replace(some()[kind], banned=()) for kind in kinds]
    members = tuple(Member(one.id, one.row, (), 0, 0, one.params, one.seed, 3, len(one.prompt)) for one in running)
    for step in range(6):
        if step == 3:
            launch(sampler, some()[2:4], scores(2, 99)).result()
        number = 1 if step == 4 else len(running)
        logits = scores(number, step)
        positions = np.array([len(one.prompt) + len(one.output) - 1 for one in running[:number]], np.int32)
        decodes = Decodes(members[:number] if step == 4 else members, positions, positions, ())
        assert [item.num_output for item in decodes.samples()] == [len(one.output) for one in running[:number]]
        expected = truth(list(decodes.samples()), logits)
        tokens, found = sampler.launch_decodes(decodes, logits.to(DEVICE)).result()
        assert list(tokens) == expected
        assert [report is not None for report in found] == [one.params.logprobs is not None for one in running[:number]]
        for one, token in zip(running, expected, strict=False):
            one.output.append(token)


@runs_kernels
def test_a_bad_row_fails_alone() -> None:
    sampler, running = DeviceSampler(8, VOCAB, DEVICE), some()
    logits = scores(len(running), 2)
    expected: list[int | None] = list(truth([one.sample() for one in running], logits))
    for place, value in ((0, torch.nan), (2, torch.inf), (6, torch.nan)):
        logits[place, 3], expected[place] = value, None
    tokens, found = launch(sampler, running, logits).result()
    assert list(tokens) == expected
    assert found[6] is None and found[7] is not None
    assert sampler.last_tokens[rows_of(running)].tolist() == [token or 0 for token in expected]


@runs_kernels
def test_rows_change_hands_and_requests_come_back() -> None:
    """A row's next request has the tokens of its own; one whose draw was dropped brings them again."""
    sampler = DeviceSampler(3, VOCAB, DEVICE)
    heavy = params(temperature=0, frequency_penalty=2.0, repetition_penalty=3.0)
    first = Running(1, 0, heavy, prompt=(3, 3, 5))
    second = Running(2, 0, heavy, prompt=())
    others = [Running(number, number - 2, params(temperature=0)) for number in (3, 4)]

    def step(one: Running, number: int, brings: bool, keeps: bool = True) -> None:
        logits = scores(3, 0)  # the same scores, so that penalties decide
        expected = truth([item.sample() for item in (one, *others)], logits)
        assert list(launch(sampler, [one, *others], logits, brings).result()[0]) == expected, number
        if keeps:
            one.output.append(expected[0])

    for number in range(3):
        step(first, number, brings=number == 0)
    step(first, 3, brings=False, keeps=False)  # drawn, counted, and dropped
    step(first, 4, brings=True)
    step(first, 5, brings=False)
    step(second, 6, brings=True)
    step(second, 7, brings=False)
    step(first, 8, brings=True)
    light = Running(5, 0, params(temperature=0))
    step(light, 9, brings=False)
    step(dataclasses.replace(second, output=list(second.output)), 10, brings=True)
    assert sampler.state_bytes == 3 * VOCAB * 4
    with pytest.raises(AssertionError, match="request 1 comes back without its output"):
        step(first, 11, brings=False)


@runs_kernels
def test_many_requests_with_penalties_grow_the_state() -> None:
    sampler = DeviceSampler(7, VOCAB, DEVICE)
    running = [Running(row, row, params(temperature=0, frequency_penalty=1.5)) for row in range(7)]
    for number in (2, 5, 7):
        part = running[:number]
        logits = scores(number, 1)
        expected = truth([one.sample() for one in part], logits)
        assert list(launch(sampler, part, logits, brings_tokens=True).result()[0]) == expected
        for one, token in zip(part, expected, strict=True):
            one.output.append(token)
    assert sampler.state_bytes == 7 * VOCAB * 4


@runs_kernels
def test_nothing_to_draw() -> None:
    assert DeviceSampler(2, VOCAB, DEVICE).launch((), torch.empty(0, VOCAB, device=DEVICE), ()).result() == ((), ())


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
