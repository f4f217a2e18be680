"""What a GPU's runner needs of a model, of its draft blocks, and of a sampler: all of it is launched without waiting."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from lamina.ops.rows import Rows
from lamina.schedule.step import Decodes, Sample, TokenLogprobs

Order: TypeAlias = Literal["decode", "prefill"]
Mode: TypeAlias = bool | Literal["strict"]


class DeviceModel(Protocol):
    """What the runner needs of a model. All of it is launched without waiting; with decode order it can be captured."""

    def forward(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> Tensor:
        """tokens [T] int32 -> final hidden vectors [T, D] fp32. max_context: no request has more tokens after the step."""
        ...

    def logits(self, hidden: Tensor, order: Order) -> Tensor:
        """hidden [S, D] fp32 -> [S, V] fp32."""
        ...


class DeviceDrafter(Protocol):
    """The draft blocks of a model, as in `drafting.Drafter`; all of it is launched without waiting.

    least_likely  a draft ends where all of it would be less likely than this.
    """

    most_tokens: int
    keeps_features: bool
    least_likely: float

    def draft(
        self, features: Tensor, before: Tensor | None, tokens: Tensor, rows: Rows, counts: Tensor, following: Tensor,
        num_tokens: int, order: Order, max_context: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """counts, following int32 [R] -> drafts int32 [R, num_tokens], and how likely each is, fp32."""
        ...


@runtime_checkable
class DraftingDeviceModel(Protocol):
    """A model whose drafter is to be fed."""

    drafter: DeviceDrafter

    def forward_with_features(self, tokens: Tensor, rows: Rows, order: Order, max_context: int) -> tuple[Tensor, Tensor]:
        """As `DeviceModel.forward`, and what the drafter reads of each row [T, F]."""
        ...


class PendingDraws(Protocol):
    """Draws that have been launched."""

    def result(self) -> tuple[tuple[int | None, ...], tuple[TokenLogprobs | None, ...]]:
        """Waits for them: a token a sample (None: scores not finite), and its log-probs where they were asked for."""
        ...


class Sampler(Protocol):
    """What draws.

    last_tokens  int32 [max_requests], the token drawn last for each table row; always an id.
    """

    last_tokens: Tensor

    def warm_up(self) -> None:
        """Compiles what any request may need."""
        ...

    def launch(self, samples: Sequence[Sample], logits: Tensor, table_rows: Sequence[int]) -> PendingDraws:
        """Draws a token for each row of logits [S, V] and keeps it in `last_tokens`."""
        ...

    def launch_decodes(self, decodes: Decodes, logits: Tensor) -> PendingDraws:
        """The same for a step of nothing but decodes, row i of `logits` being of member i."""
        ...


def drafting_device_model(model: object) -> DraftingDeviceModel:
    """A model that was loaded with its draft blocks."""
    assert isinstance(model, DraftingDeviceModel)
    return model
