"""The web page: its pictures by hand, and all of it in a headless Chromium that can reach nothing but the server."""

import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from lamina.engine.wire import CacheState, MemoryState, RequestRow, Stats
from lamina.server import ui
from lamina.server import ui_drawing as drawing
from lamina.server.state import GenerationRecord
from lamina.server.ui_history import SPAN_S, History

KEY = "a-key-of-the-test"
OTHER = "another-key-of-it"
HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"
EMPTY = CacheState("", 0, 0, 0, 0, 1024, (), (), 0, ())


# Pictures ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("fhcp"), st.integers(0, 40)), max_size=20), st.integers(1, 9))
def test_a_cell_has_the_state_that_matters_most(runs: list[tuple[str, int]], per_cell: int) -> None:
    pages = "".join(state * count for state, count in runs)
    cells = "".join(state * count for state, count in drawing.cells_of(runs, per_cell))
    expected = [min(pages[at : at + per_cell], key="phcf".index) for at in range(0, len(pages), per_cell)]
    assert cells == "".join(expected)


def rects(svg: str) -> list[tuple[str, float, float, float]]:
    """(class, x, y, width) of each rectangle."""
    found = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)
    return [(name, float(x), float(y), float(width)) for name, x, y, width in found]


def test_every_page_is_drawn_once_in_its_place() -> None:
    runs = (("h", 50), ("f", 80), ("c", 3), ("p", 7))
    svg = drawing.pages_svg(
        msgspec.structs.replace(EMPTY, free_pages=80, held_pages=50, cached_pages=3, pinned_pages=7, page_states=runs)
    )
    names = {"h": "held", "f": "free", "c": "cached", "p": "pinned"}
    pages = [names[state] for state, count in runs for _ in range(count)]
    drawn: dict[int, str] = {}
    for name, x, y, width in rects(svg):
        for column in range(int(x), int(x + width)):
            place = int(y) * drawing.COLUMNS + column
            assert place not in drawn
            drawn[place] = name
    assert [drawn[place] for place in range(len(pages))] == pages and len(drawn) == len(pages)
    assert 'aria-label="140 pages: 80 free, 50 in use, 3 kept for reuse, 7 pinned"' in svg


def test_many_pages_share_cells() -> None:
    svg = drawing.pages_svg(msgspec.structs.replace(EMPTY, free_pages=10**7, page_states=(("f", 10**7 - 1), ("h", 1))))
    area = sum(width for _, _, _, width in rects(svg))
    assert area <= drawing.MAX_CELLS
    assert "held" in svg and "One cell stands for 4,167 pages" in svg and len(svg) < 20_000


def test_bars_are_to_one_scale() -> None:
    rows = (MemoryState("a", 300, 100), MemoryState("b", 50, 150))
    text = drawing.memories_html(msgspec.structs.replace(EMPTY, memories=rows))
    found = [
        (name, float(x), float(width)) for name, x, width in re.findall(r'class="(\w+)" x="([\d.]+)" width="([\d.]+)"', text)
    ]
    assert found == [("held", 0, 75), ("cached", 75, 25), ("held", 0, 12.5), ("cached", 12.5, 37.5)]


def test_progress_of_a_request() -> None:
    row = RequestRow("0123456789", 2, "prefilling", 200, 150, 0, 16, 100, 1.5)
    text = drawing.request_html(row)
    found = re.findall(r'class="(\w+)" x="([\d.]+)" width="([\d.]+)"', text)
    assert found == [("cached", "0.00", "50.00"), ("held", "50.00", "25.00")]
    assert "01234567" in text and "#2" in text and "150 / 200" in text


