"""Lamina against Transformers on the same machine in the same run: answers of small models, and speed of a Flash-shaped one.

    python bench/against_transformers.py [--only parity|speed] [--models flash,pro,...] [--batches 1,8] [--json FILE]

Parity: random models of tests/models/random_models.py, nothing in them zero, saved by Transformers.
    fp32  scores of the token after prompts of every length around 4, 128 and 256, each alone and cold, then all in the same
          steps; and greedy answers against Transformers' full recomputation. Scores are compared as log-probabilities, without
          the positions where an expert or entry was chosen by less than 1e-5 and may fall either way.
    bf16  both engines against fp32, position by position: how often the likeliest token is the same, and how far scores are.
Speed: 4 layers (ratios 0, 4, 128, 4) of Flash's widths with 16 experts. Transformers: bf16, eager attention, its cache.
    Lamina: the official FP8/FP4 layout, served by its engine. Wall time of a decode step after prompts of 2,048 tokens; rounds
    alternate, medians.
"""

import argparse
import copy
import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from official_random import flash_config, write_directory
from torch import Tensor

from lamina import LLM, SamplingParams

TOLERANCE = 1e-3
LENGTH = 300
#: around the ends of groups of 4 and 128, the window, a tile and a block
LENGTHS = (*range(1, 14), *range(62, 68), *range(122, 138), *range(190, 194), *range(250, 264))
GREEDY_LENGTHS, GREEDY_TOKENS = (2, 5, 120, 126, 250, 254), 20
RATIOS, EXPERTS = (0, 4, 128, 4), 16


@dataclass(frozen=True, slots=True)
class Parity:
    """One model in one type: positions compared, left out as ties, the worst difference, answers equal of all."""

    model: str
    dtype: str
    positions: int
    ties: int
    worst_alone: float
    worst_together: float
    greedy_equal: int
    greedy: int

    @property
    def is_good(self) -> bool:
        """Whether it is what the README promises."""
        return max(self.worst_alone, self.worst_together) <= TOLERANCE and self.greedy_equal == self.greedy


@dataclass(frozen=True, slots=True)
class Rounding:
    """One model in bf16: share of positions whose likeliest token is fp32's, and mean distance of that token's score."""

    model: str
    positions: int
    lamina_same: float
    rival_same: float
    lamina_distance: float
    rival_distance: float


@dataclass(frozen=True, slots=True)
class Speed:
    """ms of a decode step, median and extremes of the rounds."""

    batch: int
    context: int
    lamina_ms: float
    rival_ms: float
    lamina_spread: tuple[float, float]
    rival_spread: tuple[float, float]
    ratio: float


