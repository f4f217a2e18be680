"""What a moved state says of itself, before any of its bytes: a versioned record that a receiver compares with its own.

A state moves in pieces: a block, a block of a large window, or the slot, each with its fields one after the other and a
checksum for each of them. The manifest comes first and lists every piece with every field; it follows from the layout, the
position and the tokens alone, so that blocks can follow while the rest is still being computed, and a receiver knows what to
expect before it allocates a byte. Page ids never travel. Nothing here knows whether a socket, a file or the host's memory is
at the other end.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from lamina.base.errors import LaminaError
from lamina.memory.layout import Layout
from lamina.memory.pieces import Piece, pieces
from lamina.memory.segments import Segment
from lamina.memory.tokens import TOKEN_BYTES, Prompt, block_key

VERSION = 1
#: how segments are checked: BLAKE2b of 8 bytes
CHECKSUM = "blake2b-64"
_DIGEST_BYTES = 8
#: of an encoded manifest; a receiver reads no larger one
MOST_MANIFEST_BYTES = 8 * 1024 * 1024


class MoveError(LaminaError, ValueError):
    """A moved state that is not taken: one line that says why. The receiver computes instead."""


class FieldRow(msgspec.Struct, frozen=True, array_like=True):
    """One field of one memory in a piece. format  dtype and shape of a row.   offset, nbytes  where its rows lie in the piece."""

    layer: int
    memory: str
    field: str
    format: str
    offset: int
    nbytes: int


class PieceRow(msgspec.Struct, frozen=True, array_like=True):
    """`count` pieces that follow each other and have the same fields. kind, number, tail  of the first, as in Piece."""

    kind: str
    number: int
    tail: int | None
    count: int
    nbytes: int
    fields: tuple[FieldRow, ...]


class Manifest(msgspec.Struct, frozen=True):
    """All that is known of a state before its bytes.

    tokens       a key over ids, cache_salt and the tokens whose state it is.   position  how many these are.
    first_block  blocks before this one are at the receiver already.   nbytes  of all pieces.
    """

    version: int
    layout_id: str
    model_id: str
    checksum: str
    position: int
    first_block: int
    tokens: bytes
    nbytes: int
    pieces: tuple[PieceRow, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)


def moved_position(layout: Layout, num_tokens: int) -> int:
    """The position whose state is worth moving for a prompt: its end, or its last whole block where there is nothing but logs.

    0 where a prompt's last token is always computed although there is more than logs: no checkpoint would serve that.
    """
    if layout.has_state:
        return num_tokens if layout.hidden is not None and layout.slot_pages else 0
    return max(0, num_tokens - 1) // layout.block_tokens * layout.block_tokens


def tokens_key(prompt: Prompt) -> bytes:
    """A key over both ids, the cache_salt and all tokens."""
    tail = prompt.block(prompt.num_blocks)
    assert len(tail) % TOKEN_BYTES == 0
    return block_key(prompt.key(prompt.num_blocks), tail + len(tail).to_bytes(4, "little"))


def make_manifest(layout: Layout, model_id: str, prompt: Prompt, first_block: int = 0) -> Manifest:
    """The manifest of the state after all tokens of `prompt`."""
    position = len(prompt)
    rows = tuple(_rows(pieces(layout, position, True, first_block)))
    nbytes = sum(row.count * row.nbytes for row in rows)
    return Manifest(VERSION, layout.layout_id, model_id, CHECKSUM, position, first_block, tokens_key(prompt), nbytes, rows)


def encode_manifest(manifest: Manifest) -> bytes:
    """As it travels."""
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Raises MoveError for what is none."""
    if len(data) > MOST_MANIFEST_BYTES:
        raise MoveError(f"the manifest has {len(data)} bytes, at most {MOST_MANIFEST_BYTES} are read")
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MoveError(f"the manifest cannot be read: {error}") from None


