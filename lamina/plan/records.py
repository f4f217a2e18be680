"""The records of a memory plan: what was asked, and what came out. Sizes are bytes, lengths are tokens."""

from dataclasses import dataclass, field

from lamina.memory.kinds import Field
from lamina.memory.layout import Layout
from lamina.models.description import Description


@dataclass(frozen=True, slots=True)
class RequestLine:
    """`count` requests of `tokens` tokens each."""

    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything a user may choose. None leaves a choice to the plan.

    gpu             a name of `gpus.GPUS`; or memory_bytes, the memory of one GPU; neither: bytes are said, capacity is not.
    cache_bytes     plan a pool of this size on each replica, whatever the GPU and the weights are.
    gpus, tp, ep, dp  see `gpus.resolve_mesh`.
    cache_format, index_format  the formats of entries and index keys; None: the family's.
    contexts        lengths to show, in tokens.   requests  COUNT x TOKENS lines.   Neither: 1K to 1M as far as the model goes.
    block_tokens    native tokens of a block; None: the layout's choice.   draft_tokens  tokens drafted ahead, 0 to 7.
    gpu_memory_utilization  share of the GPU's memory that is used at all.
    max_step_tokens, max_requests  rows of a step, and of its logits; they size the workspace.
    """

    gpu: str | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    gpus: int | None = None
    tp: int | None = None
    ep: int | None = None
    dp: int | None = None
    cache_format: str | None = None
    index_format: str | None = None
    contexts: tuple[int, ...] = ()
    requests: tuple[RequestLine, ...] = ()
    block_tokens: int | None = None
    draft_tokens: int = 0
    gpu_memory_utilization: float = 0.9
    max_step_tokens: int = 8192
    max_requests: int = 256


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the GPUs share the work: gpus = tp * dp.

    tp  GPUs that share each layer.   dp  replicas of the attention, each with a pool of its own.
    ep  GPUs over which whole experts are spread; None: experts are shared like the other layers.
    """

    gpus: int = 1
    tp: int = 1
    dp: int = 1
    ep: int | None = None

    @property
    def expert_ways(self) -> int:
        """GPUs over which the experts' bytes are divided; inside an expert group, tensor parallelism goes on."""
        return self.tp if self.ep is None else max(self.tp, self.ep)


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One memory of all layers that have it with the same data.

    layers         how many layers; layer_ids which.   fields  of one entry or state; their bytes add up to entry_bytes.
    bytes_per_token          per native token, all these layers together; 0 for what does not grow.
    fixed_bytes_per_request  rings, folds and states of one request, all layers, without alignment. Of a window in pages of
                             its own (in_pages): its bytes when full.
    """

    name: str
    kind: str
    layers: int
    layer_ids: tuple[int, ...]
    format: str
    fields: tuple[Field, ...]
    entry_bytes: int
    tokens_per_entry: int
    bytes_per_token: float
    fixed_bytes_per_request: int
    in_pages: bool
    lifetime: str


@dataclass(frozen=True, slots=True)
class WeightLine:
    """The weights of one component: in the checkpoint, and on the fullest GPU. split as in `WeightPart`."""

    component: str
    num_params: int
    nbytes: int
    split: str
    gpu_bytes: int


@dataclass(frozen=True, slots=True)
class WorkloadLine:
    """Requests of one length, on one replica unless said otherwise.

    requests        how many were asked for; None where only the length was.
    log_bytes       pages of blocks and of windows in pages of their own.   slot_bytes  pages of the slot.
    live_bytes      bytes that matter; the rest of bytes_per_request is padding: open_bytes (rows of open blocks that are
                    still empty, or of a window's pages that have left it), slot_padding_bytes and block_padding_bytes
                    (alignment, rest of the page).
    checkpoint_bytes  of a checkpoint at the end, without the open block.
    peak_pages      the most pages it needs on its way to that length: more than `pages` where a large window has just moved on
                    or was cleared. What counts for admission.
    fits            such requests in the pools of all replicas, by their peak; None where no memory is given.
    fits_with_checkpoint  the same where each keeps one checkpoint.   binds  what takes more of a request: "log" or "slots".
    rows            bytes by memory and "padding", as `memory.plan.predict` has them; they add up to bytes_per_request.
    """

    context: int
    requests: int | None
    pages: int
    peak_pages: int
    log_bytes: int
    slot_bytes: int
    bytes_per_request: int
    live_bytes: int
    open_bytes: int
    block_padding_bytes: int
    slot_padding_bytes: int
    padding_fraction: float
    checkpoint_bytes: int
    fits: int | None
    fits_with_checkpoint: int | None
    binds: str
    rows: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Together:
    """All COUNT x TOKENS lines at once: pages they need at their peaks, pages of all replicas, whether each finds a place."""

    pages: int
    pool_pages: int | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Budget:
    """One GPU's memory, from the whole to the pool. All None-able parts are None with `cache_bytes` or without a memory.

    usable_bytes     memory_bytes x gpu_memory_utilization.   weights_bytes  on the fullest GPU.   workspace_bytes  estimated.
    pool_bytes       what is left, at least 0.   missing_bytes  what is short of weights and workspace, else 0.
    gpus_needed      where weights do not fit: the fewest GPUs (as tensor parallel) that would do, if any was found.
    """

    memory_bytes: int | None = None
    usable_bytes: int | None = None
    weights_bytes: int | None = None
    workspace_bytes: int | None = None
    pool_bytes: int | None = None
    missing_bytes: int = 0
    gpus_needed: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every byte goes, known from the config alone.

    model           a name for people.   exact_weights  whether weights come from the files' headers, not from the config.
    weights_bytes   the whole checkpoint.   workspace  the estimate's parts, in words and bytes.
    checkpoint_pages  the most a checkpoint takes; checkpoint_range  the fewest and the most once every window is full.
    pages           pages of one replica's pool; None without a memory.   blocks, slots  how many, if all pages were that.
    """

    model: str
    description: Description
    layout: Layout
    options: PlanOptions
    mesh: Mesh
    budget: Budget
    weights_bytes: int
    exact_weights: bool
    memories: tuple[MemoryLine, ...]
    weights: tuple[WeightLine, ...]
    workspace: tuple[tuple[str, int], ...]
    workloads: tuple[WorkloadLine, ...]
    together: Together | None
    checkpoint_pages: int
    checkpoint_range: tuple[int, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def layout_id(self) -> str:
        """Says that two plans store bytes in the same shape."""
        return self.layout.layout_id

    @property
    def block_tokens(self) -> int:
        """Native tokens of a block."""
        return self.layout.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.layout.page_bytes

    @property
    def slot_pages(self) -> int:
        """Pages of a running request's slot."""
        return self.layout.slot_pages

    @property
    def pool_bytes(self) -> int | None:
        """Bytes of one replica's pool on one GPU; None without a memory."""
        return self.budget.pool_bytes

    @property
    def pages(self) -> int | None:
        """Pages of one replica's pool; None without a memory."""
        return None if self.budget.pool_bytes is None else self.budget.pool_bytes // self.layout.page_bytes

    @property
    def blocks(self) -> int | None:
        """Blocks, if every page were one; 0 for a model whose blocks have no pages."""
        return None if self.pages is None else self.pages if self.layout.has_logs else 0

    @property
    def slots(self) -> int | None:
        """Slots, if every page were part of one; None without a memory or where the model has no slot."""
        return None if self.pages is None or not self.layout.slot_pages else self.pages // self.layout.slot_pages
