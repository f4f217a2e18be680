"""The GPU's forward pass of networks against the CPU's, and whole answers of its runner: on a GPU if there is one, else small
ones in Triton's interpreter, in its own process."""

import importlib.util
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina.memory.layout import make_layout
from lamina.memory.ledger import Ledger
from lamina.models.network import Attention, Branch, Experts, Mlp, Network, Norm, Rope, Router
from lamina.models.parts_delta import DecayedAttention, DeltaRule
from lamina.models.parts_latent import Index, Latent
from lamina.models.parts_scan import Stored
from lamina.models.registry import LoadedModel, Target, blueprint
from lamina.ops.gemm.stored import StoredWeight
from lamina.ops.machine import Machine, this_machine
from lamina.ops.quantise import dequantise_fp8_weight
from lamina.ops.sequences import Sequences
from lamina.runtime.arena import DeviceArena
from lamina.runtime.runner import Runner
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint
from tests.conftest import load_helper

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if importlib.util.find_spec("transformers") is None:
    pytest.skip("Transformers is not installed", allow_module_level=True)

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MACHINE = this_machine("cuda") if HAS_GPU else Machine("cpu", (0, 0), True)
runs_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="runs in the process that test_interpreted starts")
steps_of = load_helper("models/test_device_model.py")

COMMON = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LONGER = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
WINDOWED = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}
SCANS = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 32, "num_hidden_layers": 2}
FACTORS = {
    "mamba_d_ssm": 24, "mamba_n_groups": 2, "num_hidden_layers": 1, "lm_head_multiplier": 0.4, "embedding_multiplier": 2.5,
    "mlp_multipliers": [0.7, 1.4], "key_multiplier": 0.6, "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.3,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7],
}  # fmt: skip
NORMED = {
    "mamba_rms_norm": True, "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True,
    "head_dim": 12, "mamba_norm_before_gate": True,
}  # fmt: skip
CHANNELS = {
    "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2, "num_experts": 1,
    "mamba_proj_bias": True, "mamba_dt_rank": 5,
}  # fmt: skip
PARTS = {name: value for name, value in COMMON.items() if name != "num_hidden_layers"} | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "head_dim": 10, "ssm_state_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "chunk_size": 32,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "attention_bias": True,
    "num_experts": 0,
}  # fmt: skip
DECAYED = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 0.75,
    "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 1.25, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.5,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "biases": ("LlamaConfig", COMMON | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LONGER}),
    "experts": ("Qwen3MoeConfig", COMMON | EXPERTS | {"mlp_only_layers": [], "head_dim": 12}),
    "window": ("Qwen2Config", COMMON | WINDOWED),
    "caps": ("Gemma2Config", COMMON | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 12, "num_hidden_layers": 2}),
    "scans": ("BambaConfig", COMMON | SCANS | {"attn_layer_indices": [1], "time_step_limit": (0.2, 0.9)}),
    "scans beside attention": ("FalconH1Config", COMMON | SCANS | FACTORS),
    "normed scans": ("FalconH1Config", COMMON | SCANS | FACTORS | NORMED | {"mamba_d_ssm": 48}),
    "scans, parts alone": ("NemotronHConfig", PARTS),
    "scanned channels": ("JambaConfig", COMMON | CHANNELS),
    "delta rule": ("Qwen3NextConfig", COMMON | DELTA),
    "delta rule, experts": ("Qwen3NextConfig", COMMON | DELTA | EXPERTS | {"shared_expert_intermediate_size": 20}),
    "decayed attention": ("MiniMaxConfig", COMMON | DECAYED),
}  # fmt: skip
STATES = ("delta rule", "delta rule, experts", "decayed attention")


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    families = load_helper("models/families.py")
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            config, values = MODELS[name]
            made[name] = tmp_path_factory.mktemp("network")
            families.build(families.Recipe(config, values, seed=len(made))).save_pretrained(made[name])
        return made[name]

    return find


@dataclass(frozen=True, slots=True)
class EveryRow:
    """A model of the CPU, of whose last layer all rows are wanted."""

    model: LoadedModel

    @property
    def ratios(self) -> tuple[int, ...]:
        return self.model.ratios

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        return self.model.forward(tokens, replace(sequences, wanted=None))


