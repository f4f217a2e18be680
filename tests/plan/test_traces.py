"""Trace files are checked line by line; made-up tokens are equal exactly where a trace says so; mixes are what they claim."""

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.base.errors import ConfigError
from lamina.plan.traces import MIXES, TokenSource, TraceRequest, make_mix, read_trace, shared_tokens, write_trace

GOOD = {"arrival": 0.5, "prompt_tokens": 10, "output_tokens": 4}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"arrival": 0, "prompt_tokens": 10, "output_tokens": 4, "session": "a", "turn": 0, "prefix": 7, "prefix_tokens": 6},
        "",
        {"arrival": 2.5, "prompt_tokens": 14, "output_tokens": 1, "session": "a", "cache_salt": ""},
        {"arrival": 2.5, "prompt_tokens": 3, "output_tokens": 2, "cache_salt": "x"},
    )
    assert list(read_trace(path)) == [
        TraceRequest(0, 0.0, 10, 4, "a", 0, "7", 6),
        TraceRequest(1, 2.5, 14, 1, "a", None, "7", 6),  # a later turn keeps its session's prefix
        TraceRequest(2, 2.5, 3, 2, cache_salt="x"),
    ]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("nonsense", "line"),
        ("[1, 2]", "line"),
        ("\xff{}", "line"),
        ({**GOOD, "promt": 1}, "field"),
        ({**GOOD, "arrival": None}, "arrival"),
        ({**GOOD, "arrival": "1"}, "arrival"),
        ({**GOOD, "arrival": True}, "arrival"),
        ({**GOOD, "arrival": -1}, "arrival"),
        ({**GOOD, "arrival": 0.25}, "arrival"),  # before the line above
        ('{"arrival": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "line"),
        ({"arrival": 1, "output_tokens": 1}, "prompt_tokens"),
        ({**GOOD, "prompt_tokens": 0}, "prompt_tokens"),
        ({**GOOD, "prompt_tokens": 2.0}, "prompt_tokens"),
        ({**GOOD, "prompt_tokens": False}, "prompt_tokens"),
        ({**GOOD, "prompt_tokens": 2**31 - 4}, "prompt_tokens"),
        ({**GOOD, "output_tokens": 0}, "output_tokens"),
        ({**GOOD, "output_tokens": 2**31}, "output_tokens"),
        ({**GOOD, "turn": 1}, "turn"),
        ({**GOOD, "session": "s", "turn": -1}, "turn"),
        ({**GOOD, "session": "", "turn": 1}, "session"),
        ({**GOOD, "session": 1.5}, "session"),
        ({**GOOD, "prefix": "p"}, "prefix"),
        ({**GOOD, "prefix_tokens": 4}, "prefix"),
        ({**GOOD, "prefix": "p", "prefix_tokens": 11}, "prefix_tokens"),
        ({**GOOD, "cache_salt": 3}, "cache_salt"),
        ({**GOOD, "prompt_tokens": 19, "session": "old", "turn": 3}, "prompt_tokens"),  # it has said 15 + 5 tokens
        ({**GOOD, "prompt_tokens": 20, "session": "old", "turn": 2}, "turn"),
        ({**GOOD, "prompt_tokens": 20, "session": "old", "cache_salt": "x"}, "cache_salt"),
        ({**GOOD, "prompt_tokens": 20, "session": "old", "prefix": "q", "prefix_tokens": 6}, "prefix"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, field: str) -> None:
    first = {
        "arrival": 0.5,
        "prompt_tokens": 15,
        "output_tokens": 5,
        "session": "old",
        "turn": 2,
        "prefix": "p",
        "prefix_tokens": 6,
    }
    found = read_trace(write(tmp_path, first, "", line))
    assert next(found).session == "old"  # lines before the wrong one have been served
    with pytest.raises(ConfigError) as error:
        list(found)
    assert error.value.field == f"t.jsonl line 3: {field}"
    assert "\n" not in str(error.value)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="that can be read"):
            read_trace(path)
    with pytest.raises(ConfigError, match="at least one request"):
        list(read_trace(write(tmp_path, "")))


def test_progress_counts_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, *[GOOD] * 5000)
    size, calls = path.stat().st_size, []
    assert sum(1 for _ in read_trace(path, lambda done, total: calls.append((done, total)))) == 5000
    each = size // 5000  # all lines are equally long
    assert calls == [(4096 * each, size), (size, size)]


# -- tokens


