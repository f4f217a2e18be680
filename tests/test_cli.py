"""The command line, in processes of its own as a user starts it; and the parts of it that a process cannot show."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lamina
from lamina.cli import chat, demo, main, make_parser
from lamina.cli.options import add_engine
from lamina.cli.stream import OutputStream, label

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def start(*args: str, **pipes: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "lamina", *args],
        env=ENV,
        text=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **pipes,
    )


def run(*args: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lamina", *args],
        env=ENV,
        text=True,
        encoding="utf-8",
        input=stdin or "",
        capture_output=True,
        timeout=120,
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("cli") / "model"
    done = run("tiny", str(directory), "--shape", "pro", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and re.fullmatch(r"wrote .*model \(pro, seed 3, official format, .* MiB\)\n", done.stderr)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    return str(directory)


# What is printed -----------------------------------------------------------------------------------------------------


def test_json_has_everything_and_nothing_else(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("A line.\nAnother: naïve 日本 🙂\n", encoding="utf-8")
    given = ["--prompt", "Grüße, 世界 🙂", "--prompt-file", str(file), "--prompt-ids", "17, 4,256", "--prompt-file", "-"]
    sampling = ["--max-tokens", "5", "--n", "2", "--seed", "1", "--logprobs", "2", "--ignore-eos"]
    done = run("generate", "--model", model, *given, *sampling, "--json", stdin="from stdin")
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    prompts = whole["prompts"]
    assert [one["prompt"] for one in prompts] == ["Grüße, 世界 🙂", "A line.\nAnother: naïve 日本 🙂\n", None, "from stdin"]
    assert prompts[2]["prompt_token_ids"] == [17, 4, 256]
    for one in prompts:
        assert [output["index"] for output in one["outputs"]] == [0, 1]
        for output in one["outputs"]:
            assert len(output["token_ids"]) == len(output["logprobs"]) == 5 and output["finish_reason"] == "length"
            for token, found in zip(output["token_ids"], output["logprobs"], strict=True):
                assert 2 <= len(found) <= 3 and found[str(token)]["rank"] >= 1
            total = sum(
                found[str(token)]["logprob"] for token, found in zip(output["token_ids"], output["logprobs"], strict=True)
            )
            assert output["cumulative_logprob"] == pytest.approx(total)
    count = sum(len(one["prompt_token_ids"]) for one in prompts)
    assert whole["usage"]["prompt_tokens"] == count and whole["usage"]["completion_tokens"] == 4 * 2 * 5
    assert whole["timings"]["total_s"] > 0 and whole["timings"]["prefill_tokens"] == count
    memory = whole["memory"]
    assert memory["is_equal"] is True
    assert (
        sum(row["predicted_bytes"] for row in memory["rows"])
        == memory["held_bytes"]
        == memory["held_pages"] * memory["page_bytes"]
    )
    names = {row["name"] for row in memory["rows"]}
    assert {"window", "c4", "c128", "index", "hidden", "padding", "checkpoints"} <= names
    assert re.fullmatch(rf"{count} tokens in.* \| 40 out \| prefill .*\n", done.stderr)  # no bars where there is no terminal


def test_streaming_prints_what_printing_at_the_end_does(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--prompt", "One", "--prompt", "Two\nlines")
    same = ("generate", "--model", model, *two, "--max-tokens", "12", "--temperature", "0", "--quiet")
    live = run(*same)
    assert live.returncode == 0 and live.stderr == ""
    assert main([*same, "--no-stream"]) == 0
    assert capsys.readouterr().out == live.stdout
    headings = re.findall(r"^--- prompt (\d) of 2 \(\d+ tokens\): (.*) ---$", live.stdout, re.M)
    assert headings == [("1", '"One"'), ("2", '"Two lines"')]


def test_several_prompts_say_what_each_reused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [option for text in ("Once", "Once", "Twice") for option in ("--prompt", text)]
    for_gpus = ["--no-warmup", "--kernels", "portable"]
    assert main(["generate", "--model", model, *prompts, *for_gpus, "--max-tokens", "2", "--no-stream", "--ignore-eos"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("ignored_on_a_cpu settings='kernels, warmup'") == 1
    first, same, other = (re.sub(r"[(][0-9]+ tokens?[)]", "(N)", line) for line in lines[-4:-1])
    assert first == "prompt 1 (N): 0 tokens reused: nothing was stored yet"
    assert same == "prompt 2 (N): 0 tokens reused: nothing was stored yet (prompt 1 is the same and ran beside it)"
    assert other == "prompt 3 (N): 0 tokens reused: nothing was stored yet"


def test_memory_and_logprobs_after_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["generate", "--model", model, "--prompt", "Hello", "--max-tokens", "3", "--ignore-eos"]
    assert main([*one, "--logprobs", "1", "--memory", "-v"]) == 0
    printed = capsys.readouterr()
    assert len(re.findall(r"^ *-\d+\.\d{4}  #\d+ +\d+  '", printed.out, re.M)) == 3
    check_table(printed.out)
    assert re.search(r"^ready model=model page_bytes=\d+ pages=\d+ ", printed.err, re.M)
    assert main([*one, "--quiet"]) == 0
    assert "page_bytes" not in capsys.readouterr().err


def check_table(text: str) -> None:
    """Predicted and held are equal in every row and add up to the pool in use."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"[│|]", line)[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"[\d,]+", cells[1]) and re.fullmatch(r"[\d,]+", cells[2]):
            rows[cells[0]] = (int(cells[1].replace(",", "")), int(cells[2].replace(",", "")))
    pool = next(name for name in rows if name.startswith("pool in use"))
    total = rows.pop(pool)
    assert set(rows) == {"window", "c4", "c128", "index", "folds", "hidden", "padding", "checkpoints"}
    assert all(predicted == held for predicted, held in rows.values())
    assert sum(held for _, held in rows.values()) == total[0] == total[1]
    assert "predicted = held: yes" in text


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> "subprocess.CompletedProcess[str]":
    """What `lamina demo --keep` did."""
    kept = tmp_path_factory.mktemp("demo") / "kept"
    done = run("demo", "--keep", str(kept))
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {path.name for path in kept.iterdir()}
    return done


