"""How answers are counted by the programs that measure the small model; nothing is computed."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tools.train_tiny.evaluate import TOGETHER, OutOfTimeError, Progress, Result, Setting, _batches, _done, _say
from tools.train_tiny.exam import Question
from tools.train_tiny.needles import NEEDLES, Needle, haystack, is_answered, read_needles


def test_needles_say_what_they_ask_for() -> None:
    needles = read_needles(NEEDLES)
    assert len({needle.id for needle in needles}) == len({needle.text for needle in needles}) == len(needles) == 60
    for needle in needles:
        assert re.search(rf"(?<!\w){re.escape(needle.answer)}(?!\w)", needle.text, re.IGNORECASE), needle.id
        assert needle.answer.lower() not in f"{needle.question} {needle.completion}".lower(), needle.id
    assert {len(needle.answer) for needle in needles if needle.answer.isdigit()} == {2, 3, 4, 5, 6}
    text = haystack(needles[3], needles, 5, "")
    assert needles[3].text in text and sum(needle.text in text for needle in needles) == 6
    assert needles[3].text in haystack(needles[3], needles, 0, "one\n\ntwo")


def test_a_reply_counts_if_its_first_line_has_the_answer_alone() -> None:
    number = Needle("", "", "", "", "", "", "4821", [])
    assert all(is_answered(number, reply) for reply in (" 4821\nQuestion: 7", "It is 4821.", "\n\nThe code is 4821, he said."))
    assert not any(is_answered(number, reply) for reply in ("48217", "4821 or 77", "no\n4821", "", "4821.5", "-4821"))
    name = replace(number, answer="Halvard Moe", accept=["Halvard"])
    assert (
        is_answered(name, "It was halvard.") and is_answered(name, "Halvard Moe, of 1920") and not is_answered(name, "Halvards")
    )


def test_a_line_that_is_there_is_not_asked_again(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    setting, result = Setting("recall", "train", 2048, 16, "fp8", "fp4", "cuda", "0123"), Result()
    question = Question(np.zeros(3, np.uint16), (1,), "7", (2,), 1.0)
    result.add(question, True)
    result.add(replace(question, depth=0.0), False)
    _say(out, asdict(setting) | asdict(result))
    _say(out, {"other": 1})
    assert (result.asked, result.right, result.share, result.fifths[0], result.fifths[4]) == (2, 1, 0.5, [0, 1], [1, 1])
    assert _done(out) == [setting] and _done(None) == _done(tmp_path / "none") == []
    assert replace(setting, weights="4567") not in _done(out)


def test_a_text_is_read_by_its_first_question() -> None:
    one, other = np.zeros(3, np.uint16), np.ones(3, np.uint16)
    about = [Question(one, (number,), "7", (2,), 0.5) for number in range(TOGETHER + 3)]
    assert [(first, len(part)) for first, part in _batches(about)] == [(True, 1), (False, TOGETHER), (False, 2)]
    assert [(first, len(part)) for first, part in _batches([about[0], replace(about[1], prefix=other)])] == [(False, 2)]


def test_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("recall", 0.0)
    with pytest.raises(OutOfTimeError):
        progress("at token 5")
    later = Progress("recall", float("inf"))
    later.said = -1e9
    later("at token 5")
    assert "recall: at token 5" in capsys.readouterr().err
