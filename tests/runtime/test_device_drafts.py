"""Drafts on a GPU's runner with a model of real shapes: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.memory.layout import make_layout
from lamina.memory.ledger import Ledger
from lamina.models.registry import Drafts, Target, blueprint
from lamina.models.tiny import SHAPES, write_tiny
from lamina.ops.machine import Machine, this_machine
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_runner import DeviceRunner, Mode, _likely, drafting_device_model
from lamina.runtime.device_sampler import DeviceSampler
from lamina.schedule.drafting import Drafting, DraftRule
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import LaunchedStep, Step
from lamina.weights.loader import Checkpoint, read_config

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU and not INTERPRETED else "cpu")
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
ROWS, PAGES, LONGEST = 4, 24, 300
SMALL = replace(
    SHAPES["flash"], ratios=(4, 128, 0), hidden=64, heads=4, head_dim=64, q_lora=32, o_groups=2, o_lora=16, expert_width=32,
    experts=2, experts_per_token=1, index_heads=4, index_dim=64, hash_layers=1,
)  # fmt: skip
KINDS = {"lookup": SMALL, "mtp": SMALL, "dspark": replace(SMALL, ratios=(0, 4, 0, 0, 0), taps=(0, 1), stages=3)}
#: minutes each in the interpreter; on a GPU there are more of them
LONG = [] if HAS_GPU and not INTERPRETED else [pytest.mark.long]


class FewRight(Drafting):
    """Guesses of which the first few are right."""

    def __init__(self, rule: DraftRule, answer: Sequence[int], prompt: int) -> None:
        super().__init__(rule)
        self.answer, self.prompt, self.draw = answer, prompt, random.Random(prompt)

    def is_ready(self, tokens: Sequence[int]) -> bool:
        return self.draw.random() < 0.8

    def guesses(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        true = self.answer[len(tokens) - self.prompt :][: min(most, self.rule.most)]
        right = self.draw.randint(0, len(true))
        return tuple(token if place < right else abs(token - 1) for place, token in enumerate(true))


class Serving:
    """A small model, and requests that it answers to their ends."""

    def __init__(self, directory: Path, mode: Mode, drafts: Drafts) -> None:
        plan = blueprint(read_config(directory), "bf16", "bf16", drafts=drafts)
        layout = make_layout(plan.memories, plan.hidden, draft_tokens=drafts.tokens)
        arena = DeviceArena(layout, PAGES, DEVICE)
        arena.bytes.fill_(255)
        machine = this_machine("cuda") if DEVICE.type == "cuda" else Machine("cpu", (0, 0), True)
        with Checkpoint(directory, plan.names) as checkpoint:
            target = Target(DEVICE, machine, torch.float32, "bf16", False, mode == "strict")
            model = plan.load_device(checkpoint, target, lambda spec: arena.store(spec.key, spec.codec))
        drafting = drafting_device_model(model) if drafts.by_model else None
        if drafting is not None:
            drafting.drafter.least_likely = 0.0
        sampler = DeviceSampler(ROWS, plan.vocab_size, DEVICE)
        self.runner = DeviceRunner(model, arena, sampler, ROWS, 64, LONGEST, DEVICE, mode, drafting)
        rule = DraftRule(drafts.tokens, drafts.by_model, 0.0, with_penalties=False) if drafts.tokens else None
        ledger = Ledger(layout, PAGES, adopt_twins=mode == "strict")
        self.scheduler = Scheduler(ledger, 64, ROWS, plan.vocab_size, overlaps=self.runner.overlaps, drafts=rule)

    def run(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] = ()) -> list[list[int]]:
        requests: dict[int, Request] = {}
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=8, temperature=number % 2, seed=number, ignore_eos=True)
            one = requests[number] = Request(number, str(number), tuple(prompt), params, number, 8, frozenset())
            rule = self.scheduler.guesses.rule
            if answers and rule is not None:
                one.drafting = FewRight(rule, answers[number], len(prompt))
            self.scheduler.add(one)
        flying: deque[tuple[Step, LaunchedStep]] = deque()
        while self.scheduler.has_work or flying:
            while len(flying) < 1 + self.runner.overlaps and (step := self.scheduler.plan()) is not None:
                flying.append((step, self.runner.execute(step)))
            step, launched = flying.popleft()
            self.scheduler.apply(step, launched.result(), requests)
            self.scheduler.ledger.check()
        return [one.output for one in requests.values()]


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [draw.choices(range(30, 900), k=length) for length in ((6, 3) if LONG else (121, 3, 130, 254))]


def test_a_draft_ends_where_it_is_unlikely() -> None:
    assert [_likely([0.9, 0.5, 0.9], least) for least in (0.95, 0.5, 0.45, 0.1)] == [0, 1, 2, 3] and _likely([], 0.5) == 0


@runs_kernels
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LONG) for kind in KINDS])
@pytest.mark.parametrize("mode", [True, "strict"])
def test_the_same_answers(kind: str, mode: Mode, tmp_path: Path) -> None:
    """Cold and warm, on a GPU also across the end of a group of 128: tokens are those without drafts."""
    if INTERPRETED and (kind != "lookup" or mode == "strict"):
        pytest.skip("hours in the interpreter: for a GPU")
    write_tiny(tmp_path, KINDS[kind], 5)
    plain = Serving(tmp_path, mode, Drafts())
    answers = plain.run(prompts())
    serving = Serving(tmp_path, mode, Drafts(4, kind != "lookup"))
    scripts = answers if kind == "lookup" else ()
    assert serving.run(prompts(), scripts) == answers
    assert serving.run(prompts(), scripts) == answers
    counts = serving.scheduler.guesses.counts
    assert counts.tokens > 8 and (counts.accepted > 1 or kind != "lookup")


@pytest.mark.long
@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="all tests of this file run")
def test_interpreted(interpreter: Callable[[str, str], None]) -> None:
    """Without a GPU: what of these tests Triton's interpreter can do."""
    interpreter(__file__, "long")
