"""The web page itself: what a browser sees, kept up to date over one socket. Imported only when somebody opens the page.

The server draws, the browser shows: nothing of the server's state is sent before a key that it asks for was given.
"""

import asyncio
from collections.abc import Callable
from html import escape
from pathlib import Path

from fastapi import FastAPI
from fastapi.requests import Request
from nicegui import app as nicegui_app
from nicegui import ui

from lamina.base.errors import LaminaError
from lamina.base.log import get_logger
from lamina.base.version import __version__
from lamina.engine.wire import CacheState, PrefixRow, Stats
from lamina.server import ui_drawing as drawing
from lamina.server.auth import find_key
from lamina.server.cache import visible_realm
from lamina.server.state import ServerState
from lamina.server.ui_chat import ChatBox
from lamina.server.ui_history import SPAN_S, History

_LOG = get_logger(__name__)
#: seconds between two looks at the server
REFRESH_S = 0.5
#: prefixes that the page lists
MAX_PREFIXES = 30
#: pages that may be open at once; each costs some memory and work twice a second
MAX_VIEWERS = 32
_CSS = Path(__file__).with_name("ui.css").read_text(encoding="utf-8")
_KEY = "api_key"
#: seconds that a wrong key costs
_WRONG_KEY_S = 1.0


class Watch:
    """What all open pages look at: the engine is asked once for all of them, and one loop brings them up to date."""

    def __init__(self, state: ServerState, history: History) -> None:
        self.state = state
        self.history = history
        self.caches: dict[str, CacheState] = {}  # by the realm of the prefixes in it
        self.views: set[View] = set()
        self._looking: asyncio.Task[None] | None = None

    def add(self, view: "View") -> None:
        """One more page looks."""
        self.views.add(view)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Asks the engine what its memory holds and shows it, as long as a page is open."""
        while self.views:
            try:
                if self.state.client.state == "ready":
                    realms = {view.realm for view in self.views}
                    self.caches = {realm: await self.state.client.cache(MAX_PREFIXES, realm) for realm in realms}
            except LaminaError:
                pass  # the engine is on its way down or up: the pages show its state
            for view in list(self.views):
                try:
                    view.update()
                except Exception:
                    self.views.discard(view)
                    _LOG.exception("a page could not be brought up to date")
            await asyncio.sleep(REFRESH_S)

    async def change(self, action: str, key: str, realm: str) -> None:
        """Pins, unpins or drops. Raises LaminaError with the engine's words."""
        self.caches[realm] = await self.state.client.change_cache(action, key, realm)


def make_page_app(state: ServerState, history: History) -> FastAPI:
    """NiceGUI's application with our one page; once in a process, as NiceGUI keeps its state in its modules."""
    watch = Watch(state, history)

    @ui.page("/")
    async def page(request: Request) -> None:
        if len(watch.views) >= MAX_VIEWERS:
            ui.label(f"{MAX_VIEWERS} pages are open already; close one of them.")
            return
        ui.add_css(_CSS)
        root = ui.element("div").classes("root")
        key = find_key(state.settings, request.scope["headers"], request.scope["path"]) if state.settings.api_keys else None
        client = ui.context.client
        await client.connected()  # or gone: then nothing may be made any more
        if client.is_deleted:
            return
        if state.settings.api_keys and key is None:
            saved = nicegui_app.storage.tab.get(_KEY)
            key = saved if isinstance(saved, str) and _is_key(state, saved) else await _ask_key(state, root)
        if client.is_deleted:
            return
        with root:
            view = View(watch, key)
        client.on_delete(lambda: watch.views.discard(view))
        watch.add(view)

    nicegui_app.storage.max_tab_storage_age = 24 * 3600
    made = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    ui.run_with(
        made, title="Lamina", dark=None, language="en-US", tailwind=False, mount_path="/",
        show_welcome_message=False, message_history_length=100, reconnect_timeout=6.0, binding_refresh_interval=None,
    )  # fmt: skip
    return made


def _is_key(state: ServerState, text: str) -> bool:
    return find_key(state.settings, [(b"x-api-key", text.encode())], "") is not None


async def _ask_key(state: ServerState, root: ui.element) -> str:
    """Shows the form until a right key is given, or the page is closed; the key stays in the server's memory for this tab."""
    given: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def give_up() -> None:
        if not given.done():
            given.set_result("")

    root.client.on_delete(give_up)
    with root, ui.element("main").classes("ask"), ui.element("section").classes("panel"):
        ui.html("<h1>Lamina</h1><p class='soft'>This server asks for an API key.</p>", sanitize=False)
        field = ui.input("API key", password=True, password_toggle_button=True).props("outlined autofocus autocomplete=off")
        complaint = ui.label("").classes("error").props('role="alert"')

        async def check() -> None:
            if _is_key(state, str(field.value or "")):
                nicegui_app.storage.tab[_KEY] = field.value
                if not given.done():
                    given.set_result(str(field.value))
                return
            button.disable()
            await asyncio.sleep(_WRONG_KEY_S)
            button.enable()
            complaint.set_text("This key is not one of the server's.")

        field.on("keydown.enter", check)
        button = ui.button("Open", on_click=check).props("no-caps unelevated")
    key = await given
    if not root.client.is_deleted:
        root.clear()
    return key


