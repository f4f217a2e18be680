"""What this stack gives at best: Starlette, msgspec and uvicorn, and answers that are made on the spot.

`python bench/echo_server.py`: listens on a free port of this machine and writes `ready: http://127.0.0.1:PORT`. No limits, no
checks, no tokenizer, no engine: a request is decoded, an answer of the same form as the real server's is encoded.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lamina.server.run import listen
from lamina.server.schema import (
    ChatAnswer,
    ChatChoice,
    Chunk,
    ChunkChoice,
    CompletionDetails,
    Delta,
    MessageOut,
    PromptDetails,
    Usage,
)
from lamina.server.settings import ServerSettings

_ENCODE = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_WORD = " word"


class _Message(msgspec.Struct):
    role: str
    content: str


class _Chat(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int = 16
    stream: bool = False
    model: str = "tiny"


_DECODE = msgspec.json.Decoder(_Chat).decode


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    asked = _DECODE(await request.body())
    created = int(time.time())
    if asked.stream:
        return StreamingResponse(_stream(asked, created), media_type="text/event-stream")
    message = MessageOut("assistant", _WORD * asked.max_tokens)
    answer = ChatAnswer("chatcmpl-0", created, asked.model, [ChatChoice(0, message, "length")], _usage(asked))
    return Response(_ENCODE(answer), media_type="application/json")


async def _stream(asked: _Chat, created: int) -> AsyncIterator[bytes]:
    """One chunk for each token."""
    yield _event(Chunk("chatcmpl-0", created, asked.model, [ChunkChoice(0, Delta(role="assistant", content=""))]))
    for _ in range(asked.max_tokens):
        yield _event(Chunk("chatcmpl-0", created, asked.model, [ChunkChoice(0, Delta(content=_WORD))]))
    yield _event(Chunk("chatcmpl-0", created, asked.model, [ChunkChoice(0, Delta(), finish_reason="length")]))
    yield _event(Chunk("chatcmpl-0", created, asked.model, [], usage=_usage(asked)))
    yield _DONE


def _usage(asked: _Chat) -> Usage:
    return Usage(8, asked.max_tokens, 8 + asked.max_tokens, PromptDetails(0), CompletionDetails(0))


def _event(chunk: Chunk) -> bytes:
    return b"data: " + _ENCODE(chunk) + b"\n\n"


def main() -> None:
    """Serves until it is ended."""
    listener = listen(ServerSettings(port=0))
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False, server_header=False)
    print(f"ready: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
