"""The engine's process from the other end of its socket: every message, bad ones included; and its desk, looked into."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from lamina.base.config import EngineConfig
from lamina.engine.engine import Engine
from lamina.engine.process_desk import Desk
from lamina.engine.process_facts import Tally, hit_granularity
from lamina.engine.wire import (
    CacheChange,
    CacheQuery,
    CacheState,
    Cancel,
    Command,
    Fatal,
    Finish,
    Grammar,
    Output,
    Outputs,
    Progress,
    Ready,
    Refusal,
    Report,
    Sampling,
    Shutdown,
    Start,
    Stats,
    Submit,
)  # fmt: skip
from lamina.memory.kinds import EntryFormat, Field, Log, Snapshot
from lamina.memory.layout import make_layout
from tests.conftest import load_helper

FAKE = Path(__file__).parent / "fake_engine.py"
POISON = 7
ENVIRONMENT = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}


def submit(id: str, prompt: list[int], sampling: Sampling | None = None, **options: object) -> Submit:
    return Submit(id, np.array(prompt, "<i4").tobytes(), sampling or Sampling(), **options)  # type: ignore[arg-type]


def ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(30, 900) for _ in range(length)]


class Wire:
    """The server's end, byte by byte."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address := f"ipc://{folder}/engine-{os.getpid()}")
        self.process = subprocess.Popen([*command, address], stderr=subprocess.DEVNULL, env=ENVIRONMENT)
        self.decoder = msgspec.msgpack.Decoder(Report)

    def send(self, *commands: Command | bytes) -> None:
        for command in commands:
            self.socket.send(command if isinstance(command, bytes) else msgspec.msgpack.encode(command))

    def receive(self, is_it: Callable[[Report], bool], seconds: float = 15) -> list[Report]:
        """All that comes up to the first report that is it."""
        found: list[Report] = []
        end = time.monotonic() + seconds
        while not found or not is_it(found[-1]):
            assert self.socket.poll(max(0, 1000 * (end - time.monotonic()))), f"nothing came but {found[-3:]}"
            found.append(self.decoder.decode(self.socket.recv()))
        return found

    def outputs(self, *wanted: str) -> list[Output]:
        """Outputs until each of these requests has had one that ends it."""
        found: list[Output] = []
        left = set(wanted)
        while left:
            (report,) = self.receive(lambda report: isinstance(report, Outputs))[-1:]
            assert isinstance(report, Outputs)
            found += report.items
            left -= {output.id for output in report.items if output.finish is not None}
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def tiny(tiny_of: Callable[[str, str], Path]) -> Path:
    return tiny_of("flash", "official")


def start_of(tiny: Path, **settings: object) -> Start:
    config = EngineConfig(str(tiny), cache_bytes="16MiB", max_requests=4, **settings)  # type: ignore[arg-type]
    return Start(asdict(config))


def open_wire(tiny: Path, folder: Path, **settings: object) -> Wire:
    wire = Wire(folder, sys.executable, str(FAKE), "--poison", str(POISON))
    first = wire.receive(lambda report: isinstance(report, Progress))
    assert first == [Progress("starting", 0, 1)]
    wire.send(start_of(tiny, **settings))
    return wire


