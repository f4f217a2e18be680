"""What a simulation is told and what it tells: the settings of the pretended engine, and its report."""

from dataclasses import dataclass, field

from lamina.base.errors import ConfigError
from lamina.memory.lease import PageCounts


@dataclass(frozen=True, slots=True)
class Options:
    """How the simulated engine runs.

    prefill_rate      tokens/s that all prefills together compute.   decode_rate  tokens/s of each request that decodes.
    max_step_tokens   rows of one step.   max_requests  requests that run at once.
    checkpoint_interval  tokens after which a checkpoint is made on the way; None: only at ends and junctions.
    min_checkpoint_gain  tokens that a checkpoint at a junction must save.   num_samples  moments kept of the page counts.
    """

    prefill_rate: float = 20_000.0
    decode_rate: float = 50.0
    max_step_tokens: int = 8192
    max_requests: int = 256
    checkpoint_interval: int | None = None
    min_checkpoint_gain: int = 256
    num_samples: int = 128

    def __post_init__(self) -> None:
        for name, value in (("prefill_rate", self.prefill_rate), ("decode_rate", self.decode_rate)):
            if not 1e-6 <= value <= 1e12:
                raise ConfigError(name, value, "tokens/s, from 1e-6 to 1e12")
        least = {"max_step_tokens": self.max_step_tokens, "max_requests": self.max_requests, "num_samples": self.num_samples}
        if self.checkpoint_interval is not None:
            least["checkpoint_interval"] = self.checkpoint_interval
        for name, number in least.items():
            if number < 1:
                raise ConfigError(name, number, "at least 1")


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool at one time: seconds, requests that run and that are ready and wait, and pages by use.

    padding  share of the running requests' pages that holds no live byte.
    """

    time: float
    running: int
    waiting: int
    pages: PageCounts
    padding: float


@dataclass(frozen=True, slots=True)
class Miss:
    """Requests whose lookup ended for one reason (`Hit.reason`), and the prompt tokens they had to compute."""

    reason: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """One request as it was served: times in seconds, tokens it did not compute, and how often it lost its memory.

    ready  when it could first have been sent: its arrival, or its predecessor's end.
    """

    number: int
    ready: float
    admitted: float
    ended: float
    hit_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most pages of each use, at any time; `used` is all but the free ones, `held` what running requests hold."""

    used: int = 0
    held: int = 0
    blocks: int = 0
    tails: int = 0
    slots: int = 0
    cached: int = 0
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What a workload did to a pool. Tokens count prompts at their first admission; seconds are simulated ones.

    finished, refused      requests served; requests that do not fit even alone.
    reusable_tokens        prompt tokens that an earlier request of the trace had said, whatever was kept.
    hit_tokens, hits       prompt tokens not computed, and requests that had any.
    recomputed_tokens      computed again by requests that were preempted and whose memory was evicted since.
    waited                 requests that the first step after they were ready could not admit.
    wait_s                 seconds from ready to admission, of every request.
    evicted_blocks, evicted_checkpoints   what was given up for room.
    checkpoints, skipped_checkpoints      made, and not made for want of a page.
    mean_running           requests that ran, averaged over time.   peak_running  the most at once.
    served, held           if asked for: every request, by number; and from which time on running requests held how many pages.
    """

    num_pages: int
    page_bytes: int
    requests: int
    finished: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int
    hit_tokens: int
    hits: int
    recomputed_tokens: int
    preemptions: int
    waited: int
    wait_s: tuple[float, ...] = field(repr=False)
    evicted_blocks: int
    evicted_checkpoints: int
    checkpoints: int
    skipped_checkpoints: int
    takeovers: int
    twins: int
    seconds: float
    steps: int
    mean_running: float
    peak_running: int
    peaks: Peaks
    misses: tuple[Miss, ...]
    moments: tuple[Moment, ...] = field(repr=False)
    served: tuple[Served, ...] = field(default=(), repr=False)
    held: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Share of the requests that reused anything."""
        return self.hits / self.finished if self.finished else 0.0

    @property
    def padding(self) -> float:
        """Mean over the moments at which anything ran."""
        found = [moment.padding for moment in self.moments if moment.running]
        return sum(found) / len(found) if found else 0.0