def requests() -> st.SearchStrategy[list[TraceRequest]]:
    """A few requests that may share sessions, prefixes and salts."""

    @st.composite
    def build(draw: st.DrawFn) -> list[TraceRequest]:
        found: list[TraceRequest] = []
        said: dict[tuple[str, str], TraceRequest] = {}
        for number in range(draw(st.integers(2, 5))):
            salt = draw(st.sampled_from(["", "x"]))
            session = draw(st.sampled_from([None, "a", "b"]))
            last = said.get((salt, session)) if session is not None else None
            if last is None:
                prompt = draw(st.integers(1, 12))
                prefix = draw(st.sampled_from([None, "p", "q"]))
                prefix_tokens = draw(st.integers(0, prompt)) if prefix is not None else 0
            else:
                prompt = last.total_tokens + draw(st.integers(0, 4))
                prefix, prefix_tokens = last.prefix, last.prefix_tokens
            if session is not None:
                session = f"{session}{salt}"  # a session has one salt
            made = TraceRequest(number, 0.0, prompt, draw(st.integers(1, 5)), session, None, prefix, prefix_tokens, salt)
            if session is not None:
                said[salt, session[0]] = made
            found.append(made)
        return found

    return build()


@given(requests())
def test_tokens_are_equal_exactly_where_the_trace_says(found: list[TraceRequest]) -> None:
    source = TokenSource()
    ids = [source.ids(one, 0, one.total_tokens).tolist() for one in found]
    for i, one in enumerate(found):
        assert all(0 <= token < 2**31 for token in ids[i])
        middle = one.total_tokens // 2
        assert [*source.ids(one, 0, middle), *source.ids(one, middle, one.total_tokens)] == ids[i]
        for j, other in enumerate(found[:i]):
            common = 0
            while common < min(len(ids[i]), len(ids[j])) and ids[i][common] == ids[j][common]:
                common += 1
            if one.cache_salt == other.cache_salt:
                assert shared_tokens(one, other) == shared_tokens(other, one) == common
            else:
                assert shared_tokens(one, other) == 0  # the salt keeps them apart, whatever the ids


def test_ids_stay_in_range_at_the_far_end() -> None:
    source, one = TokenSource(), TraceRequest(2**30, 0.0, 2**31 - 2, 1)
    ids = source.ids(one, 2**31 - 9, 2**31 - 1)
    assert len(set(ids)) == 8 and min(ids) >= 0


# -- mixes


@pytest.mark.parametrize("name", sorted(MIXES))
def test_a_mix_is_a_valid_trace_that_its_seed_decides(tmp_path: Path, name: str) -> None:
    found = list(make_mix(name, 3, 400))
    assert found == list(make_mix(name, 3, 400)) != list(make_mix(name, 4, 400))
    assert found[:100] == list(make_mix(name, 3, 100))
    assert write_trace(tmp_path / "mix.jsonl", found) == 400
    assert list(read_trace(tmp_path / "mix.jsonl")) == found
    assert [one.number for one in found] == list(range(400))


def test_the_agents_are_as_described() -> None:
    found = list(make_mix("agents", 0, 2000))
    lengths = [one.prompt_tokens for one in found]
    assert min(lengths) >= 55_000 and 250_000 < max(lengths) <= 280_000
    said: dict[str | None, int] = {}
    repeated = 0
    for one in found:
        repeated += said.get(one.session, min(one.prefix_tokens, 8000 if said else 0))
        said[one.session] = one.total_tokens
    assert 0.955 < repeated / sum(lengths) < 0.965  # 96 %
    assert len({one.session for one in islice(found, 0, 200)}) <= 8 + 200 // 20  # eight loops at once, which end now and then


def test_the_other_mixes_are_as_described() -> None:
    chats = list(make_mix("chat", 0, 4000))
    first = [one for one in chats if one.turn == 0]
    assert all(one.prefix == "system" and one.prefix_tokens == 1000 for one in chats)
    assert 4 < len(chats) / len(first) < 6  # five turns each
    answers = sorted(one.output_tokens for one in chats)
    assert 230 < answers[len(answers) // 2] < 270  # the median is 250
    long = list(make_mix("long", 0, 400))
    documents = {one.prefix: one.prefix_tokens for one in long}
    assert all(1 << 17 <= length <= 1 << 20 for length in documents.values())
    assert all(20 <= one.prompt_tokens - one.prefix_tokens <= 200 and one.session is None for one in long)
    assert 4 < len(long) / len(documents) < 8
    assert len({one.prefix for one in make_mix("long", 0, 40, users=1)}) < len({one.prefix for one in make_mix("long", 0, 40)})


def test_wrong_mixes_are_refused() -> None:
    for error, call in {
        "mix='talk' is not valid: one of agents, chat, long": lambda: make_mix("talk"),
        "num_requests=0": lambda: make_mix("chat", 0, 0),
        "users=0": lambda: make_mix("chat", users=0),
    }.items():
        with pytest.raises(ConfigError, match=error):
            call()
