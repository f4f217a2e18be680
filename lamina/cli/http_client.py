"""A client of OpenAI's protocol for one question at a time, on the standard library: what `lamina chat` and the start of
`lamina bench` speak with. The records that both read are here too."""

import http.client
import os
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from lamina.base.errors import ConfigError, LaminaError

_URL = "a server's address such as http://127.0.0.1:8000"
_MAX_ANSWER_BYTES = 64 << 20


class ServerError(LaminaError):
    """What a server, or the way to it, answered instead of an answer. status 0: there was none.

    retry_after_s  when to try again, where the server says so.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. base  what stands before /v1 in its paths."""

    host: str
    port: int
    is_tls: bool = False
    base: str = ""

    @property
    def netloc(self) -> str:
        """host:port as a Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' * self.is_tls}://{self.netloc}{self.base}"


def is_address(text: str) -> bool:
    """Whether a text is meant as an address and not as a directory."""
    return "://" in text or re.fullmatch(r"(localhost|[\d.]+|\[[\da-fA-F:]+\])?:\d+(/.*)?", text) is not None


def parse_address(text: str) -> Address:
    """http://host:port, also with /v1 at its end, and short as host:port. Raises ConfigError."""
    whole = text if "://" in text else f"http://{'localhost' * text.startswith(':')}{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError:
        raise ConfigError("url", text, _URL) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ConfigError("url", text, _URL)
    base = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    is_tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if is_tls else 80), is_tls, base)


def read_key(path: Path | None) -> str | None:
    """The first key of a file, else that of LAMINA_API_KEY, else None. Raises ConfigError."""
    if path is None:
        return os.environ.get("LAMINA_API_KEY", "").strip() or None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(path), f"a readable UTF-8 file ({error})") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not keys[0].isascii() or not keys[0].isprintable():
        raise ConfigError("api_key_file", str(path), "a key of printable ASCII characters on its first line")
    return keys[0]


# What comes back, as far as it is read -------------------------------------------------------------------------------


class PromptDetails(Struct):
    """usage.prompt_tokens_details."""

    cached_tokens: int | None = None


class CompletionDetails(Struct):
    """usage.completion_tokens_details."""

    reasoning_tokens: int | None = None


class Memory(Struct):
    """Lamina's usage.memory."""

    held_bytes: dict[str, int] = {}
    prefix_stop: str = ""


class Usage(Struct):
    """usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    memory: Memory | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that were not computed."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int:
        """Of the answer, those that were thoughts."""
        return (self.completion_tokens_details.reasoning_tokens or 0) if self.completion_tokens_details else 0


class FunctionPart(Struct):
    """A piece of a call's function."""

    name: str | None = None
    arguments: str | None = None


class CallPart(Struct):
    """A piece of a call."""

    function: FunctionPart | None = None


class Delta(Struct):
    """choices[].delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPart] | None = None


class ChunkChoice(Struct):
    """choices[] of a chunk of a chat (delta) or of a completion (text)."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class ErrorPart(Struct):
    """What a stream ends with where it breaks off."""

    message: str = ""
    code: str | int | None = None


class Chunk(Struct):
    """A piece of a stream."""

    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    error: ErrorPart | None = None


CHUNKS = msgspec.json.Decoder(Chunk)


class _ErrorBody(Struct):
    error: ErrorPart | str | None = None
    message: str | None = None
    detail: object = None


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class _Count(Struct):
    count: int


