"""/v1/cache: what the memory holds, as JSON, and how to keep or drop pieces of it.

GET     pages by state, bytes by memory, and the prefixes that are kept (?limit=N, the most recently used first).
POST    {"action": "pin" | "unpin" | "drop", "key": KEY}; "drop" without a key drops everything that nobody uses.
DELETE  ?key=KEY drops one prefix, without a key everything that nobody uses.
Each answers with the state afterwards. A key that is not kept is a 404, a prefix in use or pinned a 400 with the engine's words.
Where API keys have caches of their own, each sees and changes its own prefixes only; the first key, the operator's, all of them.
Pages and bytes are everybody's.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lamina.engine.wire import CacheState
from lamina.server.auth import is_operator
from lamina.server.body import json_response, read
from lamina.server.chat_request import realm_of
from lamina.server.errors import invalid
from lamina.server.routing import route
from lamina.server.state import ServerState

DEFAULT_LIMIT = 256
MAX_LIMIT = 10_000

Limit = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
Key = Annotated[str, Meta(pattern="^[0-9a-f]{0,128}$")]


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to happen. key  of a prefix, as GET lists it; "" with drop: everything that nobody uses."""

    action: Literal["pin", "unpin", "drop"]
    key: Key = ""


class Pages(msgspec.Struct, frozen=True):
    """Pages by state: free; held by running requests; cached for reuse; of these, those that are pinned, counted apart."""

    total: int
    free: int
    held: int
    cached: int
    pinned: int
    page_bytes: int


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one memory: held by running requests, kept for reuse."""

    name: str
    held_bytes: int
    cached_bytes: int


class Shared(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of a prefix, that others begin with too: `hits` lookups used all of them."""

    tokens: int
    hits: int


class Prefix(msgspec.Struct, frozen=True):
    """A beginning of prompts that is kept.

    tokens  its length.   age_s  since its last use.   hits  lookups that used it.   owner  of the request that left it.
    pages, bytes  that only it holds.   checkpoints  positions at which a lookup may end.
    shared  beginnings of it with more hits than the whole, ascending: the blocks that it has in common with other prefixes.
    """

    key: str
    tokens: int
    age_s: float
    hits: int
    owner: str
    is_pinned: bool
    is_running: bool
    pages: int
    bytes: int
    checkpoints: tuple[int, ...]
    shared: tuple[Shared, ...]


class Cache(msgspec.Struct, frozen=True):
    """What the memory holds now.

    prefixes     at most `limit`, the most recently used first; num_prefixes  all there are that this key may see.
    page_states  run lengths over page ids: [state, count], state f, h, c, p (free, held, cached, pinned).
    """

    pages: Pages
    memories: tuple[Memory, ...]
    prefixes: tuple[Prefix, ...]
    num_prefixes: int
    page_states: tuple[tuple[str, int], ...]
    object: Literal["cache"] = "cache"


def to_answer(state: CacheState) -> Cache:
    """The engine's record as clients see it."""
    total = sum(count for _, count in state.page_states)
    return Cache(
        Pages(total, state.free_pages, state.held_pages, state.cached_pages, state.pinned_pages, state.page_bytes),
        tuple(Memory(row.name, row.held_bytes, row.cached_bytes) for row in state.memories),
        tuple(
            Prefix(row.key, row.tokens, row.age_s, row.hits, row.owner, row.is_pinned, row.is_running, row.pages,
                   row.pages * state.page_bytes, row.checkpoints, tuple(Shared(*one) for one in row.shared))
            for row in state.prefixes
        ),
        state.num_prefixes,
        state.page_states,
    )  # fmt: skip


def routes(state: ServerState) -> list[Route]:
    """GET, POST, DELETE /v1/cache."""
    decoder = msgspec.json.Decoder(Change)

    async def show(request: Request) -> Response:
        limit = _query(request, "limit", str(DEFAULT_LIMIT), Limit, f"a whole number from 0 to {MAX_LIMIT}")
        return json_response(to_answer(await state.client.cache(int(limit), _realm(state, request))))

    async def change(request: Request) -> Response:
        wanted = await read(request, decoder)
        if wanted.action != "drop" and not wanted.key:
            raise invalid("key", wanted.key, f"the key of a prefix to {wanted.action}, as GET /v1/cache lists it")
        return json_response(to_answer(await state.client.change_cache(wanted.action, wanted.key, _realm(state, request))))

    async def drop(request: Request) -> Response:
        key = _query(request, "key", "", Key, "the key of a prefix, as GET /v1/cache lists it")
        return json_response(to_answer(await state.client.change_cache("drop", str(key), _realm(state, request))))

    return [
        route("/v1/cache", show),
        route("/v1/cache", change, ["POST"]),
        route("/v1/cache", drop, ["DELETE"]),
    ]


def _realm(state: ServerState, request: Request) -> str:
    return visible_realm(state, request.scope["lamina_key"])


def visible_realm(state: ServerState, api_key: str | None) -> str:
    """The realm of the prefixes that a key may see and change; "" is all."""
    return "" if is_operator(state.settings, api_key) else realm_of(state, api_key)


def _query(request: Request, name: str, default: str, kind: type[int] | type[str], allowed: str) -> int | str:
    """A parameter of the address. Raises ApiError (400) naming it, and for parameters that there are not."""
    for other in request.query_params:
        if other != name:
            raise invalid(other, request.query_params[other], f"the only parameter here is {name}")
    value = request.query_params.get(name, default)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise invalid(name, value, allowed) from None
