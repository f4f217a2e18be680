"""The training program's forward pass, optimiser and formats, held against the engine that serves what it makes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lamina import LLM, SamplingParams
from lamina.base.config import EMBEDDED
from lamina.engine.locate import locate
from lamina.ops.quantise.ref import dequantise_fp8_weight, quantise_fp8_weight
from tools.train_tiny.export import load_weights, official
from tools.train_tiny.model import Mode, Model
from tools.train_tiny.optimiser import Optimiser, orthogonal
from tools.train_tiny.quantise import cast, to_fp8
from tools.train_tiny.sinkhorn import sinkhorn
from tools.train_tiny.train import plain_inputs, rate


@pytest.fixture(scope="module")
def model() -> Model:
    model = Model(dtype=torch.float32)
    load_weights(model, locate(EMBEDDED))
    return model


def test_the_forward_pass_is_the_engines(model: Model) -> None:
    """fp32 memories, 300 tokens: two entries of 128 tokens, more entries of 4 than a small top-k selects."""
    ids = np.random.default_rng(5).integers(3, 2800, 385)
    with torch.no_grad():
        nats = model(plain_inputs(torch.from_numpy(ids)[None]), Mode(topk=64))["nats"][0]
    llm = LLM(EMBEDDED, cache_format="fp32", index_format="fp32", cache_bytes="64MiB")
    (output,) = llm.generate([ids[:300].tolist()], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    engine = [-entry[int(ids[at])].logprob for at, entry in enumerate(output.prompt_logprobs) if entry]
    np.testing.assert_allclose(nats[:299].numpy(), engine, atol=1e-3)


def test_what_is_exported_is_what_was_read(model: Model) -> None:
    tensors = official(model)
    stored = {name: tensor for file in Path(locate(EMBEDDED)).glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert tensors.keys() == stored.keys()
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {name: (t.shape, t.dtype) for name, t in stored.items()}
    name = "layers.1.attn.wq_b"
    values = [dequantise_fp8_weight(of[f"{name}.weight"], of[f"{name}.scale"]) for of in (tensors, stored)]
    assert torch.equal(*values)


def test_gradients_reach_every_tensor_and_a_step_lowers_the_loss() -> None:
    model = Model(seed=1)
    ids = torch.from_numpy(np.random.default_rng(6).integers(3, 2800, (1, 257)))
    optimiser = Optimiser(
        [stack for key, stack in model.stacks.items() if "_muon_" in key],
        [stack for key, stack in model.stacks.items() if "_muon_" not in key],
    )
    optimiser.rate.fill_(1.0)
    losses = []
    for _ in range(2):
        for stack in model.stacks.values():
            stack.grad = None
        out = model(replace(plain_inputs(ids), probes=torch.arange(20, 256, 8)[None]), Mode(quantised=True, topk=16))
        out["loss"].backward()
        losses.append(float(out["loss"].detach()))
        optimiser.step()
    untouched = [
        name
        for key, stack in model.stacks.items()
        for name, gradient in zip(model.names[key], stack.grad, strict=True)
        if not gradient.abs().max() > 0
    ]
    assert not untouched and losses[1] < losses[0] - 0.3


def test_rounding_is_the_codecs_own() -> None:
    weight = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(2))
    rounded = cast(weight, "fp8", True, torch.float32)
    assert torch.equal(rounded[1], dequantise_fp8_weight(*quantise_fp8_weight(weight[1])))
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(3), requires_grad=True)
    to_fp8(x, 448, 64).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))  # straight through


def test_parts() -> None:
    c = sinkhorn(torch.tensor([[[0.0, 1, 2, 3], [3, 0, 0, 1], [-1, 2, 0, 0], [0, 0, 0, 4]]]))
    expected = [0.046158, 0.129828, 0.623702, 0.200301]
    np.testing.assert_allclose(c[0, 0].numpy(), expected, atol=2e-6)
    u = orthogonal(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(4)))
    values = torch.linalg.svdvals(u)
    assert float(values.min()) > 0.5 and float(values.max()) < 1.4
    rates = [rate(step, 1000, 0, 1.0) for step in range(1000)]
    assert max(rates) <= 1.0 and rates[0] < 0.1 and rates[-1] == pytest.approx(0.03, abs=1e-3) and rates[30] > 0.99
    assert rate(500, 1000, 500, 1.0) < 0.05  # a new optimiser warms up again
