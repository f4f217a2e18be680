"""A state moved to another arena is an ordinary hit there, byte for byte; whatever is wrong with it is refused in one line."""

import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from lamina.memory import manifest as manifests
from lamina.memory import pieces as cutting
from lamina.memory.landing import Landing, first_missing, open_landing
from lamina.memory.layout import Layout
from lamina.memory.lease import Lease, Wait
from lamina.memory.ledger import Ledger
from lamina.memory.manifest import (
    Manifest,
    MoveError,
    checksums_of,
    decode_manifest,
    encode_manifest,
    make_manifest,
    moved_position,
)
from lamina.memory.pieces import pack_piece, pieces
from lamina.memory.segments import segments, wire_bytes
from lamina.memory.tokens import Prompt
from tests.memory.device import Device
from tests.memory.shapes import logs_only, paged, paged_only, replayed, scans_only, tiny, v4_flash, v4_pro

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "tiny": tiny, "tiny8": lambda: tiny(8), "logs_only": logs_only, "scans_only": scans_only, "paged": paged,
    "paged_only": paged_only, "replayed": replayed, "tiny_drafts": lambda: tiny(draft_tokens=3),
    "paged_drafts": lambda: paged(draft_tokens=7),
}  # fmt: skip
KIB, MIB = 1024, 1024 * 1024


