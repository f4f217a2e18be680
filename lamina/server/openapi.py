"""GET /openapi.json: what this server takes and gives, made from the records that requests are read into."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lamina.base.version import __version__
from lamina.server import (
    cache,
    health,
    index,
    instance,
    messages_schema,
    models_list,
    responses_items,
    responses_schema,
    schema,
    tokens,
)
from lamina.server.body import to_json
from lamina.server.routing import route
from lamina.server.settings import ServerSettings
from lamina.server.state import ServerState

_REF = "#/components/schemas/{name}"
_JSON, _SSE, _TEXT, _HTML = "application/json", "text/event-stream", "text/plain", "text/html"
_DONE = "[DONE]"
_ALWAYS = (400, 401, 403, 500)
_BODY = (*_ALWAYS, 408, 413, 415, 429)
_WORK = (*_BODY, 404, 503)
_TOLD = {
    200: "The answer.",
    400: "A field is not valid, or asks for what is not supported; `param` names it.",
    401: "No valid API key.",
    403: "A web page or a host name that may not call.",
    404: "There is no such thing here.",
    408: "The body did not come in time.",
    413: "The body is too large, or holds too much.",
    415: "The body is compressed.",
    429: "Too many requests are in work; Retry-After says when to come again.",
    500: "The server is to blame.",
    503: "The engine is not there right now; Retry-After says when to come again.",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong. param  the field.   code  a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error."""

    error: ErrorBody


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


class Readiness(msgspec.Struct, frozen=True):
    """Whether new requests are served."""

    status: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the address."""

    name: str
    schema: Mapping[str, object]
    told: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint. body, answer  records.   events  of the stream that `"stream": true` gives; () there is none.

    ends_with_done  the stream's last event is the text [DONE].
    """

    method: str
    path: str
    told: str
    tag: str
    body: type | None = None
    answer: type | None = None
    errors: tuple[int, ...] = _ALWAYS
    events: tuple[type, ...] = ()
    media: str = _JSON
    error: type = ErrorAnswer
    query: tuple[Parameter, ...] = field(default=())
    ends_with_done: bool = False


_EVENTS = (
    responses_schema.Lifecycle, responses_schema.ItemEvent, responses_schema.PartEvent, responses_schema.SummaryPartEvent,
    responses_schema.TextEvent, responses_schema.SummaryEvent, responses_schema.ArgumentsEvent, responses_schema.ErrorEvent,
)  # fmt: skip
_MESSAGE_EVENTS = (
    messages_schema.MessageStart, messages_schema.Ping, messages_schema.BlockStart, messages_schema.BlockDelta,
    messages_schema.BlockStop, messages_schema.MessageDelta, messages_schema.MessageStop, messages_schema.MessagesError,
)  # fmt: skip
_LIMIT = Parameter("limit", {"type": "integer", "minimum": 0, "maximum": cache.MAX_LIMIT}, "most prefixes listed")
_KEY = Parameter("key", {"type": "string", "pattern": "^[0-9a-f]{0,128}$"}, "of a prefix; without it everything that nobody uses")
_NO_STREAM = Parameter("stream", {"type": "boolean", "enum": [False]}, "kept responses are answered whole")
_ITEMS = Parameter("limit", {"type": "integer", "minimum": 1, "maximum": responses_items.MAX_LIMIT}, "most items of a page")
_ORDER = Parameter("order", {"type": "string", "enum": ["asc", "desc"]}, "desc, the default: the newest first")
_AFTER = Parameter("after", {"type": "string"}, "id of the item before the page's first")

