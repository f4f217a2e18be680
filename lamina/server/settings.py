"""How the server is run: one frozen record, made by the command line."""

from dataclasses import dataclass, field

from lamina.base.sizes import MiB


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything that is the server's and not the engine's.

    names           model names that requests may use; the first is shown.
    api_keys        one of these must come with each request; none: no key is asked for.
    max_queue       most requests that may be in work at once, waiting ones included; more get 429.
    max_body_bytes  largest body.   max_header_bytes  largest head.
    client_s        how long a client may take to send a head or a body, or to read what was sent, before it is cut off.
    keep_alive_s    a stream that has sent nothing for so long sends a sign of life; 0: never.
    generation_config  whose defaults of sampling apply: auto (the checkpoint's generation_config.json), vllm, or a directory.
    drain_s         how long running requests may go on after SIGTERM.
    stall_s         work that waits while no token moves for so long makes /health fail.
    raw_special_tokens  special tokens in users' texts come to life, as the model's own encoder does.
    salt_by_api_key each key has a cache of its own.
    salt_secret     root of the salts, new for every start.
    log_prompts     prompts and answers go to the log.
    has_ui          there is a web page at /ui.   has_traces  each request leaves an OpenTelemetry span.
    allow_origins   web pages that may call (CORS); "*" all; none: only the server's own.
    allow_hosts     names that a Host header may have where there is no key and the server listens on loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ("lamina",)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = 1024
    max_body_bytes: int = 16 * MiB
    max_header_bytes: int = 32 * 1024
    client_s: float = 60.0
    keep_alive_s: float = 15.0
    generation_config: str = "auto"
    drain_s: float = 30.0
    stall_s: float = 30.0
    raw_special_tokens: bool = False
    salt_by_api_key: bool = False
    salt_secret: bytes = field(default=b"", repr=False)
    log_prompts: bool = False
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    has_ui: bool = True
    has_traces: bool = False
