"""A real `lamina serve` process on a free port, and what tests ask it."""

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0


@dataclass(eq=False)
class Served:
    """A running server. url  without /v1.   key  sent with each request, if any."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    key: str | None = None
    clients: list[httpx.Client] = field(default_factory=list)

    @cached_property
    def http(self) -> httpx.Client:
        """A client that knows the address and the key."""
        return self.new_client()

    def new_client(self, **settings: object) -> httpx.Client:
        """Another one."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        client = httpx.Client(base_url=self.url, headers=headers, trust_env=False, **{"timeout": 60.0} | settings)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    @cached_property
    def openai(self) -> "openai.OpenAI":
        """OpenAI's own client."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=60.0)

    def post(self, path: str, body: object) -> httpx.Response:
        """POST of a JSON body."""
        return self.http.post(path, json=body)

    def stderr(self) -> str:
        """What it has written until now."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def engine_pid(self) -> int:
        """The engine's process. Waits for one."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for child in children_of(self.process.pid):
                if b"lamina.engine.process" in _command_line(child):
                    return child
            time.sleep(0.02)
        raise AssertionError("there is no engine's process")

    def wait_ready(self, status: int = 200, seconds: float = 30.0) -> None:
        """Waits until /ready has this status."""
        until = time.monotonic() + seconds
        while self.http.get("/ready").status_code != status:
            assert time.monotonic() < until, self.stderr()[-2000:]
            time.sleep(0.05)

    def idle_pages(self, seconds: float = 10.0) -> dict[str, int]:
        """Pages by state once nothing runs: waits until none is held. Asks /v1/cache."""
        until = time.monotonic() + seconds
        while True:
            found = self.http.get("/v1/cache").json()
            pages: dict[str, int] = found["pages"]
            if pages["held"] == 0 or time.monotonic() > until:
                return pages
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = 20.0) -> int:
        """Ends it; the exit code."""
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def start(
    directory: Path | None, *flags: str, key: str | None = None, environment: dict[str, str] | None = None,
    seconds: float = _START_S, program: Sequence[str] = ("-m", "lamina", "serve"),
) -> Served:  # fmt: skip
    """Starts a server on a free port and waits until it is ready."""
    descriptor, name = tempfile.mkstemp(prefix="lamina-serve-", suffix=".log")
    command = [sys.executable, *program, *([str(directory)] if directory else []), "--port", "0", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with os.fdopen(descriptor, "wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    log = Path(name)
    atexit.register(log.unlink, missing_ok=True)
    until = time.monotonic() + seconds
    while (found := re.search(r"^ready: (http://\S+)$", log.read_text(errors="replace"), re.MULTILINE)) is None:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.02)
    return Served(process, log, found[1], key)


def children_of(pid: int) -> Iterator[int]:
    """Processes whose parent it is."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                yield int(entry.name)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def events_of(text: str) -> list[str]:
    """The data of each server-sent event in a whole stream."""
    return [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
