"""What a runner needs of a model that drafts its own next tokens; models have their drafters beside them.

A step with rows [start, stop) of a sequence, the last `drafts` of them guesses:

    row         start ........ the token drawn last | guess | guess | guess
    counts      rows whose tokens are accepted: never fewer than those that are no guesses
    following   the token drawn after the last row that counts; -1 where none was (a prompt that goes on)

Nothing that a drafter does can change what is drawn, only how soon.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lamina.ops.sequences import Sequences


class Drafter(Protocol):
    """The draft blocks of one model, over the memories that they have in the slots.

    most_tokens     the most it drafts for a sequence at once.
    keeps_features  whether the slot keeps the features of the last token beside its hidden vector (memories that lag by one).
    """

    @property
    def most_tokens(self) -> int: ...

    @property
    def keeps_features(self) -> bool: ...

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


class DraftingModel(Protocol):
    """A model whose drafter is to be fed."""

    @property
    def drafter(self) -> Drafter:
        """Its draft blocks."""
        ...

    def forward_with_features(self, tokens: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """tokens [T] -> final hidden vectors [T, D] fp32, the same bits as `forward`, and what the drafter reads [T, F] fp32."""
        ...
