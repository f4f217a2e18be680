"""A DeepSeek-V4 with random weights in the official layout: FP8 and packed FP4 codes with e8m0 scales.

    python bench/official_random.py DIR [--ratios 0,4,128,4 --experts 16 --device cuda]

`write_directory` writes a checkpoint; `RandomCheckpoint` stands where a `lamina.weights.loader.Checkpoint` is expected and makes
every tensor where it is needed, when it is asked for: a model that fills a GPU is there in seconds and never was in a file.
`make_llm` is an engine over such a model; `read_bytes` says what a decode step has to read of it.
A tensor depends on the seed, its name and its shape (and on the kind of device). Nothing is zero; deviations are those of the
tiny models, gain / sqrt(fan in), so activations keep their size through any number of layers.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lamina import LLM
from lamina.base.sizes import format_bytes
from lamina.models.deepseek_v4_config import parse_config
from lamina.models.deepseek_v4_names import NAMES
from lamina.models.deepseek_v4_tensors import needed_tensors
from lamina.models.tiny import tiny_config
from lamina.ops.quantise import dequantise_fp4_weight, dequantise_fp8_weight, e8m0_to_fp32
from lamina.runtime import worker
from lamina.weights.loader import Ignored, StoredTensor
from lamina.weights.names import NameScheme
from lamina.weights.writer import write_safetensors

FLASH_LAYERS = 43
#: root of the mean square of an e2m1 code drawn evenly, and of e4m3 codes as they are drawn here (below)
_FP4_RMS, _FP8_DEVIATION = (68.5 / 8) ** 0.5, 32.0


def flash_ratios(num_layers: int = FLASH_LAYERS) -> tuple[int, ...]:
    """The first layers of Flash's schedule: two windows alone, then 4 and 128 by turns."""
    return (0, 0, *((4, 128) * num_layers))[:num_layers]


def flash_config(ratios: tuple[int, ...] | None = None, **changes: object) -> dict[str, object]:
    """config.json of Flash, with another schedule of layers and other changes; no draft block."""
    ratios = flash_ratios() if ratios is None else ratios
    wide = {
        "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
        "moe_intermediate_size": 2048, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
        "num_experts_per_tok": 6, "num_hash_layers": 3, "routed_scaling_factor": 1.5, "vocab_size": 129280,
    }  # fmt: skip
    schedule = {"num_hidden_layers": len(ratios), "compress_ratios": list(ratios), "num_nextn_predict_layers": 0}
    return tiny_config("flash") | wide | schedule | changes


@dataclass(frozen=True, slots=True)
class Form:
    """How a tensor is stored (fp8, fp4, bf16, fp32), and its deviation and mean."""

    storage: str
    deviation: float
    mean: float = 0.0


_PLAIN = {
    "scale": Form("fp32", 0.2, 1.0), "base": Form("fp32", 1.0), "attn_sink": Form("fp32", 1.0), ".ape": Form("fp32", 0.5),
    ".bias": Form("fp32", 0.1),
}  # fmt: skip
_BF16_MATRICES = (".gate.weight", ".weights_proj.weight", "compressor.wkv.weight", "compressor.wgate.weight")


def form_of(name: str, shape: tuple[int, ...]) -> Form:
    """What the official files store under a canonical name."""
    fan = shape[-1] ** -0.5
    if name.endswith("norm.weight"):
        return Form("bf16", 0.2, 1.0)
    for suffix, form in _PLAIN.items():
        if name.endswith(suffix):
            return form
    if name.endswith("fn"):
        return Form("fp32", fan)
    if name == "embed.weight":
        return Form("bf16", 1.0)
    if name == "head.weight" or name.endswith(_BF16_MATRICES):
        return Form("bf16", fan)
    gain = 4.0 if name.endswith("wo_b.weight") else 2.0 if name.endswith(".w2.weight") else 1.0
    return Form("fp4" if ".experts." in name else "fp8", gain * fan)


