"""The generic name scheme, on a table of its own."""

import pytest

from lamina.base.errors import WeightError
from lamina.weights.names import NameScheme, Place, Rename, Split

SCHEME = NameScheme(
    renames=(
        Rename(r"^model\.", ""),
        Rename(r"^(blocks\.\d+)\.self_attn\.", r"\1.attn."),
        Rename(r"\.weight_scale_inv$", ".scale"),
    ),
    splits=(Split(r"(blocks\.\d+)\.experts\.gate_up", (r"\1.experts.{index}.gate.weight", r"\1.experts.{index}.up.weight")),),
    ignored=("extra.", "draft."),
)


def test_renames_apply_in_order_and_keep_numbers() -> None:
    stored = [
        "model.blocks.12.self_attn.3.q.weight_scale_inv",
        "blocks.7.attn.q.weight",
        "other.5",
        "model.blocks.3.self_attn.3.q.weight_scale_inv",
    ]
    assert SCHEME.rename_all(stored) == [
        "blocks.12.attn.3.q.scale",
        "blocks.7.attn.q.weight",
        "other.5",
        "blocks.3.attn.3.q.scale",
    ]
    assert [SCHEME.rename(name) for name in stored] == SCHEME.rename_all(stored)


def test_a_plain_tensor_is_one_place() -> None:
    assert SCHEME.places("blocks.0.attn.q.weight", (4, 8)) == (Place("blocks.0.attn.q.weight"),)


def test_a_fused_tensor_serves_every_part_once() -> None:
    assert SCHEME.places("blocks.4.experts.gate_up", (2, 6, 5)) == (
        Place("blocks.4.experts.0.gate.weight", 0, 0, 3),
        Place("blocks.4.experts.0.up.weight", 0, 3, 6),
        Place("blocks.4.experts.1.gate.weight", 1, 0, 3),
        Place("blocks.4.experts.1.up.weight", 1, 3, 6),
    )


@pytest.mark.parametrize("shape", [(2, 5, 5), (2,), (10**9, 2, 0)])
def test_a_fused_tensor_that_cannot_be_cut_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match=r"'blocks.4.experts.gate_up': expected \[entries, rows divisible by 2"):
        SCHEME.places("blocks.4.experts.gate_up", shape)


def test_ignored_prefixes_and_scales() -> None:
    assert SCHEME.is_ignored("draft.0.x") and SCHEME.is_ignored("extra.y") and not SCHEME.is_ignored("blocks.draft.x")
    assert not NameScheme().is_ignored("x")
    assert SCHEME.scale_name("a.weight") == "a.scale" and SCHEME.scale_name("a") == "a.scale"
