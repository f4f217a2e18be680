"""Warming up compiles all that serving needs, seen without a GPU: launches compile for one, and compute nothing.

Every token drawn is 0. `tests/gpu/test_compilations.py` is the same on a GPU.
"""

import importlib.util
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from lamina.memory.layout import make_layout
from lamina.memory.ledger import Ledger
from lamina.models.registry import Target, blueprint
from lamina.models.tiny import write_tiny
from lamina.ops.gemm import triton as gemm
from lamina.ops.machine import Machine
from lamina.ops.move.triton import move
from lamina.ops.sample.triton import token_logprobs
from lamina.ops.store.triton import keep_hidden
from lamina.ops.triton import watch
from lamina.runtime.arena import DeviceArena
from lamina.runtime.device_runner import DeviceRunner, Mode
from lamina.runtime.device_sampler import DeviceSampler
from lamina.schedule.request import Request
from lamina.schedule.sampling_params import SamplingParams
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.step import LaunchedStep, Step
from lamina.weights.headers import read_config
from lamina.weights.loader import Checkpoint, StoredTensor
from tests.conftest import load_helper
from tests.ops.kernel_tests import HAS_GPU, INTERPRETED, only_compiling

CPU = torch.device("cpu")
PAGES, ROWS, BUDGET, LONGEST = 60, 20, 512, 2000
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
WAYS = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=1.2, top_k=7, top_p=0.9, min_p=0.02, seed=3),
    SamplingParams(max_tokens=9, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, seed=3),
    SamplingParams(max_tokens=9, temperature=0, logprobs=4, prompt_logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.8, logit_bias={5: 2.0}, min_tokens=4, seed=3),
]


