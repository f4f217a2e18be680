"""The C kernels of the ops (`*/native.c`), compiled for this machine when they are first wanted, and kept.

    library()       their functions, or None
    why_not()       why there are none, in one line
    address(x)      where a tensor's numbers lie, for a call

They need a C compiler (`cc`, or what CC names); without one, or with LAMINA_NATIVE=0, the definitions in PyTorch run instead.
What is compiled lies under LAMINA_CACHE, else XDG_CACHE_HOME/lamina, else ~/.cache/lamina, in a directory that is the user's
alone, and is named by a hash of the sources, the compiler and the machine's instructions; its last bytes are a hash of the rest,
so that one that was cut short is never loaded.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lamina.base.log import event, get_logger

_LOG = get_logger(__name__)
_SOURCES = Path(__file__).parent
_USUAL = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
#: tried one after another
_FLAGS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
)
_COMPILE_S = 120
_DIGEST_BYTES = 16
#: arguments of each function: p an address, i a 64-bit number, b an int, f a float
_ARGUMENTS = {
    "lamina_set_threads": "bi",
    "lamina_panel": "",
    "lamina_pack": "piip",
    "lamina_linear": "piiipippib",
    "lamina_norm": "piipfbpb",
    "lamina_join": "ppiibpfbffpb",
    "lamina_gated": "piibbfpb",
    "lamina_project": "ppiippppppp",
    "lamina_gate": "ppib",
    "lamina_keep": "ipppipppp",
    "lamina_attend": "pppppipiiip",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "b": ctypes.c_int, "f": ctypes.c_float}


@dataclass(frozen=True, slots=True)
class _Found:
    library: ctypes.CDLL | None
    why_not: str | None


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where there is no compiler or they are not wanted."""
    return _found().library


def why_not() -> str | None:
    """Why there are no compiled functions, in one line; None where there are."""
    return _found().why_not


def use_threads(count: int) -> None:
    """How many threads the functions work with from now on."""
    found = library()
    if found is not None:
        found.lamina_set_threads(count, _least_work())


def _least_work() -> int:
    """Multiply-adds from which on threads share them: those that sleep take 50 us to wake, those that spin 1."""
    return 1 << 23 if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else 1 << 16


def address(x: Tensor | None) -> int | None:
    """Of a tensor's first number; None stays None."""
    return None if x is None else x.data_ptr()


@cache
def _found() -> _Found:
    if os.environ.get("LAMINA_NATIVE") == "0":
        return _Found(None, "LAMINA_NATIVE=0")
    try:
        command = shlex.split(os.environ.get("CC", "cc"))
    except ValueError as error:
        return _Found(None, f"CC is no command: {error}")
    if not command or shutil.which(command[0]) is None:
        return _Found(None, f"there is no C compiler {command[0] if command else 'cc'!r} (CC names another)")
    sources = sorted(_SOURCES.glob("*/native.c"))
    try:
        path = _kept(command, sources)
        loaded = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        event(_LOG, "native_missing", error=str(error))
        return _Found(None, f"the C kernels could not be compiled: {_last_line(error)}")
    for name, letters in _ARGUMENTS.items():
        function = getattr(loaded, name)  # the attribute is kept, an item is not
        function.argtypes, function.restype = [_TYPES[letter] for letter in letters], None
    loaded.lamina_panel.restype = ctypes.c_int64
    loaded.lamina_set_threads(torch.get_num_threads(), _least_work())
    return _Found(loaded, None)


def _last_line(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return text.strip().splitlines()[-1][:200] if text.strip() else type(error).__name__


def _kept(command: list[str], sources: list[Path]) -> Path:
    """The shared object, which is compiled if it is not there. Raises OSError, RuntimeError, SubprocessError."""
    version = _run([*command, "--version"])
    version.check_returncode()
    known = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    facts = repr((command, version.stdout, _machine(), _USUAL, _FLAGS)).encode()
    for part in (*(path.read_bytes() for path in (*sources, _SOURCES / "native.h")), facts):
        known.update(len(part).to_bytes(8, "little") + part)
    directory = _directory()
    path = directory / f"native-{known.hexdigest()}.so"
    if path.exists() and _is_whole(path):
        return path
    handle, name = tempfile.mkstemp(suffix=".so", dir=directory)
    os.close(handle)
    try:
        _compile(command, sources, name)
        _seal(Path(name))
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    event(_LOG, "native_compiled", path=str(path))
    return path


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S, check=False)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _seal(path: Path) -> None:
    """Puts a hash of the file behind it, where the loader does not look."""
    content = path.read_bytes()
    path.write_bytes(content + _digest(content))


def _is_whole(path: Path) -> bool:
    """Whether nothing is missing: what is mapped past the end of a file ends the process that reads it."""
    content = path.read_bytes()
    return _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]


def _compile(command: list[str], sources: list[Path], output: str) -> None:
    errors = []
    for flags in _FLAGS:
        line = [*command, *_USUAL, *flags, f"-I{_SOURCES}", *map(str, sources), "-o", output, "-lm"]
        done = _run(line)
        if done.returncode == 0:
            return
        errors.append(done.stderr)
    raise subprocess.CalledProcessError(1, command, stderr=errors[0])


def _machine() -> str:
    """What decides which instructions the compiler may use."""
    flags = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


def _directory() -> Path:
    """Where compiled objects are kept; raises OSError if others may write there, since what lies there is run."""
    named = os.environ.get("LAMINA_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = Path(named) if named else home / "lamina"
    found.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = found.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{found} is not this user's alone (LAMINA_CACHE names another directory)")
    return found
