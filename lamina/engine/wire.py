"""What the server's process and the engine's process say to each other: msgspec records over a local ZeroMQ socket, no pickle.

Each message is one msgpack frame. The server sends `Command`s, the engine sends `Report`s. Token ids of prompts travel as
little-endian int32 bytes. Times are seconds; deadlines are relative, as the two clocks need not agree.
"""

import msgspec


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of SamplingParams that reach the engine; stop strings do not: the server looks for them in the text."""

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Grammar(msgspec.Struct, frozen=True):
    """What an output must match.

    kind   json_schema, json_object, regex, choice (JSON list of texts), ebnf, structural_tag (JSON).   value  its text.
    after  token id after which it begins (the end of the thoughts); None: at the first token.
    """

    kind: str
    value: str
    after: int | None = None


class Thoughts(msgspec.Struct, frozen=True):
    """How many tokens the thoughts may have that an output begins with.

    end   the token that is drawn then.   others  tokens that end them too: nothing is drawn for the model after one of these.
    """

    tokens: int
    end: int
    others: tuple[int, ...] = ()


# The server's -------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message: fields of EngineConfig by name, and of PeerConfig.

    log_level  of the lines that the process writes to stderr, as in logging.
    """

    config: dict[str, int | float | str | bool | None]
    log_level: int = 30
    peers: dict[str, int | float | str] = {}


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A prompt. id is the server's, unique while it lives.

    priority  lower comes first, as in vLLM; waiting lowers it.   deadline_s  from now; it then ends with "deadline".
    owner     shown with what it leaves in the cache, never a secret.
    keep_at   tokens of the prompt that the next turn of the chat will share.
    thoughts  None: as many as the model likes.
    peer      whom to ask for the prompt's state, if somebody else is to compute it.
    """

    id: str
    prompt: bytes
    sampling: Sampling
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    grammar: Grammar | None = None
    owner: str = ""
    keep_at: int | None = None
    thoughts: Thoughts | None = None
    peer: str = ""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The client has gone, or wants no more: all outputs end with "abort"."""

    id: str


class Finish(msgspec.Struct, tag=True, frozen=True):
    """One output has its answer (a stop string): what it remembers stays for reuse."""

    id: str
    child: int


class CacheQuery(msgspec.Struct, tag=True, frozen=True):
    """Asks for what the memory holds. limit  most prefixes listed, the most recently used first.

    realm  prefixes whose cache_salt begins with it; others are not listed or counted.
    """

    id: str
    limit: int = 256
    realm: str = ""


class CacheChange(msgspec.Struct, tag=True, frozen=True):
    """Pins, unpins or drops a prefix by its key (hexadecimal), or drops everything that nobody uses where key is "".

    realm  as in CacheQuery: what lies outside of it is not there.
    """

    id: str
    action: str
    key: str = ""
    realm: str = ""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Ends the process; what runs is cancelled."""


Command = Start | Submit | Cancel | Finish | CacheQuery | CacheChange | Shutdown


# The engine's -------------------------------------------------------------------------------------------------------


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Loading weights, compiling kernels."""

    what: str
    done: int
    total: int


class MemoryRow(msgspec.Struct, frozen=True):
    """One memory of the plan. request_bytes  by the lengths of `Ready.plan_lengths`, for one request of so many tokens."""

    name: str
    kind: str
    layers: int
    request_bytes: tuple[int, ...]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine serves. The start-up table is made of this.

    formats  of the cache and of an index, as decided.   role, peer_address  as in PeerConfig; where others ask this one.
    model_id, layout_id  what others must have to hand something over.
    drafter, draft_tokens  what drafts tokens ahead, as decided, and the most of them in a step.
    """

    pid: int
    model: str
    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device: str
    block_tokens: int
    page_bytes: int
    num_pages: int
    slot_pages: int
    max_requests: int
    max_step_tokens: int
    replay_tokens: int
    hit_granularity: str
    plan_lengths: tuple[int, ...]
    memories: tuple[MemoryRow, ...]
    ops: tuple[tuple[str, str], ...]
    load_s: float
    formats: tuple[str, str] = ("auto", "auto")
    drafter: str = "none"
    draft_tokens: int = 0
    role: str = "both"
    peer_address: str = ""
    model_id: str = ""
    layout_id: str = ""


class LogprobRow(msgspec.Struct, frozen=True, array_like=True):
    """As schedule.step.TokenLogprobs."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class UsageRow(msgspec.Struct, frozen=True):
    """What one output cost, sent with its finish. prefix_stop  why the lookup of its prefix stopped where it did.

    queued_s  until it first ran.   prefill_s  then until its first token.   decode_s  then until its end.
    accepted_drafts, rejected_drafts  tokens drafted ahead that were drawn then, and the others.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    held_bytes: dict[str, int]
    prefix_stop: str
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one output.

    finish       stop, length, abort, error, deadline; None while it goes on.   usage  of this output, with its finish.
    stop_token   the id that ended it, an end-of-text token or one of stop_token_ids: then it is the last of `tokens`.
    prompt_logprobs  come once, with the finish of child 0; None in place of the first token.
    error        why, where finish is "error".
    """

    id: str
    child: int
    tokens: tuple[int, ...]
    logprobs: tuple[LogprobRow, ...] | None = None
    finish: str | None = None
    stop_token: int | None = None
    usage: UsageRow | None = None
    prompt_logprobs: tuple[LogprobRow | None, ...] | None = None
    error: str = ""


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """All news of one step, or of several that took no time."""

    items: tuple[Output, ...]


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """A request or a change that cannot be served. kind  config (the client's fault, `field` names it), missing (that
    what it names is not there), capacity, busy, internal."""

    id: str
    kind: str
    message: str
    field: str = ""