class View:
    """One open page."""

    def __init__(self, watch: Watch, api_key: str | None) -> None:
        self.watch = watch
        self.realm = visible_realm(watch.state, api_key)
        self.dark = ui.dark_mode(value=None)
        self._shown: dict[int, str] = {}
        self._header()
        with ui.element("main").classes("page"):
            self._tiles()
            with ui.element("section").classes("panel chat").props('aria-labelledby="chat-title"'):
                ChatBox(watch.state, api_key)
            with ui.element("div").classes("panels"):
                self._panels()
        self.rows: dict[str, PrefixLine] = {}

    # What there is ---------------------------------------------------------------------------------------------------

    def _header(self) -> None:
        with ui.element("header"):
            with ui.element("div").classes("title"):
                ui.html("Lamina", sanitize=False, tag="h1")
                self.model = ui.label(self.watch.state.model_name).classes("soft model")
            self.engine = ui.html("", sanitize=False).classes("engine").props('role="status"')
            self.theme = ui.button("Theme: auto", on_click=self._turn).props("flat dense no-caps")

    def _tiles(self) -> None:
        with ui.element("section").classes("tiles").props('aria-label="Now"'):
            self.tiles = {name: ui.html("", sanitize=False).classes("tile") for name in
                          ("requests", "prefill", "decode", "first", "hits")}  # fmt: skip

    def _panels(self) -> None:
        self.pages = self._panel("Pages", "pages-title", "whole")
        self.requests = self._panel("Requests", "requests-title", "whole")
        self.memories = self._panel("Memories: in use + kept", "memories-title", "tall")
        self.reasons = self._panel("Why lookups ended", "reasons-title")
        with ui.element("section").classes("panel").props('aria-labelledby="prefixes-title"'):
            with ui.element("div").classes("head"):
                ui.html("Kept prefixes", sanitize=False, tag="h2").props('id="prefixes-title"')
                self.num_prefixes = ui.label("").classes("soft small")
                ui.button("Drop all", on_click=lambda: self._change("drop", "")).props(
                    'outline dense no-caps aria-label="Drop everything that nobody uses"'
                )
            self.complaint = ui.label("").classes("error small").props('role="alert"')
            self.prefixes = ui.element("div").classes("prefixes").props('role="list"')

    def _panel(self, title: str, name: str, kind: str = "") -> ui.html:
        with ui.element("section").classes(f"panel {kind}").props(f'aria-labelledby="{name}"'):
            ui.html(title, sanitize=False, tag="h2").props(f'id="{name}"')
            return ui.html("", sanitize=False)

    # What is new -----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Brings the page up to date."""
        history, cache = self.watch.history, self.watch.caches.get(self.realm)
        self._show(self.engine, self._engine_html())
        stats = history.stats
        if stats is not None:
            self._show_tiles(stats)
            self._show(self.requests, drawing.requests_html(stats.requests))
            self._show(self.reasons, drawing.reasons_html(stats.misses))
        if cache is not None:
            self._show(self.pages, drawing.pages_svg(cache) + drawing.pages_legend(cache))
            self._show(self.memories, drawing.memories_html(cache))
            self._show_prefixes(cache)

    def _show(self, element: ui.html, text: str) -> None:
        """Sends what has changed, nothing else."""
        if self._shown.get(element.id) != text:
            self._shown[element.id] = text
            element.set_content(text)

    def _engine_html(self) -> str:
        client = self.watch.state.client
        ready = client.ready
        restarts = f" · {client.num_restarts} restart{'s' if client.num_restarts > 1 else ''}" if client.num_restarts else ""
        device = f" · {escape(ready.device)} · {ready.max_model_len:,} tokens" if ready is not None else ""
        kind = "on" if client.state == "ready" else "off"
        return (
            f'<span class="pill {kind}">engine {client.state}</span><span class="soft">{restarts}{device} · {__version__}</span>'
        )

    def _show_tiles(self, stats: Stats) -> None:
        history = self.watch.history
        now, seconds = history.now, history.seconds
        last = seconds[-1] if seconds and now - seconds[-1].time_s < 3 else None
        first = [(ended.time_s, ended.first_token_s) for ended in history.ended]
        rate = history.hit_rate
        hits = [(one.time_s, one.cached_tokens / one.prompt_tokens) for one in seconds if one.prompt_tokens]
        work = [(one.time_s, float(one.running + one.waiting)) for one in seconds]
        self._tile("requests", "Running · waiting", f"{stats.running:,} · {stats.waiting:,}", work, "requests at once")
        self._tile("prefill", "Prefill tokens/s", drawing.number_text(last.prefill if last else 0),
                   [(one.time_s, one.prefill) for one in seconds], "prompt tokens computed per second")  # fmt: skip
        self._tile("decode", "Decode tokens/s", drawing.number_text(last.decode if last else 0),
                   [(one.time_s, one.decode) for one in seconds], "tokens drawn per second")  # fmt: skip
        self._tile("first", "Time to first token", drawing.seconds_text(first[-1][1]) if first else "–", first,
                   "time to first token of the last requests", True)  # fmt: skip
        self._tile(
            "hits", "Found in cache", "–" if rate is None else f"{100 * rate:.0f} %", hits, "share of prompt tokens found", True
        )

    def _tile(
        self, name: str, title: str, value: str, points: list[tuple[float, float]], words: str, as_dots: bool = False
    ) -> None:
        history = self.watch.history
        span_s = min(SPAN_S, max(60.0, history.now - history.seconds[0].time_s)) if history.seconds else 60.0
        line = drawing.sparkline(
            points, history.now, span_s, f"{words}, the last {drawing.seconds_text(span_s)}; now {value}", as_dots
        )
        self._show(self.tiles[name], f"<span>{title}</span><b>{value}</b>{line}")

    def _show_prefixes(self, cache: CacheState) -> None:
        """Lines stay the same elements as long as their prefix is there, so that the keyboard's place is not lost."""
        more = f"{cache.num_prefixes:,}" + (
            f", the last {len(cache.prefixes)} used" if cache.num_prefixes > len(cache.prefixes) else ""
        )
        self.num_prefixes.set_text(more)
        found = {row.key: row for row in cache.prefixes}
        for key in [key for key in self.rows if key not in found]:
            self.rows.pop(key).element.delete()
        for place, (key, row) in enumerate(found.items()):
            if key not in self.rows:
                with self.prefixes:
                    self.rows[key] = PrefixLine(key, self._change)
            line = self.rows[key]
            line.update(row, cache.page_bytes)
            if self.prefixes.default_slot.children.index(line.element) != place:
                line.element.move(target_index=place)

    async def _change(self, action: str, key: str) -> None:
        try:
            await self.watch.change(action, key, self.realm)
            self.complaint.set_text("")
        except LaminaError as error:
            self.complaint.set_text(str(error))
        self.update()

    def _turn(self) -> None:
        """Dark, light, as the system says."""
        self.dark.value = {None: True, True: False, False: None}[self.dark.value]
        self.theme.set_text({None: "Theme: auto", True: "Theme: dark", False: "Theme: light"}[self.dark.value])


