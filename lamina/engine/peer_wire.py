"""What two engines say to each other about one state that moves: msgpack records, each with bytes behind it.

    receiver                    sender
    Want, token ids      ──►
                         ◄──    Wait, again and again while the prompt waits or is computed
                         ◄──    Offer, the manifest
                         ◄──    Part, its bytes      for each piece
                         ◄──    Done, or Declined
A connection carries one state and ends with it.
"""

import msgspec

#: of what is said here; whoever differs is refused
PROTOCOL = 1


class Want(msgspec.Struct, tag=True, frozen=True):
    """Asks for the state after all tokens, which lie behind it as little-endian int32. first_block  as in the manifest.

    deadline_s  from now; nobody waits for it any longer.   can_read  large bodies may stay in the sender's memory.
    """

    protocol: int
    model_id: str
    layout_id: str
    cache_salt: str
    first_block: int
    deadline_s: float
    priority: int = 0
    can_read: bool = False


class Wait(msgspec.Struct, tag=True, frozen=True):
    """A sign of life."""


class Offer(msgspec.Struct, tag=True, frozen=True):
    """The manifest lies behind it."""


class Part(msgspec.Struct, tag=True, frozen=True):
    """A piece lies behind it: kind, number and tail as in Piece."""

    kind: str
    number: int
    tail: int | None
    checksums: bytes


class Done(msgspec.Struct, tag=True, frozen=True):
    """All pieces have been sent. cached_tokens  that the sender did not compute."""

    cached_tokens: int


class Declined(msgspec.Struct, tag=True, frozen=True):
    """There will be no state: one line."""

    why: str


class Remote(msgspec.Struct, tag=True, frozen=True):
    """Where a sender puts large bodies: what its agent says of itself, an address in its memory, and the bytes there."""

    metadata: bytes
    address: int
    nbytes: int


class Placed(msgspec.Struct, tag=True, frozen=True):
    """A message whose body lies there."""

    nbytes: int
    head: bytes


class Taken(msgspec.Struct, tag=True, frozen=True):
    """The body has been read."""


Message = Want | Wait | Offer | Part | Done | Declined | Remote | Placed | Taken