class Side:
    """A ledger and the bytes that it speaks of."""

    def __init__(self, layout: Layout, num_pages: int = 28, model_id: str = "m") -> None:
        self.layout = layout
        self.ledger = Ledger(layout, num_pages, model_id)
        self.device = Device(layout, num_pages)

    def run(self) -> None:
        for order in self.ledger.take_orders():
            self.device.execute(order)

    def admit(self, tokens: Sequence[int]) -> Lease:
        lease = self.ledger.admit(tokens, 8)
        assert isinstance(lease, Lease), lease
        self.run()
        return lease

    def compute(self, tokens: Sequence[int], step: int = 3) -> None:
        """A request that ends where its prompt does."""
        lease = self.admit(tokens)
        while lease.position < len(tokens):
            start = lease.position
            assert self.ledger.extend(lease, min(step, len(tokens) - start))
            self.device.compute("", tokens, start, lease.position, lease.blocks, lease.slot, lease)
            self.ledger.commit(lease, tokens[start : lease.position])
        self.ledger.finish(lease)
        self.run()

    def read(self, page: int) -> memoryview:
        return memoryview(self.device.pages[page])

    def write(self, page: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        self.device.pages[page] = 0xAA  # what lies between is lost
        for offset, data in parts:
            self.device.pages[page, offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        return self.ledger.prompt(list(tokens))

    def message(self, tokens: Sequence[int], first: int) -> tuple[Manifest, list[tuple[str, int, int | None, bytes, bytes]]]:
        """What travels: the manifest, then each piece."""
        prompt = self.prompt(tokens)
        held = self.ledger.hold(prompt)
        assert held is not None and held.position == len(tokens)
        found = []
        for piece in pieces(self.layout, len(tokens), True, first):
            pages: Sequence[int] = held.checkpoint
            if piece.kind == cutting.BLOCK:
                pages = (held.blocks[piece.number],)
            elif piece.tail is not None:
                pages = held.tails[piece.tail][piece.number]
            body = pack_piece(self.read, pages, piece)
            found.append((piece.kind, piece.number, piece.tail, checksums_of(piece, body), body))
        self.ledger.release(held)
        return make_manifest(self.layout, "m", prompt, first), found

    def check_hit(self, tokens: Sequence[int], hit: int) -> None:
        """A request for these tokens computes nothing before `hit`, and everything that it goes on from is right."""
        lease = self.admit(tokens)
        assert lease.position == lease.hit.position == hit, lease.hit.why
        self.device.check_log("", tokens, hit, lease.blocks)
        if hit == len(tokens):
            self.device.check_slot("", tokens, hit, lease.slot, False)
            self.device.check_tails("", tokens, hit, lease.tails)
        self.ledger.cancel(lease)
        self.ledger.check()
        self.ledger.drop_index()
        assert self.ledger.free_pages == self.ledger.num_pages, "I6: pages are lost"


def land(here: Side, there: Side, tokens: Sequence[int], seen: Callable[[Landing, int], None] | None = None) -> int:
    """Moves the state of all tokens; the bytes that went."""
    prompt = there.prompt(tokens)
    first = first_missing(there.ledger, prompt)
    if first is None:
        return 0
    manifest, message = here.message(tokens, first)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    landing = open_landing(there.ledger, prompt, manifest, "landing")
    assert isinstance(landing, Landing)
    there.run()
    for at, part in enumerate(message):
        if seen is not None:
            seen(landing, at)
        landing.take(*part, there.write)
        there.ledger.check()
    landing.finish()
    there.run()
    there.ledger.check()
    assert sum(len(part[4]) for part in message) == manifest.nbytes
    return manifest.nbytes


@pytest.mark.parametrize(
    ("name", "lengths"),
    [pytest.param(name, range(1, 40), marks=pytest.mark.long, id=f"{name}-all") for name in LAYOUTS]
    + [pytest.param(name, (1, 2, 3, 4, 5, 8, 9, 13, 18), id=name) for name in LAYOUTS],
)
def test_a_moved_state_is_an_ordinary_hit(name: str, lengths: Sequence[int]) -> None:
    """I13, with every prefix that the receiver may have before: none, part of a block, some blocks, all of it."""
    layout = LAYOUTS[name]()
    for length in lengths:
        tokens = [at * 5 % 7 for at in range(length)]
        for known in sorted({0, length // 2, length}):
            here, there = Side(layout), Side(layout)
            here.compute([3, 3, 3, 3, 3], 2)  # page ids have nothing in common
            here.compute(tokens)
            if known:
                there.compute(tokens[:known], 5)
            position = moved_position(layout, length)
            moved = land(here, there, tokens[:position]) if position else 0
            if not known and position:
                assert moved == sum(layout.live_bytes(position).values()), "what is not live has moved"
            there.check_hit(tokens, max(position, there.ledger.longest(tokens).position))


@pytest.mark.parametrize("name", ["tiny", "replayed", "paged", "logs_only"])
def test_what_breaks_off_leaves_no_page_behind(name: str) -> None:
    """At every piece: whole blocks may stay, everything else is free, and what is hit afterwards is right."""
    layout = LAYOUTS[name]()
    tokens = [at * 3 % 5 for at in range(21)]
    position = moved_position(layout, len(tokens))
    here = Side(layout)
    here.compute(tokens)
    manifest, message = here.message(tokens[:position], 0)
    for stop in range(len(message)):
        there = Side(layout)
        landing = open_landing(there.ledger, there.prompt(tokens[:position]), manifest, "")
        assert isinstance(landing, Landing)
        for part in message[:stop]:
            landing.take(*part, there.write)
        if stop % 2:
            landing.cancel()
        else:
            with pytest.raises(MoveError, match="ended before"):
                landing.finish()
        there.ledger.check()
        assert there.ledger.pages().total == there.ledger.pages().free + there.ledger.pages().cached
        there.check_hit(tokens, there.ledger.longest(tokens).position)


def test_each_wrong_byte_of_a_piece_is_noticed_before_it_is_written() -> None:
    here, there = Side(tiny()), Side(tiny())
    tokens, rng = [at % 7 for at in range(11)], random.Random(1)
    here.compute(tokens)
    manifest, message = here.message(tokens, 0)
    landing = open_landing(there.ledger, there.prompt(tokens), manifest, "")
    assert isinstance(landing, Landing)
    before = there.device.pages.copy()
    for part in message:
        kind, number, tail, checksums, body = part
        at = rng.randrange(len(body))
        wrong = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        others = checksums[:-1] + bytes([checksums[-1] ^ 128])
        for bad in (
            (kind, number, tail, checksums, wrong), (kind, number, tail, others, body), (kind, number, tail, checksums[8:], body),
            (kind, number, tail, checksums, body[:-1]), (kind, number, tail, checksums, body + b"x"),
            (kind, number + 1, tail, checksums, body), ("what", number, tail, checksums, body),
        ):  # fmt: skip
            with pytest.raises(MoveError) as caught:
                landing.take(*bad, there.write)
            assert "\n" not in str(caught.value)
            assert (there.device.pages == before).all()
        landing.take(*part, there.write)
        before = there.device.pages.copy()
    with pytest.raises(MoveError, match="nothing more is next"):
        landing.take(*message[0], there.write)
    landing.finish()
    there.check_hit(tokens, len(tokens))


def _changed(manifest: Manifest, **fields: object) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def test_a_manifest_that_differs_is_refused_before_anything_is_allocated() -> None:
    here, tokens = Side(tiny()), [at % 7 for at in range(11)]
    here.compute(tokens)
    good, _ = here.message(tokens, 0)
    head, *rest = good.pieces
    without = _changed(head, fields=head.fields[1:])
    longer = _changed(head, fields=(_changed(head.fields[0], nbytes=1 << 40), *head.fields[1:]))
    other = _changed(head, fields=(*head.fields, _changed(head.fields[0], memory="c9")))
    cases = {
        r"version=2 is not taken: version=1": _changed(good, version=2), "model_id=other": _changed(good, model_id="other"),
        "layout_id=": _changed(good, layout_id="f" * 32), "checksum=none": _changed(good, checksum="none"),
        "position=12": _changed(good, position=12), "tokens=00": _changed(good, tokens=bytes(16)),
        "from block 9 on": _changed(good, first_block=9), "from block -1 on": _changed(good, first_block=-1),
        rf"without {head.fields[0].memory}.{head.fields[0].field} of layer": _changed(good, pieces=(without, *rest)),
        "1099511627776 bytes of": _changed(good, pieces=(longer, *rest)), r"with c9\.": _changed(good, pieces=(other, *rest)),
        "kinds of pieces": _changed(good, pieces=(_changed(head, count=1 << 40), *rest)),
        "of 5 bytes": _changed(good, nbytes=5),
    }  # fmt: skip
    there = Side(tiny())
    for text, bad in cases.items():
        with pytest.raises(MoveError, match=text) as caught:
            open_landing(there.ledger, there.prompt(tokens), decode_manifest(encode_manifest(bad)), "")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
        assert there.ledger.free_pages == there.ledger.num_pages
    data = encode_manifest(good)
    for cut in (b"", b"\xc1", data[:-1], data[1:], b"\x93" * 200, data.replace(b"version", b"versiom")):
        with pytest.raises(MoveError):
            decode_manifest(cut)


def test_a_state_waits_for_room_or_is_too_large() -> None:
    here, tokens = Side(tiny()), [at % 7 for at in range(17)]
    here.compute(tokens)
    manifest, _ = here.message(tokens, 0)
    small = Side(tiny(), 4)
    with pytest.raises(MoveError, match="17 tokens is not taken"):
        open_landing(small.ledger, small.prompt(tokens), manifest, "")
    assert small.ledger.free_pages == 4
    full = Side(tiny(), 9)
    lease = full.admit([5] * 12)
    assert isinstance(open_landing(full.ledger, full.prompt(tokens), manifest, ""), Wait)
    full.ledger.cancel(lease)
    assert isinstance(open_landing(full.ledger, full.prompt(tokens), manifest, ""), Landing)


def test_blocks_that_went_meanwhile_are_missed() -> None:
    here, there, tokens = Side(replayed()), Side(replayed()), [at % 7 for at in range(17)]
    here.compute(tokens)
    there.compute(tokens[:12])
    first = first_missing(there.ledger, there.prompt(tokens))
    assert first == 6
    manifest, _ = here.message(tokens, first)
    there.ledger.drop_index()
    with pytest.raises(MoveError, match="are not here any more"):
        open_landing(there.ledger, there.prompt(tokens), manifest, "")
    assert there.ledger.free_pages == there.ledger.num_pages


@pytest.mark.parametrize(
    ("tokens", "most"), [(1 * KIB, 10 * MIB), (4 * KIB, 25 * MIB), (32 * KIB, 163 * MIB), (KIB * KIB, int(4.93 * KIB * MIB))]
)
def test_bytes_on_the_wire(tokens: int, most: int) -> None:
    """Of the large model with fp8 entries and an fp4 index: manifest, checksums and all."""
    layout = v4_pro()
    wire = 0
    for piece in pieces(layout, tokens, True):
        wire += piece.nbytes + 8 * len(piece.parts) + 100
    ledger = Ledger(layout, 1, "m")
    manifest = encode_manifest(make_manifest(layout, "m", ledger.prompt([0] * tokens)))
    assert wire + len(manifest) <= most, (wire + len(manifest)) / MIB
    if tokens <= 4 * KIB:
        assert sum(piece.nbytes for piece in pieces(layout, tokens, True)) == wire_bytes(segments(layout, tokens))


@pytest.mark.parametrize("position", [1, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000])
def test_pieces_are_the_segments(position: int) -> None:
    """Nothing is left out and nothing comes twice, from any block on, frozen or not."""
    layout = v4_flash()
    for first in (0, 1, 3):
        for frozen in (False, True):
            found = [
                (part.layer, part.memory, part.field, piece.number if piece.kind == "block" else None, part.offset, part.nbytes)
                for piece in pieces(layout, position, frozen, first)
                for part in piece.parts
            ]
            wanted = segments(layout, position, frozen, first)
            assert found == [(s.layer, s.memory, s.field, s.block, s.offset, s.nbytes) for s in wanted]


def _skips_the_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lamina.memory.landing.check_piece", lambda piece, checksums, body: None)


def _trusts_the_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lamina.memory.landing.check_manifest", lambda found, expected: None)


def _forgets_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manifests, "tokens_key", lambda prompt: bytes(16))


def _keeps_a_broken_landing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "cancel", lambda self: None)


def _packs_the_slot_as_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    real = cutting.pieces
    patch.setattr("lamina.memory.landing.pieces", lambda layout, position, frozen, first: real(layout, position, True, first))


def _sends_a_block_too_few(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lamina.memory.landing.first_missing", lambda ledger, prompt: 0)
    real = cutting.unpack_piece
    patch.setattr(
        "lamina.memory.landing.unpack_piece", lambda w, pages, piece, body: piece.number == 1 or real(w, pages, piece, body)
    )


NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    _skips_the_checksums: test_each_wrong_byte_of_a_piece_is_noticed_before_it_is_written,
    _trusts_the_manifest: test_a_manifest_that_differs_is_refused_before_anything_is_allocated,
    _forgets_the_salt: test_a_manifest_that_differs_is_refused_before_anything_is_allocated,
    _keeps_a_broken_landing: lambda: test_what_breaks_off_leaves_no_page_behind("tiny"),
    _packs_the_slot_as_a_checkpoint: lambda: test_a_moved_state_is_an_ordinary_hit("tiny_drafts", (9, 13)),
    _sends_a_block_too_few: lambda: test_a_moved_state_is_an_ordinary_hit("tiny", (9, 13)),
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_faults_are_noticed(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, MoveError, pytest.fail.Exception)):
        NOTICED_BY[fault]()