class PrefixRow(msgspec.Struct, frozen=True):
    """A leaf of what is kept. tokens  its length.   age_s  since its last use.   pages  that only it holds.

    shared  (tokens, hits) of beginnings that had more hits than the whole, ascending.
    """

    key: str
    tokens: int
    age_s: float
    hits: int
    owner: str
    is_pinned: bool
    is_running: bool
    pages: int
    checkpoints: tuple[int, ...]
    shared: tuple[tuple[int, int], ...] = ()


class MemoryState(msgspec.Struct, frozen=True):
    """Bytes of one memory now: held by running requests, kept for reuse."""

    name: str
    held_bytes: int
    cached_bytes: int


class CacheState(msgspec.Struct, tag=True, frozen=True):
    """The answer to a CacheQuery or CacheChange. page_states  run lengths over page ids: (state, count), state f, h, c, p
    (free, held, cached, pinned)."""

    id: str
    free_pages: int
    held_pages: int
    cached_pages: int
    pinned_pages: int
    page_bytes: int
    memories: tuple[MemoryState, ...]
    prefixes: tuple[PrefixRow, ...]
    num_prefixes: int
    page_states: tuple[tuple[str, int], ...] = ()


class RequestRow(msgspec.Struct, frozen=True):
    """A request that waits or runs, as the web page shows it."""

    id: str
    child: int
    state: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    age_s: float


#: bounds of the histogram of seconds that a grammar took to compile
GRAMMAR_S = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1.0, 2.5, 5.0, 10.0)  # fmt: skip


class GrammarStats(msgspec.Struct, frozen=True):
    """What grammars cost. compiled  how many by the bounds of GRAMMAR_S, the last count is of those beyond; total_s  in all.

    hits     requests whose grammar was kept.   kept, kept_bytes  now.   evicted  to make room.
    refused  by reason: invalid, late (given up at its limit), busy (nobody was free to compile it).
    """

    compiled: tuple[int, ...] = (0,) * (len(GRAMMAR_S) + 1)
    total_s: float = 0.0
    hits: int = 0
    kept: int = 0
    kept_bytes: int = 0
    evicted: int = 0
    refused: dict[str, int] = {}


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counters since the start, which only grow, and gauges of now; sent every quarter of a second and when work begins or ends.

    time_s   since the start.   prompt_tokens, cached_tokens, lookups, misses  of prompts that ran, each once whatever n is.
    misses   lookups by the reason why they stopped.   computed_tokens  rows computed: grows while the engine has work and moves.
    prefill_s, decode_s  of steps that computed any prompt token, and of the others.   finished  outputs by how they ended.
    requests  running ones first, not more than some.
    arriving requests, of those that wait, whose prompt is computed by somebody else.
    moves    states that moved between engines: sent, declined (wanted by others and not given), received, recomputed (wanted and
             not received).   moved_bytes  of those sent and received.
    drafts   steps of a request with drafts.   draft_tokens, accepted_drafts, accepted_by_place  all of these, and the right ones.
    """

    time_s: float
    running: int
    waiting: int
    free_pages: int
    held_pages: int
    cached_pages: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    drawn_tokens: int
    steps: int
    prefill_s: float
    decode_s: float
    preemptions: int
    evictions: int
    late_results: int
    lookups: int
    misses: dict[str, int]
    finished: dict[str, int]
    memories: tuple[MemoryState, ...]
    requests: tuple[RequestRow, ...]
    grammars: GrammarStats = GrammarStats()
    drafts: int = 0
    draft_tokens: int = 0
    accepted_drafts: int = 0
    accepted_by_place: tuple[int, ...] = ()
    arriving: int = 0
    moves: dict[str, int] = {}
    moved_bytes: dict[str, int] = {}


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on, or could not start; one line.

    kind  config (the user can fix it: field, value and allowed as in ConfigError), capacity, weights, internal.
    """

    message: str
    kind: str = "internal"
    field: str = ""
    value: int | float | str | bool | None = None
    allowed: str = ""


Report = Progress | Ready | Outputs | Refusal | CacheState | Stats | Fatal
