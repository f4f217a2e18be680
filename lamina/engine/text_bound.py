"""How few tokens a text can have: a bound that holds for every text, from the tokenizer's parts, without encoding anything."""

from typing import Literal

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer, models

_BYTE_FALLBACK = tuple(f"<0x{byte:02X}>" for byte in range(256))


class _Part(Struct):
    """A normalizer or pre-tokenizer as tokenizer.json has it."""

    type: str
    normalizers: "list[_Part] | None" = None
    pretokenizers: "list[_Part] | None" = None
    behavior: str | None = None
    pattern: object = None
    content: str | None = None


class _Replaced(Struct):
    String: str


def longest_token_bytes(tokenizer: Tokenizer, byte_chars: dict[str, int]) -> int | None:
    """Most bytes of a text that one token can stand for; None where a token, or nothing, may stand for any number of them.

    byte_chars  the characters by which byte-level vocabularies write bytes.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these take any white space beside them
        return None
    normalizer, splitter = (
        None if part is None else msgspec.json.decode(part.__getstate__(), type=_Part)
        for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    )
    if not (_keeps_length(normalizer) and _keeps_text(splitter)):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    has_bytes: Literal["chars", "tokens"] | None = None
    if _is_byte_level(splitter) and isinstance(tokenizer.model, models.BPE) and all(char in vocabulary for char in byte_chars):
        has_bytes = "chars"
    elif (
        isinstance(tokenizer.model, models.BPE)
        and tokenizer.model.byte_fallback
        and all(token in vocabulary for token in _BYTE_FALLBACK)
    ):
        has_bytes = "tokens"
    if has_bytes is None:  # what the vocabulary does not know may be dropped, or be one token however long it is
        return None
    own = max((len(piece) if has_bytes == "chars" else len(piece.encode()) for piece in vocabulary), default=1)
    return max(own, *(len(token.content.encode()) for token in added), 1)


def _keeps_length(part: _Part | None) -> bool:
    """Whether a normalizer never makes a text shorter."""
    if part is None:
        return True
    if part.type == "Sequence":
        return all(map(_keeps_length, part.normalizers or ()))
    if part.type == "Replace":
        try:
            pattern = msgspec.convert(part.pattern, _Replaced).String
        except msgspec.ValidationError:
            return False
        return len((part.content or "").encode()) >= len(pattern.encode())
    return part.type in ("Prepend", "ByteLevel")


def _keeps_text(part: _Part | None) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    if part is None:
        return True
    if part.type == "Sequence":
        return all(map(_keeps_text, part.pretokenizers or ()))
    return part.type in ("ByteLevel", "Metaspace", "Digits") or (
        part.type in ("Split", "Punctuation") and part.behavior is not None and part.behavior != "Removed"
    )


def _is_byte_level(part: _Part | None) -> bool:
    if part is None:
        return False
    return part.type == "ByteLevel" or any(map(_is_byte_level, part.pretokenizers or ()))
