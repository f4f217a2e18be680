"""The page's chat box: the same prompts, parsers and limits as /v1/chat/completions, in the same process."""

import time
from dataclasses import dataclass, field
from html import escape

from msgspec.structs import replace
from nicegui import ui

from lamina.base.errors import LaminaError
from lamina.base.log import get_logger
from lamina.chat.records import CallArguments, CallEnd, CallStart, ChatOptions, Content, Event, Message, Reasoning
from lamina.server import ui_drawing as drawing
from lamina.server.chat_request import Extras, salt_of, to_ask
from lamina.server.errors import to_api_error
from lamina.server.generation import Ask, Generation, generate, to_sampling
from lamina.server.state import ServerState

_LOG = get_logger(__name__)
#: seconds between two sendings of a growing text; longer ones are sent less often, as each sending is the whole text
_SEND_S = 0.1
_CHARS_A_SECOND = 200_000
DEFAULT_MAX_TOKENS = 512
OWNER = "web page"
_HINT = "Enter sends, Shift+Enter begins a new line"


@dataclass(slots=True)
class Answer:
    """An answer as it grows. calls  tool calls as text: the page has no tools, but a model may make one."""

    thoughts: str = ""
    content: str = ""
    first_token_s: float | None = None
    start_s: float = field(default_factory=time.perf_counter)

    def take(self, events: tuple[Event, ...]) -> None:
        """What is new."""
        for event in events:
            match event:
                case Reasoning():
                    self.thoughts += event.text
                case Content():
                    self.content += event.text
                case CallStart():
                    self.content += f"\n[calls {event.name}: "
                case CallArguments():
                    self.content += event.text
                case CallEnd():
                    self.content += "]\n"


class ChatBox:
    """Questions and answers of one open page."""

    def __init__(self, state: ServerState, api_key: str | None) -> None:
        self.state = state
        self.api_key = api_key
        self.messages: list[Message] = []
        self._running: Generation | None = None
        self._is_busy = False
        self._build()
        ui.context.client.on_delete(self.stop)

    def _build(self) -> None:
        with ui.element("div").classes("head"):
            ui.html("Chat", sanitize=False, tag="h2").props('id="chat-title"')
            self.clear_button = ui.button("New chat", on_click=self.clear).props("flat dense no-caps")
        self.log = ui.element("div").classes("log").props('role="log" aria-live="polite" aria-label="Conversation" tabindex="0"')
        why = self._why_not()
        if why:
            with self.log:
                ui.label(why).classes("soft")
            self.clear_button.set_visibility(False)
            return
        with self.log:
            self.hint = ui.label("Ask something; below each answer it says what came from the cache and what it held.").classes(
                "soft"
            )
        self.field = (
            ui.textarea(placeholder="Message").props(f'outlined autogrow dense aria-label="Message. {_HINT}"').classes("field")
        )
        self.field.on(
            "keydown.enter", lambda event: self.send(str(event.args)),
            js_handler="(e) => { if (!e.shiftKey && !e.isComposing) { e.preventDefault(); emit(e.target.value); } }",
        )  # fmt: skip
        with ui.element("div").classes("controls"):
            self.thinking = ui.checkbox("Think", value=False)
            self.thinking.set_visibility(self.state.chat is not None and self.state.chat.end_of_thinking is not None)
            usual = self.state.defaults.temperature
            self.temperature = ui.number("Temperature", value=usual, min=0, max=2, step=0.1).props("dense outlined")
            self.max_tokens = ui.number("Max tokens", value=DEFAULT_MAX_TOKENS, min=1, step=1, precision=0).props(
                "dense outlined"
            )
            self.stop_button = ui.button("Stop", on_click=self.stop).props("outline no-caps color=negative")
            self.send_button = ui.button("Send", on_click=lambda: self.send(str(self.field.value or ""))).props(
                "unelevated no-caps"
            )
        self._set_busy(False)

    def _why_not(self) -> str:
        """Why nothing can be asked; "" where it can."""
        if self.state.codec is None:
            return "This checkpoint has no tokenizer.json, so there is no chat: use /v1/completions with token ids."
        return ""

    def _set_busy(self, is_busy: bool) -> None:
        self._is_busy = is_busy
        self.send_button.set_visibility(not is_busy)
        self.stop_button.set_visibility(is_busy)

    # One question ----------------------------------------------------------------------------------------------------

    async def send(self, text: str) -> None:
        """Asks, and shows the answer as it comes."""
        if self._is_busy or not text.strip():
            return
        self._set_busy(True)
        self.field.set_value("")
        self.hint.set_visibility(False)
        question = Message("user", text)
        with self.log:
            ui.label(text).classes("said")
            shown = Shown()
        self._scroll()
        answer = Answer()
        try:
            reason = await self._answer([*self.messages, question], answer, shown)
        except Exception as error:  # whatever it is, it is this answer's and the page goes on
            if not isinstance(error, LaminaError):
                _LOG.error("failed request=%s", "web page", exc_info=error)
            shown.fail(to_api_error(error).message)
            return
        finally:
            self._running = None
            if not ui.context.client.is_deleted:
                self._set_busy(False)
        self.messages += [question, Message("assistant", answer.content, answer.thoughts)]
        shown.note(reason)

    async def _answer(self, messages: list[Message], answer: Answer, shown: "Shown") -> str:
        """Fills `answer`; returns how it ended."""
        generation = self._running = generate(self.state, self._ask(messages))
        reason, sent_s = "stopped", 0.0
        try:
            while pieces := await generation.get_pieces():
                for piece in pieces:
                    if answer.first_token_s is None and piece.tokens:
                        answer.first_token_s = time.perf_counter() - answer.start_s
                    answer.take(piece.events)
                    reason = piece.finish or reason
                now = time.perf_counter()
                if now - sent_s >= max(_SEND_S, (len(answer.content) + len(answer.thoughts)) / _CHARS_A_SECOND):
                    sent_s = now
                    shown.update(answer, False)
                    self._scroll()
        except LaminaError:
            if self._running is not None:
                raise
            reason = "stopped"  # by the button: the engine says that it was cancelled
        finally:
            generation.cancel()
            shown.update(answer, True)
        shown.count(answer, generation)
        self._scroll()
        return reason

    def _ask(self, messages: list[Message]) -> Ask:
        """The question as the server's other endpoints would put it. Raises ConfigError and ApiError naming the field."""
        most, temperature = int(self.max_tokens.value or DEFAULT_MAX_TOKENS), float(self.temperature.value or 0.0)
        defaults = self.state.defaults
        params = replace(defaults, temperature=temperature, max_tokens=defaults.most_tokens(most)).params()
        salt = salt_of(self.state, None, self.api_key)
        if self.state.chat is None:
            codec = self.state.need_codec("messages")
            text = "\n".join(message.content for message in messages)
            return Ask(codec.encode(text), to_sampling(params), cache_salt=salt, owner=OWNER)
        options = ChatOptions(thinking=bool(self.thinking.value) if self.thinking.visible else None)
        return to_ask(self.state, messages, options, to_sampling(params), Extras(cache_salt=salt, owner=OWNER))

    def stop(self) -> None:
        """Ends the answer that is being written."""
        running, self._running = self._running, None
        if running is not None:
            self.state.client.cancel(running.id)

    def clear(self) -> None:
        """Forgets the conversation."""
        self.stop()
        self.messages = []
        for element in list(self.log.default_slot.children):
            if element is not self.hint:
                element.delete()
        self.hint.set_visibility(True)

    def _scroll(self) -> None:
        ui.run_javascript(
            f"const log = getHtmlElement({self.log.id});"
            "if (log && log.scrollHeight - log.scrollTop - log.clientHeight < 200) log.scrollTop = log.scrollHeight;"
        )