def test_demo_shows_what_was_held_and_reused(shown: "subprocess.CompletedProcess[str]") -> None:
    check_table(shown.stdout)
    assert "predicted" not in shown.stderr
    count = re.search(r"prompt 1 of 2 \(([\d,]+) tokens\)", shown.stdout)
    reused = re.search(r"^([\d,]+) of its ([\d,]+) tokens were not computed again", shown.stdout, re.M)
    assert count is not None and reused is not None
    length, cached, of = (int(found.replace(",", "")) for found in (count[1], *reused.groups()))
    assert 1300 <= length <= 1800 and 0 < of - cached < 20 and abs(of - length) < 10


def test_demo_answers_what_the_text_says(shown: "subprocess.CompletedProcess[str]") -> None:
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.findall(r"^What is .*$", shown.stdout, re.M) == [
        f"{question.text} {question.answer}: right" for question in demo.QUESTIONS
    ]


def test_demo_fails_if_a_figure_or_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lamina.cli.demo._STORY_TOKENS", 2)
    monkeypatch.setattr("lamina.cli.demo.document", lambda: "The code of the blue door is 17.")
    predict = lamina.engine.watch.predict
    assert main(["demo"]) == 1
    first = "error: the answer to 'What is the code of the blue door?' is '"
    printed = capsys.readouterr()
    assert printed.err.startswith(first) and printed.err.count("\n") == 1 and "WRONG, the text says 4821" in printed.out
    monkeypatch.setattr("lamina.engine.watch.predict", lambda layout, held: predict(layout, held[:-1]))
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("error: predicted = held: NO; the answer to ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version").stdout == f"lamina {lamina.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    helps = capsys.readouterr().out
    for option in ("--prompt-file", "--temperature", "--cache-bytes SIZE", "(default 1GiB)", "--deterministic", "Examples:"):
        assert option in helps
    assert max(len(line) for line in make_parser().format_help().splitlines()) <= 100


# What goes wrong -----------------------------------------------------------------------------------------------------

