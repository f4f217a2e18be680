"""Bodies of requests: read with a limit, decoded into records, and errors that name the field."""

import asyncio
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lamina.server.census import Census
from lamina.server.errors import ApiError, shown
from lamina.server.state import ServerState

T = TypeVar("T", bound=msgspec.Struct)
P = ParamSpec("P")
R = TypeVar("R")
_LARGE_BYTES = 32 * 1024
_MOST_LARGE = 32  # large bodies in work at once, if each is as large as one may be
_MOST_CHARS = 300
_MOST_EXPLAINED = 1024 * 1024  # bytes of a body whose wrong value is shown: finding it takes decoding everything
_AT = re.compile(r"^(.*) - at (?:`key` in )?`\$?(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


def state_of(request: Request) -> ServerState:
    """The server's state."""
    state = request.scope["lamina_state"]
    assert isinstance(state, ServerState)
    return state


async def read_body(request: Request, most_bytes: int, seconds: float) -> bytes:
    """The whole body. Raises ApiError as it comes: 413 beyond `most_bytes`, or where there is too much in it; 429 where others
    have too large ones in work; 408 where it takes longer than `seconds`.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding={shown(coding)} is not valid: identity", "Content-Encoding", "unsupported_feature")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > most_bytes):
        raise _too_large(most_bytes)
    if request.scope.get("state", {}).get("is_whole", False):  # protocol.py has all of it
        return await _parts(request, most_bytes)
    try:
        async with asyncio.timeout(seconds):
            return await _parts(request, most_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s", code="request_timeout") from None


async def _parts(request: Request, most_bytes: int) -> bytes:
    """The body, counted as it comes."""
    state = state_of(request)
    parts: list[bytes] = []
    size = num_counted = 0
    census = Census()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has gone before its body was there", code="client_gone")
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise _too_large(most_bytes)
        parts.append(part)
        if size > _LARGE_BYTES:
            state.take_body_bytes(request.scope, size, _MOST_LARGE * most_bytes)
            for one in parts[num_counted:]:
                census.add(one)
            num_counted = len(parts)
            await asyncio.sleep(0)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than --max-body-bytes={most_bytes}", code="body_too_large")


async def off_loop(request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function gives; where the body is large it runs in a thread, so that a long prompt's tokens hold up nobody else."""
    if request.scope["lamina_bytes"] < _LARGE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def read(request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """The record in a request's body. Raises ApiError naming the field."""
    settings = state_of(request).settings
    body = await read_body(request, settings.max_body_bytes, settings.client_s)
    request.scope["lamina_bytes"] = len(body)
    return decode(body, decoder)


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """The record in a JSON text. Raises ApiError (400) naming the field, its value and what is allowed."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(body, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _explain(body: bytes, text: str) -> ApiError:
    """The library's error, in our words: `n=0 is not valid: expected int >= 1`."""
    found = _AT.match(text)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing is not None:
            return ApiError(400, f"{missing[1]} is required", missing[1], "missing_field")
        return ApiError(400, f"the body is not valid: {text.replace('`', '')}", code="invalid_value")
    what, path = found[1].replace("`", ""), found[2].lstrip(".")
    field = path or "body"
    missing = re.search(r"missing required field (\w+)", what)
    if missing is not None:
        whole = f"{field}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{whole} is required", whole, "missing_field")
    what = what[:1].lower() + what[1:]
    if len(what) > _MOST_CHARS:  # it may quote the whole value
        what = what[:_MOST_CHARS] + "..."
    try:
        if len(body) > _MOST_EXPLAINED:
            raise LookupError(path)
        value = _find(msgspec.json.decode(body), path)
        return ApiError(400, f"{field}={shown(value)} is not valid: {what}", field, "invalid_value")
    except (LookupError, TypeError, ValueError, msgspec.DecodeError, RecursionError):
        return ApiError(400, f"{field} is not valid: {what}", field, "invalid_value")


def _find(value: object, path: str) -> object:
    """The value at a path such as messages[3].content. Raises LookupError or TypeError where the path is not exact."""
    for name, index in _STEP.findall("." + path if not path.startswith("[") else path):
        if isinstance(value, dict) and name:
            value = value[name]
        elif isinstance(value, list) and index and index != "...":
            value = value[int(index)]
        else:
            raise LookupError(path)
    return value


_ENCODER = msgspec.json.Encoder()


def json_response(value: object, status: int = 200) -> Response:
    """An answer with a JSON body."""
    return Response(_ENCODER.encode(value), status, media_type="application/json")


def to_json(value: object) -> bytes:
    """JSON bytes of a record."""
    return _ENCODER.encode(value)