def error_text(body: bytes) -> str:
    """The message of an error's body, on one line."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(body[:200].decode("utf-8", "replace").split())
    text = found.error.message if isinstance(found.error, ErrorPart) else found.error
    return " ".join((text or found.message or str(found.detail or "")).split())


def to_error(status: int, body: bytes, retry_after: str | None, address: Address) -> ServerError:
    """The error that an answer is."""
    text = error_text(body)
    wait = float(retry_after) if retry_after is not None and retry_after.isdigit() else None
    match status:
        case 401 | 403:
            text += " (give it with --api-key-file FILE or LAMINA_API_KEY)" * (status == 401)
        case 404 if not text:
            text = f"{address} does not have this path: is it a server of OpenAI's protocol?"
        case 429 | 503:
            text += f" (try again in {wait:g} s)" if wait is not None else " (try again later)"
    return ServerError(f"{status}: {text}", status, wait)


# The client ---------------------------------------------------------------------------------------------------------


class Client:
    """Asks one server, one question at a time, over a connection that is kept. Close it."""

    def __init__(self, address: Address, key: str | None = None, timeout_s: float = 600.0) -> None:
        self.address = address
        self._headers = {"Content-Type": "application/json", "User-Agent": "lamina"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        if address.is_tls:
            context = ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)

    def models(self) -> list[_Model]:
        """What the server serves. Raises ServerError."""
        try:
            return msgspec.json.decode(self._ask("GET", "/v1/models"), type=_Models).data
        except msgspec.DecodeError:
            raise ServerError(f"{self.address} answers /v1/models with something else than a list of models") from None

    def is_ready(self) -> bool:
        """Whether new requests are served; a server without /ready that answers is ready. Raises ServerError if none answers."""
        try:
            self._ask("GET", "/ready")
        except ServerError as error:
            if not error.status:
                raise
            return error.status != 503
        return True

    def count_tokens(self, text: str, model: str) -> int | None:
        """Tokens of a text by the server's /tokenize; None where it has none. Raises ServerError."""
        try:
            return msgspec.json.decode(self._ask("POST", "/tokenize", {"prompt": text, "model": model}), type=_Count).count
        except msgspec.DecodeError:
            return None
        except ServerError as error:
            if error.status in (0, 401, 403):
                raise
            return None

    def stream(self, path: str, value: object) -> Iterator[Chunk]:
        """The chunks of a streamed answer as they come. Raises ServerError; leaving early closes the connection."""
        response = self._send("POST", path, value)
        is_whole = False
        try:
            while line := self._read_line(response):
                if line == b"data: [DONE]":
                    is_whole = True
                    response.read()
                    return
                if line.startswith(b"data:"):
                    chunk = _to_chunk(line[5:])
                    if chunk.error is not None:
                        raise ServerError(f"the answer broke off: {chunk.error.message}")
                    yield chunk
            raise ServerError("the answer broke off: the server closed the connection")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"the answer broke off: {error or type(error).__name__}") from None
        finally:
            if not is_whole:
                self.close()

    def close(self) -> None:
        """Gives the connection up; the next question makes a new one."""
        self._connection.close()

    def _read_line(self, response: http.client.HTTPResponse) -> bytes:
        """The next line that is not empty; b"" at the end."""
        while line := response.readline(_MAX_ANSWER_BYTES):
            if stripped := line.strip():
                return stripped
        return b""

    def _ask(self, method: str, path: str, value: object = None) -> bytes:
        response = self._send(method, path, value)
        try:
            return response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerError(f"{self.address} broke off: {error or type(error).__name__}") from None

    def _send(self, method: str, path: str, value: object = None) -> http.client.HTTPResponse:
        """The answer's head. Raises ServerError for every status but 200, and where there is no server."""
        body = None if value is None else msgspec.json.encode(value)
        for is_last in (False, True):
            is_fresh = self._connection.sock is None
            try:
                self._connection.request(method, self.address.base + path, body, self._headers)
                response = self._connection.getresponse()
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self.close()
                if is_last or is_fresh:  # a kept connection may have been closed by the server meanwhile
                    raise ServerError(f"{self.address} closed the connection ({error})") from None
            except socket.gaierror:
                raise ServerError(f"{self.address}: this host is not known") from None
            except TimeoutError:
                self.close()
                raise ServerError(f"{self.address} does not answer in time") from None
            except ssl.SSLError as error:
                self.close()
                raise ServerError(f"{self.address}: no TLS connection ({error.reason or error})") from None
            except http.client.HTTPException as error:
                self.close()
                raise ServerError(f"{self.address} does not speak HTTP ({type(error).__name__})") from None
            except OSError as error:
                self.close()
                text = f"no server at {self.address} ({error.strerror or error}): start one with `lamina serve`"
                raise ServerError(text) from None
        if response.status != 200:
            said = response.read(1 << 20)
            raise to_error(response.status, said, response.getheader("Retry-After"), self.address)
        return response


def _to_chunk(data: bytes) -> Chunk:
    try:
        return CHUNKS.decode(data)
    except msgspec.DecodeError:
        raise ServerError(f"a chunk of the answer is not what was expected: {data[:100]!r}") from None
