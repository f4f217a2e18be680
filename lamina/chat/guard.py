"""Control tokens that a user's text merely spells stay text.

A tokenizer turns every spelling of an added token into that token, whoever wrote it. So while a prompt is written, marks are
put into what users wrote: inside each spelled token, and where a text's edge could complete one together with its neighbour.
`settle` then drops the marks that break nothing, and `encode` cuts the prompt at the rest and encodes the parts apart: a
spelled token never comes to life, and a text that spells none encodes as if it had never been looked at.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from lamina.chat.records import Json, Rendered

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode reserves them for use inside a program
_NONCE_DIGITS = 24


def new_mark() -> str:
    """A text that nobody can guess. Digits only, so that changing the case of a text leaves it alone."""
    return f"{_OPEN}{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}d}{_CLOSE}"


class _Spellings:
    """Finds tokens in texts. Tokens of one character, and those of white space alone, are text to users and stay so."""

    def __init__(self, tokens: Sequence[str]) -> None:
        found = sorted({token for token in tokens if len(token) > 1 and not token.isspace()})
        self._longest = max(map(len, found), default=0)
        self._joined = "\0".join(found)
        self._starts = {token[:length] for token in found for length in range(1, len(token))}
        self._ends = {token[length:] for token in found for length in range(1, len(token))}
        self._first, self._last = {token[0] for token in found}, {token[-1] for token in found}  # every start and end has one
        self._pattern = re.compile(f"(?=({_trie_pattern(found)}))" if found else r"(?!)")

    def marked(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of each spelled token, and at edges that may be part of one."""
        if not text or not self._longest:
            return text
        cuts = [match.start() + 1 for match in self._pattern.finditer(text)]
        is_inside = len(text) < self._longest and text in self._joined
        reach = min(len(text), self._longest - 1)
        head, tail, lengths = text[:reach], text[-reach:], range(1, reach + 1)
        if is_inside or (not self._last.isdisjoint(head) and any(head[:length] in self._ends for length in lengths)):
            cuts.insert(0, 0)
        if is_inside or (not self._first.isdisjoint(tail) and any(tail[-length:] in self._starts for length in lengths)):
            cuts.append(len(text))
        if not cuts:
            return text
        bounds = [0, *cuts, len(text)]
        return mark.join(text[start:stop] for start, stop in pairwise(bounds))

    def settled(self, text: str, mark: str) -> str:
        """`text` with those marks alone that stand inside a spelled token."""
        parts = text.split(mark)
        if len(parts) == 1:
            return text
        spans = ((match.start(1), match.end(1)) for match in self._pattern.finditer("".join(parts)))
        start, stop = next(spans, (-1, -1))
        kept, at, reach = [parts[0]], 0, -1  # reach: the furthest end of a span that began before this mark
        for before, part in pairwise(parts):
            at += len(before)
            while start >= 0 and start < at:
                reach = max(reach, stop)
                start, stop = next(spans, (-1, -1))
            kept += [mark, part] if reach > at else [part]
        return "".join(kept)


def _trie_pattern(tokens: Sequence[str]) -> str:
    """A pattern for the longest of `tokens`, which shares their beginnings, so that many cost little more than one."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        if token:
            groups.setdefault(token[0], []).append(token[1:])
    branches = []
    for first, rests in groups.items():
        head = re.escape(first)
        while len(rests) == 1 and rests[0]:  # one token is left: its rest is plain
            head, rests = head + re.escape(rests[0]), [""]
        branches.append(head + (_trie_pattern(rests) if any(rests) else ""))
    body = branches[0] if len(branches) == 1 and "" not in tokens else f"(?:{'|'.join(branches)})"
    return body + ("?" if "" in tokens else "")


@lru_cache(maxsize=8)
def _spellings(tokens: tuple[str, ...]) -> _Spellings:
    return _Spellings(tokens)


def guard(text: str, special_tokens: Sequence[str], mark: str) -> str:
    """`text` with marks wherever it spells a token or may be part of a spelling; as it is where there is no mark or token."""
    return _spellings(tuple(special_tokens)).marked(text, mark) if mark else text


def guard_json(value: Json, special_tokens: Sequence[str], mark: str) -> Json:
    """A copy of `value` with every text in it guarded, keys too."""
    if isinstance(value, str):
        return guard(value, special_tokens, mark)
    if isinstance(value, Mapping):
        return {guard(key, special_tokens, mark): guard_json(item, special_tokens, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [guard_json(item, special_tokens, mark) for item in value]
    return value


def settle(text: str, special_tokens: Sequence[str], mark: str, is_thinking: bool) -> Rendered:
    """A finished prompt: marks that stand in no spelled token are gone."""
    if not mark:
        return Rendered(text, "", is_thinking)
    text = _spellings(tuple(special_tokens)).settled(text, mark)
    return Rendered(text, mark if mark in text else "", is_thinking)


def encode(rendered: Rendered, encode: Callable[[str], list[int]], most: int | None = None) -> list[int]:
    """Token ids of a prompt: what stands between marks is encoded apart. Those of a part more than `most`, if there are more."""
    parts = rendered.text.split(rendered.mark) if rendered.mark else [rendered.text]
    found: list[int] = []
    for part in parts:
        if part:
            found += encode(part)
            if most is not None and len(found) > most:
                break
    return found
