"""The instances behind a router: which of them live, what they are, and which one a request should go to."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.server.instance import Instance
from lamina.server.route_client import Origin, RouteError, fetch, parse_origin
from lamina.server.route_prefix import Affinity

_LOG = get_logger(__name__)
_LOOK_S = 0.5
_ANSWER_S = 2.0
_MOST_MISSES = 2
#: an instance with so many more requests than another one is passed over, whatever it has seen
_MOST_AHEAD = 8


@dataclass(slots=True, eq=False)
class Backend:
    """One instance.

    about  None while it is not known or does not serve.   misses  times in a row that it did not answer.
    in_work, prefills  requests that it answers, and that it was named for.   lost  set when it goes: what it has in work ends.
    """

    origin: Origin
    about: Instance | None = None
    misses: int = 0
    in_work: int = 0
    prefills: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_serving(self) -> bool:
        """Whether new requests may go there."""
        return self.about is not None and not self.about.is_draining


class Instances:
    """All of them. key  sent when they are asked what they are."""

    def __init__(self, urls: Sequence[str], key: str | None = None) -> None:
        origins = dict.fromkeys(parse_origin(url) for url in urls)
        if not origins:
            raise ConfigError("url", "nothing", "at least one instance's address")
        self.all = [Backend(origin) for origin in origins]
        self._headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        self._decodes: Affinity[Backend] = Affinity()
        self._prefills: Affinity[Backend] = Affinity()
        self._turn = 0

    async def follow(self) -> None:
        """Looks after all of them, for ever."""
        await asyncio.gather(*(self._follow(one) for one in self.all))

    async def _follow(self, one: Backend) -> None:
        while True:
            await self.look(one)
            await asyncio.sleep(_LOOK_S)

    async def look(self, one: Backend) -> None:
        """Asks an instance what it is."""
        try:
            status, body = await asyncio.wait_for(fetch(one.origin, "/v1/instance", self._headers), _ANSWER_S)
            if status != 200:
                raise RouteError(f"it answers {status}")
            about = msgspec.json.decode(body, type=Instance)
        except (RouteError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            one.misses += 1
            if one.misses >= _MOST_MISSES:
                self.lose(one, str(error) or "it does not answer")
            return
        if one.about is None or (one.about.model_id, one.about.layout_id) != (about.model_id, about.layout_id):
            event(_LOG, "instance_found", url=str(one.origin), role=about.role, models=",".join(about.models))
        one.misses, one.about = 0, about

    def lose(self, one: Backend, why: str) -> None:
        """An instance serves no longer: what it has in work ends, and what it has seen counts no more."""
        if one.about is not None:
            event(_LOG, "instance_lost", logging.WARNING, url=str(one.origin), why=why, in_work=one.in_work)
        one.about = None
        one.lost.set()
        one.lost = asyncio.Event()
        self._decodes.forget(one)
        self._prefills.forget(one)

    def choose(self, chain: Sequence[bytes], without: Sequence[Backend] = ()) -> Backend | None:
        """The instance for a request: of those that have not much more to do than others the one that knows most of it.

        Those that compute prompts for others are asked only where nobody else is left.
        """
        serving = [one for one in self.all if one.is_serving and one not in without]
        able = [one for one in serving if one.about is not None and one.about.role != "prefill"] or serving
        return self._best(able, self._decodes, chain, [one.in_work for one in able])

    def choose_prefill(self, chain: Sequence[bytes], decode: Backend) -> Backend | None:
        """Who should compute a prompt that `decode` goes on with; None where it does all itself."""
        about = decode.about
        if about is None or about.role != "decode":
            return None
        able = [
            one for one in self.all
            if one.is_serving and one.about is not None and one.about.peer_address
            and (one.about.model_id, one.about.layout_id) == (about.model_id, about.layout_id)
        ]  # fmt: skip
        return self._best(able, self._prefills, chain, [one.prefills for one in able])

    def _best(
        self, able: Sequence[Backend], seen: Affinity[Backend], chain: Sequence[bytes], loads: Sequence[int]
    ) -> Backend | None:
        if not able:
            return None
        least = min(loads)
        self._turn += 1
        ranks = []
        for number, (one, load) in enumerate(zip(able, loads, strict=True)):
            known = seen.known(one, chain) if load <= least + _MOST_AHEAD else -1
            ranks.append((-known, load, (number - self._turn) % len(able), number))
        found = able[min(ranks)[-1]]
        seen.note(found, chain)
        return found
