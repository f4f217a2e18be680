"""Who computes prompts for whom: one frozen record, resolved once."""

import ipaddress
import math
from dataclasses import dataclass

from lamina.base.errors import ConfigError

ROLES = ("both", "prefill", "decode")
TRANSPORTS = ("tcp", "nixl")
LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """How an engine works with others. Checked where it is made.

    role      prefill: computes prompts for others; decode: lets others compute long prompts and goes on from there; both: alone,
              and for others where `listen` is given.
    listen    where others ask for prompts, HOST:PORT or unix:PATH; "": nowhere.
    peers     whom to ask: HOST:PORT, several with commas between them; a file with one a line; or a URL of such a text.
    key_file  the key that all of them share; "": none, and then nothing beyond this machine is spoken to.
    handover_s       seconds until a prompt that somebody else computes must be there; then it is computed here.
    handover_tokens  prompts with fewer tokens to compute are computed here.
    transport        how large parts of a state move: tcp (over the socket), nixl (read out of the sender's memory by NIXL, where
                     both sides say so).
    kv_events        address of a ZeroMQ socket that tells which blocks are kept, tcp://HOST:PORT or ipc://PATH; "": none.
    kv_events_replay the same for one that repeats what was missed.
    """

    role: str = "both"
    listen: str = ""
    peers: str = ""
    key_file: str = ""
    handover_s: float = 60.0
    handover_tokens: int = 256
    transport: str = "tcp"
    kv_events: str = ""
    kv_events_replay: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError("role", self.role, f"one of {', '.join(ROLES)}")
        if self.transport not in TRANSPORTS:
            raise ConfigError("peer_transport", self.transport, f"one of {', '.join(TRANSPORTS)}")
        if self.transport == "nixl" and not self.key_file:
            raise ConfigError("peer_transport", "nixl", "with --peer-key-file: it opens ports on all of this machine's networks")
        if self.role == "decode" and not self.peers:
            raise ConfigError("peers", "", "HOST:PORT of a prefill instance, a file with one a line, or a URL: decode needs one")
        if self.role != "decode" and self.peers:
            raise ConfigError("peers", self.peers, f"nothing with --role {self.role}: only decode asks others")
        if self.role == "decode" and self.listen:
            raise ConfigError("peer_listen", self.listen, "nothing with --role decode: nobody asks it")
        if not (isinstance(self.handover_s, int | float) and math.isfinite(self.handover_s) and self.handover_s > 0):
            raise ConfigError("handover_seconds", self.handover_s, "a number above 0")
        if not isinstance(self.handover_tokens, int) or self.handover_tokens < 1:
            raise ConfigError("handover_tokens", self.handover_tokens, "an integer of at least 1")
        if self.listen and not self.key_file and not is_near(self.listen):
            raise ConfigError("peer_listen", self.listen, "a loopback address, or give --peer-key-file")

        for name, address in (("kv_events", self.kv_events), ("kv_events_replay", self.kv_events_replay)):
            if address and not (address.startswith("ipc://") or (address.startswith("tcp://") and is_near(address[6:]))):
                raise ConfigError(
                    name, address, "ipc://PATH, or tcp:// with a loopback address: whoever reads it sees all prompts"
                )
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError("kv_events_replay", self.kv_events_replay, "nothing without --kv-events")

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to speak to."""
        return not (self.listen or self.peers)


def is_near(address: str) -> bool:
    """Whether HOST:PORT or unix:PATH is on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