@pytest.fixture(scope="module")
def wire(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    found = open_wire(tiny, tmp_path_factory.mktemp("wire"))
    try:
        ready = found.receive(lambda report: isinstance(report, Ready))[-1]
        assert isinstance(ready, Ready) and ready.pid == found.process.pid
        yield found
    finally:
        found.close()


# Messages ------------------------------------------------------------------------------------------------------------------


def test_what_is_no_command_is_dropped(wire: Wire, tiny: Path) -> None:
    good = msgspec.msgpack.encode(submit("x", [40]))
    wire.send(b"", b"\x00", b"\xff" * 1000, good[:-3], msgspec.msgpack.encode({"type": "Nothing"}), msgspec.msgpack.encode([1]))
    wire.send(msgspec.msgpack.encode({"type": "Submit", "id": 5, "prompt": b"", "sampling": {}}))
    wire.send(msgspec.msgpack.encode({"type": "Submit", "id": "y", "prompt": b"1234", "sampling": {"n": "one"}}))
    rng = random.Random(1)
    for _ in range(200):
        broken = bytearray(good)
        broken[rng.randrange(len(good))] = rng.randrange(256)
        wire.send(bytes(broken[: rng.randrange(1, len(good))]))
    wire.send(start_of(tiny), Cancel("nobody"), Finish("nobody", -1), submit("fine", [40], Sampling(max_tokens=3)))
    last = wire.outputs("fine")[-1]
    assert (last.finish, last.usage and last.usage.completion_tokens) == ("length", 3)


def test_every_output_of_a_step_is_in_one_message(wire: Wire) -> None:
    names = {f"p{i}" for i in range(4)}
    wire.send(*(submit(name, [40], Sampling(max_tokens=100_000)) for name in names))
    wire.receive(lambda report: isinstance(report, Outputs) and {output.id for output in report.items} == names)
    wire.send(*(Cancel(name) for name in names))
    wire.outputs(*names)


def test_counters_follow_a_request_of_a_moment(wire: Wire) -> None:
    """One that begins and ends between two of the regular counters is counted soon, not with the next of these."""
    delays = []
    for index in range(5):
        before = wire.receive(lambda report: isinstance(report, Stats))[-1]
        assert isinstance(before, Stats)
        wire.send(submit(f"moment{index}", [40], Sampling(max_tokens=2)))
        assert wire.outputs(f"moment{index}")[-1].finish == "length"
        ended, count = time.monotonic(), sum(before.finished.values())
        wire.receive(lambda report, count=count: isinstance(report, Stats) and sum(report.finished.values()) > count)
        delays.append(time.monotonic() - ended)
    assert sorted(delays)[2] < 0.15  # the regular ones are 0.25 s apart


def test_an_id_that_lives_is_refused(wire: Wire) -> None:
    wire.send(submit("twice", [40], Sampling(max_tokens=100_000)), submit("twice", [40]))
    refused = wire.receive(lambda report: isinstance(report, Refusal))[-1]
    assert isinstance(refused, Refusal) and (refused.id, refused.kind, refused.field) == ("twice", "config", "id")
    wire.send(Cancel("twice"))
    assert wire.outputs("twice")[-1].finish == "abort"
    wire.send(submit("twice", [40], Sampling(max_tokens=1)))
    assert wire.outputs("twice")[-1].finish == "length"
    wire.send(submit("odd", [])), wire.send(Submit("odd", b"12345", Sampling()))
    for _ in range(2):
        refused = wire.receive(lambda report: isinstance(report, Refusal))[-1]
        assert isinstance(refused, Refusal) and refused.field == "prompt"


def test_prefixes_are_listed_pinned_and_dropped(wire: Wire) -> None:
    def ask(command: CacheQuery | CacheChange) -> CacheState | Refusal:
        wire.send(command)
        (found,) = wire.receive(lambda report: isinstance(report, CacheState | Refusal) and report.id == command.id)[-1:]
        assert isinstance(found, CacheState | Refusal)
        return found

    assert isinstance(ask(CacheChange("c0", "drop")), CacheState)
    prompt = ids(600, 1)
    wire.send(submit("kept", prompt, Sampling(max_tokens=2), owner="me"))
    wire.outputs("kept")
    state = ask(CacheQuery("c1"))
    assert isinstance(state, CacheState) and state.num_prefixes == len(state.prefixes) >= 1
    row = max(state.prefixes, key=lambda row: row.tokens)
    assert row.tokens == 601 and row.owner == "me" and not row.is_pinned and state.held_pages == 0
    assert sum(count for _, count in state.page_states) == state.free_pages + state.cached_pages
    pinned = ask(CacheChange("c2", "pin", row.key))
    assert isinstance(pinned, CacheState) and pinned.pinned_pages > 0 and any(row.is_pinned for row in pinned.prefixes)
    bad = {"key": (CacheChange("c3", "drop", row.key), CacheChange("c4", "pin", "zz")), "action": (CacheChange("c5", "burn"),)}
    for field, refused in ((field, ask(command)) for field, commands in bad.items() for command in commands):
        assert isinstance(refused, Refusal) and (refused.kind, refused.field) == ("config", field)
    assert isinstance(ask(CacheChange("c6", "unpin", row.key)), CacheState)
    dropped = ask(CacheChange("c7", "drop"))
    assert isinstance(dropped, CacheState) and (dropped.cached_pages, dropped.pinned_pages, dropped.prefixes) == (0, 0, ())
    assert isinstance(listed := ask(CacheQuery("c8", -5)), CacheState) and listed.prefixes == ()


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
def test_grammars(wire: Wire) -> None:
    digits = Grammar("regex", "[0-9]{3}")
    wire.send(submit("g", [40], Sampling(max_tokens=20, n=2), grammar=digits))
    (first,) = wire.receive(lambda report: isinstance(report, Outputs | Refusal))[-1:]
    assert isinstance(first, Outputs), first
    wire.send(submit("bad", [40], grammar=Grammar("json_schema", '{"type": 5}')), submit("worse", [40], grammar=Grammar("?", "")))
    refused = {}
    while len(refused) < 2:
        (report,) = wire.receive(lambda report: isinstance(report, Refusal))[-1:]
        assert isinstance(report, Refusal)
        refused[report.id] = (report.kind, bool(report.field))
    assert refused == {"bad": ("config", True), "worse": ("config", True)}


# Faults --------------------------------------------------------------------------------------------------------------------


def test_a_step_that_breaks_off_ends_what_ran_and_nothing_else(wire: Wire) -> None:
    """Counters go on, though the engine has new books; three such steps are too many only without one that works between them."""
    wire.send(*(submit(f"w{i}", ids(20, i), Sampling(max_tokens=20)) for i in range(3)), submit("bad", [POISON]))
    wire.send(*(submit(f"v{i}", ids(20, i), Sampling(max_tokens=20)) for i in range(4)))
    names = [*(f"w{i}" for i in range(3)), *(f"v{i}" for i in range(4)), "bad"]
    ends = {output.id: output.finish for output in wire.outputs(*names) if output.finish is not None and output.id in names}
    assert ends["bad"] == "error" and set(ends.values()) == {"error", "length"}
    assert sum(end == "error" for end in ends.values()) <= 4, "more than can run at once"
    stats = wire.receive(lambda report: isinstance(report, Stats) and not report.running)[-1]
    assert isinstance(stats, Stats) and stats.held_pages == 0
    for round in range(4):
        wire.send(submit(f"bad{round}", [POISON]))
        wire.outputs(f"bad{round}")
        wire.send(submit(f"good{round}", [40], Sampling(max_tokens=2)))
        assert wire.outputs(f"good{round}")[-1].finish == "length"


def test_sigint_is_the_servers_and_sigterm_ends_after_a_step(wire: Wire) -> None:
    """The last one: afterwards the process is gone."""
    wire.process.send_signal(signal.SIGINT)
    wire.send(submit("i", [40], Sampling(max_tokens=2)))
    assert wire.outputs("i")[-1].finish == "length"
    wire.send(submit("j", [40], Sampling(max_tokens=100_000)))
    wire.receive(lambda report: isinstance(report, Outputs))
    wire.process.terminate()
    assert wire.outputs("j")[-1].finish == "abort" and wire.process.wait(20) == 0


def test_an_engine_that_only_fails_gives_up_and_one_that_is_told_ends(tiny: Path, tmp_path: Path) -> None:
    """Four processes: steps that only fail; SIGTERM while loading; Shutdown with work; a first message that is no Start."""
    wires = []
    try:
        for name in ("failing", "sigterm", "shutdown", "late"):
            folder = tmp_path / name
            folder.mkdir()
            is_fake = name in ("failing", "shutdown")
            command = [str(FAKE), "--poison", str(POISON)] if is_fake else ["-m", "lamina.engine.process"]
            wires.append(Wire(folder, sys.executable, *command))
        failing, sigterm, shutdown, late = wires
        late.send(Shutdown())
        for wire in (failing, sigterm, shutdown):
            wire.send(start_of(tiny))
        sigterm.receive(lambda report: isinstance(report, Progress))
        sigterm.process.terminate()
        for wire in (failing, shutdown):
            wire.receive(lambda report: isinstance(report, Ready), 60)
        for number in range(3):
            failing.send(submit(f"b{number}", [POISON]))
            failing.outputs(f"b{number}")
        fatal = failing.receive(lambda report: isinstance(report, Fatal))[-1]
        assert isinstance(fatal, Fatal) and "3 steps failed" in fatal.message
        shutdown.send(submit("long", [40], Sampling(max_tokens=100_000)), submit("wait", [40], Sampling(max_tokens=10, n=3)))
        shutdown.send(Shutdown())
        assert {output.finish for output in shutdown.outputs("long", "wait")} >= {"abort"}
        assert [wire.process.wait(20) for wire in wires] == [1, 128 + signal.SIGTERM, 0, 1]
    finally:
        for wire in wires:
            wire.close()


@pytest.mark.parametrize("arguments", [[], ["tcp://127.0.0.1:1"], ["ipc:///a", "b"]])
def test_an_address_is_needed(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lamina.engine.process", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=ENVIRONMENT)
    assert done.returncode == 2 and "usage" in done.stderr and done.stdout == ""


# The desk ------------------------------------------------------------------------------------------------------------------


class Bench:
    """An engine over an instant model and its desk, in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tally = Tally(engine)
        self.desk = Desk(engine, self.tally, lambda: None)

    def run(self) -> list[Output]:
        found = self.desk.take()
        while self.desk.has_requests:
            for refused in self.desk.add_compiled():
                raise AssertionError(refused)
            self.desk.expire(time.monotonic())
            if self.engine.has_work:
                self.desk.step()
            found += self.desk.take()
        return found

    def is_empty(self) -> bool:
        desk, engine = self.desk, self.engine
        books = (desk._live, desk._owners, desk._times, desk._unstarted, desk._untold, engine._requests, engine.groups)
        return not any(books) and not engine.news and not desk.num_compiling()


@pytest.fixture(scope="module")
def bench(tiny: Path) -> Bench:
    fake = load_helper("engine/fake_engine.py")
    config = EngineConfig(str(tiny), cache_bytes="16MiB", max_requests=4)
    return Bench(fake.make_engine(config, lambda done, total: None, lambda done, total: None))


def test_nothing_is_kept_of_requests_that_have_ended(bench: Bench) -> None:
    rng = random.Random(3)
    for number in range(300):
        sampling = Sampling(n=rng.choice((1, 1, 3)), max_tokens=rng.randrange(1, 9))
        ends = rng.choice((None, None, None, 0.0, 0.001, 100.0))
        assert bench.desk.submit(submit(f"r{number}", ids(rng.randrange(1, 50), number), sampling, deadline_s=ends)) is None
        if rng.random() < 0.3:
            bench.desk.step()
        if rng.random() < 0.2:
            bench.desk.finish(f"r{number}", 0)
        if rng.random() < 0.1:
            bench.desk.cancel(f"r{number}")
    outputs = bench.run()
    ends_of = [(output.id, output.child) for output in outputs if output.finish is not None]
    assert len(ends_of) == len(set(ends_of)) == sum(bench.tally.finished.values())
    assert set(bench.tally.finished) == {"length", "stop", "abort", "deadline"}
    assert bench.is_empty() and bench.desk.next_deadline < float("inf")
    bench.desk.expire(time.monotonic() + 1000)
    assert bench.desk.next_deadline == float("inf")


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_request_whose_grammar_is_compiled_can_end(bench: Bench, how: str) -> None:
    pytest.importorskip("xgrammar")
    grammar = Grammar("json_schema", json.dumps({"type": "object", "properties": {how: {"type": "string"}}}))
    asked = submit("g", [40, 41], Sampling(n=2), grammar=grammar, deadline_s=5.0)
    assert bench.desk.submit(asked) is None and bench.desk.num_compiling() == 1 and not bench.engine.has_work
    bench.desk.finish("g", 0)  # there is nothing to finish yet
    if how == "cancel":
        bench.desk.cancel("g")
    else:
        bench.desk.expire(time.monotonic() + 10)
    outputs, finish = bench.desk.take(), "abort" if how == "cancel" else "deadline"
    assert [(output.child, output.finish) for output in outputs] == [(0, finish), (1, finish)]
    assert all(output.usage is not None and output.usage.prompt_tokens == 2 for output in outputs)
    assert bench.desk.add_compiled() == [] and bench.is_empty()
    assert bench.desk.submit(submit("g", [40])) is None
    bench.run()


def test_where_a_hit_can_end_is_said_in_words() -> None:
    log, state = (
        Log("kv", 0, EntryFormat("kv", (Field("kv", "bf16", (64,)),)), 1),
        Snapshot("state", 1, (Field("s", "fp32", (64,)),)),
    )
    assert hit_granularity(make_layout([log], None, 32)) == "every 32 tokens"
    assert hit_granularity(make_layout([log, state], None, 32)).endswith("nothing between them")
