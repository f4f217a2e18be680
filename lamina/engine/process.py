"""The engine's process: `python -m lamina.engine.process ADDRESS`, started by the server and told everything over a socket.

It loads what `Start` names, says `Ready`, and then goes round: take the commands that are there, make one step, send its news
(steps far below a millisecond are made and told several at a time). Texts never come here, only token ids; wire.py has the
messages.

What needs torch is imported only once the server has been heard, as that takes longer than everything else here.
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from lamina.base.config import EngineConfig
from lamina.base.errors import CapacityError, ConfigError, LaminaError, WeightError
from lamina.base.log import event, get_logger
from lamina.base.peers import PeerConfig
from lamina.engine.locate import locate
from lamina.engine.process_guard import Guard
from lamina.engine.process_link import Link
from lamina.engine.wire import Fatal, Progress, Start

if TYPE_CHECKING:
    from lamina.engine.process_loop import Loop, MakeEngine

_LOG = get_logger(__name__)
_FIRST_COMMAND_S = 60.0
_PROGRESS_S = 0.05


def main(arguments: Sequence[str] | None = None, make_engine: "MakeEngine | None" = None) -> int:
    """Serves one server until it says Shutdown, or has gone; gives the exit code. make_engine  None: loads a checkpoint."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or not given[0].startswith("ipc://"):
        print("usage: python -m lamina.engine.process ipc://PATH (lamina serve does this)", file=sys.stderr)
        return 2
    link = Link(given[0])
    guard = Guard(link.server_pid, link.wake, link.forget_folder)
    try:
        return _run(link, guard, make_engine)
    finally:
        link.close()


def _run(link: Link, guard: Guard, make_engine: "MakeEngine | None") -> int:
    link.send(Progress("starting", 0, 1))
    start = _wait_for_start(link)
    if start is None:
        event(_LOG, "no_start", logging.ERROR, seconds=_FIRST_COMMAND_S)
        link.forget_folder()
        return 1
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")  # see grammar_quiet.py
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("lamina").setLevel(start.log_level)
    guard.bind_to_parent()
    try:
        loop = _make_loop(start, link, guard, make_engine)
    except Exception as error:
        link.send(_fatal(error))
        if not isinstance(error, LaminaError):
            _LOG.exception("loading failed")
        return 1
    guard.is_serving = True
    gc.collect()
    gc.freeze()  # what is here now stays: a look at all of it would be a pause in the midst of answers
    link.send(loop.ready)
    try:
        return loop.run()
    except Exception as error:  # outside of a step: the books cannot be trusted
        _LOG.exception("the loop failed")
        link.send(_fatal(error))
        return 1


def _make_loop(start: Start, link: Link, guard: Guard, make_engine: "MakeEngine | None") -> "Loop":
    """Loads the engine."""
    begin = time.monotonic()
    config = EngineConfig(**start.config)  # type: ignore[arg-type]
    peers = PeerConfig(**start.peers)  # type: ignore[arg-type]
    locate(config.model)  # what is not there is told at once
    module = import_module("lamina.engine.process_loop")
    make = module.load_engine if make_engine is None else make_engine
    engine = make(config, _teller(link, "weights"), _teller(link, "kernels"))
    loop: Loop = module.Loop(engine, link, guard, time.monotonic() - begin, peers)
    return loop


def _wait_for_start(link: Link) -> Start | None:
    """The first message; None if none comes, or another."""
    ends = time.monotonic() + _FIRST_COMMAND_S
    while time.monotonic() < ends:
        for command in link.commands(1):
            return command if isinstance(command, Start) else None
        link.wait(1.0)
    return None


def _teller(link: Link, what: str) -> Callable[[int, int], None]:
    """Sends progress, not too often, and always the end."""
    last = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= _PROGRESS_S:
            last = now
            link.send(Progress(what, done, total))

    return tell


def _fatal(error: Exception) -> Fatal:
    """Why loading failed, as the server raises it again."""
    if isinstance(error, ConfigError):
        value = error.value if isinstance(error.value, int | float | str | bool | None) else str(error.value)
        return Fatal(str(error), "config", error.field, value, error.allowed)
    if isinstance(error, CapacityError):
        return Fatal(str(error), "capacity")
    if isinstance(error, WeightError):
        return Fatal(str(error), "weights")
    return Fatal(" ".join(f"{type(error).__name__}: {error}".split()))


def leave(code: int) -> NoReturn:
    """Ends the process at once: all has been sent, and taking apart what torch has made takes longer than ending it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