@pytest.mark.parametrize("value", [0, 0.5, 1, 1e9])
def test_a_line_stays_inside_its_box(value: float) -> None:
    svg = drawing.sparkline([(0.0, 5.0), (50.0, value), (60.0, value / 2)], 60.0, 30.0, "w")
    places = [
        tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", re.search(r'class="line" d="([^"]*)"', svg)[1])
    ]
    assert len(places) == 2  # the first is older than 30 s
    assert all(0 <= x <= 100 and 0 <= y <= 30 for x, y in places)


def test_what_came_from_outside_is_text() -> None:
    assert "<img" not in drawing.reasons_html({HOSTILE: 3})
    assert "<img" not in drawing.memories_html(msgspec.structs.replace(EMPTY, memories=(MemoryState(HOSTILE, 1, 1),)))
    row = RequestRow(HOSTILE, 0, HOSTILE, 0, 0, 0, 0, 0, 0)
    assert "<img" not in drawing.requests_html((row,))


def test_numbers_of_nothing() -> None:
    row = RequestRow("a", 0, "waiting", 0, 0, 0, 0, 0, 0)
    assert drawing.requests_html(()) and drawing.requests_html((row,) * 50).count("and 38 more") == 1
    assert drawing.reasons_html({}) and drawing.sparkline([], 0, 60, "w")
    assert "nan" not in drawing.memories_html(msgspec.structs.replace(EMPTY, memories=(MemoryState("a", 0, 0),)))


# History -------------------------------------------------------------------------------------------------------------


def stats_of(computed: int, drawn: int, prompts: int = 0, cached: int = 0) -> Stats:
    return Stats(0, 1, 2, 0, 0, 0, prompts, cached, computed, drawn, 0, 0, 0, 0, 0, 0, 0, {}, {}, (), ())


def test_rates_by_hand() -> None:
    now = [100.0]
    history = History(lambda: now[0])
    history.on_stats(stats_of(1000, 50))
    for step in range(1, 9):  # two seconds in quarters: 400 computed and 40 drawn in each second
        now[0] += 0.25
        history.on_stats(stats_of(1000 + 100 * step, 50 + 10 * step, 200 * step, 50 * step))
    assert [(second.prefill, second.decode, second.running, second.waiting) for second in history.seconds] == [
        (360, 40, 1, 2)
    ] * 2
    assert history.hit_rate == 0.25


def test_history_is_bounded() -> None:
    now = [0.0]
    history = History(lambda: now[0])
    record = GenerationRecord("", "", 1, 0, 1, 0, ("stop",), 0.5, 1, 0, 0, 0, "", {})
    for step in range(3 * SPAN_S):
        now[0] += 1
        history.on_stats(stats_of(step, step))
        history.on_generation(record)
    assert len(history.seconds) == SPAN_S and len(history.ended) == 200
    assert history.hit_rate is None


# Without the library -------------------------------------------------------------------------------------------------


def state_of(has_ui: bool = True) -> SimpleNamespace:
    client = SimpleNamespace(add_listener=lambda callback: None)
    return SimpleNamespace(settings=SimpleNamespace(has_ui=has_ui), observers=[], client=client)


def test_without_nicegui_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "find_spec", lambda name: None)
    client = TestClient(Starlette(routes=list(ui.routes(state_of()))))
    for path in ("/ui", "/ui/", "/ui/anything"):
        answer = client.get(path)
        assert answer.status_code == 501
        assert answer.text == "The web page needs NiceGUI, which is not installed: pip install 'lamina[ui]'\n"


def test_the_page_can_be_left_out() -> None:
    assert ui.routes(state_of(has_ui=False)) == []


# In a browser --------------------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"lamina_tests_server_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served(start_server: Callable[..., object], tmp_path_factory: pytest.TempPathFactory) -> object:
    """A server that asks for one of two keys, keeps them apart, and has few pages."""
    pytest.importorskip("nicegui", reason="nicegui is not installed")
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n{OTHER}\n")
    return start_server("--api-key-file", str(file), "--salt-by-api-key", "--cache-bytes", "16MiB", key=KEY)


@pytest.fixture
def chrome(served, tmp_path: Path) -> Iterator[object]:
    """A browser in which the page asks for the key."""
    module = load("chrome")
    program = module.find()
    if program is None:
        pytest.skip("no Chromium here")
    with module.Chrome(program, tmp_path / "profile") as browser:
        browser.size(1280, 800)
        browser.open(f"{served.url}/ui")
        browser.wait("document.querySelector('.ask input')")
        yield browser
        host = re.escape(served.url.removeprefix("http://"))
        outside = [url for url in browser.requests if not re.match(rf"(http|ws)://{host}/ui(/|$)|data:|about:", url)]
        assert len(browser.requests) > 5 and outside == [] and browser.errors == []
        assert "Traceback" not in served.stderr()


def enter_key(chrome, key: str) -> None:
    chrome.js("document.querySelector('.ask input').select()")
    chrome.type(key)
    chrome.press("Enter")


def say(chrome, text: str, max_tokens: int) -> None:
    """Asks in the chat box, by keyboard; the most likely tokens, so that each run is the same."""
    chrome.js("document.querySelector('[aria-label=\"Temperature\"]').select()")
    chrome.type("0")
    chrome.js("document.querySelector('[aria-label=\"Max tokens\"]').select()")
    chrome.type(str(max_tokens))
    chrome.js("document.querySelector('.chat textarea').focus()")
    chrome.type(text)
    chrome.press("Enter")


def last(what: str) -> str:
    """JavaScript for a part of the last answer."""
    return f"document.querySelector('.answer:last-child {what}')"


def click(chrome, where: str, text: str) -> None:
    chrome.js(f"[...document.querySelectorAll('{where} button')].find(one => one.innerText == '{text}').click()")


def test_a_key_is_asked_for_and_kept_in_its_tab(served, chrome, tmp_path: Path) -> None:
    plain = httpx.get(f"{served.url}/ui/", trust_env=False)
    assert plain.status_code == 200 and "default-src 'self'" in plain.headers["content-security-policy"]
    assert "engine ready" not in plain.text and "tiny" not in plain.text and KEY not in plain.text
    enter_key(chrome, "not the key")
    chrome.wait("document.querySelector('.ask').innerText.includes('not one of')")
    assert "Pages" not in chrome.text()
    chrome.wait("!document.querySelector('.ask button.disabled')")
    enter_key(chrome, KEY)
    chrome.wait("document.querySelector('svg.pages')")
    assert "engine ready" in chrome.text()
    chrome.open(f"{served.url}/ui")
    chrome.wait("document.querySelector('svg.pages')")
    stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    assert KEY not in str(chrome.js(stored))
    module = load("chrome")
    with module.Chrome(module.find(), tmp_path / "other") as other:
        other.open(f"{served.url}/ui")
        other.wait("document.querySelector('.ask input')")


def test_a_page_shows_the_prefixes_of_its_key(served, chrome, tmp_path: Path) -> None:
    """Another key's are seen and dropped by the first key alone."""
    served.http.request("DELETE", "/v1/cache")
    for key, owner in ((KEY, "of the first"), (OTHER, "of the second")):
        body = {"prompt": f"A prompt {owner} key. " * 30, "max_tokens": 1, "user": owner}
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, trust_env=False).status_code == 200
    enter_key(chrome, OTHER)
    chrome.wait("document.body.innerText.includes('of the second')")
    assert "of the first" not in chrome.text()
    module = load("chrome")
    with module.Chrome(module.find(), tmp_path / "first") as first:
        first.open(f"{served.url}/ui")
        first.wait("document.querySelector('.ask input')")
        enter_key(first, KEY)
        first.wait("document.body.innerText.includes('of the second') && document.body.innerText.includes('of the first')")
    assert "of the first" not in chrome.text()
    click(chrome, ".panel .head", "Drop all")
    chrome.wait("!document.body.innerText.includes('of the second')")
    owners = [one["owner"] for one in served.http.get("/v1/cache").json()["prefixes"]]
    assert "of the first" in owners and "of the second" not in owners