class Serving:
    """A small model as on a GPU of this compute capability, with a scheduler that is one step ahead."""

    def __init__(
        self, directory: Path, capability: tuple[int, int], mode: Mode, pages: int = PAGES, block_tokens: int | None = None,
        cache_format: str = "fp8",
    ) -> None:  # fmt: skip
        plan = blueprint(read_config(directory), cache_format, "fp4")
        layout = make_layout(plan.memories, plan.hidden, block_tokens)
        arena = DeviceArena(layout, pages, CPU)
        arena._mover = move
        target = Target(CPU, Machine("cuda", capability, True), torch.bfloat16, "fp8" if capability >= (8, 9) else "bf16")
        with Checkpoint(directory, plan.names) as checkpoint:
            model = plan.load_device(checkpoint, target, lambda spec: arena.store(spec.key, spec.codec))
        self.vocab_size = plan.vocab_size
        self.runner = DeviceRunner(model, arena, DeviceSampler(ROWS, plan.vocab_size, CPU), ROWS, BUDGET, LONGEST, CPU, mode)
        self.runner._keep_hidden, self.runner._token_logprobs = keep_hidden, token_logprobs
        self.scheduler = Scheduler(Ledger(layout, pages), BUDGET, ROWS, plan.vocab_size, overlaps=True)
        self.requests: dict[int, Request] = {}
        self.flying: deque[tuple[Step, LaunchedStep]] = deque()
        self.copies = 0

    def warm_up(self, mode: Mode) -> None:
        self.runner.warmup()
        graphs = self.runner.graphs  # which capture nothing here
        for bucket in [(size, context) for context in graphs.contexts for size in graphs.requests if mode != "strict"]:
            graphs.run(bucket)

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY, max_new: int = 9) -> None:
        number = len(self.requests) + 1
        self.requests[number] = Request(number, f"r{number}", tuple(prompt), params, number, max_new, frozenset())
        self.scheduler.add(self.requests[number])

    def run(self, preempts: bool = False) -> None:
        for number in itertools.count(1):
            if preempts and number % 20 == 0 and self.scheduler.running:
                self.scheduler.preempt(self.scheduler.running[-1])
            while len(self.flying) < 2 and (step := self.scheduler.plan()) is not None:
                self.copies += len(step.copies_before) + len(step.copies_after)
                self.flying.append((step, self.runner.execute(step)))
            if not self.flying:
                break
            step, launched = self.flying.popleft()
            self.scheduler.apply(step, launched.result(), self.requests)
        assert not self.scheduler.has_work


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("warm-up") / "model"
    write_tiny(found, "flash")
    return found


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Everything believes to be on such a GPU, and what kernels would have written is zeros."""
    found: tuple[int, int] = request.param
    for name, module in list(sys.modules.items()):
        if name.startswith("lamina."):
            for function, value in (("capability_of", found), ("is_hopper", found == (9, 0))):
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, lambda device, value=value: value)
    monkeypatch.setattr(gemm, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch, "empty", torch.zeros)

    def aligned(self: StoredTensor, *_: object) -> StoredTensor:  # a GPU's memory is, that of a file is not
        return StoredTensor(self.kind, self.codes.clone(), None if self.scales is None else self.scales.clone())

    monkeypatch.setattr(StoredTensor, "to", aligned)
    with only_compiling(10 * found[0] + found[1]):
        yield found


@pytest.mark.long
@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="tests/gpu/test_compilations.py says it of the GPU that is here")
@pytest.mark.parametrize(
    ("capability", "mode"),
    [((9, 0), True), ((9, 0), "strict"), ((9, 0), False), ((8, 0), True)],
    indirect=["capability"],
    ids=str,
)
def test_nothing_is_compiled_while_serving(capability: tuple[int, int], mode: Mode, directory: Path) -> None:
    serving, draw = Serving(directory, capability, mode), random.Random(1)

    def words(length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(3, 1000), k=length)

    with watch() as seen:
        serving.warm_up(mode)
        seen.clear()
        for length in (1, 2, 3, 4, 5, 16, 17, 31, 33, 127, 128, 129, 257, 300, 511, 512, 513, 1000, 1900):
            serving.add(words(length, length))
            serving.run()
            assert seen == [], f"a prompt of {length} tokens"
        for count in (2, 3, 4, 5, 13, 20, 33):
            for number in range(count):
                serving.add(words(1 + 53 * number % 700, 100 * count + number), WAYS[number % len(WAYS)])
            serving.run()
            assert seen == [], f"{count} requests"
        for way in WAYS:  # the later ones find blocks of the first
            for prompt in (words(300, 1), [*words(300, 1)[:270], 5], [*words(300, 1)[:130], 6], words(300, 1)):
                serving.add(prompt, way)
            serving.run()
            assert seen == [], way
        for number in range(20):
            serving.add(words(draw.choice([1, 2, 5, 127, 129, 300, 700]), number), WAYS[number % len(WAYS)], 60)
        serving.run(preempts=True)
        assert seen == [], "preempted requests"
    assert sum(one.num_preemptions for one in serving.requests.values()) and serving.copies > 100


COMMON = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1], "head_dim": 20}
SCANS = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_rms_norm": True,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.2, "attention_out_multiplier": 0.8,
}  # fmt: skip
CHANNELS = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 20,
    "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"], "head_dim": 24,
}  # fmt: skip
DECAYED = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
}  # fmt: skip
STREAMS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3, "sliding_window": 100,
    "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 16,
    "activation_sparsity_pattern": [0.9, 0.0, 0.3], "head_dim": 20,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "num_key_value_heads": 4,
}  # fmt: skip
NETWORKS: dict[str, tuple[str, dict[str, object]]] = {
    "logs": ("Qwen3MoeConfig", COMMON | EXPERTS),
    "scans": ("FalconH1Config", COMMON | SCANS),
    "scanned channels": ("JambaConfig", COMMON | CHANNELS),
    "delta rule": ("Qwen3NextConfig", COMMON | EXPERTS | DELTA),
    "decayed attention": ("MiniMaxConfig", COMMON | DECAYED),
    "experts with biases": ("GptOssConfig", COMMON | {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 20}),
    "latents": ("DeepseekV3Config", COMMON | LATENT),
    "latents, an index": ("DeepseekV32Config", COMMON | LATENT | {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 100}),
    "large windows": ("MistralConfig", COMMON | {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 400}),
    "streams": ("Gemma3nTextConfig", COMMON | STREAMS),
    "windows": ("Qwen2Config", COMMON | {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(HAS_GPU or INTERPRETED, reason="tests/gpu/test_networks.py says it of the GPU that is here")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="Transformers is not installed")
@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], indirect=True, ids=str)
def test_networks_too(capability: tuple[int, int], name: str, tmp_path: Path) -> None:
    """Models without slots, with rings, and with states."""
    families = load_helper("models/families.py")
    config, values = NETWORKS[name]
    families.build(families.Recipe(config, values)).save_pretrained(tmp_path)
    has_logs_alone = name in ("logs", "latents", "latents, an index")
    serving = Serving(tmp_path, capability, True, 3000, 16 if has_logs_alone else None, "bf16" if name == "latents" else "fp8")
    with watch() as seen:
        serving.warm_up(True)
        assert seen
        seen.clear()
        for length in (1, 2, 3, 17, 128, 511, 512, 513, 1000):
            serving.add(random.Random(length).choices(range(3, 900), k=length))
            serving.run()
            assert seen == [], f"a prompt of {length} tokens"
        for count in (2, 5, 13, 20):
            for number in range(count):
                prompt = random.Random(100 * count + number).choices(range(3, 900), k=1 + 53 * number % 700)
                serving.add(prompt, WAYS[number % len(WAYS)])
            serving.run()
            assert seen == [], f"{count} requests"
