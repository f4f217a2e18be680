"""The format "jinja": a checkpoint's own template writes the prompt; thoughts and calls are read by the tags it uses.

The template is data from a stranger: it runs in Jinja's sandbox, which gives it no attribute of Python's, changes nothing it
is given, and is cut off when its output, a range or a repeated text grows without measure. (A template can still loop for
long without output; it is the operator who chooses the checkpoint, and no request can bring a template.)
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lamina.base.errors import ConfigError
from lamina.chat.answers import AnswerParser, ThoughtTags
from lamina.chat.formats import OutputParser
from lamina.chat.guard import guard, guard_json, new_mark, settle
from lamina.chat.records import ChatOptions, Json, Message, Rendered, Tool, ToolCall
from lamina.chat.tagged_calls import TaggedCalls

THINK, END_THINK = "<think>", "</think>"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "tools", "documents", "raise_exception", "strftime_now"})
_MAX_CHARS = 1 << 26
_MAX_REPEATED = 1 << 20
_MAX_POWER = 1 << 10


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a measure for what grows by multiplication."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """The result of an operator, unless it is too large."""
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, str | list | tuple) and isinstance(other, int):
                if len(one) * other > _MAX_REPEATED:
                    raise SecurityError(f"a text or list repeated to more than {_MAX_REPEATED} items")
            elif operator == "**" and isinstance(one, int) and abs(one) > _MAX_POWER:
                raise SecurityError(f"a power of numbers beyond {_MAX_POWER}")
        return super().call_binop(context, operator, left, right)


class JinjaFormat:
    """A `ChatFormat`."""

    name = "jinja"
    starts_of_calls: tuple[str, ...] = ("<tool_call>",)

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, str], added_tokens: frozenset[str]) -> None:
        """templates  by name: "default", and "tool_use" for requests with tools where there is one.

        tokens        bos_token, eos_token, ..., as the templates name them.
        added_tokens  of the vocabulary: whether <think> and </think> are among them.
        Raises ConfigError if a template is no valid Jinja.
        """
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise
        self._environment.globals["strftime_now"] = _strftime_now
        try:
            self._templates = {name: self._environment.from_string(text) for name, text in templates.items()}
        except (TemplateError, RecursionError, ValueError) as error:
            raise ConfigError("chat_template", ", ".join(templates), f"valid Jinja ({_first_line(error)})") from None
        if not self._templates:
            raise ConfigError("chat_template", "", "at least one template")
        self._tokens = dict(tokens)
        source = "\n".join(templates.values())
        self._knows_developer = "developer" in source
        self._shows_tools = any(self._names_tools(text) for text in templates.values())
        has_tokens = END_THINK in added_tokens
        self._tags = ThoughtTags(THINK, END_THINK, has_tokens) if has_tokens or END_THINK in source else None
        self._has_calls = "<tool_call>" in source
        self._end_of_thinking = END_THINK if has_tokens else None

    @property
    def shows_tools(self) -> bool:
        """Whether a template reads its variable `tools`."""
        return self._shows_tools

    def _names_tools(self, text: str) -> bool:
        return any(name.name == "tools" for name in self._environment.parse(text).find_all(nodes.Name))

    @property
    def end_of_thinking(self) -> str | None:
        """The token that ends the thoughts, where the vocabulary has it."""
        return self._end_of_thinking

    def render(self, messages: Sequence[Message], options: ChatOptions, special_tokens: Sequence[str] = ()) -> Rendered:
        """The prompt up to where the answer begins. Raises ConfigError where the template refuses the messages."""
        if not messages:
            raise ConfigError("messages", [], "at least one message")
        try:
            return self._render(messages, options, special_tokens)
        except RecursionError:
            raise ConfigError("messages", "as sent", "JSON nested less deeply") from None

    def _render(self, messages: Sequence[Message], options: ChatOptions, special_tokens: Sequence[str]) -> Rendered:
        bad = sorted(_RESERVED.union(self._tokens) & options.template_kwargs.keys())
        if bad:
            raise ConfigError(
                f"chat_template_kwargs.{bad[0]}", options.template_kwargs[bad[0]], "a name that the server does not set"
            )
        mark = new_mark() if special_tokens else ""
        end_mark = new_mark()
        records = [self._record(message, f"messages[{index}]", special_tokens, mark) for index, message in enumerate(messages)]
        is_open = messages[-1].is_open and messages[-1].role == "assistant"
        if is_open:
            records[-1]["content"] = f"{records[-1]['content']}{end_mark}"
        tools = [_tool_record(tool, special_tokens, mark) for tool in _tools(options)]
        values: dict[str, object] = {
            **self._tokens,
            "messages": records,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": options.begins_answer and not is_open,
        }
        if options.thinking is not None:
            values |= {"enable_thinking": options.thinking, "thinking": options.thinking}
        if options.effort is not None:
            values["reasoning_effort"] = options.effort
        values |= {name: guard_json(value, special_tokens, mark) for name, value in options.template_kwargs.items()}
        text = self._write("tool_use" if tools and "tool_use" in self._templates else "default", values)
        if is_open:
            text, found, _ = text.partition(end_mark)
            if not found:
                raise ConfigError(
                    f"messages[{len(messages) - 1}]", "an open turn", "a closed turn: the chat template drops open ones"
                )
        is_thinking = self._tags is not None and text.rstrip().endswith(self._tags.start)
        return settle(text, special_tokens, mark, is_thinking)

    def parser(self, options: ChatOptions, is_thinking: bool) -> OutputParser:
        """Reads one answer: thoughts where the vocabulary or the template has their tags, calls where it has theirs.

        Where calls are demanded, or tools are strict, the answer has the tags whatever the template says.
        """
        tools = _tools(options)
        is_enforced = options.tool_choice.mode in ("required", "named") or any(tool.is_strict for tool in tools)
        reader = TaggedCalls(options.parallel_tool_calls) if tools and (self._has_calls or is_enforced) else None
        return AnswerParser(self._tags, reader, is_thinking)

    def _write(self, name: str, values: Mapping[str, object]) -> str:
        template = self._templates.get(name) or next(iter(self._templates.values()))
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(values):
                num_chars += len(part)
                if num_chars > _MAX_CHARS:
                    raise SecurityError(f"a prompt of more than {_MAX_CHARS} characters")
                parts.append(part)
        except Exception as error:  # a template raises whatever its expressions raise
            raise ConfigError("messages", "as sent", f"what the chat template takes ({_first_line(error)})") from None
        return "".join(parts)

    def _record(self, message: Message, place: str, special_tokens: Sequence[str], mark: str) -> dict[str, Json]:
        """A message as templates expect it."""
        if message.role not in _ROLES:
            raise ConfigError(f"{place}.role", message.role, f"one of {', '.join(_ROLES)}")
        if message.task is not None:
            raise ConfigError(f"{place}.task", message.task, "nothing: this model has no tasks")

        def safe(text: str) -> str:
            return guard(text, special_tokens, mark)

        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        record: dict[str, Json] = {"role": role, "content": safe(message.content)}
        if message.reasoning:
            record |= {"reasoning_content": safe(message.reasoning), "reasoning": safe(message.reasoning)}
        if message.tool_calls:
            record["tool_calls"] = [
                {
                    "id": safe(call.id),
                    "type": "function",
                    "function": {"name": safe(call.name), "arguments": guard_json(_arguments(call), special_tokens, mark)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            record["tool_call_id"] = safe(message.tool_call_id)
        if message.name is not None:
            record["name"] = safe(message.name)
        return record


def _tools(options: ChatOptions) -> tuple[Tool, ...]:
    return () if options.tool_choice.mode == "none" else options.tools


def _tool_record(tool: Tool, special_tokens: Sequence[str], mark: str) -> Json:
    return {"type": "function", "function": guard_json(tool.function, special_tokens, mark)}


def _arguments(call: ToolCall) -> Json:
    """As an object, which templates expect; as it was sent where it is none."""
    try:
        value: Json = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Transformers' templates expect it: plain, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
