"""Transformers behind the HTTP layer that Lamina's server has: Starlette, msgspec, uvicorn, the same chunks.

`python bench/transformers_server.py MODEL_DIR`: listens on a free port and writes `ready: http://127.0.0.1:PORT`. Batches are
dynamic: when the model is free, all that waits and has the same prompt length starts together, at most --max-batch; what comes
later waits until that batch has ended. Greedy, fp32, prompts in pieces of 512 tokens, no cache between requests.
With --random the weights are made on the spot, in bf16: of MODEL_DIR only config.json and the tokenizer are read.
"""

import argparse
import asyncio
import inspect
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, logging

from lamina.chat.records import ChatOptions, Message
from lamina.engine.text import load_codec
from lamina.server.run import find_chat_format, listen
from lamina.server.schema import (
    Chunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionDetails,
    Delta,
    PromptDetails,
    Usage,
)
from lamina.server.settings import ServerSettings

_ENCODE = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_PIECE = 512


class _Turn(msgspec.Struct):
    role: str
    content: str


class _Asked(msgspec.Struct):
    prompt: list[int] = []
    messages: list[_Turn] = []
    max_tokens: int = 16
    model: str = "tiny"


_DECODE = msgspec.json.Decoder(_Asked).decode


@dataclass(eq=False)
class _Job:
    ids: list[int]
    max_tokens: int
    tokens: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)


class Model:
    """The model in a thread of its own. experts  how they are computed, where the weights are random; else the default."""

    def __init__(self, directory: Path, max_batch: int, device: str, is_random: bool, experts: str) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if is_random:
            from against_transformers import Rival

            rival = Rival(json.loads((directory / "config.json").read_bytes()), device, experts)
            self._config, self._model = rival.config, rival.model
        else:
            self._config = AutoConfig.from_pretrained(directory)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
            self._model = model.to(device).eval()
        names = inspect.signature(self._model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache"
        self._device = device
        self._max_batch = max_batch
        self._waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._held: list[_Job] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, job: _Job) -> None:
        """Takes a job."""
        self._waiting.put(job)

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                if not self._held:
                    self._held.append(self._waiting.get())
                    time.sleep(0.02)  # those that come together are one batch
                while not self._waiting.empty():
                    self._held.append(self._waiting.get())
                length = len(self._held[0].ids)
                batch = [job for job in self._held if len(job.ids) == length][: self._max_batch]
                self._held = [job for job in self._held if job not in batch]
                self._generate(batch)

    def _generate(self, batch: list[_Job]) -> None:
        tokens = torch.tensor([job.ids for job in batch], device=self._device)
        kept = {self._cache_name: DynamicCache(config=self._config), "use_cache": True}
        for at in range(0, tokens.shape[1], _PIECE):
            out = self._model(input_ids=tokens[:, at : at + _PIECE], logits_to_keep=1, **kept)
        for place in range(max(job.max_tokens for job in batch)):
            drawn = out.logits[:, -1:].argmax(-1)
            for job, token in zip(batch, drawn[:, 0].tolist(), strict=True):
                if place < job.max_tokens:
                    assert self.loop is not None
                    self.loop.call_soon_threadsafe(job.tokens.put_nowait, token)
            if place + 1 < max(job.max_tokens for job in batch):
                out = self._model(input_ids=drawn, **kept)


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--random", action="store_true", help="weights made on the spot, in bf16")
    parser.add_argument("--experts", default="grouped_mm", help="with --random: grouped_mm, batched_mm or eager")
    args = parser.parse_args()
    model = Model(args.model, args.max_batch, args.device, args.random, args.experts)
    codec, chat = load_codec(args.model), find_chat_format(args.model, None, None)
    assert codec is not None and chat is not None

    async def answer(request: Request) -> Response:
        asked = _DECODE(await request.body())
        is_chat = bool(asked.messages)
        ids = asked.prompt
        if is_chat:
            messages = [Message("system" if one.role == "system" else "user" if one.role == "user" else "assistant", one.content)
                        for one in asked.messages]  # fmt: skip
            ids = codec.encode(chat.render(messages, ChatOptions(thinking=False)).text, add_special_tokens=False)
        job = _Job(ids, asked.max_tokens)
        model.add(job)
        return StreamingResponse(_stream(job, asked, is_chat), media_type="text/event-stream")

    async def _stream(job: _Job, asked: _Asked, is_chat: bool) -> AsyncIterator[bytes]:
        created = int(time.time())
        for place in range(job.max_tokens):
            text = codec.token_text(await job.tokens.get())
            finish = "length" if place + 1 == job.max_tokens else None
            if is_chat:
                yield _event(Chunk("0", created, asked.model, [ChunkChoice(0, Delta(content=text), finish_reason=finish)]))
            else:
                yield _event(Completion("0", created, asked.model, [CompletionChoice(0, text, finish_reason=finish)]))
        sizes = len(job.ids), job.max_tokens, len(job.ids) + job.max_tokens
        yield _event(Chunk("0", created, asked.model, [], usage=Usage(*sizes, PromptDetails(0), CompletionDetails(0))))
        yield _DONE

    paths = ("/v1/completions", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])
    listener = listen(ServerSettings(port=0))
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False, server_header=False)

    async def serve() -> None:
        model.loop = asyncio.get_running_loop()
        await uvicorn.Server(config).serve(sockets=[listener])

    print(f"ready: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    asyncio.run(serve())


def _event(chunk: Chunk | Completion) -> bytes:
    return b"data: " + _ENCODE(chunk) + b"\n\n"


if __name__ == "__main__":
    main()