def test_a_conversation(served, chrome) -> None:
    served.http.request("DELETE", "/v1/cache")
    enter_key(chrome, KEY)
    chrome.wait("document.querySelector('svg.pages')")
    pages_and_requests_move_while_an_answer_is_written(chrome)
    the_second_turn_says_what_came_from_the_cache(chrome)
    thoughts_fold_away(chrome)
    an_answer_can_be_stopped(served, chrome)
    a_question_that_cannot_be_asked_says_why(chrome)
    prefixes_are_pinned_and_dropped_by_keyboard(served, chrome)
    a_name_from_outside_is_only_text(served, chrome)


def pages_and_requests_move_while_an_answer_is_written(chrome) -> None:
    before = chrome.js("document.querySelector('svg.pages').outerHTML")
    assert "held" not in str(before)
    say(chrome, "Tell me something long.", 150)
    chrome.wait("document.querySelector('.request')")
    chrome.wait("document.querySelector('svg.pages rect.held')")
    chrome.wait("document.querySelector('.tiles').innerText.includes('1 · 0')")
    drawn = "document.querySelector('.request svg.bar + svg.bar rect.drawn')?.getAttribute('width')"
    first = chrome.js(drawn)
    chrome.wait(f"{drawn} != {first!r}".replace("None", "undefined"))
    chrome.wait(last(".content") + ".innerText.length > 20")
    chrome.wait(last(".counts") + ".innerText.includes('150 out')", 60)
    chrome.wait("document.querySelector('svg.pages rect.cached')")
    assert chrome.js("document.querySelector('svg.pages').outerHTML") != before
    chrome.wait("document.querySelector('.prefix')")
    chrome.wait("!document.querySelector('.request')")
    chrome.wait("/Time to first token\\s+[\\d.]+ m?s/.test(document.querySelector('.tiles').innerText)")


def the_second_turn_says_what_came_from_the_cache(chrome) -> None:
    counts = "({}.innerText.match(/(\\d+) in, (\\d+) from cache/) || [])[{}]"
    first_in = int(str(chrome.wait(counts.format(last(".counts summary"), 1))))
    say(chrome, "And now?", 8)
    chrome.wait("document.querySelectorAll('.answer .counts summary').length == 2")
    assert int(str(chrome.wait(counts.format(last(".counts summary"), 2)))) >= first_in
    chrome.js(last(".counts summary") + ".click()")
    table = str(chrome.wait(last(".counts table") + ".innerText"))
    assert "window" in table and "tokens reused" in table


