"""Several residual streams of which a layer computes one and predicts the others (AltUp): data for `build_altup.py`. No torch.

rows -> Opening -> streams [T, S, D] -> AltUpLayer, ... -> Closing -> rows
"""

from dataclasses import dataclass

from lamina.models.network import Branch, Norm


@dataclass(frozen=True, slots=True)
class Opening:
    """The streams of the embedded rows, and what each layer gets beside them: an embedding of its own and a projection.

    prefix  of altup_projections, embed_tokens_per_layer, per_layer_model_projection and per_layer_projection_norm.
    num     streams.   inner  width of what a layer gets.   vocab  rows of its embedding; other tokens have the first row.
    """

    prefix: str
    num: int
    layers: int
    inner: int
    vocab: int
    eps: float


@dataclass(frozen=True, slots=True)
class Closing:
    """The mean of the streams, each projected (`{prefix}.altup_unembed_projections`) and as long as the first."""

    prefix: str
    num: int


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """One layer over S streams.

    prefix   of altup, laurel, per_layer_input_gate and per_layer_projection.   active  the stream that is computed.
    rank     of the second residual (laurel).   inner  width of what the layer gets beside the streams.
    scales   what was computed is multiplied by `altup.correct_output_scale` before it meets the layer's own input.
    last     norm of what is added to the other streams.
    """

    prefix: str
    attention: Branch
    mlp: Branch
    num: int
    active: int
    rank: int
    inner: int
    scales: bool
    last: Norm
    eps: float
    activation: str
