"""How a chat is written in the DSML encoding, byte for byte as DeepSeek-V4's own encoder writes it.

Messages become turns (tool results move into user turns, neighbouring user messages merge), old thoughts are pruned, and
each turn is written with what follows it in mind. Everything that users wrote passes `_Writer.safe` on its way.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lamina.base.errors import ConfigError
from lamina.chat.dsml_texts import RESPONSE_FORMAT, TOOLS
from lamina.chat.guard import guard, new_mark, settle
from lamina.chat.records import Json, Message, Rendered, Tool, ToolCall

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is wanted of the prompt, all defaults resolved. preamble  text of the effort, "" for none."""

    is_thinking: bool
    drops_thoughts: bool
    preamble: str
    tools: tuple[Tool, ...]
    response_schema: Mapping[str, Json] | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a user's turn. call  id of the call that a tool's result answers; None for plain text."""

    text: str
    call: str | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message after merging. place  where it came from, for error messages."""

    role: str
    place: str
    message: Message
    blocks: tuple[_Block, ...] = ()
    task: str | None = None
    holds_tools: bool = False
    holds_schema: bool = False


def write_prompt(messages: Sequence[Message], plan: Plan, special_tokens: Sequence[str], context: Sequence[Message]) -> Rendered:
    """The prompt of `messages`, after `context`, whose prompt was written before (no BOS then)."""
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not context:
        turns = _attach(turns, plan)
    before = _merged([_turn(message, f"context[{index}]") for index, message in enumerate(context)])
    turns = _in_call_order([*before, *_merged(turns)])
    drops = plan.drops_thoughts and not any(turn.holds_tools for turn in turns)
    skip = len(before)
    if plan.is_thinking and drops:
        skip = len(_pruned(before))
        turns = _pruned(turns)
    writer = _Writer(plan, special_tokens, drops, turns)
    text = "".join(writer.write(index) for index in range(skip, len(turns)))
    return settle((BOS if not context else "") + text, special_tokens, writer.mark, writer.is_in_thoughts)


def _check(message: Message, place: str) -> None:
    if message.role not in _ROLES:
        raise ConfigError(f"{place}.role", message.role, f"one of {', '.join(_ROLES)}")
    if message.role == "developer" and not message.content:
        raise ConfigError(f"{place}.content", message.content, "a non-empty text, as the role is developer")
    if message.task is not None and message.task not in TASKS:
        raise ConfigError(f"{place}.task", message.task, f"one of {', '.join(TASKS)}")


def _turn(message: Message, place: str) -> _Turn:
    return _Turn(message.role, place, message, task=message.task)


def _attach(turns: list[_Turn], plan: Plan) -> list[_Turn]:
    """Tools and the answer's schema go into the first system message, or into an empty one put in front."""
    if not plan.tools and plan.response_schema is None:
        return turns
    at = next((index for index, turn in enumerate(turns) if turn.role == "system"), None)
    if at is None:
        at, turns = 0, [_turn(Message("system"), "tools"), *turns]
    turns[at] = replace(turns[at], holds_tools=bool(plan.tools), holds_schema=plan.response_schema is not None)
    return turns


def _merged(turns: Sequence[_Turn]) -> list[_Turn]:
    """Tool results and user texts as blocks of user turns. A task of a message that joins an earlier one is lost, as it is
    in the model's own encoder."""
    merged: list[tuple[_Turn, list[_Block]]] = []
    for turn in turns:
        if turn.role not in ("tool", "user"):
            merged.append((turn, []))
            continue
        is_tool = turn.role == "tool"
        block = _Block(turn.message.content, (turn.message.tool_call_id or "") if is_tool else None)
        if merged and merged[-1][0].role == "user" and (is_tool or merged[-1][0].task is None):
            merged[-1][1].append(block)
        else:
            merged.append((replace(turn, role="user", task=None) if is_tool else turn, [block]))
    return [replace(turn, blocks=tuple(blocks)) if blocks else turn for turn, blocks in merged]


def _in_call_order(turns: Sequence[_Turn]) -> list[_Turn]:
    """Results of a turn in the order of the calls they answer; other blocks keep their places."""
    order: dict[str, int] = {}
    ordered = []
    for turn in turns:
        if turn.role == "assistant" and turn.message.tool_calls:
            order = {call.id: index for index, call in enumerate(turn.message.tool_calls) if call.id}
        results = [block for block in turn.blocks if block.call is not None]
        if len(results) > 1 and order:
            following = iter(sorted(results, key=lambda block: order.get(block.call or "", 0)))
            turn = replace(turn, blocks=tuple(block if block.call is None else next(following) for block in turn.blocks))
        ordered.append(turn)
    return ordered


