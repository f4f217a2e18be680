"""The pieces of a generation as streams want them: joined where they came together."""

from collections.abc import AsyncIterator, Sequence

from lamina.chat.records import CallArguments, Content, Event, Reasoning
from lamina.server.generation import Generation, Piece


async def batches(generation: Generation, first: list[Piece] | None) -> AsyncIterator[list[Piece]]:
    """The pieces that come together, from `first` on; None: it has not come yet."""
    pieces = await generation.get_pieces() if first is None else first
    while pieces:
        yield pieces
        pieces = await generation.get_pieces()


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
