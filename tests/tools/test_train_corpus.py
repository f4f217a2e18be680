"""The corpus' preparation: what is prose, what is held out, how packages are opened. No download, no package needed."""

import io
import lzma
import random
import struct
import tarfile
import zlib
from pathlib import Path

import pytest

from tools.train_tiny.clean import html_paragraphs, is_prose, osis_paragraphs, plain
from tools.train_tiny.corpus import VAL_SHARE, WHOLE, split
from tools.train_tiny.fetch import Package, PackageError, check, fetch, members, read_table
from tools.train_tiny.sources import SOURCES, Document, Source, r_novels, sword_books

PAGE = """<html><head><title>Locks - Manual</title></head><body><nav>Next: Keys</nav><h1>Locks</h1>
<p>A lock keeps two tasks from <code>writing</code> at once.</p><pre>lock.acquire()</pre><table><tr><td>x</td></tr></table>
<div class="sphinxsidebar"><p>Search here.</p></div><dl><dt>acquire()</dt><dd><p>Waits until it is free.</p></dd></dl></body>"""
PROSE = "The old man went down to the harbour, and there he waited for the ship that had been promised to him in the spring."


def test_pages_lose_everything_but_prose() -> None:
    title, paragraphs = html_paragraphs(PAGE)
    assert title == "Locks"
    assert paragraphs == ["A lock keeps two tasks from writing at once.", "Waits until it is free."]
    osis = (
        '<title>Ruth</title><div type="x-p"/>In the days of <note>1:1 or judges</note> old , a man went.<div type="x-p"/>He came.'
    )
    assert osis_paragraphs(osis) == ["In the days of old, a man went.", "He came."]
    assert plain("\u201cIt\u2019s  na\u00efve\u2014so\u2026\u201d _he_ said [12] .") == '"It\'s naive - so..." he said.'


@pytest.mark.parametrize(
    ("text", "manual", "expected"),
    [
        (PROSE, True, True),
        (PROSE, False, True),
        ('"No."', False, True),
        ('"No."', True, False),
        ("Set max_wal_size and use foo.bar() or a::b as x = y + 1 in the file that is at https://x.org/y.", True, False),
        ("Montreal Toronto Ottawa Vancouver Calgary Edmonton Winnipeg Quebec Hamilton Kitchener London Halifax", False, False),
    ],
)  # fmt: skip
def test_prose(text: str, manual: bool, expected: bool) -> None:
    assert is_prose(text, manual) is expected


def test_nothing_held_out_is_trained_on() -> None:
    rng = random.Random(1)
    sentences = [f"{PROSE} It was {rng.choice('abcdefgh') * (i + 1)} again." for i in range(40)]
    short = [Document("s", f"t{i}", "novel", (*rng.sample(sentences, 6), f"only {'x' * i} here " * 20)) for i in range(300)]
    long = Document("l", "long", "novel", tuple(f"{PROSE} {'y' * i}" for i in range(3000)))
    assert long.characters > WHOLE
    train, val = split([*short, long])
    seen = {paragraph for document in train for paragraph in document.paragraphs}
    held = [paragraph for document in val for paragraph in document.paragraphs]
    assert held and seen.isdisjoint(held) and len(held) == len(set(held))
    tail = next(document for document in val if document.source == "l")
    assert tail.paragraphs == long.paragraphs[-len(tail.paragraphs) :]
    assert VAL_SHARE <= tail.characters / long.characters < 2 * VAL_SHARE
    assert 0 < sum(document.source == "s" for document in val) < 30


def _deb(path: Path, files: dict[str, bytes]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"abc", "data.tar.xz": lzma.compress(data.getvalue())}
    ar = b"!<arch>\n"
    for name, content in parts.items():
        ar += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
    path.write_bytes(ar)


def test_packages_are_opened_and_checked(tmp_path: Path) -> None:
    lines = ["A SHORT BOOK", "", "Chapter 1", "", *[word for word in PROSE.split()], "", PROSE.replace("old", "young")]
    strings = b"".join(struct.pack(">ii", 9, len(line)) + line.encode() for line in lines)
    r_data = b"X\n" + struct.pack(">iiii", 3, 0, 0, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines)) + strings
    packed = zlib.compress(r_data)
    block = f'<title type="main">Ruth</title><div type="x-p"/>{PROSE}<div type="x-p"/>{PROSE.replace("man", "woman")}'.encode()
    zipped = zlib.compress(block)
    path = tmp_path / "book_1-1_all.deb"
    _deb(path, {
        "./a/Rdata.rdb": struct.pack(">i", len(r_data)) + packed,
        "./a/ot.bzs": struct.pack("<III", 0, len(zipped), len(block)), "./a/ot.bzz": zipped,
    })  # fmt: skip
    assert [name for name, _ in members(path, r"\.bz")] == ["./a/ot.bzs", "./a/ot.bzz"]
    (novel,) = r_novels(Source("book", "novel", r"\.rdb$", r_novels), path)
    assert (novel.title, novel.paragraphs) == ("A Short Book", (PROSE, PROSE.replace("old", "young")))
    (ruth,) = sword_books(Source("book", "scripture", r"\.bz[sz]$", sword_books), path)
    assert (ruth.title, ruth.paragraphs) == ("Ruth", (PROSE, PROSE.replace("man", "woman")))
    package = Package("deb", "book", "1-1", "public domain", path.stat().st_size, "0" * 64)
    with pytest.raises(PackageError, match=r"book: book_1-1_all\.deb has .* sha256 000"):
        check(package, path)
    assert fetch(package, tmp_path, any_version=True) == path


def test_every_source_has_its_row() -> None:
    assert {source.package for source in SOURCES} == set(read_table())
