"""Engines that hand prompts over, each with what its process has around it, driven step by step or in a process of its own."""

import os
import random
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from lamina.base.config import EngineConfig
from lamina.base.peers import PeerConfig
from lamina.engine.engine import Engine
from lamina.engine.moves import Moves
from lamina.engine.process_desk import Desk
from lamina.engine.process_facts import Tally
from lamina.engine.wire import Output, Sampling, Submit


class Side:
    """One engine and its desk. `go` is one round of its process's loop."""

    def __init__(self, engine: Engine, peers: PeerConfig | None = None) -> None:
        self.engine = engine
        self.moves = None if peers is None else Moves(engine, peers, lambda: None)
        self.desk = Desk(engine, Tally(engine), lambda: None, self.moves)
        self.outputs: dict[str, list[Output]] = {}

    def submit(self, id: str, tokens: list[int], max_tokens: int = 6, salt: str = "", **options: object) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.9, seed=7, logprobs=2, ignore_eos=True)
        refused = self.desk.submit(Submit(id, array("i", tokens).tobytes(), sampling, salt, **options))
        assert refused is None, refused
        self.outputs[id] = []

    def go(self) -> bool:
        """Whether it had something to do."""
        refused = self.desk.pump()
        assert not refused, refused
        self.desk.expire(time.monotonic())
        has_moved = self.engine.has_work and self.desk.step()
        for output in self.desk.take():
            self.outputs[output.id].append(output)
        return has_moved

    def is_done(self, *ids: str) -> bool:
        return all(any(output.finish is not None for output in self.outputs[id]) for id in ids)

    def answer(self, id: str) -> tuple[list[int], list[object], str | None]:
        """Tokens, every log-probability to the last bit, and how it ended."""
        found = self.outputs[id]
        rows = [row for output in found for row in output.logprobs or ()]
        return [token for output in found for token in output.tokens], rows, found[-1].finish

    def cached(self, id: str) -> int:
        usage = self.outputs[id][-1].usage
        assert usage is not None
        return usage.cached_tokens

    def is_clean(self) -> bool:
        """Whether nothing is held once all has ended."""
        self.engine.ledger.check()
        arena = self.engine.ledger.arena
        return not self.engine.ledger.leases and arena.held == 0 and not (self.moves is not None and self.moves.is_busy)


def run(sides: Iterable[Side], until: Callable[[], bool], seconds: float = 60.0) -> None:
    """Rounds of all of them, in turn."""
    sides, ends = list(sides), time.monotonic() + seconds
    while not until():
        assert time.monotonic() < ends, "stuck"
        if not any([side.go() for side in sides]):
            time.sleep(0.0005)


class Child:
    """A process of its own that goes round with an engine of this one's, until it is killed.

    make  makes the side in the child and gives what is to be known of it, a line of text.
    """

    def __init__(self, make: Callable[[], tuple[Side, str]], seconds: float = 120.0) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                side, text = make()
                os.write(writer, text.encode() + b"\n")
                ends = time.monotonic() + seconds
                while time.monotonic() < ends:
                    if not side.go():
                        time.sleep(0.0005)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as file:
            self.text = file.readline().strip()
        assert self.text, "the child did not start"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def make_engine(directory: Path, cache_bytes: str = "32MiB", **settings: object) -> Engine:
    return Engine(EngineConfig(model=str(directory), cache_bytes=cache_bytes, **settings), has_text=False)


def prefill(engine: Engine, **settings: object) -> Side:
    return Side(engine, PeerConfig("prefill", **{"listen": "127.0.0.1:0"} | settings))


def decode(engine: Engine, peers: str, **settings: object) -> Side:
    return Side(engine, PeerConfig("decode", peers=peers, **{"handover_tokens": 1, "handover_s": 30.0} | settings))


def random_ids(length: int, seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, vocab) for _ in range(length)]
