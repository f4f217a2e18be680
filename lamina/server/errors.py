"""Errors as clients see them: one JSON object that names the field, whatever went wrong behind it."""

import re
from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from lamina.base.errors import CapacityError, ConfigError, LaminaError
from lamina.engine.client import EngineGone, EngineRefused

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_SHOWN = 80
_BUSY_S = 5.0


class ApiError(LaminaError):
    """An answer that is an error.

    field  the request's field that is wrong, as a path (messages[3].content).   code  a word for programs.
    retry_after_s  when to try again.
    """

    def __init__(
        self, status: int, message: str, field: str | None = None, code: str | None = None, type: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.code = code
        self.type = type or _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after_s = retry_after_s


def invalid(field: str, value: object, allowed: str) -> ApiError:
    """400: a field whose value is not allowed."""
    return ApiError(400, f"{field}={shown(value)} is not valid: {allowed}", field, "invalid_value")


def unsupported(field: str, feature: str) -> ApiError:
    """400: a feature that is not served; ignoring it would give a wrong answer."""
    return ApiError(400, f"{field}: {feature} not supported by this server", field, "unsupported_feature")


def shown(value: object) -> str:
    """A value in an error: short, whatever it is."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception. Of our own mistakes it learns nothing but that they are ours."""
    match error:
        case ApiError():
            return error
        case ConfigError():
            return invalid(error.field, error.value, error.allowed)
        case CapacityError():
            return ApiError(400, str(error), code="capacity_exceeded")
        case EngineGone():
            return ApiError(503, str(error), code="engine_unavailable", retry_after_s=error.retry_after_s)
        case EngineRefused():
            if error.kind == "internal":
                return ApiError(500, error.message, error.field or None, "engine_error")
            if error.kind == "busy":
                return ApiError(503, error.message, error.field or None, "busy", retry_after_s=_BUSY_S)
            if error.kind == "missing":
                return ApiError(404, error.message, error.field or None, "not_found")
            return ApiError(400, error.message, error.field or None, _CODES.get(error.kind, "invalid_value"))
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_json")
        case _:
            text = "internal error; the server's log has the details under this request's id"
            return ApiError(500, text, code="internal_error")


_CODES = {"config": "invalid_value", "capacity": "capacity_exceeded"}


class _Body(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


def body_of(error: ApiError) -> dict[str, object]:
    """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
    return {"error": _Body(error.message, error.type, error.field, error.code)}


#: other protocols' error objects by the start of their paths
STYLES: dict[str, Callable[[ApiError], Mapping[str, object]]] = {}


_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")


def is_request_id(value: bytes) -> bool:
    """Whether a client may call its request so."""
    return _ID.fullmatch(value) is not None


def id_headers(id: str) -> list[tuple[bytes, bytes]]:
    """The headers that carry a request's id; the second is where the messages protocol's clients look for it."""
    return [(b"x-request-id", id.encode("ascii")), (b"request-id", id.encode("ascii"))]


def style_of(path: str) -> Callable[[ApiError], Mapping[str, object]]:
    """How errors are written for a path."""
    return next((style for start, style in STYLES.items() if path.startswith(start)), body_of)


def to_response(error: ApiError, path: str = "") -> Response:
    """The answer that an error is, in the dialect of `path`."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(style_of(path)(error))
    return Response(content, error.status, headers, media_type="application/json")
