"""Custom tools of the responses protocol: what they are given is a text, not JSON.

A model calls one as a function whose only argument is that text, `input`; clients see the text alone.
"""

import json
import re
from collections.abc import Mapping

import msgspec

from lamina.chat.records import Json, Tool
from lamina.server.errors import ApiError, invalid
from lamina.server.responses_schema import CustomFormat

INPUT = "input"
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PART = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]', re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB]..")  # the first half of a pair of surrogates
_PAIR_CHARS = 6  # of the second half


class InputReader:
    """The text of a call, out of the JSON of its arguments as that streams.

    Arguments that do not begin with the text are looked at as a whole at the end; what has no text is the text itself.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside: bool | None = None  # None: it has not begun yet; False: it is over
        self._all: list[str] = []

    def push(self, piece: str) -> str:
        """More JSON: the text that is certain."""
        if self._is_inside is False:
            return ""
        self._held += piece
        if self._is_inside is None:
            self._all.append(piece)
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._is_inside, self._held = True, self._held[head.end() :]
        return self._take()

    def _take(self) -> str:
        """What cannot change whatever follows: half of a pair of surrogates waits for the other."""
        held, end = self._held, 0
        while (part := _PART.match(held, end)) is not None:
            rest = held[part.end() : part.end() + _PAIR_CHARS]
            if _HIGH.match(part[0]) and len(rest) < _PAIR_CHARS and '"' not in rest:
                break
            end = part.end()
        self._held = held[end:]
        self._is_inside = not self._held.startswith('"')
        return _decoded(held[:end])

    def finish(self) -> str:
        """The rest, once the call is over or was cut off."""
        if self._is_inside is not None:
            return ""
        whole = "".join(self._all)
        try:
            arguments = msgspec.json.decode(whole) if whole else {}
        except (msgspec.DecodeError, RecursionError):
            return whole
        found = arguments.get(INPUT) if isinstance(arguments, dict) else None
        if isinstance(found, str):
            return found
        return "" if arguments == {} else whole


def _decoded(text: str) -> str:
    """What the inside of a JSON text says; half of a pair of surrogates is U+FFFD."""
    try:
        value: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not know
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def arguments_of(text: str) -> str:
    """The arguments of a call that is given a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The text of a call with such arguments."""
    reader = InputReader()
    return reader.push(arguments) + reader.finish()


def to_function(name: str, description: str | None, form: CustomFormat | None, at: str) -> Tool:
    """The function that a custom tool is for the model. An expression of `form` is enforced, a grammar only shown.

    Raises ApiError naming the field.
    """
    schema: dict[str, Json] = {"type": "string"}
    says = [description] if description else []
    is_enforced = False
    if form is not None and form.type == "grammar":
        if form.definition is None:
            raise ApiError(400, f"{at}.definition is missing: a grammar", f"{at}.definition", "missing_field")
        if form.syntax not in ("lark", "regex"):
            raise invalid(f"{at}.syntax", form.syntax, "lark, regex")
        says.append(f"The input must match this {form.syntax} grammar:\n{form.definition}")
        if form.syntax == "regex":
            schema["pattern"], is_enforced = form.definition, True
    elif form is not None and form.type != "text":
        raise invalid(f"{at}.type", form.type, "text, grammar")
    parameters: Mapping[str, Json] = {
        "type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False,
    }  # fmt: skip
    record: dict[str, Json] = {"name": name, **({"description": "\n\n".join(says)} if says else {}), "parameters": parameters}
    return Tool(name, record, is_enforced)