OPERATIONS: tuple[Operation, ...] = (
    Operation("get", "/v1/models", "The model, under every name it has.", "models", None, models_list.ModelList),
    Operation("get", "/v1/models/{id}", "One name.", "models", None, models_list.ModelCard, (*_ALWAYS, 404)),
    Operation("get", "/v1/instance", "What a router has to know.", "models", None, instance.Instance, (*_ALWAYS, 503)),
    Operation(
        "post", "/v1/completions", "Goes on from prompts.", "generate", schema.CompletionRequest, schema.Completion, _WORK,
        (schema.Completion,), ends_with_done=True,
    ),
    Operation(
        "post", "/v1/chat/completions", "Answers a chat.", "generate", schema.ChatRequest, schema.ChatAnswer, _WORK,
        (schema.Chunk,), ends_with_done=True,
    ),
    Operation(
        "post", "/v1/responses", "Answers a chat, in the responses protocol.", "generate", responses_schema.ResponsesRequest,
        responses_schema.ResponseObject, _WORK, _EVENTS,
    ),
    Operation(
        "post", "/v1/responses/input_tokens", "Counts the tokens of such a request's prompt.", "tokens",
        responses_schema.ResponsesRequest, responses_schema.InputTokenCount, (*_BODY, 404, 503),
    ),
    Operation(
        "get", "/v1/responses/{response_id}", "A response that is kept or in work.", "generate", None,
        responses_schema.ResponseObject, (*_ALWAYS, 404), query=(_NO_STREAM,),
    ),
    Operation(
        "delete", "/v1/responses/{response_id}", "Forgets a response.", "generate", None, responses_schema.DeletedResponse,
        (*_ALWAYS, 404),
    ),
    Operation(
        "post", "/v1/responses/{response_id}/cancel", "Ends a response in work.", "generate", None,
        responses_schema.ResponseObject, (*_ALWAYS, 404),
    ),
    Operation(
        "get", "/v1/responses/{response_id}/input_items", "What a response answers, page by page.", "generate", None,
        responses_items.ItemList, (*_ALWAYS, 404), query=(_ITEMS, _ORDER, _AFTER),
    ),
    Operation(
        "post", "/v1/messages", "Answers a chat, in the messages protocol.", "generate", messages_schema.MessagesRequest,
        messages_schema.AnswerMessage, _WORK, _MESSAGE_EVENTS, error=messages_schema.MessagesError,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "Counts the tokens of such a request's prompt.", "tokens",
        messages_schema.CountTokensRequest, messages_schema.TokenCount, (*_BODY, 404, 503), error=messages_schema.MessagesError,
    ),
    Operation(
        "post", "/tokenize", "Token ids of a prompt or a chat.", "tokens", tokens.TokenizeRequest, tokens.Tokenized,
        (*_BODY, 404, 503),
    ),
    Operation(
        "post", "/detokenize", "Text of token ids.", "tokens", tokens.DetokenizeRequest, tokens.Detokenized, (*_BODY, 404, 503)
    ),
    Operation("get", "/v1/cache", "What the memory holds.", "cache", None, cache.Cache, (*_ALWAYS, 503), query=(_LIMIT,)),
    Operation("post", "/v1/cache", "Pins, unpins or drops a prefix.", "cache", cache.Change, cache.Cache, (*_BODY, 404, 503)),
    Operation("delete", "/v1/cache", "Drops prefixes.", "cache", None, cache.Cache, (*_ALWAYS, 404, 503), query=(_KEY,)),
    Operation("get", "/health", "Whether tokens move while work waits.", "server", None, health.Health, (*_ALWAYS, 503)),
    Operation("get", "/ping", "As /health.", "server", None, health.Health, (*_ALWAYS, 503)),
    Operation("get", "/ready", "Whether new requests are served.", "server", None, Readiness, (*_ALWAYS, 503)),
    Operation("get", "/", "What there is to ask for; a browser goes to /ui.", "server", None, index.Index),
    Operation("get", "/version", "The server's version.", "server", None, Version),
    Operation("get", "/metrics", "Counters and gauges for Prometheus.", "server", media=_TEXT),
    Operation("get", "/openapi.json", "This file.", "server"),
    Operation("get", "/docs", "This file as a page.", "server", None, None, (*_ALWAYS, 404), media=_HTML),
    Operation("get", "/ui", "What the server does, as a page.", "server", media=_HTML),
)  # fmt: skip

#: registered, but not described: parts of pages, and paths that only say what is not supported
UNDESCRIBED = ("/docs/", "/_nicegui", "/v1/embeddings", "/v1/images/", "/v1/audio/", "/v1/moderations", "/v1/rerank")
#: answers with the same record when things are not well
_SAME_ANSWER = {"/health", "/ping", "/ready"}


