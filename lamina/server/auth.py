"""Who may ask: API keys, and what a browser may be used for."""

import base64
import binascii
import hmac
import ipaddress
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.server.settings import ServerSettings

#: answers that need no key: whether the server lives, its version, and what there is to ask for
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
#: pages for a browser, which asks its user for the key (any name, the key as the password)
BROWSER_PATHS = ("/docs", "/openapi.json")
#: the web page and what is below it: it asks for the key itself, and shows nothing of the server before
PAGE_PATH = "/ui"
_MIN_KEY_CHARS = 8


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line, and of LAMINA_API_KEY. Raises ConfigError for a short or unprintable one, and for none."""
    keys: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("api_key_file", str(path), f"a readable UTF-8 file ({error})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError("api_key_file", str(path), "at least one key, one a line")
    from_environment = os.environ.get("LAMINA_API_KEY", "").strip()
    if from_environment:
        keys.append(from_environment)
    for number, key in enumerate(keys, start=1):
        if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("api_key", f"number {number}", f"at least {_MIN_KEY_CHARS} printable ASCII characters, no space")
    return tuple(dict.fromkeys(keys))


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def find_key(settings: ServerSettings, headers: Iterable[tuple[bytes, bytes]], path: str) -> str | None:
    """The key that a request brings, if it is one of ours: `Authorization: Bearer`, `x-api-key`; for pages also Basic.

    Takes as long whichever key it is, and however much of it is right.
    """
    given: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            if scheme.lower() == b"bearer":
                given.append(rest.strip())
            elif scheme.lower() == b"basic" and is_for_browsers(path):
                given.append(_password(rest.strip()))
        elif name == b"x-api-key":
            given.append(value.strip())
    found = None
    for one in given[:2]:
        for key in settings.api_keys:
            if hmac.compare_digest(one, key.encode()):
                found = key
    return found


def is_operator(settings: ServerSettings, key: str | None) -> bool:
    """Whether a key may see and change what other keys' requests have left: the first one; every one where they are not kept
    apart."""
    return not settings.salt_by_api_key or key == settings.api_keys[0]


def is_for_browsers(path: str) -> bool:
    """Whether a path is a page or belongs to one."""
    return any(path == start or path.startswith(start + "/") for start in BROWSER_PATHS)


def needs_key(path: str) -> bool:
    """Whether a request for a path must bring a key."""
    return path not in OPEN_PATHS and path != PAGE_PATH and not path.startswith(PAGE_PATH + "/")


def _password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_own_origin(settings: ServerSettings, origin: str, host: str) -> bool:
    """Whether a page of `origin` may call: those that were allowed, and the server's own."""
    if "*" in settings.allow_origins or origin in settings.allow_origins:
        return True
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest == host


def is_allowed_host(settings: ServerSettings, host: str) -> bool:
    """Whether a Host header is one of ours. Where neither a key nor a network keeps strangers out, a name that somebody made
    point to this machine must not let a web page in."""
    if settings.api_keys or not is_loopback(settings.host):
        return True
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]").lower().rstrip(".")
    return name in ("", "localhost") or name.endswith(".localhost") or name in settings.allow_hosts or _is_ip(name)


@lru_cache(maxsize=256)
def _is_ip(name: str) -> bool:
    """Whether a name is an address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
