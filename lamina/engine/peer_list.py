"""The addresses of the engines that compute prompts: as they are given, in a file or behind a URL that is read again."""

import logging
import threading
import time
import urllib.request
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.base.peers import is_near
from lamina.engine.peer_channel import parse_address

_LOG = get_logger(__name__)
_READ_S = 2.0
_FETCH_S = 2.0
_MOST_BYTES = 256 * 1024
_MOST_PEERS = 1024


class PeerList:
    """has_key  without one only addresses of this machine count. `addresses` may be asked from any thread."""

    def __init__(self, source: str, has_key: bool) -> None:
        self._source = source
        self._has_key = has_key
        self._found: tuple[str, ...] = ()
        self._complaint = ""
        self._stop = threading.Event()
        is_url = source.startswith(("http://", "https://"))
        self._path = None if is_url or all(":" in one for one in source.split(",")) else Path(source)
        if not is_url and self._path is None:
            self._found = self._checked(source.replace(",", "\n"), strict=True)
            return
        if self._path is not None:
            self._found = self._checked(self._read(), strict=True)
        threading.Thread(target=self._follow, name="peer-list", daemon=True).start()

    @property
    def addresses(self) -> tuple[str, ...]:
        """As they were read last."""
        return self._found

    def close(self) -> None:
        """Reads them no more."""
        self._stop.set()

    def _read(self) -> str:
        """The text now. Raises ConfigError."""
        try:
            if self._path is not None:
                with self._path.open("rb") as file:
                    return file.read(_MOST_BYTES).decode()
            with urllib.request.urlopen(self._source, timeout=_FETCH_S) as answer:
                text: bytes = answer.read(_MOST_BYTES)
                return text.decode()
        except (OSError, ValueError) as error:
            raise ConfigError("peers", self._source, f"a file or URL that can be read ({error})") from None

    def _checked(self, text: str, strict: bool) -> tuple[str, ...]:
        """The addresses in a text, one a line."""
        found = []
        for line in text.splitlines()[:_MOST_PEERS]:
            address = line.partition("#")[0].strip()
            if not address:
                continue
            try:
                parse_address(address)
                if not self._has_key and not is_near(address):
                    raise ConfigError("peers", address, "on this machine, or give --peer-key-file")
            except ConfigError as error:
                if strict:
                    raise
                self._complain(str(error))
                continue
            found.append(address)
        return tuple(dict.fromkeys(found))

    def _follow(self) -> None:
        while True:
            try:
                self._found = self._checked(self._read(), strict=False)
            except ConfigError as error:  # those that were known before stay
                self._complain(str(error))
            if self._stop.wait(_READ_S):
                return

    def _complain(self, text: str) -> None:
        """Once, until it is something else."""
        if text != self._complaint:
            self._complaint = text
            event(_LOG, "peers_not_read", logging.WARNING, why=text, at=round(time.time()))