def thoughts_fold_away(chrome) -> None:
    box = "document.querySelector('.chat .q-checkbox')"
    chrome.js(f"{box}.click()")
    chrome.wait(f"{box}.getAttribute('aria-checked') == 'true'")
    say(chrome, "Think hard.", 24)
    chrome.wait(last(".thoughts") + ".innerText.includes('Thoughts')")
    chrome.wait("!" + last(".thoughts") + ".open")
    assert int(str(chrome.js(last(".thoughts div") + ".textContent.length"))) > 10
    chrome.js(last(".thoughts summary") + ".click()")
    chrome.wait(last(".thoughts") + ".open")
    chrome.js(f"{box}.click()")


def an_answer_can_be_stopped(served, chrome) -> None:
    say(chrome, "Go on for ever.", 100_000)
    chrome.wait(last(".content") + ".innerText.length > 5")
    click(chrome, ".chat", "Stop")
    chrome.wait("document.querySelector('.answer:last-child').innerText.includes('Stopped.')")
    served.idle_pages()
    chrome.wait("[...document.querySelectorAll('.chat button')].some(one => one.innerText == 'Send' && one.offsetParent)")


def a_question_that_cannot_be_asked_says_why(chrome) -> None:
    say(chrome, "y " * 200_000, 5)
    chrome.wait(last(".error") + ".innerText.includes('tokens')")
    click(chrome, ".chat", "New chat")
    chrome.wait("!document.querySelector('.answer')")


def prefixes_are_pinned_and_dropped_by_keyboard(served, chrome) -> None:
    chrome.js("document.querySelector('.prefix button').focus()")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert str(chrome.js(focused)).startswith("Pin prefix")
    chrome.press("Enter")
    chrome.wait("document.querySelector('.prefix .pin')")
    assert [prefix["is_pinned"] for prefix in served.http.get("/v1/cache").json()["prefixes"]].count(True) == 1
    assert str(chrome.js(focused)).startswith("Unpin prefix")  # the keyboard's place is kept
    chrome.press("Enter")
    chrome.wait("!document.querySelector('.prefix .pin')")
    click(chrome, ".head", "Drop all")
    chrome.wait("!document.querySelector('.prefix')")
    assert served.http.get("/v1/cache").json()["pages"]["cached"] == 0


def a_name_from_outside_is_only_text(served, chrome) -> None:
    body = {"model": "tiny", "prompt": "abc " * 300, "max_tokens": 2, "user": HOSTILE}
    assert served.post("/v1/completions", body).status_code == 200
    chrome.wait("document.querySelector('.prefix')?.innerText.includes('onerror')")
    assert chrome.js("document.title") == "Lamina" and not chrome.js("document.querySelector('.root img')")


def test_names_keyboard_and_widths(chrome) -> None:
    enter_key(chrome, KEY)
    chrome.wait("document.querySelector('svg.pages')")
    every_part_has_a_name(chrome)
    the_tab_key_reaches_everything(chrome)
    for width in (1280, 768, 390):
        nothing_hangs_over_the_edge(chrome, width)


def every_part_has_a_name(chrome) -> None:
    nodes = chrome.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "textbox", "spinbutton", "checkbox", "img", "image", "region", "log"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert [role for role, name in found if role in wanted and not name.strip()] == []
    assert {"Pages", "Requests", "Chat", "Kept prefixes"} <= {name for role, name in found if role == "region"}


def the_tab_key_reaches_everything(chrome) -> None:
    wanted = {"Send", "New chat", "Temperature", "Max tokens", "Theme: auto", "Think", "Conversation"}
    reached: set[str] = set()
    for _ in range(40):
        chrome.press("Tab")
        reached.add(str(chrome.js("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")))
        if wanted <= reached and any(name.startswith("Message") for name in reached):
            return
    raise AssertionError(f"the Tab key reaches only {reached}")


def nothing_hangs_over_the_edge(chrome, width: int) -> None:
    chrome.size(width, 800, is_dark=width == 768)
    chrome.wait(f"innerWidth == {width}")
    chrome.wait(f"document.documentElement.scrollWidth <= {width}", 3)
    over = "[...document.querySelectorAll('.panel, .tile')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
    chrome.wait(f"{over} == 0", 3)
    paper = "rgb(20, 23, 27)" if width == 768 else "rgb(255, 255, 255)"
    chrome.wait(f"getComputedStyle(document.body).backgroundColor == '{paper}'", 3)
