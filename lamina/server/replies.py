"""What completions and chats share on the way out: usage, log-probabilities in both dialects, several prompts at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from lamina.engine.text import Detokeniser, TextCodec
from lamina.engine.wire import LogprobRow
from lamina.server.generation import Generation, Piece, Totals
from lamina.server.schema import (
    CompletionDetails,
    CompletionLogprobs,
    Memory,
    PromptDetails,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)

#: JSON has no infinity; OpenAI writes an impossible token's log-probability so
_LEAST = -9999.0


def usage_of(totals: Sequence[Totals]) -> Usage:
    """usage of one answer, over all its prompts."""
    prompt = sum(one.prompt_tokens for one in totals)
    completion = sum(one.completion_tokens for one in totals)
    held: dict[str, int] = {}
    for one in totals:
        for name, size in one.held_bytes.items():
            held[name] = held.get(name, 0) + size
    stops = dict.fromkeys(one.prefix_stop for one in totals if one.prefix_stop)
    return Usage(
        prompt, completion, prompt + completion, PromptDetails(sum(one.cached_tokens for one in totals)),
        CompletionDetails(
            sum(one.reasoning_tokens for one in totals), sum(one.accepted_drafts for one in totals),
            sum(one.rejected_drafts for one in totals),
        ),
        Memory(held, "; ".join(stops)),
    )  # fmt: skip


def finite(value: float) -> float:
    """A log-probability that JSON can write."""
    return value if value > _LEAST else _LEAST


def token_name(codec: TextCodec | None, token: int) -> str:
    """A token in a list of log-probabilities: its text; a part of a character as `bytes:\\xe2\\x80`, so that no two are alike."""
    if codec is None:
        return f"token_id:{token}"
    raw = codec.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(codec: TextCodec | None, rows: Sequence[LogprobRow], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities in the dialect of chats."""
    return [
        TokenLogprob(
            token_name(codec, row.token), finite(row.logprob), _bytes(codec, row.token),
            [
                TopLogprob(token_name(codec, token), finite(value), _bytes(codec, token))
                for token, value in list(zip(row.top_tokens, row.top_logprobs, strict=True))[:num_top]
            ],
        )
        for row in rows
    ]  # fmt: skip


def _bytes(codec: TextCodec | None, token: int) -> list[int]:
    return [] if codec is None else list(codec.token_bytes(token))


def prompt_logprobs(codec: TextCodec | None, rows: Sequence[LogprobRow | None]) -> PromptLogprobs:
    """vLLM's prompt_logprobs: for each position null or token id -> log-probability, rank and text."""
    return [None if row is None else _ranked(codec, row) for row in rows]


def _ranked(codec: TextCodec | None, row: LogprobRow) -> dict[str, PromptLogprob]:
    def text(token: int) -> str | None:
        return None if codec is None else codec.token_text(token)

    found = {str(row.token): PromptLogprob(finite(row.logprob), row.rank, text(row.token))}
    for rank, (token, value) in enumerate(zip(row.top_tokens, row.top_logprobs, strict=True), start=1):
        found.setdefault(str(token), PromptLogprob(finite(value), rank, text(token)))
    return found


class CompletionRows:
    """Log-probabilities in the dialect of completions, token by token: offsets count characters of the text."""

    def __init__(self, codec: TextCodec | None, num_top: int, offset: int, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._num_top = num_top
        self._offset = offset
        self._text = None if codec is None else Detokeniser(codec, skip_special_tokens)

    def take(self, rows: Sequence[LogprobRow | None], tokens: Sequence[int]) -> CompletionLogprobs:
        """The next tokens; a row that is None (the first of a prompt) has no log-probability."""
        out = CompletionLogprobs([], [], [], [])
        for row, token in zip(rows, tokens, strict=True):
            out.tokens.append(token_name(self._codec, token))
            out.text_offset.append(self._place(token))
            if row is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            out.token_logprobs.append(finite(row.logprob))
            top = list(zip(row.top_tokens, row.top_logprobs, strict=True))[: self._num_top]
            found = {token_name(self._codec, one): finite(value) for one, value in top}
            found.setdefault(token_name(self._codec, token), finite(row.logprob))
            out.top_logprobs.append(found)
        return out

    def _place(self, token: int) -> int:
        """Where a token's text begins. What was held back of an open character before it is not its own."""
        if self._codec is None or self._text is None:
            return 0
        before, text, own = self._offset, self._text.push(token), self._codec.token_text(token)
        self._offset += len(text)
        return self._offset - len(own) if own and text.endswith(own) else before


async def merged(generations: Sequence[Generation]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """Pieces of several prompts as they come, each with its prompt's index."""
    if len(generations) == 1:
        while pieces := await generations[0].get_pieces():
            yield [(0, piece) for piece in pieces]
        return
    tasks = {asyncio.ensure_future(one.get_pieces()): index for index, one in enumerate(generations)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            batch: list[tuple[int, Piece]] = []
            for task in done:
                index = tasks.pop(task)
                pieces = task.result()
                if pieces:
                    batch += [(index, piece) for piece in pieces]
                    tasks[asyncio.ensure_future(generations[index].get_pieces())] = index
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