ERRORS = [
    (1, ("generate", "--model", "no/such/dir", "--prompt", "x"), "model='no/such/dir' is not valid"),
    (1, ("generate", "--model", "MODEL", "--prompt-file", "missing.txt"), "missing.txt: No such file or directory"),
    (1, ("generate", "--model", "MODEL", "--prompt-ids", "1,two"), "prompt-ids='1,two' is not valid: whole numbers"),
    (
        1,
        ("generate", "--model", "MODEL", "--prompt", "x", "--temperature", "-1"),
        "temperature=-1.0 is not valid: a finite number",
    ),
    (1, ("generate", "--model", "MODEL", "--prompt", "x", "--cache-bytes", "lots"), "cache_bytes='lots' is not valid"),
    (1, ("generate", "--model", "MODEL", "--prompt", "x", "--cache-bytes", "1KiB"), "cache_bytes=1024 holds 0 pages"),
    (1, ("generate", "--model", "MODEL", "--prompt", "fine", "--prompt", ""), "prompt 2='' is not valid: at least one token"),
    (1, ("generate", "--model", "MODEL", "--prompt", "much too long", "--max-model-len", "3"), "at most max_model_len=3"),
    (1, ("generate", "--model", "MODEL", "--prompt-ids", "5,99999"), "prompt 1=99999 is not valid: token ids from 0 to 1023"),
    (1, ("generate",), "at least one of --prompt, --prompt-file and --prompt-ids"),
    (1, ("tiny", "MODEL"), "a new or an empty directory"),
    (1, ("tiny", "new", "--seed", "-1"), "seed=-1 is not valid: 0 or more"),
    (
        2,
        ("generate", "--model", "MODEL", "--prompt", "x", "--max-tokens", "many"),
        "argument --max-tokens: invalid int value: 'many'",
    ),
    (2, ("generate", "--model", "MODEL", "--prompt", "x", "--dtype", "fp7"), "argument --dtype: invalid choice: 'fp7'"),
    (2, ("generate", "--model", "MODEL", "--prom", "x"), "unrecognized arguments: --prom x"),
    (2, ("serve", "--speculative-config={}"), "--speculative-config: give --draft auto, and --draft-tokens if it matters"),
    (2, ("generate", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype: it is --cache-format here"),
    (2, ("fly",), "invalid choice: 'fly'"),
    (2, (), "a command is needed"),
    (1, ("demo", "--keep", "MODEL"), "a new or an empty directory"),
]


def test_a_chat_with_a_directory_hands_every_option_of_the_engine_on() -> None:
    """What `lamina chat DIR` understands, its own server is told: no option may be dropped in between."""
    plain, parser = argparse.ArgumentParser(), argparse.ArgumentParser(add_help=False)
    add_engine(plain)
    chat.add_options(parser)
    names = set(vars(plain.parse_args([]))) - {"no_warmup"}
    assert names == set(parser.parse_args([]).engine_defaults)


def check_error(code: int, error: str, expected: str) -> None:
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert expected in error, (code, error)


@pytest.mark.parametrize(
    ("code", "args", "expected"), ERRORS, ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else ""
)
def test_an_error_is_one_line(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    args: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = main([model if arg == "MODEL" else arg for arg in args])
    except SystemExit as exit_code:
        found = exit_code.code
    printed = capsys.readouterr()
    assert found == code and printed.out == ""
    check_error(code, printed.err, expected)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.long), 12])
def test_a_process_ends_with_that_line_and_code(model: str, number: int) -> None:
    code, args, expected = ERRORS[number]
    done = run(*(model if arg == "MODEL" else arg for arg in args))
    assert done.returncode == code and done.stdout == ""
    check_error(code, done.stderr, expected)


def test_bytes_that_are_no_text(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    assert main(["generate", "--model", model, "--prompt-file", str(file)]) == 1
    check_error(1, capsys.readouterr().err, "a UTF-8 text (unexpected end of data at byte 3)")
    assert main(["generate", "--model", model, "--prompt", "caf\udce9"]) == 1
    check_error(1, capsys.readouterr().err, "unpaired surrogates")


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    process = start("generate", "--model", model, "--prompt", "Hello", "--max-tokens", "2000", "--ignore-eos", "--quiet")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_an_interrupt_is_one_line_and_130(model: str) -> None:
    process = start("generate", "--model", model, "--prompt", "Hello", "--max-tokens", "20000", "--ignore-eos")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.stderr.read() == "error: interrupted\n"
    assert process.wait(60) == 130


# Streams -------------------------------------------------------------------------------------------------------------


def test_one_output_streams_bare() -> None:
    out = io.StringIO()
    stream = OutputStream(out, ["only"])
    stream.feed(0, "a\x1b[2J", False)
    assert out.getvalue() == "a\x1b[2J"  # a pipe gets the text as it is
    stream.feed(0, "b", True)
    assert out.getvalue() == "a\x1b[2Jb\n"


def test_outputs_wait_for_their_turn() -> None:
    out = io.StringIO()
    stream = OutputStream(out, ["A", "B", "C"])
    for number, text, is_last in [(1, "b1 ", False), (2, "c", True), (0, "a1 ", False), (1, "b2\n", True), (0, "a2", True)]:
        stream.feed(number, text, is_last)
    assert out.getvalue() == "--- A ---\na1 a2\n\n--- B ---\nb1 b2\n\n--- C ---\nc\n"


def test_the_first_output_is_live_and_a_terminal_is_safe() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    stream = OutputStream(out, ["A", "B"])
    stream.feed(1, "late", False)
    stream.feed(0, "x\x1b[2J\x9b\t\n", False)
    assert out.getvalue() == "\033[1m--- A ---\033[0m\nx␛[2J�\t\n"


def test_labels() -> None:
    assert label(0, 2, 0, 1, "a\n b", 1) == 'prompt 1 of 2 (1 token): "a b"'
    assert label(1, 2, 2, 3, None, 1504) == "prompt 2 of 2, output 3 of 3 (1,504 tokens)"
    assert label(0, 1, 0, 1, "x" * 60, 9).endswith('xxx..."')
