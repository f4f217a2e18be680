"""How layers over several residual streams are built."""

from lamina.layers.altup import AltUp, CloseStreams, Mixing, Normed, OpenStreams
from lamina.models.builder import Builder, Layer
from lamina.models.network import Branch, Norm
from lamina.models.parts_altup import AltUpLayer, Closing, Opening
from lamina.ops.gemm import Weight


def _square(builder: Builder, name: str, count: int) -> tuple[Weight, ...]:
    """Weights [D, D] of that name, numbered from 0."""
    width = builder.width
    return tuple(builder.product(builder.take(f"{name}.{number}.weight", width, width)) for number in range(count))


def opening(builder: Builder, part: object) -> Layer:
    """The layer of an `Opening`."""
    assert isinstance(part, Opening)
    prefix, inner = part.prefix, part.inner
    return OpenStreams(
        projections=_square(builder, f"{prefix}.altup_projections", part.num - 1),
        table=builder.take(f"{prefix}.embed_tokens_per_layer.weight", part.vocab, part.layers * inner),
        projection=builder.product(
            builder.take(f"{prefix}.per_layer_model_projection.weight", part.layers * inner, builder.width)
        ),
        norm=builder.norm(Norm(f"{prefix}.per_layer_projection_norm.weight", part.eps), inner), inner=inner,
    )  # fmt: skip


def closing(builder: Builder, part: object) -> Layer:
    """The layer of a `Closing`."""
    assert isinstance(part, Closing)
    return CloseStreams(_square(builder, f"{part.prefix}.altup_unembed_projections", part.num - 1))


def altup_layer(builder: Builder, part: object) -> Layer:
    """The layer of an `AltUpLayer`."""
    assert isinstance(part, AltUpLayer)
    prefix, width, num = part.prefix, builder.width, part.num

    def product(name: str, rows: int, columns: int) -> Weight:
        return builder.product(builder.take(f"{prefix}.{name}.weight", rows, columns))

    def normed(branch: Branch) -> Normed:
        assert branch.before is not None and branch.after is not None
        return Normed(builder.build(branch.part), builder.norm(branch.before, width), builder.norm(branch.after, width))

    scale = builder.take(f"{prefix}.altup.correct_output_scale", width)
    return AltUp(
        number=builder.layer, active=part.active,
        mixing=Mixing(
            product("altup.modality_router", num, width),
            builder.norm(Norm(f"{prefix}.altup.router_norm.weight", part.eps), width),
            product("altup.prediction_coefs", num * num, num), product("altup.correction_coefs", num, num),
        ),
        attention=normed(part.attention), mlp=normed(part.mlp), left=product("laurel.linear_left", part.rank, width),
        right=product("laurel.linear_right", width, part.rank),
        laurel_norm=builder.norm(Norm(f"{prefix}.laurel.post_laurel_norm.weight", part.eps), width),
        scale=scale if part.scales else None, gate=product("per_layer_input_gate", part.inner, width),
        back=product("per_layer_projection", width, part.inner), last=builder.norm(part.last, width), activation=part.activation,
    )  # fmt: skip