class PrefixLine:
    """One kept prefix with its buttons."""

    def __init__(self, key: str, change: Callable[[str, str], object]) -> None:
        self.key = key
        self.is_pinned = False
        with ui.element("div").classes("prefix").props('role="listitem"') as self.element:
            self.text = ui.html("", sanitize=False).classes("what")
            self.pin = ui.button("Pin", on_click=lambda: change("unpin" if self.is_pinned else "pin", key))
            self.drop = ui.button("Drop", on_click=lambda: change("drop", key))
        for button in (self.pin, self.drop):
            button.props("outline dense no-caps size=sm")
        self._shown = ""

    def update(self, row: PrefixRow, page_bytes: int) -> None:
        """Shows what is known now."""
        owner = f" · from {escape(row.owner[:40])}" if row.owner else ""
        shared = "".join(f", first {tokens:,} tokens {_hits(hits)}" for tokens, hits in reversed(row.shared[-2:]))
        use = (
            '<span class="pill on">in use</span>'
            if row.is_running
            else '<span class="pill pin">pinned</span>'
            if row.is_pinned
            else ""
        )
        text = (
            f"<b>{row.tokens:,} tokens</b> {use}<span class='soft small'>{drawing.bytes_text(row.pages * page_bytes)} alone · "
            f"{_hits(row.hits)}{shared} · {_ago(row.age_s)}{owner} · "
            f"<code>{row.key[:8]}</code></span>"
        )
        if text != self._shown:
            self._shown = text
            self.text.set_content(text)
            self.is_pinned = row.is_pinned
            name = f"prefix {row.key[:8]} of {row.tokens} tokens"
            self.pin.set_text("Unpin" if row.is_pinned else "Pin")
            self.pin.props(f'aria-label="{"Unpin" if row.is_pinned else "Pin"} {name}"')
            self.drop.props(f'aria-label="Drop {name}"')
            self.drop.set_enabled(not row.is_running)


def _hits(number: int) -> str:
    return f"{number:,} hit{'' if number == 1 else 's'}"


def _ago(seconds: float) -> str:
    """When it was, in steps that do not change at every look."""
    return "just now" if seconds < 10 else f"{drawing.seconds_text(seconds // 5 * 5)} ago"
