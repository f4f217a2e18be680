"""A decoder as data: what its layers compute, and which tensors of a checkpoint they take. No tensors here, no torch.

A family's file turns a config.json into a `Network`; `network_model.py` builds the layers that it names and runs them. What the
layers remember, the family's `describe` says.

    ids -> embedding -> [ x + part(norm(x)) for each part of each layer ] -> norm -> head
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.models.config_fields import check_end_tokens
from lamina.weights.names import NameScheme


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the hidden width, or of a head.

    kind   rms: x / rms(x) * w.   rms1: x / rms(x) * (1 + w).   plain: x / rms(x), no tensor.   layer: (x - mean) / std * w.
    name   of its tensor.
    """

    name: str
    eps: float
    kind: str = "rms"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of `dim` dims at theta.

    kind     default, linear, llama3, yarn or longrope; `scaling` holds its numbers by the names of config.json.
    is_pairs the rotated pairs are dims (2i, 2i + 1); else (i, i + dim / 2).
    max_positions  of the config; some kinds depend on it.
    """

    dim: int
    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, object], ...] = ()
    is_pairs: bool = False
    max_positions: int = 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with grouped keys and values: H query heads over K key/value heads.

    prefix   of q_proj, k_proj, v_proj, o_proj (names in `names` if others).
    memory   name of the layer's memory; shares  layer whose memory this layer reads instead of having one.
    window   tokens that a query sees, its own included; chunk  it sees those since the last multiple.
    rope     rotates the first `rope.dim` dims of each head; None: no positions.
    q_norm, k_norm  per head, or over all heads' dims where `norm_all`; before the rotation, or after it with norm_after_rope.
    scale    of the scores.   softcap  cap * tanh(score / cap); 0 none.   sinks  name of [H] logits without a value.
    is_gated  q_proj gives for each head a query and a gate; the output is multiplied by sigmoid(gate).
    v_norm   plain norm of the values (its eps), 0 for none.
    temperature  (step, amount, first): queries at position p are multiplied by 1 + amount * log(1 + floor((p + first) / step)).
    """

    prefix: str
    heads: int
    kv_heads: int
    dim: int
    scale: float
    memory: str
    bias: bool = False
    out_bias: bool = False
    rope: Rope | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_all: bool = False
    norm_after_rope: bool = False
    v_norm_eps: float = 0.0
    sinks: str | None = None
    is_gated: bool = False
    shares: int | None = None
    temperature: tuple[float, float, float] | None = None
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate(x)) * up(x)); without a gate down(act(up(x))).

    activation  silu, gelu_tanh, relu2.   cut  the gate is what lies above its mean plus so many standard deviations, else 0.
    """

    prefix: str
    width: int
    activation: str = "silu"
    bias: bool = False
    names: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    multipliers: tuple[float, float] = (1.0, 1.0)  # of the gate, and of the result
    cut: float | None = None
    is_fused: bool = False  # the tensor named for `up` has the gate's rows before its own


@dataclass(frozen=True, slots=True)
class Router:
    """Who gets a token.

    kind   softmax: softmax of all, then the k best; chosen: the k best, then softmax of these; chosen_sigmoid: the k best, then
           their sigmoids; sigmoid: sigmoids, with `bias` (the name of its tensor) for the selection alone.
    normalises  the weights of a token sum to 1, then come times `scale`.   groups, kept  limits the choice to the best groups.
    """

    kind: str
    top_k: int
    normalises: bool = True
    scale: float = 1.0
    bias: str | None = None
    groups: int = 1
    kept: int = 1


@dataclass(frozen=True, slots=True)
class Experts:
    """`num` gated experts of `width`, of which the router gives each token a few, and a shared one.

    prefix   experts are `{prefix}.experts.{e}.{name}.weight` for the names gate, up, down.   gate  name of the router's tensor.
    shared_gate  name of [1, D]: the shared expert is multiplied by its sigmoid.
    """

    prefix: str
    num: int
    width: int
    router: Router
    gate: str
    shared: Mlp | None = None
    shared_gate: str | None = None
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that read the same normed input; their results are added."""

    parts: tuple["Part", ...]


#: what a residual branch may compute; `network_model.BUILDERS` has a builder for each
Part: TypeAlias = object


@dataclass(frozen=True, slots=True)
class Branch:
    """kept * x + scale * after(part(before(x))); norms may be missing.

    keeps_normed  before(x) is what goes on in place of x.   kept  0: what the part gives is the next residual.
    """

    part: Part
    before: Norm | None
    after: Norm | None = None
    scale: float = 1.0
    kept: float = 1.0
    keeps_normed: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The whole decoder.

    embed, head   names of the tensors; head None: the embedding once more.   embed_scale  of the embedded rows.
    opening, closing  parts that turn embedded rows into the residual, and back before the norm; None: they are the same.
    head_may_miss a checkpoint without the head means the embedding once more.
    logit_scale, softcap  logits are logit_scale * hidden @ head, capped as scores are.
    names         how a file's names become those that the parts ask for.
    """

    vocab_size: int
    hidden_size: int
    embed: str
    layers: tuple[tuple[Branch, ...], ...]
    norm: Norm
    head: str | None
    eos_token_ids: tuple[int, ...]
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    head_may_miss: bool = False
    opening: Part | None = None
    closing: Part | None = None
    names: NameScheme = field(default_factory=NameScheme)

    def __post_init__(self) -> None:
        check_end_tokens("eos_token_id", self.eos_token_ids, self.vocab_size)


def parts_of(network: Network) -> Iterator[object]:
    """All parts of a network, those that stand side by side one after another."""
    ends = [part for part in (network.opening, network.closing) if part is not None]
    waiting = [*ends, *(each.part if isinstance(each, Branch) else each for layer in network.layers for each in layer)]
    waiting.reverse()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Parallel):
            waiting += reversed(part.parts)
        else:
            yield part
