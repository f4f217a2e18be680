"""Options by which instances share their work."""

import argparse
from pathlib import Path

from lamina.base.peers import LOOPBACK, ROLES, TRANSPORTS, PeerConfig
from lamina.engine.peer_channel import read_peer_key
from lamina.engine.peer_list import PeerList


def add_peers(parser: argparse.ArgumentParser) -> None:
    """The options of PeerConfig."""
    default = PeerConfig()
    group = parser.add_argument_group("several instances")
    group.add_argument(
        "--role", choices=ROLES, default=default.role,
        help="prefill: computes prompts for others; decode: lets others compute long prompts (default both: alone)",
    )  # fmt: skip
    group.add_argument(
        "--peers", default="", metavar="FILE_OR_URL",
        help="whom a decode instance asks: a file or URL with HOST:PORT on each line, or HOST:PORT itself, several with commas",
    )  # fmt: skip
    group.add_argument(
        "--peer-key-file", type=Path, metavar="FILE",
        help="a key of 16 characters or more that all of them share; without it nothing leaves this machine",
    )  # fmt: skip
    group.add_argument(
        "--peer-listen", default="", metavar="HOST:PORT",
        help=f"where others ask for prompts, or unix:PATH (default for prefill: {LOOPBACK}, any port that is free)",
    )  # fmt: skip
    group.add_argument(
        "--peer-transport", choices=TRANSPORTS, default=default.transport,
        help="how large parts move; nixl needs the package nixl-cu13 on both sides and a key (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--handover-seconds", type=float, default=default.handover_s, metavar="S",
        help="a prompt that has not come by then is computed here (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--handover-tokens", type=int, default=default.handover_tokens, metavar="N",
        help="prompts with fewer tokens to compute are computed here (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--kv-events", default="", metavar="ADDRESS",
        help="tell which blocks are kept as vLLM does, from a ZeroMQ socket at tcp://127.0.0.1:PORT or ipc://PATH",
    )  # fmt: skip
    group.add_argument("--kv-events-replay", default="", metavar="ADDRESS", help="repeat there what a listener has missed")


def peer_config(args: argparse.Namespace) -> PeerConfig:
    """What the options say. Raises ConfigError, also for a key and a list that the engine could not read."""
    listen = args.peer_listen or (LOOPBACK if args.role == "prefill" else "")
    key_file = "" if args.peer_key_file is None else str(args.peer_key_file.resolve())
    peers = args.peers
    if peers and Path(peers).exists():
        peers = str(Path(peers).resolve())
    config = PeerConfig(
        args.role, listen, peers, key_file, args.handover_seconds, args.handover_tokens,
        args.peer_transport, args.kv_events, args.kv_events_replay,
    )  # fmt: skip
    key = read_peer_key(args.peer_key_file)
    if config.peers and not config.peers.startswith(("http://", "https://")):
        PeerList(config.peers, bool(key)).close()
    return config