def check_manifest(found: Manifest, expected: Manifest) -> None:
    """Raises MoveError, in one line that names the first difference, unless both say the same."""
    for name, ours, theirs in (
        ("version", expected.version, found.version), ("model_id", expected.model_id, found.model_id),
        ("layout_id", expected.layout_id, found.layout_id), ("checksum", expected.checksum, found.checksum),
        ("position", expected.position, found.position), ("tokens", expected.tokens.hex(), found.tokens.hex()),
        ("first_block", expected.first_block, found.first_block),
    ):  # fmt: skip
        if ours != theirs:
            raise MoveError(f"a state with {name}={theirs} is not taken: {name}={ours} is needed")
    if found == expected:
        return
    ours_of, theirs_of = _by_field(expected.pieces), _by_field(found.pieces)
    for key, row in ours_of.items():
        other = theirs_of.get(key)
        if other is None:
            raise MoveError(f"a state without {_name(key)} is not taken: {row.nbytes} bytes of {row.format} are needed")
        if other != row:
            raise MoveError(
                f"a state whose {_name(key)} has {other.nbytes} bytes of {other.format} from byte {other.offset} is not taken: "
                f"{row.nbytes} of {row.format} from {row.offset} are needed"
            )
    extra = next((key for key in theirs_of if key not in ours_of), None)
    if extra is not None:
        raise MoveError(f"a state with {_name(extra)} is not taken: there is no such memory here")
    raise MoveError(
        f"a state of {found.nbytes} bytes in {len(found.pieces)} kinds of pieces is not taken: {expected.nbytes} bytes "
        f"in {len(expected.pieces)} are needed"
    )


def checksums_of(piece: Piece, body: bytes | memoryview) -> bytes:
    """The checksums of a piece's segments, one after the other."""
    view = memoryview(body)
    return b"".join(_digest(view[part.wire_offset : part.wire_offset + part.nbytes]) for part in piece.parts)


def check_piece(piece: Piece, checksums: bytes, body: bytes | memoryview) -> None:
    """Raises MoveError unless a piece has its size and every segment its checksum."""
    if len(body) != piece.nbytes:
        raise MoveError(f"{piece.name} has {len(body)} bytes: {piece.nbytes} are needed")
    if len(checksums) != _DIGEST_BYTES * len(piece.parts):
        raise MoveError(f"{piece.name} has {len(checksums)} bytes of checksums: {_DIGEST_BYTES * len(piece.parts)} are needed")
    found = checksums_of(piece, body)
    if found != checksums:
        at = next(i for i in range(len(piece.parts)) if found[8 * i : 8 * i + 8] != checksums[8 * i : 8 * i + 8])
        part = piece.parts[at]
        raise MoveError(f"the checksum of {part.memory}.{part.field} of layer {part.layer} in {piece.name} is wrong")


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _rows(found: Iterator[Piece]) -> Iterator[PieceRow]:
    """The pieces, those that follow each other and are alike in one row."""
    row: PieceRow | None = None
    last: Sequence[Segment] = ()
    for piece in found:
        if row is not None and piece.parts is last:
            row = PieceRow(row.kind, row.number, row.tail, row.count + 1, row.nbytes, row.fields)
            continue
        if row is not None:
            yield row
        last = piece.parts
        fields = tuple(FieldRow(p.layer, p.memory, p.field, p.format, p.wire_offset, p.nbytes) for p in piece.parts)
        row = PieceRow(piece.kind, piece.number, piece.tail, 1, piece.nbytes, fields)
    if row is not None:
        yield row


_Key = tuple[str, int, int | None, int, str, str]


def _by_field(rows: Sequence[PieceRow]) -> dict[_Key, FieldRow]:
    """Every field by the piece, or the first of several, that it is in."""
    return {
        (row.kind, row.number, row.tail, field.layer, field.memory, field.field): field for row in rows for field in row.fields
    }


def _name(key: _Key) -> str:
    kind, number, _, layer, memory, field = key
    where = kind if kind == "slot" else f"{kind} {number}"
    return f"{memory}.{field} of layer {layer} in {where}"
