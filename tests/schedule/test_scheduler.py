"""The scheduler over the real ledger, with results that are made up: what it plans, not what a model says."""

from collections.abc import Callable

import pytest

from lamina.memory.kinds import EntryFormat, Field, Log, Snapshot, Window
from lamina.memory.layout import Layout, make_layout
from lamina.memory.ledger import Ledger
from lamina.schedule.request import Request, RequestState
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import Step, StepResult

ROW = EntryFormat("row", (Field("row", "u8", (128,)),))


def scans() -> Layout:
    """A log and a state that is a function of the whole prefix: no replay can rebuild it."""
    return make_layout(
        [Log("kv", 0, ROW, 1), Snapshot("state", 1, (Field("s", "fp32", (64,)),))], Field("hidden", "fp32", (8,)), 16, 0, 256
    )


def windows() -> Layout:
    """A log beside a window of 40 tokens that is larger than a page."""
    return make_layout([Log("kv", 0, ROW, 1), Window("window", 1, ROW, 40)], Field("hidden", "fp32", (8,)), 16, 0, 1024)


def request(number: int, prompt: range | list[int], max_new: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_new, ignore_eos=True)
    return Request(number, f"r{number}", tuple(prompt), params, 0, max_new, frozenset())


class Drive:
    """Runs a scheduler to its end; every answer is token 7."""

    def __init__(self, layout: Layout, num_pages: int = 400, budget: int = 64, interval: int | None = None) -> None:
        self.ledger = Ledger(layout, num_pages, min_checkpoint_gain=8)
        self.scheduler = Scheduler(self.ledger, budget, 8, 1000, interval)
        self.requests: dict[int, Request] = {}
        self.steps: list[Step] = []

    def run(self, *requests: Request) -> None:
        for one in requests:
            self.requests[one.id] = one
            self.scheduler.add(one)
        while self.scheduler.has_work:
            step = self.scheduler.plan()
            assert step is not None, "work is waiting and nothing is planned"
            self.ledger.check()
            result = StepResult((7,) * len(step.samples), (None,) * len(step.samples), ((),) * len(step.slices))
            self.scheduler.apply(step, result, self.requests)
            self.steps.append(step)
        assert all(one.state is RequestState.FINISHED and one.finish_reason == "length" for one in requests)

    def positions(self) -> list[int]:
        return sorted(checkpoint.position for checkpoint in self.ledger.all_checkpoints())


def test_checkpoints_come_every_so_many_tokens_if_asked() -> None:
    """A prompt of 150 and 30 more tokens, every 48: 48, 96, 144 on the way; the prompt's end; the last computed token."""
    drive = Drive(scans(), interval=48)
    drive.run(request(1, range(150), 31))
    assert drive.positions() == [48, 96, 144, 150, 180]
    assert all(part.stop <= cut or part.start >= cut for step in drive.steps for part in step.slices for cut in (48, 96, 144))


def test_without_an_interval_only_the_ends_are_kept() -> None:
    drive = Drive(scans())
    drive.run(request(1, range(150), 31))
    assert drive.positions() == [150, 180]


def test_a_state_of_the_whole_prefix_is_taken_up_from_the_last_interval() -> None:
    """The second prompt parts at 130; the nearest state is at 96, though the log is there up to 128."""
    drive = Drive(scans(), interval=48)
    drive.run(request(1, range(150)))
    drive.run(request(2, [*range(130), *range(500, 520)]))
    hit = drive.requests[2].first_hit
    assert hit is not None and (hit.position, hit.log_tokens, hit.replayed, hit.differs_at) == (96, 128, False, 130)
    assert "no checkpoint after position 96, though the tokens are known up to 130" in hit.why


@pytest.mark.parametrize("layout", [scans, windows])
def test_slices_say_what_is_stored_already(layout: Callable[[], Layout]) -> None:
    """The second request computes tokens 96 to 128 again without writing their log: its table is whole from the first slice."""
    drive = Drive(layout(), interval=48)
    drive.run(request(1, range(150)))
    drive.steps.clear()
    drive.run(request(2, [*range(130), *range(500, 520)]))
    first = drive.steps[0].slices[0]
    assert (first.start, first.write_from, first.table_start) == (96, 128, 0) and len(first.table) >= 8


def test_long_prompts_in_little_room_for_their_windows() -> None:
    """A large window limits the slices instead of stopping the request: 64 rows a step need two windows at once."""
    layout = windows()
    alone = layout.peak_pages(600 + 20)
    drive = Drive(layout, alone, budget=256)
    drive.run(request(1, range(600), 21))
    assert max(part.stop - part.start for step in drive.steps for part in step.slices) > 1
    several = Drive(layout, 2 * alone + 10, budget=256)
    several.run(*(request(number, range(number, number + 400), 21) for number in range(1, 6)))