def _last_request(turns: Sequence[_Turn]) -> int:
    """Index of the last user or developer turn, or -1."""
    return max((index for index, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _pruned(turns: Sequence[_Turn]) -> list[_Turn]:
    """Without developer turns before the last request. (Thoughts before it are left out where the turns are written.)"""
    last = _last_request(turns)
    return [turn for index, turn in enumerate(turns) if index >= last or turn.role != "developer"]


class _Writer:
    """Writes turns, one by one."""

    def __init__(self, plan: Plan, special_tokens: Sequence[str], drops: bool, turns: Sequence[_Turn]) -> None:
        self._plan = plan
        self._tokens = special_tokens
        self._drops = drops
        self._turns = turns
        self._last_request = _last_request(turns)
        self.mark = new_mark() if special_tokens else ""
        self.is_in_thoughts = False

    def safe(self, text: str) -> str:
        """A user's text, guarded."""
        return guard(text, self._tokens, self.mark)

    def write(self, index: int) -> str:
        """One turn, with what opens the answer where one follows."""
        turn = self._turns[index]
        start = self._plan.preamble if index == 0 and self._plan.is_thinking else ""
        return start + self._body(turn, index) + self._opening(turn, index)

    def _body(self, turn: _Turn, index: int) -> str:
        content = self.safe(turn.message.content)
        match turn.role:
            case "user":
                return USER + "\n\n".join(map(self._block, turn.blocks))
            case "assistant":
                return self._answer(turn, index)
            case "latest_reminder":
                return REMINDER + content
            case "developer":
                return USER + content
            case _:
                return content + self._sections(turn)

    def _block(self, block: _Block) -> str:
        text = self.safe(block.text)
        return text if block.call is None else f"<tool_result>{text}</tool_result>"

    def _sections(self, turn: _Turn) -> str:
        text = ""
        if turn.holds_tools:
            schemas = "\n".join(self.safe(_to_json(tool.function, "tools")) for tool in self._plan.tools)
            names = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
            text += "\n\n" + TOOLS.format(tool_schemas=schemas, **names)
        if turn.holds_schema:
            schema = self.safe(_to_json(self._plan.response_schema, "response_format"))
            text += "\n\n" + RESPONSE_FORMAT.format(schema=schema)
        return text

    def _answer(self, turn: _Turn, index: int) -> str:
        message = turn.message
        is_task = index > 0 and self._turns[index - 1].task is not None
        shows_thoughts = self._plan.is_thinking and not is_task and (not self._drops or index > self._last_request)
        text = self.safe(message.reasoning) + END_THINK if shows_thoughts else ""
        text += self.safe(message.content)
        if message.tool_calls:
            calls = [self._call(call, f"{turn.place}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)]
            text += "\n\n" + "\n".join([f"<{DSML}tool_calls>", *calls, f"</{DSML}tool_calls>"])
        self.is_in_thoughts = False
        return text if message.is_open else text + EOS

    def _call(self, call: ToolCall, place: str) -> str:
        lines = []
        for key, value in _arguments(call, place).items():
            is_text = isinstance(value, str)
            shown = self.safe(value if isinstance(value, str) else _to_json(value, f"{place}.function.arguments"))
            flag = "true" if is_text else "false"
            lines.append(f'<{DSML}parameter name="{self.safe(key)}" string="{flag}">{shown}</{DSML}parameter>')
        return f'<{DSML}invoke name="{self.safe(call.name)}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>"

    def _opening(self, turn: _Turn, index: int) -> str:
        """What follows a turn that is the last, or that an assistant or a reminder follows."""
        following = self._turns[index + 1].role if index + 1 < len(self._turns) else None
        if following not in (None, "assistant", "latest_reminder"):
            return ""
        is_thinking = self._plan.is_thinking
        if turn.task is not None:
            self.is_in_thoughts = False  # a task's answer has no thoughts
            opened = ASSISTANT + (THINK if is_thinking else END_THINK) if turn.task == "action" else ""
            return opened + TASKS[turn.task]
        if turn.role not in ("user", "developer", "system") or (turn.role == "system" and following == "latest_reminder"):
            return ""
        self.is_in_thoughts = is_thinking and (not self._drops or index >= self._last_request)
        return ASSISTANT + (THINK if self.is_in_thoughts else END_THINK)


def _arguments(call: ToolCall, place: str) -> Mapping[str, Json]:
    """A call's arguments as an object. A text that is no JSON becomes its only argument, as in the model's own encoder."""
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return {"arguments": call.arguments}
    except RecursionError:
        raise ConfigError(f"{place}.function.arguments", call.arguments[:60], "JSON nested less deeply") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}.function.arguments", call.arguments[:60], "a JSON object")
    return value


def _to_json(value: Json, place: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ConfigError(place, "...", "JSON nested less deeply") from None
