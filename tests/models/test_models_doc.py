"""docs/models.md: its table names every family, and its worked example runs as it stands, equal to a definition written here."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from lamina import LLM, SamplingParams
from lamina.models import families
from lamina.models.network_tensors import needed_tensors

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
CONFIG: dict[str, object] = {
    "model_type": "tidal", "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "sliding_window": 20,
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
DIM, EPS = 8, 1e-6


@pytest.fixture(scope="module")
def tidal() -> ModuleType:
    """The page's module."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    module = ModuleType("lamina.models.tidal")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), vars(module))
    return module


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def attention(x: Tensor, of: dict[str, Tensor], window: int | None) -> Tensor:
    num = x.shape[0]
    q, k, v = ((x @ of[f"self_attn.{name}_proj.weight"].T).view(num, -1, DIM).transpose(0, 1) for name in "qkv")
    angle = torch.arange(num)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    q, k = (each * cos + torch.cat([-each[..., DIM // 2 :], each[..., : DIM // 2]], dim=-1) * sin for each in (q, k))
    at = torch.arange(num)
    seen = at[:, None] >= at
    if window is not None:
        seen &= at[:, None] - at < window
    k, v = (each.repeat_interleave(q.shape[0] // each.shape[0], dim=0) for each in (k, v))
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return (scores @ v).transpose(0, 1).flatten(1) @ of["self_attn.o_proj.weight"].T


def scan(x: Tensor, of: dict[str, Tensor]) -> Tensor:
    """Mamba-2, one token after another: 4 heads of 16 channels, 8 numbers each, 2 groups."""
    gate, mixed, steps = (x @ of["mamba.in_proj.weight"].T).split([64, 96, 4], dim=-1)
    padded = F.pad(mixed.T, (3, 0))
    mixed = F.silu(F.conv1d(padded[None], of["mamba.conv1d.weight"], of["mamba.conv1d.bias"], groups=96)[0].T)
    values, b, c = mixed.split([64, 16, 16], dim=-1)
    steps = F.softplus(steps + of["mamba.dt_bias"])
    state, rows = torch.zeros(4, 16, 8, dtype=torch.float64), []
    for t in range(x.shape[0]):
        own, bt, ct = values[t].view(4, 16), *(each[t].view(2, 8).repeat_interleave(2, dim=0) for each in (b, c))
        decay = torch.exp(-steps[t] * of["mamba.A_log"].exp())
        state = state * decay[:, None, None] + (own * steps[t][:, None])[..., None] * bt[:, None]
        rows.append(((state * ct[:, None]).sum(-1) + own * of["mamba.D"][:, None]).flatten())
    gated = (torch.stack(rows) * F.silu(gate)).unflatten(1, (2, 32))  # the norm is of each group
    return rms(gated, of["mamba.norm.weight"].view(2, 32)).flatten(1) @ of["mamba.out_proj.weight"].T


def definition(ids: list[int], weights: dict[str, Tensor]) -> Tensor:
    """Scores [T, V] in fp64."""
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(6):
        prefix = f"model.layers.{layer}."
        of = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        normed = rms(x, of["input_layernorm.weight"])
        x = x + (scan(normed, of) if layer % 3 == 2 else attention(normed, of, 20 if layer % 3 else None))
        normed = rms(x, of["post_attention_layernorm.weight"])
        inner = F.silu(normed @ of["mlp.gate_proj.weight"].T) * (normed @ of["mlp.up_proj.weight"].T)
        x = x + inner @ of["mlp.down_proj.weight"].T
    return rms(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def test_the_worked_example(tidal: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driving: ModuleType) -> None:
    monkeypatch.setitem(families.FAMILIES, "tidal", tidal.describe)
    monkeypatch.setitem(families.NETWORKS, "tidal", tidal.network)
    generator, weights = torch.Generator().manual_seed(0), {}
    for one in needed_tensors(tidal.network(CONFIG)):
        noise = torch.randn(one.shape, generator=generator)
        weights[one.name] = noise * one.shape[-1] ** -0.5 if len(one.shape) == 2 else noise * 0.3 + ("norm" in one.name)
    assert sum(each.numel() for each in weights.values()) == sum(w.num_params for w in families.describe(CONFIG).weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    exact = {name: each.double() for name, each in weights.items()}

    llm = LLM(str(tmp_path), cache_format="fp32", cache_bytes="64MiB")
    recorder, params = driving.Recorder(llm.engine), SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=0)
    for length in (1, 19, 20, 21, 63, 64, 65, 150):
        ids = torch.randint(2, 101, (length,), generator=generator).tolist()
        for budget in (1024, 17):
            driving.wipe(llm.engine)
            recorder.forget()
            llm.engine.scheduler.max_step_tokens = budget
            (group,) = driving.serve(llm.engine, [ids], params)
            tokens = group.requests[0].tokens
            want = definition(tokens[:-1], exact)
            rows = recorder.prompt | recorder.logits
            assert len(rows) == len(tokens) - 1
            assert max(float((row - want[at]).abs().max()) for (_, at), row in rows.items()) < 1e-4
        (group,) = driving.serve(llm.engine, [ids], SamplingParams(max_tokens=5, temperature=0))
        assert group.output.usage.cached_tokens == length and group.requests[0].tokens == tokens


def test_every_family_is_in_the_table() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## What a prefix hit needs")[0]
    named = set(re.findall(r"`([\w]+)`", table))
    spelled_otherwise = {"MiniMaxM1", "MiniMaxText01"}
    assert set(families.FAMILIES) - named == spelled_otherwise
