"""`lamina chat` and `lamina bench serve` as processes, against a real server."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lamina(*words: str, given: str = "", environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command's output and exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.run(
        [sys.executable, "-m", "lamina", *words], cwd=ROOT, env=env, input=given, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


class Pty:
    """A command on a terminal of its own."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lamina", *words], cwd=ROOT, env=env, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str, seconds: float = 40.0) -> str:
        """Reads until `text` is there; what came before it and with it, which is then forgotten."""
        until = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < until, self.text
            if select.select([self._master], [], [], 0.1)[0]:
                self.text += os.read(self._master, 65536).decode("utf-8", "replace")
        found, _, self.text = self.text.partition(text)
        return found + text

    def type(self, text: str) -> None:
        """Keys."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(20)
        os.close(self._master)
        return code


# chat ----------------------------------------------------------------------------------------------------------------


def test_piped_lines_are_messages_and_commands(server: object, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = ["/system Be brief.", "Hello", "/stats", "//no command", "/new", "/think high", "Again", f"/save {saved}", "/quit"]
    done = lamina("chat", f"{server.url}/v1", "--max-tokens", "6", "--think", "off", "--seed", "1", given="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2 and "(thinking" not in done.stdout
    for text in ("answer tokens", "of them cached", "first text after", "memory ", "prefix ", "a new conversation"):
        assert text in done.stderr, text
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be brief." and messages[1]["content"] == "Again"


def test_a_second_turn_finds_the_first_in_the_cache(server: object) -> None:
    long = "A prefix hit is a piece of log plus a checkpoint. " * 8
    arguments = ("chat", server.url, "--max-tokens", "4", "--think", "off", "--temperature", "0")
    done = lamina(*arguments, given=f"{long}\nAnd then?\n/stats\n")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stderr.splitlines() if "of them cached" in line)
    assert int(row.split("│")[2].split()[0].replace(",", "")) > 50, row


def test_all_of_stdin_is_one_message(server: object) -> None:
    done = lamina("chat", server.url, "--one-message", "--max-tokens", "3", "--think", "off", given="/not a command\nline two\n")
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr


def test_thoughts_are_dim_on_a_terminal_and_ctrl_c_stops_an_answer(server: object, tmp_path: Path) -> None:
    chat = Pty("chat", server.url, "--max-tokens", "4000", "--temperature", "0", environment={"XDG_STATE_HOME": str(tmp_path)})
    chat.wait_for("> ")
    chat.type("Hello\n")
    chat.wait_for("\033[2m")
    time.sleep(0.3)
    os.killpg(chat.process.pid, signal.SIGINT)
    chat.wait_for("(stopped)")
    chat.wait_for("> ")
    chat.type("/stats\n")
    chat.wait_for("last answer")
    chat.wait_for("> ")
    while chat.process.poll() is None:  # readline may not listen yet when its prompt is there
        os.killpg(chat.process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert chat.end() == 0
    server.idle_pages()
    assert "Hello" in (tmp_path / "lamina" / "chat_history").read_text()


def test_a_server_of_its_own_is_started_and_stopped(tiny_of: Callable[[str, str], Path]) -> None:
    directory = str(tiny_of("flash", "official"))
    done = lamina("chat", directory, "--max-tokens", "3", "--think", "off", "--cache-bytes", "16MiB", given="Hello\n")
    assert done.returncode == 0, done.stderr
    port = int(done.stderr.partition(" at http://127.0.0.1:")[2].split()[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1).close()


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_errors_are_one_line(command: str, start_server: Callable[..., object], tmp_path: Path) -> None:
    words = ("bench", "serve") if command == "bench" else ("chat",)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = lamina(*words, f"http://127.0.0.1:{unused.getsockname()[1]}", given="x\n")
    assert nobody.returncode == 1 and "no server at http://127.0.0.1" in nobody.stderr
    for wrong in ("ftp://127.0.0.1", "http://"):
        assert "is not valid: a server's address" in lamina(*words, wrong, given="x\n").stderr


def test_keys_and_a_full_server(start_server: Callable[..., object], tmp_path: Path) -> None:
    served = start_server("--max-queue", "1", key="correct-horse", environment={"LAMINA_API_KEY": "correct-horse"})
    refused = lamina("chat", served.url, given="x\n")
    assert refused.returncode == 1 and refused.stderr.startswith("error: 401") and "--api-key-file" in refused.stderr
    key = tmp_path / "key"
    key.write_text("correct-horse\n")
    with served.new_client() as client, client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 20000, "ignore_eos": True, "stream": True}
    ) as busy:  # fmt: skip
        chunks = busy.iter_raw()
        next(chunks)
        full = lamina("chat", served.url, "--api-key-file", str(key), "--max-tokens", "2", given="x\n")
        assert full.returncode == 1 and "error: 429" in full.stderr and "try again in" in full.stderr
        counted = lamina("bench", "serve", served.url, "--api-key-file", str(key), "--num-prompts", "3", "--input-len", "4")
        assert counted.returncode == 1 and "HTTP 429: 3" in counted.stdout
    good = lamina("chat", served.url, "--max-tokens", "2", environment={"LAMINA_API_KEY": "correct-horse"}, given="x\n")
    assert good.returncode == 0, good.stderr


# bench ---------------------------------------------------------------------------------------------------------------


def test_bench_counts_what_it_asked_for(server: object, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = lamina(
        "bench", "serve", server.url, "--num-prompts", "8", "--concurrency", "4", "--input-len", "20", "--output-len", "5",
        "--warmup", "1", "--goodput", "ttft:60s,tpot:10000", "--rate", "50", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"]) == (8, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (160, 40)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["mean_tpot_ms"] > 0 and found["mean_itl_ms"] > 0
    for name in ("Successful requests:", "Request throughput (req/s):", "Mean TTFT (ms):", "P99 TPOT (ms):", "Median ITL (ms):"):
        assert name in done.stdout, name


def test_agents_reuse_what_came_before(server: object) -> None:
    done = lamina(
        "bench", "serve", server.url, "--dataset", "agents", "--num-prompts", "6", "--turns", "3", "--turn-len", "10",
        "--input-len", "200", "--output-len", "4", "--concurrency", "1", "--json", "-", "--extra-body",
        '{"chat_template_kwargs": {"thinking": false}}',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["completed"] == 6 and found["total_output_tokens"] == 24
    assert found["total_cached_tokens"] > 0.5 * found["total_input_tokens"]


def test_people_like_lengths_differ(server: object) -> None:
    done = lamina(
        "bench", "serve", server.url, "--dataset", "sharegpt-like", "--num-prompts", "4", "--input-len", "10", "--output-len",
        "4", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 4


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--goodput", "speed:3"), "goodput='speed:3' is not valid"),
        (("--num-prompts", "0"), "num_prompts=0 is not valid"),
        (("--rate", "0"), "rate=0.0 is not valid"),
        (("--model", "another"), "model='another' is not valid: one of tiny"),
        (("--dataset", "agents", "--endpoint", "completions"), "--endpoint chat"),
    ],
)
def test_bench_names_what_is_wrong(server: object, flags: tuple[str, ...], text: str) -> None:
    done = lamina("bench", "serve", server.url, *flags)
    assert done.returncode == 1 and text in done.stderr and done.stderr.count("\n") == 1, done.stderr