def load_random_models() -> ModuleType:
    """tests/models/random_models.py, which is in no package."""
    path = Path(__file__).resolve().parents[1] / "tests" / "models" / "random_models.py"
    spec = importlib.util.spec_from_file_location("random_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["random_models"] = module
    spec.loader.exec_module(module)
    return module


# Parity --------------------------------------------------------------------------------------------------------------


def small_llm(directory: Path, device: str, dtype: str) -> LLM:
    """An engine for one of the small models with everything it keeps in `dtype`."""
    return LLM(
        str(directory), device=device, dtype=dtype, cache_format=dtype, index_format=dtype, cache_bytes="128MiB", max_requests=64,
        max_model_len=512, warmup=False,
    )  # fmt: skip


def scores_of(llm: LLM, prompts: list[list[int]], salt: str) -> Tensor:
    """[prompts, V] log-probabilities of the token after each, all served together."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    found = []
    for output in llm.generate(prompts, params, cache_salt=salt):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append([logprobs[0][token].logprob for token in range(llm.engine.vocab_size)])
    return torch.tensor(found)


def compare_fp32(models: ModuleType, name: str, directory: Path, model: torch.nn.Module, device: str) -> Parity:
    """Scores and answers of one model."""
    ids = models.token_ids(LENGTH, 100 + models.RECIPES[name].seed)
    with torch.device(device):
        reference = models.refer(model, ids)
    expected, ties = reference.logits.log_softmax(-1).cpu(), reference.ties.cpu()
    llm = small_llm(directory, device, "fp32")
    last = torch.tensor(LENGTHS) - 1
    kept = ~ties[last]
    prompts = [ids[:length] for length in LENGTHS]
    alone = torch.cat([scores_of(llm, [prompt], f"alone {len(prompt)}") for prompt in prompts])
    together = scores_of(llm, prompts, "together")
    worst = [float((found - expected[last]).abs().amax(-1)[kept].max()) for found in (alone, together)]
    equal = sum(has_equal_answer(llm, model, ids[:length], device) for length in GREEDY_LENGTHS)
    return Parity(name, "fp32", int(kept.sum()), int((~kept).sum()), worst[0], worst[1], equal, len(GREEDY_LENGTHS))


def has_equal_answer(llm: LLM, model: torch.nn.Module, prompt: list[int], device: str) -> bool:
    """Whether a greedy answer is what a full recomputation would say at each of its tokens."""
    params = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True)
    answer = llm.generate(prompt, params)[0].outputs[0].token_ids
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([prompt + answer], device=device)).logits[0]
    return bool(answer == scores[len(prompt) - 1 : -1].argmax(-1).tolist())


def compare_bf16(models: ModuleType, name: str, directory: Path, exact: torch.nn.Module, device: str) -> Rounding:
    """Both engines in bf16 against Transformers in fp32."""
    ids = models.token_ids(LENGTH, 500 + models.RECIPES[name].seed)
    tokens = torch.tensor([ids], device=device)
    rival = in_bf16(exact)
    with torch.no_grad():
        truth = exact(input_ids=tokens).logits[0].float().log_softmax(-1).cpu()
        theirs = rival(input_ids=tokens).logits[0].float().log_softmax(-1).cpu()
    llm = small_llm(directory, device, "bf16")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
    reported = llm.generate(ids, params)[0].prompt_logprobs
    assert reported is not None
    vocab = range(llm.engine.vocab_size)
    ours = torch.tensor([[row[token].logprob for token in vocab] for row in reported[1:] if row is not None])  # [LENGTH - 1, V]
    best = truth[:-1].argmax(-1)

    def judge(found: Tensor) -> tuple[float, float]:
        distance = (found.gather(1, best[:, None]) - truth[:-1].gather(1, best[:, None])).abs().mean()
        return float((found.argmax(-1) == best).float().mean()), float(distance)

    (lamina_same, lamina_distance), (rival_same, rival_distance) = judge(ours), judge(theirs[:-1])
    return Rounding(name, LENGTH - 1, lamina_same, rival_same, lamina_distance, rival_distance)


def in_bf16(exact: torch.nn.Module) -> torch.nn.Module:
    """A copy whose parameters are bf16, rotary frequencies excepted. (`from_pretrained` keeps some parameters in fp32, which this
    model's products do not accept.)"""
    rival = copy.deepcopy(exact).to(torch.bfloat16)
    for name, values in exact.named_buffers():
        if "inv_freq" in name:
            owner, _, last = name.rpartition(".")
            setattr(rival.get_submodule(owner), last, values.clone())
    return rival.eval()


def run_parity(names: list[str], device: str, with_bf16: bool) -> list[Parity | Rounding]:
    """Every model in both types; lines as they are done."""
    models = load_random_models()
    found: list[Parity | Rounding] = []
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            model = models.build(models.RECIPES[name])
            model.save_pretrained(root)
            model = model.to(device)
            parity = compare_fp32(models, name, Path(root), model, device)
            found.append(parity)
            print(
                f"parity {name:10} fp32 | {parity.positions} positions ({parity.ties} ties) | worst alone"
                f" {parity.worst_alone:.1e}, together {parity.worst_together:.1e} | greedy equal"
                f" {parity.greedy_equal}/{parity.greedy} | {'good' if parity.is_good else 'NOT GOOD'}", flush=True,
            )  # fmt: skip
            if with_bf16:
                rounding = compare_bf16(models, name, Path(root), model, device)
                found.append(rounding)
                print(
                    f"parity {name:10} bf16 | likeliest token as in fp32: Lamina {rounding.lamina_same:.3f}, Transformers"
                    f" {rounding.rival_same:.3f} | its score differs by {rounding.lamina_distance:.1e},"
                    f" {rounding.rival_distance:.1e} on average", flush=True,
                )  # fmt: skip
    return found


# Speed ---------------------------------------------------------------------------------------------------------------


class Rival:
    """Transformers' model of the same shapes with its own random weights."""

    def __init__(self, values: dict[str, object], device: str, experts: str) -> None:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        plain = {key: value for key, value in values.items() if key not in ("quantization_config", "expert_dtype", "torch_dtype")}
        self.config = DeepseekV4Config(**plain, attn_implementation="eager", experts_implementation=experts)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self.model = DeepseekV4ForCausalLM(self.config).eval()
        finally:
            torch.set_default_dtype(before)
        names = inspect.signature(self.model.forward).parameters
        self.cache_name = "past_key_values" if "past_key_values" in names else "cache"

    @torch.inference_mode()
    def step_ms(self, prompts: Tensor, decode_tokens: int, warm_up: int = 4) -> float:
        """Prefills [B, T] and gives the median ms of a greedy decode step."""
        from transformers import DynamicCache

        kept = {self.cache_name: DynamicCache(config=self.config), "use_cache": True}
        drawn = self.model(input_ids=prompts, logits_to_keep=1, **kept).logits[:, -1:].argmax(-1)
        times = []
        for _ in range(warm_up + decode_tokens):
            synchronize(prompts.device)
            start = time.perf_counter()
            drawn = self.model(input_ids=drawn, **kept).logits[:, -1:].argmax(-1)
            synchronize(prompts.device)
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[warm_up:])


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lamina_step_ms(llm: LLM, prompts: list[list[int]], decode_tokens: int) -> float:
    """Mean ms of a decode step of the whole batch, everything of the host included: the engine's loop, from the step after
    every prompt is done to the end of the answers."""
    engine = llm.engine
    params = SamplingParams(max_tokens=decode_tokens + 1, temperature=0, ignore_eos=True)
    groups = [engine.add(prompt, params) for prompt in prompts]
    while any(group.requests[0].num_output == 0 for group in groups):
        engine.step()
    done = sum(group.requests[0].num_output for group in groups)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    elapsed = time.perf_counter() - start
    steps = (sum(len(group.output.outputs[0].token_ids) for group in groups) - done) / len(groups)
    return elapsed / steps * 1e3


def run_speed(
    batches: list[int], context: int, decode_tokens: int, rounds: int, device: str, experts: str, changes: dict[str, object]
) -> list[Speed]:
    """Both engines, rounds by turns."""
    values = flash_config(RATIOS, n_routed_experts=EXPERTS, **changes)
    vocab = int(str(values["vocab_size"]))
    found = []
    with tempfile.TemporaryDirectory() as root:
        write_directory(Path(root), values, device=device)
        start = time.perf_counter()
        llm = LLM(
            root, device=device, cache_bytes="4GiB" if device == "cuda" else "256MiB", max_step_tokens=2048,
            max_requests=max(batches), max_model_len=context + decode_tokens + 64, warmup=False,
        )  # fmt: skip
        print(f"speed: Lamina loaded in {time.perf_counter() - start:.1f} s", flush=True)
        rival = Rival(values, device, experts)
        for batch in batches:
            ours, theirs = [], []
            for turn in range(rounds + 1):  # the first warms both up
                generator = torch.Generator().manual_seed(1000 * turn + batch)
                ids = torch.randint(3, vocab, (batch, context), generator=generator)
                ours.append(lamina_step_ms(llm, ids.tolist(), decode_tokens))
                theirs.append(rival.step_ms(ids.to(device), decode_tokens // 4))
            ours, theirs = ours[1:], theirs[1:]
            mine, other = statistics.median(ours), statistics.median(theirs)
            row = Speed(batch, context, mine, other, (min(ours), max(ours)), (min(theirs), max(theirs)), other / mine)
            found.append(row)
            print(
                f"decode 4 layers, 16 experts, batch {batch:3}, context {context} | Lamina {mine:7.3f} ms/step"
                f" ({min(ours):.3f}-{max(ours):.3f}) | Transformers {other:7.2f} ({min(theirs):.2f}-{max(theirs):.2f}) |"
                f" {row.ratio:5.1f}x", flush=True,
            )  # fmt: skip
    return found


def main() -> None:
    """Runs what was asked for; exit code 1 if an answer is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("parity", "speed"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="flash,pro,narrow,blocks,blocks-pro")
    parser.add_argument("--no-bf16", action="store_true", help="fp32 alone")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--decode-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rival-experts", default="grouped_mm", help="Transformers' experts: grouped_mm, batched_mm or eager")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON with changes of the config of the speed model")
    parser.add_argument("--json", type=Path, help="append one JSON line a result to this file")
    args = parser.parse_args()
    from transformers import __version__, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {__version__}", flush=True)
    found: list[Parity | Rounding | Speed] = []
    if args.only != "speed":
        found += run_parity(args.models.split(","), args.device, not args.no_bf16)
    if args.only != "parity":
        batches = [int(batch) for batch in args.batches.split(",")]
        found += run_speed(
            batches, args.context, args.decode_tokens, args.rounds, args.device, args.rival_experts, args.shape
        )  # fmt: skip
    common = {"device": name, "torch": torch.__version__, "transformers": __version__}
    lines = [json.dumps({"op": f"against_transformers.{type(row).__name__.lower()}", **asdict(row), **common}) for row in found]
    if args.json is not None:
        with args.json.open("a") as file:
            file.write("\n".join(lines) + "\n")
    if any(isinstance(row, Parity) and not row.is_good for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
