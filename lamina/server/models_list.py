"""/v1/models: the one model, under every name it has. One answer serves clients of both protocols: each reads its own fields."""

from datetime import UTC, datetime

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from lamina.server.body import json_response, state_of
from lamina.server.errors import ApiError
from lamina.server.routing import route
from lamina.server.state import ServerState


class ModelCard(Struct):
    """One name. created  seconds; created_at, display_name, type: as the messages protocol has it."""

    id: str
    created: int
    max_model_len: int | None
    root: str
    display_name: str
    created_at: str
    object: str = "model"
    owned_by: str = "lamina"
    type: str = "model"


class ModelList(Struct):
    """All names, in one page."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


def _card(state: ServerState, name: str) -> ModelCard:
    ready = state.client.ready
    length = None if ready is None else ready.max_model_len
    created_at = datetime.fromtimestamp(state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelCard(name, state.created, length, state.model_name, name, created_at)


async def list_models(request: Request) -> ASGIApp:
    """GET /v1/models."""
    state = state_of(request)
    cards = [_card(state, name) for name in state.settings.names]
    return json_response(ModelList(cards, cards[0].id, cards[-1].id))


async def show_model(request: Request) -> ASGIApp:
    """GET /v1/models/{id}."""
    state, name = state_of(request), str(request.path_params["id"])
    state.check_model(name)
    return json_response(_card(state, name))


async def no_embeddings(request: Request) -> ASGIApp:
    """POST /v1/embeddings, /v1/images/..., /v1/audio/...: said clearly."""
    raise ApiError(400, "this server generates text: embeddings, images and audio are not supported", code="unsupported_feature")


def routes(state: ServerState) -> list[BaseRoute]:
    """The endpoints of this file."""
    return [
        route("/v1/models", list_models),
        route("/v1/models/{id:path}", show_model),
        *(
            route(path, no_embeddings, ("POST",))
            for path in ("/v1/embeddings", "/v1/images/{rest:path}", "/v1/audio/{rest:path}", "/v1/moderations", "/v1/rerank")
        ),
    ]
