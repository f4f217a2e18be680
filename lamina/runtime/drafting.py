"""What a runner needs of a model that drafts its own next tokens; models have their drafters beside them.

A step with rows [start, stop) of a sequence, the last `drafts` of them guesses:

    row         start ........ the token drawn last | guess | guess | guess
    counts      rows whose tokens are accepted: never fewer than those that are no guesses
    following   the token drawn after the last row that counts; -1 where none was (a prompt that goes on)

Nothing that a drafter does can change what is drawn, only how soon.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from lamina.base.config import EngineConfig
from lamina.base.errors import ConfigError
from lamina.base.log import event, get_logger
from lamina.memory.kinds import Memory
from lamina.models.files import list_stored
from lamina.models.registry import draft_blocks, has_draft_blocks, most_drafts
from lamina.ops.sequences import Sequences
from lamina.schedule.step import Step

_LOG = get_logger(__name__)
#: tokens drafted ahead where nobody says how many
_DEFAULT_TOKENS, _DEFAULT_BLOCK_TOKENS = 4, 5


class Drafter(Protocol):
    """The draft blocks of one model, over the memories that they have in the slots.

    most_tokens     the most it drafts for a sequence at once.
    keeps_features  whether the slot keeps the features of the last token beside its hidden vector (memories that lag by one).
    """

    @property
    def most_tokens(self) -> int:
        """See above."""
        ...

    @property
    def keeps_features(self) -> bool:
        """See above."""
        ...

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, sequences: Sequences, counts: Sequence[int],
        following: Sequence[int], wanted: Sequence[int],
    ) -> list[list[int]]:  # fmt: skip
        """Brings the drafter's memories up to the accepted rows of a step, then drafts.

        features   [T, F] fp32 of every row of the step, as `forward_with_features` gave them.
        before     [R, F] those of the position before each sequence's first row, what a slot keeps (anything where a sequence
                   starts at position 0); None unless `keeps_features`.
        tokens     [T] int64, padding included.
        counts, following  of each sequence, see above.   wanted  tokens to draft at most; 0 where `following` is -1.
        Returns    of each sequence the drafts for the positions after `following`: at most `wanted`, or fewer.
        """
        ...


@runtime_checkable
class DraftingModel(Protocol):
    """A model whose drafter is to be fed."""

    @property
    def drafter(self) -> Drafter:
        """Its draft blocks."""
        ...

    @property
    def hidden_size(self) -> int:
        """D: of what a slot keeps, the first D numbers are the final hidden vector."""
        ...

    def forward_with_features(self, tokens: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """tokens [T] -> final hidden vectors [T, D] fp32, the same bits as `forward`, and what the drafter reads [T, F] fp32."""
        ...


def settled(step: Step, drawn: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Of each slice how many rows count, and the token that follows them, -1 where none was drawn."""
    counts = [part.stop - part.start - part.num_guesses for part in step.slices]
    following = [-1] * len(step.slices)
    is_open = [True] * len(step.slices)
    for item, token in zip(step.samples, drawn, strict=True):
        at = item.slice_index
        if at is None or not is_open[at]:
            continue
        part = step.slices[at]
        following[at] = -1 if token is None else token
        is_open[at] = item.rows_back > 0 and part.tokens[len(part.tokens) - item.rows_back] == token
        counts[at] += is_open[at]
    return counts, following


def drafting_model(model: object) -> DraftingModel:
    """A model that was loaded with its draft blocks."""
    assert isinstance(model, DraftingModel)
    return model


def chosen_drafts(
    config: EngineConfig, values: Mapping[str, object], directory: Path, memories: Sequence[Memory]
) -> EngineConfig:
    """The settings with what drafts and how far decided: auto becomes what the checkpoint has, else lookup where it can be.

    values  its config.json; its files may have no draft blocks whatever that says.
    Raises ConfigError for draft blocks that the checkpoint does not have.
    """
    kind = config.draft
    has_blocks = kind not in ("none", "lookup") and has_draft_blocks(values, [one.name for one in list_stored(directory)])
    stored = draft_blocks(values) if has_blocks else None
    if kind == "auto":
        fixed = any(not memory.takes_drafts for memory in memories)
        kind = stored or ("none" if fixed else "lookup")
        if kind == "none":
            event(_LOG, "no_drafts", logging.WARNING, reason="a scan's state takes in tokens and cannot give drafts back")
    blocking = next((memory for memory in memories if not memory.takes_drafts), None)
    if kind == "lookup" and blocking is not None:
        why = f"layer {blocking.layer}'s {blocking.name} takes in the whole prefix and cannot give tokens back"
        raise ConfigError("draft", kind, f"none or auto: {why}")
    if kind == "none":
        return replace(config, draft=kind, draft_tokens=None)
    if kind != "lookup" and kind != stored:
        allowed = "none, auto or lookup" if stored is None else f"none, auto, lookup or {stored}"
        raise ConfigError("draft", kind, f"{allowed}: the checkpoint has {stored or 'no'} draft blocks")
    default = _DEFAULT_BLOCK_TOKENS if kind == "dspark" else _DEFAULT_TOKENS
    tokens = config.draft_tokens or default
    return replace(config, draft=kind, draft_tokens=min(tokens, most_drafts(values)) if kind == stored else tokens)