class Shown:
    """An answer on the page: the thoughts fold away once the content begins."""

    def __init__(self) -> None:
        with ui.element("div").classes("answer"):
            with ui.element("details").classes("thoughts") as self.fold:
                self.title = ui.html("Thinking …", sanitize=False, tag="summary")
                self.thoughts = ui.label("")
            self.content = ui.label("").classes("content")
            self.waiting = ui.label("…").classes("soft")
            self.error = ui.label("").classes("error").props('role="alert"')
            with ui.element("details").classes("counts") as self.counts:
                self.line = ui.html("", sanitize=False, tag="summary")
                self.table = ui.html("", sanitize=False)
        for hidden in (self.fold, self.error, self.counts):
            hidden.set_visibility(False)

    def update(self, answer: Answer, is_over: bool) -> None:
        """The answer so far."""
        if answer.thoughts and not self.fold.visible:
            self.fold.set_visibility(True)
            self.fold.props("open")
        if (answer.content or is_over) and "open" in self.fold.props and self.title.content != "Thoughts":
            self.title.set_content("Thoughts")
            self.fold.props(remove="open")
        if answer.thoughts or answer.content or is_over:
            self.waiting.set_visibility(False)
        self.thoughts.set_text(answer.thoughts)
        self.content.set_text(answer.content)

    def count(self, answer: Answer, generation: Generation) -> None:
        """What the answer cost: a line, and behind it each memory's bytes and how far the cache reached."""
        totals = generation.totals
        whole_s = time.perf_counter() - answer.start_s
        parts = [f"{totals.prompt_tokens:,} in, {totals.cached_tokens:,} from cache", f"{totals.completion_tokens:,} out"]
        if answer.first_token_s is not None:
            parts.append(f"first token {drawing.seconds_text(answer.first_token_s)}")
            rest_s = whole_s - answer.first_token_s
            if totals.completion_tokens > 1 and rest_s > 0:
                parts.append(f"{(totals.completion_tokens - 1) / rest_s:.1f} tokens/s")
        rows = [("Prefix", totals.prefix_stop or "not known"), ("Thoughts", f"{totals.reasoning_tokens:,} tokens")]
        rows += [(name, drawing.bytes_text(nbytes)) for name, nbytes in totals.held_bytes.items()]
        cells = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        self.line.set_content(" · ".join(parts))
        self.table.set_content(f"<table>{cells}</table>")
        self.counts.set_visibility(True)

    def note(self, reason: str) -> None:
        """How it ended, where that was not the model's wish."""
        words = {"length": "Cut off at max tokens.", "stopped": "Stopped.", "deadline": "Out of time."}
        if reason in words:
            self.waiting.set_text(words[reason])
            self.waiting.set_visibility(True)

    def fail(self, message: str) -> None:
        """Why there is no answer."""
        self.waiting.set_visibility(False)
        self.error.set_text(message)
        self.error.set_visibility(True)