class RandomCheckpoint:
    """The tensors of the model that `values` (a config.json) describes, made on `device` one at a time.

    The same methods as a `Checkpoint`; a name that the model does not have, or another shape, is a KeyError.
    """

    def __init__(self, values: Mapping[str, object], device: str | torch.device = "cpu", seed: int = 0) -> None:
        self.needed = {needed.name: needed for needed in needed_tensors(values)}
        self.device = torch.device(device)
        self.seed = seed
        self.num_experts = int(str(values["n_routed_experts"]))
        self.ignored = Ignored(0, 0)
        self._generator = torch.Generator(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def has(self, name: str) -> bool:
        """Whether the model has it."""
        return name in self.needed

    def take_stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """As a checkpoint of the official layout has it."""
        made = self._make(name, shape)
        if made.kind != "fp8":
            return made
        assert made.scales is not None
        return StoredTensor("fp8", made.codes, e8m0_to_fp32(made.scales))

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same tensor in fp32."""
        made = self._make(name, shape)
        if made.scales is None:
            return made.codes.float()
        return (dequantise_fp8_weight if made.kind == "fp8" else dequantise_fp4_weight)(made.codes, made.scales)

    def take_file(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Codes and e8m0 scales with the types that files give them."""
        made = self._make(name, shape)
        if made.scales is None:
            return made.codes, None
        codes = made.codes.view(torch.int8) if made.kind == "fp4" else made.codes
        return codes, made.scales.view(torch.float8_e8m0fnu)

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """The table of a hash layer: distinct experts in every row, int64."""
        self._start(name, shape)
        first = torch.randint(low, high, (shape[0], 1), generator=self._generator, device=self.device)
        steps = 1 + 2 * torch.arange(shape[1], device=self.device) * (high - low) // (2 * shape[1])  # distinct, below high - low
        return low + (first + steps) % (high - low)

    def finish(self) -> None:
        """Nothing to close; what was not taken was never made."""

    def _make(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor with e8m0 scales."""
        form = self._start(name, shape)
        if form.storage == "fp4":
            return self._fp4(shape, form)
        if form.storage == "fp8":
            return self._fp8(shape, form)
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=_DTYPES[form.storage])
        return StoredTensor("plain", values.mul_(form.deviation).add_(form.mean))

    def _start(self, name: str, shape: tuple[int, ...]) -> Form:
        if self.needed[name].shape != tuple(shape):
            raise KeyError(f"{name} {list(shape)}, not {list(self.needed[name].shape)}")
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little"))
        return form_of(name, tuple(shape))

    def _bytes(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] of all 256 values alike, eight at a time."""
        words = torch.empty(-(-rows * columns // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self._generator)
        return words.view(torch.uint8)[: rows * columns].view(rows, columns)

    def _fp4(self, shape: tuple[int, ...], form: Form) -> StoredTensor:
        """All codes alike, scales over three binades."""
        rows, columns = shape
        middle = 127 + round(float(torch.tensor(form.deviation / (_FP4_RMS * 1.32)).log2()))  # 1.32: of the three binades
        scales = self._bytes(rows, columns // 32).remainder_(3).add_(middle - 1)
        return StoredTensor("fp4", self._bytes(rows, columns // 2), scales)

    def _fp8(self, shape: tuple[int, ...], form: Form) -> StoredTensor:
        """Normal numbers of deviation 32, so of all binades that matter, under scales over three binades."""
        rows, columns = shape
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        values.normal_(0, _FP8_DEVIATION, generator=self._generator)
        middle = 127 + round(float(torch.tensor(form.deviation / (_FP8_DEVIATION * 1.32)).log2()))
        scales = self._bytes(-(-rows // 128), -(-columns // 128)).remainder_(3).add_(middle - 1)
        return StoredTensor("fp8", values.clamp_(-448, 448).to(torch.float8_e4m3fn), scales)


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def write_directory(
    directory: Path, values: Mapping[str, object], seed: int = 0, device: str | torch.device = "cpu", names: NameScheme = NAMES
) -> None:
    """config.json and model.safetensors in the official layout; no tokenizer, so prompts are token ids."""
    source = RandomCheckpoint(values, device, seed)
    tensors: dict[str, Tensor] = {}
    for name, needed in source.needed.items():
        if needed.is_integer:
            tensors[name] = source.take_int(name, needed.shape, 0, source.num_experts).cpu()
            continue
        codes, scales = source.take_file(name, needed.shape)
        tensors[name] = codes.cpu()
        if scales is not None:
            tensors[names.scale_name(name)] = scales.cpu()
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


def make_llm(values: Mapping[str, object], device: str, cache_bytes: str | int, seed: int = 0, **settings: object) -> LLM:
    """An engine over a model that was never in a file. settings  those of `LLM`."""
    checkpoint, before = RandomCheckpoint(values, device, seed), worker.Checkpoint
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(dict(values)), encoding="utf-8")
        worker.Checkpoint = lambda *_: checkpoint  # type: ignore[assignment,misc]
        try:
            return LLM(root, device=device, cache_bytes=cache_bytes, **settings)  # type: ignore[arg-type]
        finally:
            worker.Checkpoint = before  # type: ignore[misc]


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor with its scales."""
    if name.endswith("tid2eid"):
        return 4 * math.prod(shape)
    storage = form_of(name, shape).storage
    if storage in _DTYPES:
        return math.prod(shape) * _DTYPES[storage].itemsize
    rows, columns = shape[0], shape[1]
    return rows * columns * 17 // 32 if storage == "fp4" else rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def needed_bytes(values: Mapping[str, object]) -> int:
    """Bytes of all weights as they are stored."""
    return sum(stored_bytes(needed.name, needed.shape) for needed in needed_tensors(values))


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """What a decode step must read at least, by component; each byte once."""

    dense: int
    experts: int
    head: int
    attend: int
    index: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.dense + self.experts + self.head + self.attend + self.index


def read_bytes(values: Mapping[str, object], batch: int, context: int) -> ReadBytes:
    """For `batch` requests of `context` tokens, even routing, fp8 entries (584 B) and fp4 index keys (68 B)."""
    config = parse_config(values)
    ratios, num, chosen, top_k = config.ratios, config.num_experts, config.experts_per_token, config.index_topk
    hit = 1 - (1 - chosen / num) ** batch
    found = {"dense": 0, "experts": 0, "head": 0}
    for needed in needed_tensors(values):
        if needed.name == "embed.weight" or needed.is_integer:
            continue
        part = "head" if needed.name == "head.weight" else "experts" if ".experts." in needed.name else "dense"
        found[part] += stored_bytes(needed.name, needed.shape)
    rows = {0: 0, 4: min(top_k, context // 4), 128: context // 128}
    attend = sum(min(context, 128) + rows[ratio] for ratio in ratios) * 584 * batch
    index = sum(context // 4 * 68 for ratio in ratios if ratio == 4 and context // 4 > top_k) * batch
    return ReadBytes(found["dense"], int(found["experts"] * hit), found["head"], attend, index)


def main() -> None:
    """Writes one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ratios", default="0,4,128,4", help="one for each layer")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=129280)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    ratios = tuple(int(part) for part in args.ratios.split(","))
    values = flash_config(ratios, n_routed_experts=args.experts, vocab_size=args.vocab)
    write_directory(args.directory, values, args.seed, args.device)
    print(f"wrote {args.directory}: {format_bytes((args.directory / 'model.safetensors').stat().st_size)}")


if __name__ == "__main__":
    main()
