"""What a checkpoint may store, and every way it can lie."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lamina.base.errors import ConfigError, WeightError
from lamina.ops.quantise import e8m0_to_fp32
from lamina.weights.loader import Checkpoint, read_config
from lamina.weights.names import NameScheme, Rename, Split
from lamina.weights.writer import encode

SCHEME = NameScheme(
    renames=(Rename(r"\.weight_scale_inv$", ".scale"),),
    splits=(
        Split(r"experts\.gate_up", (r"experts.{index}.gate.weight", r"experts.{index}.up.weight")),
        Split(r"experts\.gate_up\.scale", (r"experts.{index}.gate.scale", r"experts.{index}.up.scale")),
    ),
    ignored=("draft.",),
)


def opened(directory: Path, **tensors: Tensor) -> Checkpoint:
    """A checkpoint of `tensors`; two underscores in a name stand for a dot."""
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return Checkpoint(directory, SCHEME)


def refused(call: Callable[[], object], *words: str) -> None:
    """Asserts one line of WeightError that holds every word."""
    with pytest.raises(WeightError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_tensors_come_back_as_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = random(5, 3).to(dtype)
    checkpoint = opened(tmp_path, a__weight=stored, b=random(7).to(dtype))
    values = checkpoint.take("a.weight", (5, 3))
    assert values.dtype == torch.float32 and torch.equal(values, stored.float())
    values.zero_()  # its own memory
    assert checkpoint.take("b", (7,)).shape == (7,)
    checkpoint.finish()


@pytest.mark.parametrize("shape", [(128, 256), (130, 70)])
@pytest.mark.parametrize("kind", ["e8m0", "u8", "fp32"])
def test_fp8_pairs(tmp_path: Path, shape: tuple[int, int], kind: str) -> None:
    encoded = encode(random(*shape), "fp8")
    assert encoded.scale is not None
    scale = {"e8m0": encoded.scale, "u8": encoded.scale.view(torch.uint8), "fp32": e8m0_to_fp32(encoded.scale) * 1.7}[kind]
    checkpoint = opened(tmp_path, a__weight=encoded.stored, a__weight_scale_inv=scale)
    values = checkpoint.take("a.weight", shape)
    expected = encoded.values if kind != "fp32" else encoded.values * torch.tensor(1.7)
    assert torch.equal(values, expected) if kind != "fp32" else torch.allclose(values, expected, rtol=1e-6)
    checkpoint.finish()


@pytest.mark.parametrize("kind", ["e8m0", "u8", "fp32"])
def test_fp4_pairs(tmp_path: Path, kind: str) -> None:
    encoded = encode(random(6, 64), "fp4")
    assert encoded.scale is not None and encoded.stored.dtype == torch.int8
    scale = {"e8m0": encoded.scale, "u8": encoded.scale.view(torch.uint8), "fp32": e8m0_to_fp32(encoded.scale)}[kind]
    packed = encoded.stored.view(torch.uint8) if kind == "u8" else encoded.stored
    checkpoint = opened(tmp_path, a__weight=packed, a__scale=scale)
    assert torch.equal(checkpoint.take("a.weight", (6, 64)), encoded.values)
    checkpoint.finish()


def test_fused_experts_plain_and_fp8(tmp_path: Path) -> None:
    fused = random(3, 8, 4)
    checkpoint = opened(tmp_path, experts__gate_up=fused)
    for index in (2, 0, 1):
        assert torch.equal(checkpoint.take(f"experts.{index}.up.weight", (4, 4)), fused[index, 4:])
        assert torch.equal(checkpoint.take(f"experts.{index}.gate.weight", (4, 4)), fused[index, :4])
    checkpoint.finish()
    assert not checkpoint.has("experts.gate_up") and not checkpoint.has("experts.3.up.weight")
    encoded = [encode(random(256, 128) + index, "fp8") for index in range(2)]
    stored, scale = (
        torch.stack([e.stored.view(torch.uint8) for e in encoded]),
        torch.stack([e.scale.view(torch.uint8) for e in encoded]),
    )
    checkpoint = opened(
        tmp_path, experts__gate_up=stored.view(torch.float8_e4m3fn), experts__gate_up__scale=scale.view(torch.float8_e8m0fnu)
    )
    for index in range(2):
        assert torch.equal(checkpoint.take(f"experts.{index}.gate.weight", (128, 128)), encoded[index].values[:128])
        assert torch.equal(checkpoint.take(f"experts.{index}.up.weight", (128, 128)), encoded[index].values[128:])
    checkpoint.finish()


def test_integers_are_range_checked(tmp_path: Path) -> None:
    ids = torch.tensor([[0, 3], [1, 2]])
    assert torch.equal(opened(tmp_path, ids=ids).take_int("ids", (2, 2), 0, 4), ids)
    assert opened(tmp_path, ids=ids.to(torch.int32)).take_int("ids", (2, 2), 0, 4).dtype == torch.int64
    refused(lambda: opened(tmp_path, ids=ids).take_int("ids", (2, 2), 0, 3), "'ids'", "0 to 2", "found 3")
    refused(lambda: opened(tmp_path, ids=-ids).take_int("ids", (2, 2), 0, 4), "'ids'", "found -3")
    refused(lambda: opened(tmp_path, ids=ids).take_int("ids", (4,), 0, 4), "'ids'", "[4]", "I64 [2, 2]")
    refused(lambda: opened(tmp_path, ids=ids.float()).take_int("ids", (2, 2), 0, 4), "'ids'", "F32")
    refused(lambda: opened(tmp_path, ids=ids).take("ids", (2, 2)), "'ids'", "I64")


def test_what_take_refuses(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, a__weight=random(4, 4))
    refused(lambda: checkpoint.take("b.weight", (4, 4)), "'b.weight'", "missing")
    refused(lambda: checkpoint.take("a.weight", (4, 5)), "'a.weight'", "[4, 5]", "[4, 4]")
    checkpoint = opened(tmp_path, a__weight=random(4, 4))
    checkpoint.take("a.weight", (4, 4))
    refused(lambda: checkpoint.take("a.weight", (4, 4)), "'a.weight'", "twice")
    refused(lambda: opened(tmp_path, a=random(4).double()).take("a", (4,)), "'a'", "F64")
    for bad in (float("nan"), float("inf"), float("-inf")):
        poisoned = random(300)
        poisoned[217] = bad
        for dtype in (torch.float32, torch.bfloat16):
            refused(
                lambda poisoned=poisoned, dtype=dtype: opened(tmp_path, a=poisoned.to(dtype)).take("a", (300,)), "'a'", "finite"
            )


def test_what_quantised_tensors_may_not_be(tmp_path: Path) -> None:
    fp8, fp4 = encode(random(130, 128), "fp8"), encode(random(4, 64), "fp4")
    assert fp8.scale is not None and fp4.scale is not None
    nan_scale = fp8.scale.clone()
    nan_scale.view(torch.uint8)[1, 0] = 255
    nan_code = fp8.stored.clone()
    nan_code.view(torch.uint8)[5, 5] = 127
    take_fp8 = ("a.weight", (130, 128))
    refused(lambda: opened(tmp_path, a__weight=fp8.stored).take(*take_fp8), "'a.weight'", "'a.scale'")
    refused(lambda: opened(tmp_path, a__weight=fp4.stored).take("a.weight", (4, 64)), "'a.weight'", "'a.scale'")
    refused(lambda: opened(tmp_path, a__weight=fp8.stored, a__scale=nan_scale).take(*take_fp8), "'a.scale'", "255")
    refused(lambda: opened(tmp_path, a__weight=nan_code, a__scale=fp8.scale).take(*take_fp8), "'a.weight'", "finite")
    refused(
        lambda: opened(tmp_path, a__weight=fp8.stored, a__scale=fp8.scale[:1]).take(*take_fp8), "'a.scale'", "[2, 1]", "[1, 1]"
    )
    refused(lambda: opened(tmp_path, a__weight=fp8.stored, a__scale=fp8.scale.float().half()).take(*take_fp8), "'a.scale'", "F16")
    refused(
        lambda: opened(tmp_path, a__weight=fp4.stored, a__scale=fp4.scale).take("a.weight", (4, 32)),
        "'a.weight'",
        "[4, 16]",
        "[4, 32]",
    )
    refused(
        lambda: opened(tmp_path, a__weight=fp4.stored, a__scale=fp4.scale[:, :1].contiguous()).take("a.weight", (4, 64)),
        "'a.scale'",
        "[4, 2]",
    )
    refused(lambda: opened(tmp_path, a__weight=fp8.stored[0]).take("a.weight", (128,)), "'a.weight'", "F8_E4M3")


def test_unused_tensors_are_named_and_counted(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, **{f"x{index}": random(2) for index in range(8)}, draft__a=random(3), draft__b=random(2, 2))
    checkpoint.take("x3", (2,))
    refused(checkpoint.finish, "7 tensors", "'x0', 'x1', 'x2', 'x4', 'x5'", "and 2 more")
    assert (checkpoint.ignored.count, checkpoint.ignored.nbytes) == (2, 28)
    assert not checkpoint.has("draft.a")
    plain = opened(tmp_path, a__weight=random(4, 4), a__scale=torch.ones(1, 1))
    plain.take("a.weight", (4, 4))
    refused(plain.finish, "1 tensor", "'a.scale'")


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    fp8 = encode(random(4, 4), "fp8")
    assert fp8.scale is not None
    opened(tmp_path, a__weight=fp8.stored, a__scale=fp8.scale, b=random(2), c=torch.arange(3), draft__a=random(1))
    seen: list[tuple[int, int]] = []
    with Checkpoint(tmp_path, SCHEME, lambda done, total: seen.append((done, total))) as checkpoint:
        checkpoint.take("a.weight", (4, 4))
        checkpoint.take("b", (2,))
        checkpoint.take_int("c", (3,), 0, 3)
        checkpoint.finish()
    assert seen == [(2, 4), (3, 4), (4, 4)]


def sharded(directory: Path, shards: dict[str, dict[str, Tensor]], weight_map: dict[str, object] | None = None) -> None:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    listed = {name: file for file, tensors in shards.items() for name in tensors} if weight_map is None else weight_map
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))


def test_shards(tmp_path: Path) -> None:
    a, b = random(3), random(4)
    sharded(tmp_path, {"m-1.safetensors": {"a": a}, "m-2.safetensors": {"b": b}})
    checkpoint = Checkpoint(tmp_path, SCHEME)
    assert torch.equal(checkpoint.take("b", (4,)), b) and torch.equal(checkpoint.take("a", (3,)), a)
    checkpoint.finish()


def test_shards_that_contradict_their_index(tmp_path: Path) -> None:
    one, two = {"m-1.safetensors": {"a": random(3)}}, {"m-2.safetensors": {"b": random(4)}}
    for file in (
        "../m.safetensors",
        "/m.safetensors",
        "..",
        "x\\m.safetensors",
        ".m.safetensors",
        "sub/m.safetensors",
        "m.bin",
        7,
        None,
    ):
        sharded(tmp_path, one, {"a": file})
        refused(lambda: Checkpoint(tmp_path, SCHEME), "'a'", "plain", repr(file))
    sharded(tmp_path, one, {"a": "m-1.safetensors", "b": "m-9.safetensors"})
    refused(lambda: Checkpoint(tmp_path, SCHEME), "m-9.safetensors", "missing")
    sharded(tmp_path, one, {"a": "m-1.safetensors", "b": "m-1.safetensors"})
    refused(lambda: Checkpoint(tmp_path, SCHEME), "'b'", "m-1.safetensors")
    sharded(
        tmp_path, one | {"m-2.safetensors": {"b": random(4), "a": random(3)}}, {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    )
    refused(lambda: Checkpoint(tmp_path, SCHEME), "'a'", "m-2.safetensors")
    sharded(tmp_path, {"m-1.safetensors": {"a.scale": random(3)}, "m-2.safetensors": {"a.weight_scale_inv": random(3)}})
    refused(lambda: Checkpoint(tmp_path, SCHEME), "'a.scale'", "twice", "m-1.safetensors", "m-2.safetensors")
    sharded(tmp_path, one | two)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "m-1.safetensors").read_bytes())
    refused(lambda: Checkpoint(tmp_path, SCHEME), "both")
    for text in ("[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}", '{"a": 1, "a": 2}', "[" * 100_000, "\x00"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        refused(lambda: Checkpoint(tmp_path, SCHEME), "model.safetensors.index.json")


def test_directories_without_safetensors(tmp_path: Path) -> None:
    refused(lambda: Checkpoint(tmp_path, SCHEME), "neither", "model.safetensors")
    refused(lambda: Checkpoint(tmp_path / "absent", SCHEME), "neither")
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        refused(lambda: Checkpoint(tmp_path, SCHEME), "pickled")


def raw(directory: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def entry(begin: object = 0, end: object = 8, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    opened(tmp_path, a=random(4), b=random(2, 2))
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        refused(lambda: Checkpoint(tmp_path, SCHEME), "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(whole + b"\0")
    refused(lambda: Checkpoint(tmp_path, SCHEME), "longer")


def test_hostile_headers(tmp_path: Path) -> None:
    raw(tmp_path, {"a": entry()}, b"\0" * 8)
    assert torch.equal(Checkpoint(tmp_path, SCHEME).take("a", (2,)), torch.zeros(2))
    huge = 1 << 62
    for header, size, words in (
        ({"a": entry(), "b": entry(4, 12)}, 12, ("'b'", "overlaps")),
        ({"a": entry(), "b": entry(0, 8)}, 8, ("'b'", "overlaps")),
        ({"a": entry(), "b": entry(12, 20)}, 20, ("'b'", "hole")),
        ({"a": entry(4, 12)}, 12, ("'a'", "hole")),
        ({"a": entry(0, 12)}, 12, ("'a'", "expected 8 bytes", "found 12")),
        ({"a": entry(8, 0)}, 8, ("'a'", "found -8")),
        ({"a": entry(0, 16, shape=[huge, huge])}, 16, ("'a'",)),
        ({"a": entry(-8, 0)}, 8, ("'a'", "offsets")),
        ({"a": entry(0, "8")}, 8, ("'a'", "offsets")),
        ({"a": entry(0, True, "U8", [1])}, 1, ("'a'", "offsets")),
        ({"a": entry(shape=[2.0])}, 8, ("'a'", "shape")),
        ({"a": entry(shape=2)}, 8, ("'a'", "shape")),
        ({"a": entry(dtype="F33")}, 8, ("'a'", "'F33'")),
        ({"a": entry(dtype=None)}, 8, ("'a'", "None")),
        ({"a": [1]}, 0, ("'a'", "list")),
        ([], 0, ("JSON object",)),
        (b"{", 0, ("JSON object",)),
        (b"\xff\xfe", 0, ("JSON object",)),
        (b"[" * 100_000, 0, ("JSON object",)),
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            8,
            ("'a'", "repeated"),
        ),
    ):
        raw(tmp_path, header, b"\0" * size)
        refused(lambda: Checkpoint(tmp_path, SCHEME), "model.safetensors", *words)
    for length in (1 << 63, 1 << 40, 200):
        raw(tmp_path, {"a": entry()}, b"\0" * 8, length=length)
        refused(lambda: Checkpoint(tmp_path, SCHEME), "model.safetensors")
    raw(tmp_path, {"a\nb": entry(dtype="F33")}, b"\0" * 8)
    refused(lambda: Checkpoint(tmp_path, SCHEME), r"'a\nb'")


def test_read_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    for text in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"a": 1, "a": 2}', b" " * (1 << 20) + b"{}", b"null"):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"^config\.json[^\n]*$"):
            read_config(tmp_path)
    path.write_text('{"a": [1, {"b": null}], "c": "é"}', encoding="utf-8")
    assert read_config(tmp_path) == {"a": [1, {"b": None}], "c": "é"}
