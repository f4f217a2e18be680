"""The pieces of a generation as streams want them: joined where they came together, with a sign when nothing came for a while."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from lamina.chat.records import CallArguments, Content, Event, Reasoning
from lamina.server.generation import Generation, Piece


async def batches(
    generation: Generation, first: "asyncio.Task[list[Piece]]", idle_s: float
) -> AsyncGenerator[list[Piece] | None]:
    """The pieces that come together, from `first` on; None each time that idle_s pass without any. Close it."""
    waiting = first
    try:
        while True:
            if not waiting.done():
                await asyncio.wait((waiting,), timeout=idle_s)
            if not waiting.done():
                yield None
                continue
            pieces = waiting.result()
            if not pieces:
                return
            yield pieces
            waiting = asyncio.create_task(generation.get_pieces())
    finally:
        waiting.cancel()


def joined(events: Sequence[Event]) -> list[Event]:
    """The same answer in as few events as there can be: neighbours of one kind are one."""
    found: list[Event] = []
    for event in events:
        match (found[-1] if found else None, event):
            case (Content(before), Content(text)):
                found[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(event)
    return found
