"""The plan of a model: every byte from its description alone. `make_plan` makes it, `plan_json` says it as one JSON object.

Others build on the records that this module gives out.
"""

from collections.abc import Sequence
from dataclasses import replace

from lamina.base.errors import ConfigError
from lamina.memory.kinds import Field, Memory
from lamina.memory.layout import HIDDEN, Layout, make_layout
from lamina.models.description import Choices, Description, WeightPart
from lamina.plan.budget import entry_bytes, make_budget, weight_lines, workspace
from lamina.plan.gpus import resolve_mesh
from lamina.plan.records import (
    Budget,
    MemoryLine,
    Mesh,
    Plan,
    PlanOptions,
    RequestLine,
    Together,
    WeightLine,
    WorkloadLine,
)  # fmt: skip
from lamina.plan.workloads import checkpoint_range, lengths, together, workload

__all__ = [
    "Budget", "MemoryLine", "Mesh", "Plan", "PlanOptions", "RequestLine", "Together", "WeightLine", "WorkloadLine",
    "choices_of", "make_plan", "plan_json",
]  # fmt: skip

_MOST_DRAFTS = 7
#: a format's name by the element type that most of an entry has
_FORMATS = {"e4m3": "fp8", "e2m1": "fp4", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def choices_of(options: PlanOptions) -> Choices:
    """What a family must know to describe a model for these options. Raises ConfigError."""
    _check(options)
    mesh = resolve_mesh(options)
    return Choices(options.cache_format, options.index_format, mesh.tp, options.draft_tokens)


def make_plan(
    description: Description,
    options: PlanOptions,
    name: str,
    weights: Sequence[WeightPart] | None = None,
    num_experts: int | None = None,
) -> Plan:
    """The plan of a model described with `choices_of(options)`.

    name     of the model, for people.   weights  exact ones, from a checkpoint's headers; None: those of the description.
    num_experts  of a layer, where it is known: whole experts may not divide over expert-parallel GPUs.
    Raises ConfigError for options that do not go together, lengths past the model's maximum, impossible block sizes.
    """
    _check(options)
    mesh = resolve_mesh(options)
    layout = make_layout(description.memories, description.hidden, options.block_tokens, options.draft_tokens)
    lines = weight_lines(description.weights if weights is None else weights, mesh, num_experts)
    space = workspace(description, options)
    budget = make_budget(options, lines, space)
    pages = None if budget.pool_bytes is None else budget.pool_bytes // layout.page_bytes
    loads = tuple(
        workload(layout, tokens, count, pages, mesh.dp) for tokens, count in lengths(options, description.max_positions)
    )
    fewest, most = checkpoint_range(layout)
    return Plan(
        model=name, description=description, layout=layout, options=options, mesh=mesh, budget=budget,
        weights_bytes=sum(line.nbytes for line in lines), exact_weights=weights is not None, memories=memory_lines(layout),
        weights=lines, workspace=space, workloads=loads, together=together(layout, options.requests, pages, mesh.dp),
        checkpoint_pages=most, checkpoint_range=(fewest, most), notes=description.notes,
    )  # fmt: skip


def _check(options: PlanOptions) -> None:
    for field, value, low, high in (
        ("draft", options.draft_tokens, 0, _MOST_DRAFTS), ("max-step-tokens", options.max_step_tokens, 1, 2**24),
        ("max-requests", options.max_requests, 1, 2**24),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(field, value, f"an integer from {low} to {high}")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError("gpu-memory-utilization", options.gpu_memory_utilization, "above 0 and at most 1")
    for field, size in (("memory", options.memory_bytes), ("cache-bytes", options.cache_bytes)):
        if size is not None and size < 1:
            raise ConfigError(field, size, "at least 1 byte")


# Memories ------------------------------------------------------------------------------------------------------------


def memory_lines(layout: Layout) -> tuple[MemoryLine, ...]:
    """The memories, those that differ in nothing but the layer in one line; then the final hidden vector."""
    in_pages = {memory for tail in layout.tails for memory in tail.windows}
    groups: dict[tuple[Memory, bool], list[Memory]] = {}
    for memory in layout.memories:
        groups.setdefault((replace(memory, layer=0), memory in in_pages), []).append(memory)
    lines = [_line(layout, members, is_paged) for (_, is_paged), members in groups.items()]
    if layout.hidden is not None:
        size = layout.hidden.nbytes
        hidden = MemoryLine(
            name=HIDDEN, kind=HIDDEN, layers=1, layer_ids=(), format=format_of((layout.hidden,)), fields=(layout.hidden,),
            entry_bytes=size, tokens_per_entry=1, bytes_per_token=0.0, in_pages=False,
            fixed_bytes_per_request=size * (1 + layout.draft_tokens),
            lifetime="the last token's vector",
        )  # fmt: skip
        lines.append(hidden)
    return tuple(lines)


def _line(layout: Layout, members: Sequence[Memory], is_paged: bool) -> MemoryLine:
    memory, count = members[0], len(members)
    parts = memory.block_parts(layout.block_tokens)
    in_slot = () if is_paged else memory.slot_parts(layout.draft_tokens)
    fields = tuple(part.field for part in parts or in_slot or memory.tail_parts(1))
    fixed = sum(part.rows * part.field.nbytes for part in in_slot)
    if is_paged:
        fixed = sum(memory.most_tail_rows) * entry_bytes(memory)
    per_block = sum(part.rows * part.field.nbytes for part in parts)
    return MemoryLine(
        name=memory.name, kind=memory.kind, layers=count, layer_ids=tuple(one.layer for one in members), format=format_of(fields),
        fields=fields, entry_bytes=sum(field.nbytes for field in fields), tokens_per_entry=memory.log_stride,
        bytes_per_token=count * per_block / layout.block_tokens, fixed_bytes_per_request=count * fixed, in_pages=is_paged,
        lifetime=memory.lifetime,
    )  # fmt: skip


def format_of(fields: Sequence[Field]) -> str:
    """The name of the format that most elements have: fp8, fp4, bf16, fp32; "-" for what owns no bytes."""
    counts: dict[str, int] = {}
    for field in fields:
        bits = field.nbytes
        counts[field.dtype] = counts.get(field.dtype, 0) + bits
    widest = max(counts, key=lambda dtype: counts[dtype], default="-")
    return _FORMATS.get(widest, widest)


# JSON ----------------------------------------------------------------------------------------------------------------


def plan_json(plan: Plan) -> dict[str, object]:
    """Everything a plan says, as plain values that JSON can hold: sizes in bytes, lengths in tokens, null for unknown."""
    options, mesh, budget, layout = plan.options, plan.mesh, plan.budget, plan.layout
    return {
        "model": plan.model,
        "model_type": plan.description.model_type,
        "layout_id": plan.layout_id,
        "block_tokens": plan.block_tokens,
        "page_bytes": plan.page_bytes,
        "slot_pages": plan.slot_pages,
        "checkpoint_pages": plan.checkpoint_pages,
        "checkpoint_pages_range": list(plan.checkpoint_range),
        "weights_bytes": plan.weights_bytes,
        "weights_are_exact": plan.exact_weights,
        "cache_format": plan.description.cache_format,
        "index_format": plan.description.index_format,
        "max_positions": plan.description.max_positions,
        "replay_tokens": None if layout.replay == float("inf") else int(layout.replay),
        "options": {
            "gpu": options.gpu, "memory_bytes": options.memory_bytes, "cache_bytes": options.cache_bytes, "gpus": mesh.gpus,
            "tp": mesh.tp, "ep": mesh.ep, "dp": mesh.dp, "draft": options.draft_tokens,
            "gpu_memory_utilization": options.gpu_memory_utilization, "max_step_tokens": options.max_step_tokens,
            "max_requests": options.max_requests,
        },
        "gpu": None if budget.memory_bytes is None else {
            "name": options.gpu, "memory_bytes": budget.memory_bytes, "usable_bytes": budget.usable_bytes,
            "weights_bytes": budget.weights_bytes,
            "workspace_bytes": budget.workspace_bytes, "missing_bytes": budget.missing_bytes, "gpus_needed": budget.gpus_needed,
        },
        "pool_bytes": plan.pool_bytes,
        "pages": plan.pages,
        "blocks": plan.blocks,
        "slots": plan.slots,
        "memories": [_memory_json(line) for line in plan.memories],
        "weights": [
            {"component": w.component, "num_params": w.num_params, "bytes": w.nbytes, "split": w.split, "gpu_bytes": w.gpu_bytes}
            for w in plan.weights
        ],
        "workspace": [{"name": name, "bytes": size} for name, size in plan.workspace],
        "workloads": [_workload_json(line) for line in plan.workloads],
        "together": None if plan.together is None else {
            "pages": plan.together.pages, "pool_pages": plan.together.pool_pages, "fits": plan.together.fits,
        },
        "notes": list(plan.notes),
    }  # fmt: skip


def _memory_json(line: MemoryLine) -> dict[str, object]:
    return {
        "name": line.name,
        "kind": line.kind,
        "layers": line.layers,
        "layer_ids": list(line.layer_ids),
        "format": line.format,
        "fields": [
            {"name": field.name, "dtype": field.dtype, "shape": list(field.shape), "bytes": field.nbytes} for field in line.fields
        ],
        "entry_bytes": line.entry_bytes,
        "tokens_per_entry": line.tokens_per_entry,
        "bytes_per_token": int(line.bytes_per_token) if line.bytes_per_token.is_integer() else line.bytes_per_token,
        "fixed_bytes_per_request": line.fixed_bytes_per_request,
        "in_pages_of_its_own": line.in_pages,
        "lifetime": line.lifetime,
    }


def _workload_json(line: WorkloadLine) -> dict[str, object]:
    return {
        "context": line.context,
        "requests": line.requests,
        "pages": line.pages,
        "peak_pages": line.peak_pages,
        "log_bytes": line.log_bytes,
        "slot_bytes": line.slot_bytes,
        "bytes_per_request": line.bytes_per_request,
        "live_bytes": line.live_bytes,
        "open_block_bytes": line.open_bytes,
        "block_padding_bytes": line.block_padding_bytes,
        "slot_padding_bytes": line.slot_padding_bytes,
        "padding_fraction": line.padding_fraction,
        "checkpoint_bytes": line.checkpoint_bytes,
        "fits": line.fits,
        "fits_with_checkpoint": line.fits_with_checkpoint,
        "binds": line.binds,
        "memories": dict(line.rows),
    }
