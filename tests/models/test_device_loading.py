"""Weights as a GPU holds them, whatever mixture of formats a checkpoint has; nothing is launched, so no GPU is needed."""

import importlib.util
import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lamina.base.errors import WeightError
from lamina.memory.layout import make_layout
from lamina.models.registry import Target, blueprint
from lamina.models.tiny import write_tiny
from lamina.ops.machine import Machine
from lamina.runtime.arena import DeviceArena
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint
from lamina.weights.writer import encode, write_safetensors

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.models.deepseek_v4_device import DeviceModel
from lamina.ops.experts import PackedExperts
from lamina.ops.experts.plain import PlainExperts

CPU = torch.device("cpu")
HOPPER = Machine("cuda", (9, 0), True)
LAYER = 2
Load = Callable[[re.Pattern[str], str], DeviceModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """load(names, storage) -> the tiny model, loaded as for an H200, with the tensors of these names stored otherwise."""
    directory = tmp_path_factory.mktemp("mixed") / "model"
    write_tiny(directory, "flash")
    file = directory / "model.safetensors"
    stored = load_file(file)

    def make(names: re.Pattern[str], storage: str) -> DeviceModel:
        tensors = dict(stored)
        for name in filter(names.fullmatch, stored):
            tensors |= _stored_as(name, stored[name], storage)
            if storage not in ("fp8", "fp4"):
                del tensors[name.replace(".weight", ".scale")]
        write_safetensors(file, tensors)
        plan = blueprint(read_config(directory), "fp8", "fp4")
        arena = DeviceArena(make_layout(plan.memories, plan.hidden, None), 64, CPU)
        with Checkpoint(directory, plan.names) as checkpoint:
            target = Target(CPU, HOPPER, torch.bfloat16, "fp8")
            model = plan.load_device(checkpoint, target, lambda spec: arena.store(spec.key, spec.codec))
        assert isinstance(model, DeviceModel)
        return model

    return make


def _stored_as(name: str, packed: Tensor, storage: str) -> dict[str, Tensor]:
    """Random values of the shape that FP4 codes stand for."""
    encoded = encode(torch.randn(packed.shape[0], 2 * packed.shape[1]), storage)
    return {name: encoded.stored} | ({} if encoded.scale is None else {name.replace(".weight", ".scale"): encoded.scale})


def _experts(which: str, matrix: str) -> re.Pattern[str]:
    return re.compile(rf"layers\.{LAYER}\.ffn\.experts\.({which})\.({matrix})\.weight")


@pytest.mark.parametrize("storage", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("matrix", ["w2", "w1|w3", "w1|w2|w3"])
def test_a_layer_whose_matrices_are_stored_in_several_formats(load: Load, matrix: str, storage: str) -> None:
    """It is served from plain weights; the other layers from FP4."""
    model = load(_experts(r"\d", matrix), storage)
    experts = model.blocks[LAYER].ffn.experts
    assert isinstance(experts, PlainExperts) and isinstance(model.blocks[LAYER + 1].ffn.experts, PackedExperts)
    dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}[storage]
    for found, own in ((experts.gate_up, "w1"), (experts.down, "w2")):
        assert found.codes.dtype == (dtype if own in matrix else torch.bfloat16)
        assert found.is_fp8 == (found.codes.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize(("matrix", "storage"), [("w2", "bf16"), ("w3", "fp8")])
def test_one_expert_that_is_stored_otherwise(load: Load, matrix: str, storage: str) -> None:
    with pytest.raises(WeightError) as caught:
        load(_experts("3", matrix), storage)
    message = str(caught.value)
    assert "\n" not in message and f"layers.{LAYER}.ffn.experts.3.{matrix}.weight" in message and "fp4" in message
