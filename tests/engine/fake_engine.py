"""The engine's process with a model that takes no time: `python fake_engine.py [OPTIONS] ADDRESS`.

All but the model is real: socket, loop, scheduler, ledger, and the layout of the checkpoint that is named. Each step draws a
token for each running request, which depends on its place in the answer alone and never ends it.

    --step-ms MS   what a step takes.
    --poison ID    a step that computes this token raises.
    --script FILE  a JSON list of answers, lists of token ids: a request's seed says which one it gets.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lamina.base.config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.process import leave, main
from lamina.runtime.worker import Worker
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.step import Slice, Step, StepResult, TokenLogprobs

FIRST, COUNT, PERIOD = 32, 512, 1 << 16


def token_at(place: int, vocab_size: int) -> int:
    """The token that every answer has at this place, counted from 0."""
    return FIRST + place % PERIOD * 7 % max(1, min(COUNT, vocab_size - 2 * FIRST))


class InstantRunner:
    """Executes steps in no time, or in `step_s` each; one that computes the token `poison` fails. script  answers by seed."""

    overlaps = False

    def __init__(self, vocab_size: int, step_s: float, poison: int | None, script: Sequence[Sequence[int]] = ()) -> None:
        self._step_s, self._poison, self._script = step_s, poison, script
        self._tokens = [token_at(place, vocab_size) for place in range(PERIOD)]

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing is compiled."""

    def execute(self, step: Step) -> StepResult:
        """The tokens that a step is to draw."""
        if self._step_s:
            time.sleep(self._step_s)
        if step.decodes is not None:
            starts = step.decodes.positions.tolist()
            places = [start + 1 - one.num_prompt for one, start in zip(step.decodes.members, starts, strict=True)]
            params = [one.params for one in step.decodes.members]
            prompts: tuple[tuple[TokenLogprobs, ...], ...] = ((),) * len(places)
        else:
            if any(self._poison in part.tokens for part in step.slices):
                raise RuntimeError("poisoned")
            places = [item.num_output for item in step.samples]
            params = [item.params for item in step.samples]
            prompts = tuple(_prompt_rows(part) for part in step.slices)
        if self._script:
            tokens = tuple([self._script[one.seed or 0][place] for place, one in zip(places, params, strict=True)])
        else:
            tokens = tuple([self._tokens[place % PERIOD] for place in places])
        return StepResult(tokens, tuple(map(_row_for, tokens, params)), prompts)


def _row_for(token: int, params: SamplingParams) -> TokenLogprobs | None:
    return None if params.logprobs is None else _row(token, params.logprobs)


def _row(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, tuple(range(token, token + count)), (-0.5,) * count)


def _prompt_rows(part: Slice) -> tuple[TokenLogprobs, ...]:
    return () if part.num_logprobs is None else tuple(_row(token, part.num_logprobs) for token in part.targets)


class InstantWorker(Worker):
    """Knows a checkpoint's layout and limits, and reads no weights."""

    def __init__(
        self, directory: Path, config: EngineConfig, step_s: float = 0.0, poison: int | None = None,
        script: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        super().__init__(directory, config)
        self._step_s, self._poison, self._script = step_s, poison, script

    def load(self, on_tensor: Callable[[int, int], None] | None = None, max_model_len: int | None = None) -> None:
        """Nothing but the runner."""
        self.runner = InstantRunner(self.vocab_size, self._step_s, self._poison, self._script)
        if on_tensor is not None:
            on_tensor(1, 1)

    def bytes_written(self) -> dict[str, int]:
        """Nothing is stored."""
        return {}


def make_engine(
    config: EngineConfig, on_tensor: Callable[[int, int], None], on_warmup: Callable[[int, int], None], step_s: float = 0.0,
    poison: int | None = None, script: Sequence[Sequence[int]] = (),
) -> Engine:  # fmt: skip
    """An engine over an InstantWorker."""
    make_worker = partial(InstantWorker, step_s=step_s, poison=poison, script=script)
    return Engine(config, on_tensor, on_warmup, has_text=False, make_worker=make_worker)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--poison", type=int)
    parser.add_argument("--script", type=Path)
    parser.add_argument("address")
    args = parser.parse_args()
    script = () if args.script is None else json.loads(args.script.read_text())
    leave(main([args.address], partial(make_engine, step_s=args.step_ms / 1000, poison=args.poison, script=script)))
