"""The bytes that each token stands for, as a grammar sees them."""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from lamina.base.errors import ConfigError
from lamina.engine.text import BYTE_OF
from lamina.engine.wire import Grammar
from lamina.models.files import read_file

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROLS = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_BOUNDS = ('"minLength"', '"maxLength"')
_SPACE = "\u2581"
_LEAST_ALPHABET = 128  # single characters of the byte alphabet in a vocabulary that is written in it
_SPELLED_KINDS = ("ebnf", "structural_tag", "regex", "choice")


@dataclass(frozen=True, slots=True)
class View:
    """How a grammar sees tokens. spelled  added tokens that are text.   is_printable  no control character but line ends."""

    spelled: tuple[int, ...]
    is_printable: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """pieces  by id the bytes of each token, b"" of added ones.   added  ids and texts of those that are no control tokens."""

    pieces: list[bytes]
    added: tuple[tuple[int, str], ...]

    def view_of(self, grammar: Grammar) -> View:
        """Added tokens that a grammar spells out are text to it; a schema speaks of data, never of tokens.

        Where a schema bounds lengths, the library lets control characters into texts, which JSON does not allow: no token has
        any then but the ends of lines, which it keeps out itself.
        """
        is_bounded = "json" in grammar.value + grammar.kind and any(word in grammar.value for word in _BOUNDS)
        spelled: tuple[int, ...] = ()
        if grammar.kind in _SPELLED_KINDS:
            spelled = tuple(token for token, text in self.added if text in grammar.value)
        return View(spelled, is_bounded)

    def texts(self, view: View) -> list[bytes]:
        """The bytes of all tokens; b"" of those that are no text."""
        pieces = list(self.pieces)
        if view.is_printable:
            pieces = [b"" if _CONTROLS.search(piece) else piece for piece in pieces]
        for token, text in self.added:
            if token in view.spelled:
                pieces[token] = text.encode()
        return pieces


def read_vocabulary(directory: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a checkpoint. ConfigError if it has no tokenizer.json; ids that it does not know are b""."""
    found = read_file(directory, "tokenizer.json")
    if found is None:
        raise ConfigError("response_format", "a grammar", "none: this checkpoint has no tokenizer.json")
    tokenizer = Tokenizer.from_buffer(found)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_bytes = sum(char in vocabulary for char in BYTE_OF) >= _LEAST_ALPHABET
    to_bytes = _from_alphabet if is_bytes else _from_words
    pieces = [b""] * vocab_size
    for text, token in vocabulary.items():
        if token < vocab_size and token not in added:
            pieces[token] = to_bytes(text)
    texts = tuple(sorted((i, one.content) for i, one in added.items() if i < vocab_size and not one.special and one.content))
    return Vocabulary(pieces, texts)


def _from_alphabet(text: str) -> bytes:
    """Of a vocabulary that writes each byte as a character."""
    try:
        return bytes([BYTE_OF[char] for char in text])
    except KeyError:
        return text.encode()


def _from_words(text: str) -> bytes:
    """Of one that writes a space as U+2581 and bytes that are no characters as <0xNN>."""
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