def document(settings: ServerSettings, paths: Sequence[str]) -> dict[str, object]:
    """The file for the endpoints at `paths`, as they are registered."""
    known = {plain(path) for path in paths}
    operations = [one for one in OPERATIONS if one.path in known]
    records = list(dict.fromkeys(kind for one in operations for kind in _records(one)))
    schemas, components = msgspec.json.schema_components(records, schema_hook=_hook, ref_template=_REF)
    found = dict(zip(records, schemas, strict=True))
    for one in operations:
        if one.body is not None:
            _name_models(components[str(found[one.body]["$ref"]).rpartition("/")[2]], settings.names)
    written: dict[str, dict[str, object]] = {}
    for one in operations:
        written.setdefault(one.path, {})[one.method] = _operation(one, found)
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"x_api_key": []}] if settings.api_keys else []
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Lamina",
            "version": __version__,
            "description": "Fields that are not described are ignored. Every answer carries X-Request-Id.",
        },
        "servers": [{"url": "/"}],
        "security": keys,
        "paths": written,
        "components": {
            "schemas": components,
            "securitySchemes": schemes if keys else {},
        },
    }


def plain(path: str) -> str:
    """A path without the kinds of its parameters: "/v1/models/{id}" of "/v1/models/{id:path}"."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def routes(state: ServerState) -> Sequence[BaseRoute]:
    """GET /openapi.json."""
    made: list[bytes] = []

    async def show(request: Request) -> Response:
        if not made:
            made.append(to_json(document(state.settings, registered(request.app.routes))))
        return Response(made[0], media_type=_JSON)

    return [route("/openapi.json", show)]


def registered(found: Sequence[BaseRoute]) -> list[str]:
    """The paths of routes and mounts."""
    return [path for one in found for name, path in vars(one).items() if name == "path" and isinstance(path, str)]


def _records(one: Operation) -> tuple[type, ...]:
    return tuple(kind for kind in (one.body, one.answer, one.error, *one.events) if kind is not None)


def _operation(one: Operation, schemas: Mapping[type, Mapping[str, object]]) -> dict[str, object]:
    """An operation object."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", one.path)
    ] + [{"name": each.name, "in": "query", "schema": each.schema, "description": each.told} for each in one.query]
    answer: Mapping[str, object] = {"type": "string"} if one.answer is None else schemas[one.answer]
    if one.media == _JSON and one.answer is None:
        answer = {"type": "object"}
    content: dict[str, object] = {one.media: {"schema": answer}}
    if one.events:
        content[_SSE] = {"schema": _event(one, schemas)}
    told = _TOLD[200] if not one.events else 'The answer; with "stream": true a stream of server-sent events.'
    responses: dict[str, object] = {"200": {"description": told, "content": content}}
    for status in sorted(one.errors):
        same = status == 503 and one.path in _SAME_ANSWER
        kind = one.answer if same and one.answer is not None else one.error
        responses[str(status)] = {"description": _TOLD[status], "content": {_JSON: {"schema": schemas[kind]}}}
    written: dict[str, object] = {
        "operationId": f"{one.method}{re.sub(r'[^A-Za-z0-9]+', '_', one.path).rstrip('_')}",
        "summary": one.told,
        "tags": [one.tag],
        "responses": responses,
    }
    if parameters:
        written["parameters"] = parameters
    if one.body is not None:
        written["requestBody"] = {"required": True, "content": {_JSON: {"schema": schemas[one.body]}}}
    return written


def _event(one: Operation, schemas: Mapping[type, Mapping[str, object]]) -> dict[str, object]:
    """One server-sent event of a stream."""
    kinds = [schemas[kind] for kind in dict.fromkeys((*one.events, one.error))]
    data: dict[str, object] = {"contentMediaType": _JSON, "contentSchema": {"anyOf": kinds}}
    told = "Each event of the stream."
    if one.ends_with_done:
        data = {"if": {"const": _DONE}, "else": data}
        told += f" The last one's data is {_DONE}."
    properties = {"event": {"type": "string"}, "data": {"type": "string"} | data}
    return {"type": "object", "description": told, "properties": properties}


def _name_models(record: dict[str, object], names: Sequence[str]) -> None:
    """A request's model is one of the names, or left out."""
    properties = record["properties"]
    assert isinstance(properties, dict)
    if "model" in properties:
        properties["model"] = {"anyOf": [{"enum": list(names)}, {"type": "null"}], "default": None}


def _hook(kind: type) -> dict[str, object]:
    """`object` in a record: any JSON."""
    if kind is object or kind is msgspec.Raw:
        return {"description": "any JSON"}
    raise NotImplementedError(kind)