@runs_kernels
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("biases", "fp32"),
        ("window", "fp32"),
        ("scans beside attention", "fp32"),
        ("scanned channels", "fp32"),
        pytest.param("delta rule", "fp32", marks=pytest.mark.long),
        *(pytest.param(*one, marks=pytest.mark.long) for one in (("experts", "fp32"), ("caps", "fp32"), ("window", "bf16"))),
        *(
            pytest.param(one, "fp32", marks=pytest.mark.long)
            for one in ("scans", "normed scans", "scans, parts alone", *STATES[1:])
        ),
    ],
)
def test_the_forward_pass(name: str, cache: str, directory_of: Callable[[str], Path]) -> None:
    """Prompts together, cut, then decodes: the same sums in another order."""
    lengths, cuts = ((300, 77, 20), (64, 130)) if HAS_GPU else ((9, 2), (7,))
    directory = directory_of(name)
    plan = blueprint(read_config(directory), cache, "fp32")
    layout = make_layout(plan.memories, plan.hidden, 64 if "scan" in name or name in STATES else 8, min_page_bytes=4096)
    blocks = -(-max(lengths) // layout.block_tokens) + 1
    sides = tuple(steps_of.Side(plan, layout, directory, "fp32", len(lengths), blocks, there) for there in (False, True))
    sides[0].model = EveryRow(sides[0].model)
    steps_of.compare(sides, lengths, cuts, 1, 67, 1e-5 if cache == "fp32" else 2e-2)


@runs_kernels
@pytest.mark.long
@pytest.mark.parametrize("name", ["decayed attention"])
def test_states_by_products(name: str, directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills chunk by chunk, as in bf16, wherever they are cut; then decodes, row by row, from the states that these leave."""
    from lamina.layers import device_delta

    monkeypatch.setattr(device_delta, "_form", lambda context: "rows" if context.order == "decode" else "chunks")
    directory = directory_of(name)
    plan = blueprint(read_config(directory), "fp32", "fp32")
    layout = make_layout(plan.memories, plan.hidden, 64, min_page_bytes=4096)
    sides = tuple(steps_of.Side(plan, layout, directory, "fp32", 2, 4, there) for there in (False, True))
    sides[0].model = EveryRow(sides[0].model)
    steps_of.compare(sides, (140, 66), (30, 64, 128), 2, 67, 1e-5)


class Serving:
    """A scheduler and a runner of the CPU or of a GPU, over an arena full of NaN."""

    def __init__(self, directory: Path, is_there: bool, most_tokens: int, block_tokens: int) -> None:
        plan = blueprint(read_config(directory), "fp32", "fp32")
        layout = make_layout(plan.memories, plan.hidden, block_tokens, min_page_bytes=4096)
        device = DEVICE if is_there else torch.device("cpu")
        arena = DeviceArena(layout, 60, device)
        arena.bytes.fill_(255)
        with Checkpoint(directory, plan.names) as checkpoint:
            if is_there:
                from lamina.runtime.device_runner import DeviceRunner
                from lamina.runtime.device_sampler import DeviceSampler

                model = plan.load_device(
                    checkpoint, Target(device, MACHINE, torch.float32, "fp8"), lambda spec: arena.store(spec.key, spec.codec)
                )  # fmt: skip
                sampler = DeviceSampler(4, plan.vocab_size, device)
                self.runner = DeviceRunner(model, arena, sampler, 4, most_tokens, 100, device, True)
            else:
                model = plan.load(checkpoint, "fp32", lambda spec: arena.store(spec.key, spec.codec))
                self.runner = Runner(model, arena, plan.rings, 4, device, 4)
        self.scheduler = Scheduler(Ledger(layout, 60), most_tokens, 4, plan.vocab_size, overlaps=is_there)

    def answers(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        made = {n: Request(n, f"r{n}", tuple(ids), params, n, count, frozenset()) for n, ids in enumerate(prompts, start=1)}
        for one in made.values():
            self.scheduler.add(one)
        flying: deque = deque()
        while True:
            while len(flying) < 2 and (step := self.scheduler.plan()) is not None:
                flying.append((step, self.runner.execute(step)))
                if not self.scheduler.overlaps:
                    break
            if not flying:
                return [list(one.output) for one in made.values()]
            step, launched = flying.popleft()
            self.scheduler.apply(step, launched.result(), made)


@runs_kernels
@pytest.mark.parametrize(
    "name",
    ["biases", "window", "scans", *(pytest.param(one, marks=pytest.mark.long) for one in ("scanned channels", *STATES[1:]))],
)
def test_whole_answers(name: str, directory_of: Callable[[str], Path]) -> None:
    """Greedy tokens of the GPU's runner, one step ahead, are the CPU's: without slots, and with windows; cold and after hits."""
    draw = torch.Generator().manual_seed(1)
    longest, count = (90, 8) if HAS_GPU else (13, 3)
    prompts = [torch.randint(3, 67, (length,), generator=draw).tolist() for length in (longest, 1)]
    cpu, there = (
        Serving(directory_of(name), is_there, 10, 64 if "scan" in name or name in STATES else 4) for is_there in (False, True)
    )
    truth = cpu.answers(prompts, count)
    assert there.answers(prompts, count) == truth
    assert there.answers(prompts[:1], 1) == [truth[0][:1]]


# Refusals --------------------------------------------------------------------------------------------------------------


def refuses(part: object) -> str | None:
    from lamina.models.network_device import refuses_network

    norm = Norm("norm.weight", 1e-5)
    network = Network(9, 32, "embed", ((Branch(part, norm),),), norm, None, ())
    return refuses_network(network, Machine("cuda", (9, 0), True))


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_refusals() -> None:
    attention = Attention("attn", 4, 2, 8, 1.0, "kv", rope=Rope(8, 1e4))
    mlp = Mlp("mlp", 40)
    experts = Experts("mlp", 4, 16, Router("softmax", 2), "gate")
    assert refuses(replace(attention, is_gated=True)) is None
    assert refuses(attention) is None and refuses(mlp) is None and refuses(experts) is None
    assert refuses(replace(attention, norm_all=True)) is None
    after = replace(attention, norm_all=True, norm_after_rope=True)
    assert refuses(after) == "norms over all heads' dims after the rotation: no GPU kernels yet"
    assert refuses(replace(attention, dim=300)) == "heads must have 1 to 256 dims, not 300"
    assert refuses(replace(experts, router=Router("sigmoid", 2, groups=2))) is None
    delta = DeltaRule("delta", 2, 128, 4, 128, 4, 1e-6, Stored("bf16", "fp32"))
    assert refuses(delta) is None
    assert refuses(replace(delta, key_dim=300)) == "keys of the delta rule must have 1 to 256 dims, not 300"
    decayed = DecayedAttention("attn", 128, (0.5,) * 64, 1e-6, Stored("bf16", "fp32"))
    assert refuses(decayed) is None
    assert refuses(replace(decayed, dim=260)) == "heads of linear attention must have 1 to 256 dims, not 260"
    index = Index("attn.indexer", "index", 64, 128, 2048, 1e-6)
    latent = Latent("attn", "latent", 128, 1536, 512, 128, 128, Rope(64, 1e4, max_positions=163840), 1.0, 1e-6, index=index)
    assert refuses(latent) is None
    assert refuses(replace(latent, index=replace(index, top_k=4096))) == "top_k must be 1 to 2048, not 4096"
    assert refuses(replace(latent, rank=513)) == "latents must have 1 to 512 dims, not 513"
    assert refuses(object()) == "object layers have no GPU kernels yet"


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
@pytest.mark.parametrize(("groups", "sizes"), [(3, (128, 256)), (2, (128, 64))], ids=["scales of one kind", "of several"])
def test_rows_by_kind(groups: int, sizes: tuple[int, int]) -> None:
    """fp8 keeps its format where no scale is of rows of two kinds."""
    from lamina.models.device_build_delta import by_kind

    draw = torch.Generator().manual_seed(1)
    rows = groups * sum(sizes)
    codes = torch.randn(rows, 130, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), 2, generator=draw)
    found = by_kind("some.weight", StoredWeight(codes, scales), groups, sizes, torch.float32)
    assert found.is_fp8 == (sizes[1] % 128 == 0)
    whole = dequantise_fp8_weight(codes, scales).view(groups, sum(sizes), 130)
    truth = torch.cat([part.flatten(0, 1) for part in whole.split(sizes, dim=1)])
    mine = found.codes if found.scales is None else dequantise_fp8_weight(found.codes, found.scales)
    assert torch.equal(mine, truth)


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
@pytest.mark.parametrize(("dim", "is_kept"), [(64, True), (24, False)], ids=["scales of whole heads", "of parts of heads"])
def test_rows_of_an_index_in_another_order(dim: int, is_kept: bool) -> None:
    """fp8 keeps its format where rows move under one scale."""
    from lamina.models.device_build_latent import reordered

    draw = torch.Generator().manual_seed(1)
    codes = torch.randn(5 * dim, 130, generator=draw).to(torch.float8_e4m3fn)
    weight = StoredWeight(codes, torch.rand(-(-5 * dim // 128), 2, generator=draw))
    assert weight.scales is not None
    order = (torch.arange(5)[:, None] * dim + torch.randperm(dim, generator=draw)).flatten()
    found = reordered("some.weight", weight, order, dim, torch.float32)
    assert found.is_fp8 == is_kept
    truth = dequantise_fp8_weight(codes, weight.scales)[order]
    mine = found.codes if found.scales is None else dequantise_fp8_weight(found.codes, found.scales)
    assert torch.equal(mine, truth)


@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="the kernels run in this process")
def test_interpreted(run_interpreted: Callable[[str], None]) -> None:
    """The tests above, once more with Triton's interpreter."""
    run_interpreted(__file__)
