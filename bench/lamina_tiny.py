"""The model in the package on a GPU, beside itself on the CPU: PYTHONPATH=. python bench/lamina_tiny.py [--json FILE]

For each cache format: nats per character of a held-out text on both, the answers to questions about a text of 2,000 tokens, and
whether the same question gets the same answer cold, from what is kept, and in another order. With deterministic="strict" these
have the same bits. Last, decode speed. A check that fails says why, and the next one runs.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from lamina import LLM, RequestOutput, SamplingParams

FORMATS = ("fp8:fp4", "bf16:bf16", "fp32:fp32", "fp8:fp32")


def embedded() -> ModuleType:
    """What the tests ask the model; read by its path, as pytest need not be there."""
    path = Path(__file__).resolve().parents[1] / "tests" / "models" / "embedded.py"
    spec = importlib.util.spec_from_file_location("lamina_tests_models_embedded", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(args: argparse.Namespace, formats: str, device: str, mode: bool | str | None = None) -> LLM:
    """The engine on one device."""
    cache_format, index_format = formats.split(":")
    options: dict[str, object] = {} if device == "cpu" else {"warmup": False, "max_step_tokens": 4096}
    return LLM(
        args.model, device=device, cache_format=cache_format, index_format=index_format, cache_bytes="512MiB", max_requests=16,
        deterministic=mode, **options,
    )  # type: ignore[arg-type]  # fmt: skip


def english(args: argparse.Namespace, asked: ModuleType, formats: str) -> dict[str, object]:
    """Nats per character on the device and on the CPU."""
    found, cpu = (asked.nats_per_character(make(args, formats, device)) for device in (args.device, "cpu"))
    return {
        "nats": round(found, 4),
        "nats_cpu": round(cpu, 4),
        "off": round(found - cpu, 5),
        "ok": abs(found - cpu) < args.within,
    }


def answers(args: argparse.Namespace, asked: ModuleType, formats: str) -> dict[str, object]:
    """Questions in order, and some of them again: warm, cold in another cache, from what that kept."""
    return _answers(make(args, formats, args.device), asked, False)


def bits(args: argparse.Namespace, asked: ModuleType, formats: str) -> dict[str, object]:
    """The same in the mode that promises the same bits."""
    return _answers(make(args, formats, args.device, "strict"), asked, True)


def _answers(llm: LLM, asked: ModuleType, same_bits: bool) -> dict[str, object]:
    prompts, began = asked.questions(), time.perf_counter()
    first = asked.in_order(llm)
    seconds = time.perf_counter() - began
    right, cached = asked.num_right(first), [output.usage.cached_tokens for output in first]
    (again,) = asked.ask(llm, prompts[:1])
    cold, moved = asked.ask(llm, prompts[-1:], "another cache"), asked.ask(llm, prompts[:1], "another cache")
    pairs = [(again, first[0]), (moved[0], first[0]), (cold[0], first[-1])]
    same_tokens = all(_tokens(one) == _tokens(other) for one, other in pairs)
    off = max(abs(_logprob(one) - _logprob(other)) for one, other in pairs)
    ok = right == len(prompts) and same_tokens and min(cached[2:]) > len(first[0].prompt_token_ids) - 32
    return {
        "right": right, "asked": len(prompts), "cached_tokens": cached, "prompt_tokens": len(first[0].prompt_token_ids),
        "same_tokens": same_tokens, "logprob_off": off, "seconds": round(seconds, 2), "ok": ok and (off == 0.0 or not same_bits),
        "texts": [output.outputs[0].text for output in first],
    }  # fmt: skip


def _tokens(output: RequestOutput) -> Sequence[int]:
    return output.outputs[0].token_ids


def _logprob(output: RequestOutput) -> float:
    found = output.outputs[0].cumulative_logprob
    assert found is not None
    return found


def speed(args: argparse.Namespace, asked: ModuleType, formats: str) -> dict[str, object]:
    """Tokens/s of decoding for one request and for 16, once graphs are there."""
    llm, found = make(args, formats, args.device), {}
    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
    for count in (1, 16):
        prompts = [f"Once upon a time there were {number} ships." for number in range(count)]
        for _ in range(2):
            began = time.perf_counter()
            llm.generate(prompts, params)
            found[f"tokens_s_{count}"] = round(count * 128 / (time.perf_counter() - began))
    return found | {"ok": True}


def main() -> int:
    """Runs all checks; 1 if one of them is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="lamina-tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--formats", default=",".join(FORMATS), help="cache:index format, with commas between")
    parser.add_argument("--within", type=float, default=0.02, help="nats per character that a GPU may be away from the CPU")
    parser.add_argument("--json", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    asked, failed = embedded(), 0
    every: list[tuple[Callable[..., dict[str, object]], str]] = [
        (check, formats) for formats in args.formats.split(",") for check in (english, answers)
    ]
    for check, formats in [*every, (bits, "fp8:fp4"), (speed, "fp8:fp4")]:
        line: dict[str, object] = {"op": "lamina_tiny", "check": check.__name__, "formats": formats, "device": args.device}
        began = time.perf_counter()
        try:
            line |= check(args, asked, formats)
        except Exception as error:  # the next check may still say something
            line |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        failed += not line["ok"]
        line["check_s"] = round(time.perf_counter() - began, 1)
        print(json.dumps(line), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
