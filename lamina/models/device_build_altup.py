"""How layers over several residual streams are built on a GPU."""

from lamina.layers.device_altup import DeviceAltUp, DeviceClosing, DeviceNorm, DeviceNormed, DeviceOpening, DeviceStreams
from lamina.layers.device_heads import DeviceHeads
from lamina.models.device_builder import DeviceBuilder, refuses_attention, refuses_mlp
from lamina.models.network import Attention, Branch, Mlp, Network, Norm
from lamina.models.parts_altup import AltUpLayer, Closing, Opening
from lamina.ops.gemm.stored import StoredWeight
from lamina.ops.machine import Machine


def refuses_altup(part: AltUpLayer, machine: Machine) -> str | None:
    """Why a layer is not served, or None."""
    attention, mlp = part.attention.part, part.mlp.part
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp) or part.activation != "gelu_tanh":
        return "streams around other layers: no GPU kernels yet"
    if not all(
        norm is not None and norm.kind == "rms" for branch in (part.attention, part.mlp) for norm in (branch.before, branch.after)
    ):
        return "streams with other norms: no GPU kernels yet"
    return refuses_attention(attention, machine) or refuses_mlp(mlp, machine)


def build_streams(builder: DeviceBuilder, network: Network) -> DeviceStreams:
    """The decoder of a network whose layers all are `AltUpLayer`s."""
    opening, closing, width = network.opening, network.closing, builder.width
    assert isinstance(opening, Opening) and isinstance(closing, Closing)

    def norm(given: Norm | None, size: int) -> DeviceNorm:
        assert given is not None
        weight = builder.take(given.name, size)
        return DeviceNorm(weight + 1 if given.kind == "rms1" else weight, given.eps)

    def squares(name: str) -> tuple[StoredWeight, ...]:
        return tuple(builder.weight(f"{name}.{number}.weight", width, width) for number in range(opening.num - 1))

    def normed(branch: Branch) -> DeviceNormed:
        return DeviceNormed(builder.build(branch.part), norm(branch.before, width), norm(branch.after, width))

    def layer(part: object) -> DeviceAltUp:
        assert isinstance(part, AltUpLayer)
        prefix, num = part.prefix, part.num

        def weight(name: str, rows: int, columns: int) -> StoredWeight:
            return builder.weight(f"{prefix}.{name}.weight", rows, columns)

        scale = builder.take(f"{prefix}.altup.correct_output_scale", width)
        return DeviceAltUp(
            active=part.active, router=weight("altup.modality_router", num, width),
            router_norm=norm(Norm(f"{prefix}.altup.router_norm.weight", part.eps), width),
            predictions=builder.take(f"{prefix}.altup.prediction_coefs.weight", num * num, num),
            corrections=builder.take(f"{prefix}.altup.correction_coefs.weight", num, num),
            attention=normed(part.attention), mlp=normed(part.mlp), left=weight("laurel.linear_left", part.rank, width),
            right=weight("laurel.linear_right", width, part.rank),
            laurel_norm=norm(Norm(f"{prefix}.laurel.post_laurel_norm.weight", part.eps), width),
            scale=scale if part.scales else None, gate=weight("per_layer_input_gate", part.inner, width),
            back=weight("per_layer_projection", width, part.inner), last=norm(part.last, width),
        )  # fmt: skip

    prefix, inner = opening.prefix, opening.inner
    table = builder.stored(f"{prefix}.embed_tokens_per_layer.weight", opening.vocab, opening.layers * inner)
    assert table.scales is None, "an embedding has no scales"
    first = DeviceOpening(
        squares(f"{prefix}.altup_projections"), table.codes,
        builder.weight(f"{prefix}.per_layer_model_projection.weight", opening.layers * inner, width),
        norm(Norm(f"{prefix}.per_layer_projection_norm.weight", opening.eps), inner), inner,
    )  # fmt: skip
    layers = []
    for number, (branch,) in enumerate(network.layers):
        builder.layer = number
        layers.append(layer(branch.part))
    heads = [each.attention.layer for each in layers]
    return DeviceStreams(
        first, tuple(layers), DeviceClosing(squares(f"{closing.prefix}.altup_unembed_projections")), norm(network.norm, width),
        tuple(each for each in heads if isinstance(each, DeviceHeads) and each.is_shared),
    )  # fmt: skip
