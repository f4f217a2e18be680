"""Between text and token ids: encoding, and decoding token by token.

Decoding a list of tokens is a chain of steps over token strings (byte-level, word pieces, byte fallback, ...). Each step
is written here as a stream: what it gives for the first tokens, while more may come, and what is left at the end. So the
parts of a streamed text join to exactly the text of the whole list, and each token costs its own length, once. A step
that can only be judged at the end (a regular expression over the fused text, say) makes the detokeniser wait for the end.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec
from tokenizers import Regex, Tokenizer, decoders

from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.engine.text_bound import longest_token_bytes
from lamina.engine.text_stops import StopChecker
from lamina.models.files import read_file

_log = get_logger(__name__)
_NUM_U32 = 1 << 32
_LONG = 4096  # characters or ids from which on the library's batches are used: they alone let other threads run meanwhile


class TextCodec:
    """A tokenizer.json: text to ids and back. Safe to share between requests; holds no state of one."""

    def __init__(self, path: str | Path | bytes, *, add_bos: bool | None = None, bos_token: str | None = None) -> None:
        """Reads tokenizer.json at `path`, or what is in it.

        add_bos    True/False: whether prompts start with `bos_token`; None: as the file's own post-processor does.
        Raises     ConfigError if the file cannot be read, or add_bos is asked for without a known bos_token.
        """
        if not isinstance(path, bytes) and not Path(path).is_file():
            raise ConfigError("tokenizer", str(path), "a readable tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_buffer(path) if isinstance(path, bytes) else Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            shown = f"{len(path)} bytes" if isinstance(path, bytes) else str(path)
            raise ConfigError("tokenizer", shown, f"a readable tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()  # what a training script left on must not cut prompts
        self._tokenizer.no_padding()
        self._add_bos = add_bos
        self._bos_token = bos_token
        self._bos_id = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        if add_bos and self._bos_id is None:
            raise ConfigError("bos_token", bos_token, "a token of tokenizer.json, because add_bos_token is true")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._added = frozenset(added)
        self._pieces = _Pieces(self._tokenizer)
        self._plain: set[int] = set()
        self._added_texts = tuple(self.token_piece(token) or "" for token in sorted(added))
        decoder = self._tokenizer.decoder
        self._steps = _plan_steps(None if decoder is None else msgspec.json.decode(decoder.__getstate__(), type=_DecoderSpec))
        if self._steps is None:
            event(_log, "detokenise", streaming=False, why="the decoder of tokenizer.json needs the whole text")
        self._texts: dict[int, str] = {}
        self._longest = longest_token_bytes(self._tokenizer, BYTE_OF)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that no encoding of `text` goes below; 0 where there is no such bound."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return 0 if self._longest is None else -(-num_bytes // self._longest)

    @property
    def vocab_size(self) -> int:
        """Number of tokens with an id, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that starts a text, if one is named."""
        return self._bos_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids. Raises ConfigError if it is not valid Unicode."""
        try:
            if len(text) < _LONG:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise ConfigError("text", ascii(text)[:60], "a text without unpaired surrogates") from None

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with one BOS in front if the tokenizer's configuration asks for it."""
        if self._add_bos is None:
            ids = self.encode(text, add_special_tokens=True)
            is_twice = self._bos_id is not None and ids[:2] == [self._bos_id] * 2 and text.startswith(self._bos_token or "")
            return ids[1:] if is_twice else ids
        ids = self.encode(text)
        if self._add_bos and self._bos_id is not None and not text.startswith(self._bos_token or ""):
            return [self._bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give nothing."""
        known = [i for i in ids if 0 <= i < _NUM_U32]
        if len(known) < _LONG:
            return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        text: str = self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special tokens as they are written; "" for an unknown id."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (before decoding), or None for an unknown id."""
        return self._pieces[token_id]

    def known_pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Those of `token_piece` that are known."""
        return [piece for piece in map(self._pieces.__getitem__, token_ids) if piece is not None]

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens drops the token."""
        return self.token_piece(token_id) in self._special

    def is_special_text(self, piece: str) -> bool:
        """The same, by what the vocabulary writes."""
        return piece in self._special

    def is_added(self, token_id: int) -> bool:
        """Whether it is one of the vocabulary's added tokens: control tokens, special or not."""
        return token_id in self._added

    def end_of_plain(self, token_ids: Sequence[int], start: int, stop: int) -> int:
        """Where from `start` on the first token is that is an added one or has a "<" in it, with which tags begin; or `stop`."""
        for place in range(start, stop):
            token_id = token_ids[place]
            if token_id not in self._plain:
                if token_id in self._added or "<" in (self.token_piece(token_id) or ""):
                    return place
                self._plain.add(token_id)
        return stop

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The added tokens as they are written, by id."""
        return self._added_texts

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary writes it; None if it has none."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, part of a character perhaps; b"" for an unknown id."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        piece = self.token_piece(token_id) or ""
        if _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        try:
            return bytes([BYTE_OF[char] for char in piece])
        except KeyError:
            return text.encode()

    def new_steps(self) -> "list[_Step] | None":
        """Fresh decoding steps for one stream, or None if only the whole list can be decoded."""
        return None if self._steps is None else [make() for make in self._steps]


class _Pieces(dict[int, str | None]):
    """What the vocabulary writes for each token, asked for once; None for what it does not know."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id < _NUM_U32 else None
        if piece is not None:
            self[token_id] = piece
        return piece


class _TokenizerConfig(msgspec.Struct):
    """The two fields of tokenizer_config.json that change ids; a token is a text or a record with its content."""

    add_bos_token: bool | None = None
    bos_token: str | dict[str, object] | None = None


def load_codec(directory: str | Path) -> TextCodec | None:
    """The codec of a checkpoint; None if it has no tokenizer.json. Raises ConfigError if a file is bad."""
    path = Path(directory) / "tokenizer.json"
    source = path if path.exists() else read_file(Path(directory), "tokenizer.json")
    if source is None:
        return None
    config, found = _TokenizerConfig(), read_file(Path(directory), "tokenizer_config.json")
    if found is not None:
        try:
            config = msgspec.json.decode(found, type=_TokenizerConfig)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = str(Path(directory) / "tokenizer_config.json")
            raise ConfigError("tokenizer_config", where, f"JSON with a boolean add_bos_token ({error})") from None
    bos = config.bos_token.get("content") if isinstance(config.bos_token, dict) else config.bos_token
    if bos is not None and not isinstance(bos, str):
        raise ConfigError("bos_token", bos, "a text or a record with a text `content`")
    return TextCodec(source, add_bos=config.add_bos_token, bos_token=bos)


class Detokeniser:
    """The text of one output, token by token. All that `push` and `finish` return, joined, is `codec.decode(all ids)`."""

    def __init__(self, codec: TextCodec, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skips = skip_special_tokens
        self._steps = codec.new_steps()
        self._waiting: list[int] = []  # only where nothing is certain before the end

    def push(self, *token_ids: int) -> str:
        """The text that is certain once these tokens are known, whatever follows; often "" inside a character."""
        if self._steps is None:
            self._waiting += token_ids
            return ""
        pieces = self._codec.known_pieces(token_ids)
        if self._skips:
            pieces = [piece for piece in pieces if not self._codec.is_special_text(piece)]
        return "".join(_feed(self._steps, pieces))

    def finish(self) -> str:
        """The rest of the text; call once, after the last token."""
        if self._steps is None:
            return self._codec.decode(self._waiting, self._skips)
        pieces: list[str] = []
        for index, step in enumerate(self._steps):  # a step's rest still passes the steps after it
            pieces += _feed(self._steps[index + 1 :], step.finish())
        return "".join(pieces)


class _Step(Protocol):
    """One step of decoding as a stream over token strings."""

    def push(self, tokens: list[str]) -> list[str]:
        """The tokens that are certain once `tokens`, at least one, are known."""

    def finish(self) -> list[str]:
        """The tokens that only the end makes certain."""


def _feed(steps: Sequence[_Step], tokens: list[str]) -> list[str]:
    """What comes out of a chain of steps when `tokens` go in."""
    for step in steps:
        if not tokens:
            return tokens
        tokens = step.push(tokens)
    return tokens


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte: itself if printable, else the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


#: the byte that each character of a byte-level vocabulary stands for
BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


@lru_cache(maxsize=1 << 16)
def _bytes_of(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


class _ByteLevel:
    """Each character is a byte, and bytes are UTF-8 with U+FFFD for what is not; any other character makes it plain text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: list[str]) -> list[str]:
        return [self._decoder.decode(b"".join(map(_bytes_of, tokens)))]

    def finish(self) -> list[str]:
        return [self._decoder.decode(b"", final=True)]


class _ByteFallback:
    """A run of <0xNN> tokens is UTF-8 if all of it is valid, else one U+FFFD per token; nothing of it is certain before."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        found: list[str] = []
        for token in tokens:
            if _BYTE_TOKEN.fullmatch(token):
                self._run.append(int(token[3:5], 16))
            else:
                found += [*self.finish(), token]
        return found

    def finish(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _Local:
    """A step that maps tokens one by one, with another rule for the first one."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._rule, self._later = first, later

    def push(self, tokens: list[str]) -> list[str]:
        found = [self._rule(tokens[0]), *map(self._later, tokens[1:])]
        self._rule = self._later
        return found

    def finish(self) -> list[str]:
        return []


class _WordEnds:
    """A word-end suffix is a space, except in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        certain = [*([] if self._last is None else [self._last]), *tokens[:-1]]
        self._last = tokens[-1]
        return [token.replace(self._suffix, " ") for token in certain]

    def finish(self) -> list[str]:
        return [] if self._last is None else [self._last.replace(self._suffix, "")]


class _Distinct:
    """Equal neighbours count once; the rest is token by token, and empty results vanish."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        self._rule = rule
        self._last: str | None = None

    def push(self, tokens: list[str]) -> list[str]:
        found: list[str] = []
        for token in tokens:
            if token != self._last:
                self._last = token
                found.append(self._rule(token))
        return [text for text in found if text]

    def finish(self) -> list[str]:
        return []


class _FusedStrip:
    """Drops up to `start` leading and `stop` trailing characters equal to `content` of a text that comes in parts."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._tail = ""

    def push(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        while self._start and text:
            if text[0] != self._content:
                self._start = 0
            else:
                text, self._start = text[1:], self._start - 1
        whole = self._tail + text
        shown = len(whole)
        while shown > max(0, len(whole) - self._stop) and whole[shown - 1] == self._content:
            shown -= 1
        self._tail = whole[shown:]
        return [whole[:shown]]

    def finish(self) -> list[str]:
        return []


class _FusedReplace:
    """Replaces a fixed text, from the left, in a text that comes in parts."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._finder = StopChecker([pattern])

    def push(self, tokens: list[str]) -> list[str]:
        shown: list[str] = []
        for char in "".join(tokens):
            text, is_found = self._finder.push(char)
            shown.append(text)
            if is_found:
                shown.append(self._content)
                self._finder = StopChecker([self._pattern])
        return ["".join(shown)]

    def finish(self) -> list[str]:
        return [self._finder.finish()]


class _DecoderSpec(msgspec.Struct):
    """A decoder as tokenizer.json writes it; each type uses its own few fields."""

    type: str
    decoders: "list[_DecoderSpec]" = []
    prefix: str = ""
    cleanup: bool = False
    replacement: str = ""
    prepend_scheme: str = ""
    suffix: str = ""
    pad_token: str = ""
    word_delimiter_token: str = ""
    pattern: dict[str, str] = {}
    content: str = ""
    start: int = 0
    stop: int = 0


def _plan_steps(spec: _DecoderSpec | None) -> list[Callable[[], _Step]] | None:
    """Makers of the steps of a decoder, or None if one of them cannot be streamed. No decoder joins tokens with spaces."""
    if spec is None:
        return [lambda: _Local(str, lambda token: " " + token)]
    makers: list[Callable[[], _Step]] = []
    is_fused = False  # from then on the tokens are parts of one
    for part in _flatten(spec):
        if part.type == "Fuse":
            is_fused = True
            continue
        maker = _fused_step(part) if is_fused else _token_step(part)
        if maker is None:
            return None
        makers.append(maker)
        is_fused = is_fused or part.type == "ByteLevel"
    return makers


def _flatten(spec: _DecoderSpec) -> list[_DecoderSpec]:
    return [part for inner in spec.decoders for part in _flatten(inner)] if spec.type == "Sequence" else [spec]


def _fused_step(spec: _DecoderSpec) -> Callable[[], _Step] | None:
    """Maker of a step over one text that comes in parts; None if it must see the whole."""
    if spec.type == "Strip":
        return lambda: _FusedStrip(spec.content, spec.start, spec.stop)
    if spec.type == "Replace" and spec.pattern.get("String"):
        return lambda: _FusedReplace(spec.pattern["String"], spec.content)
    return None


def _token_step(spec: _DecoderSpec) -> Callable[[], _Step] | None:
    """Maker of a step over a list of tokens; None for a decoder that is not known here."""
    if spec.type == "ByteLevel":
        return _ByteLevel
    if spec.type == "ByteFallback":
        return _ByteFallback
    if spec.type == "BPEDecoder":
        return lambda: _WordEnds(spec.suffix)
    if spec.type == "Strip":  # the library's own stops the process at a token shorter than `stop`
        return lambda: _Local(lambda token: _strip(spec, token), lambda token: _strip(spec, token))
    library = _library_decoder(spec)
    if library is None:
        return None
    if spec.type == "CTC":
        return lambda: _Distinct(lambda token: library.decode([token]))
    if spec.type in ("WordPiece", "Metaspace"):  # the library's rule for a token that is not the first: behind a letter
        return lambda: _Local(lambda token: library.decode([token]), lambda token: library.decode(["a", token])[1:])
    return lambda: _Local(lambda token: library.decode([token]), lambda token: library.decode([token]))


def _strip(spec: _DecoderSpec, token: str) -> str:
    return "".join(_FusedStrip(spec.content, spec.start, spec.stop).push([token]))


def _library_decoder(spec: _DecoderSpec) -> decoders.Decoder | None:
    """The library's decoder of a type that treats tokens one by one; None if the type is not known here."""
    match spec.type:
        case "WordPiece":
            return decoders.WordPiece(spec.prefix, spec.cleanup)
        case "Metaspace":
            return decoders.Metaspace(spec.replacement, spec.prepend_scheme)
        case "CTC":
            return decoders.CTC(spec.pad_token, spec.word_delimiter_token, spec.cleanup)
        case "Replace" if "String" in spec.pattern:
            return decoders.Replace(spec.pattern["String"], spec.content)
        case "Replace":
            return decoders.Replace(Regex(spec.pattern["Regex"]), spec.content)
    return None
