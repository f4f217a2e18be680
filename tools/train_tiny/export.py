"""The trained weights in the official layout: FP4 experts, FP8 linears, bf16 and fp32 rest, config, tokenizer, chat defaults."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from lamina.models.tiny import config_of, specs, write_settings
from lamina.ops.quantise.ref import dequantise_fp4_weight, dequantise_fp8_weight
from lamina.weights.writer import encode, write_safetensors
from tools.train_tiny.model import Model

#: a file of the tree or of a transfer is at most this large
MOST_BYTES = 16 * 2**20


def official(model: Model) -> dict[str, Tensor]:
    """Every tensor of the official file by its name, scales included."""
    values = {
        name: value
        for key, stack in model.stacks.items()
        for name, value in zip(model.names[key], stack.detach().cpu(), strict=True)
    }
    tensors: dict[str, Tensor] = {}
    for spec in specs(model.shape):
        head, experts, tail = spec.name.partition(".experts.")
        if spec.name in model.routes or spec.name in model.biases:
            tensors[spec.name] = model.buffer(spec.name).cpu()
            continue
        if experts:
            index, kind, _ = tail.split(".")
            value = values[f"{head}.experts.{kind}"][int(index)]
        else:
            value = values[spec.name]
        encoded = encode(value.float(), spec.storage)
        tensors[spec.name] = encoded.stored
        if encoded.scale is not None:
            tensors[spec.name.removesuffix(".weight") + ".scale"] = encoded.scale
    return tensors


def export(model: Model, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the checkpoint to `directory`: shards of at most 16 MiB with their index, config and tokenizer files."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in official(model).items():
        bytes_here = tensor.numel() * tensor.element_size()
        if size + bytes_here > MOST_BYTES - 2**19:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, total = size + bytes_here, total + bytes_here
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        write_safetensors(directory / file, shard)
        where.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    write_settings(directory, config_of(model.shape))
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)


def save_weights(model: Model, directory: Path) -> None:
    """The masters in bf16 and the buffers as they are, for the next piece on another machine: files of at most 16 MiB."""
    tensors = {f"stacks.{key}": stack.detach().to(torch.bfloat16) for key, stack in model.stacks.items()}
    tensors |= {name: value for name, value in model.named_buffers()}
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        bytes_here = tensor.numel() * tensor.element_size()
        if size + bytes_here > MOST_BYTES - 2**19:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu()
        size += bytes_here
    for index, shard in enumerate(shards):
        write_safetensors(directory / f"weights-{index:02}.safetensors", shard)


def load_weights(model: Model, directory: Path) -> None:
    """Reads what `save_weights` or `export` wrote. Raises ValueError if the files are not this model's."""
    if (directory / "config.json").exists():
        _load_official(model, directory)
        return
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("weights-*.safetensors")):
        tensors.update(load_file(file))
    expected = {f"stacks.{key}": stack for key, stack in model.stacks.items()} | dict(model.named_buffers())
    if {name: tuple(t.shape) for name, t in tensors.items()} != {name: tuple(t.shape) for name, t in expected.items()}:
        raise ValueError(f"{directory} does not hold this model's weights")
    with torch.no_grad():
        for name, target in expected.items():
            target.copy_(tensors[name])


def _load_official(model: Model, directory: Path) -> None:
    """The values that an engine computes with become the masters."""
    stored: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model-*.safetensors")):
        stored.update(load_file(file))
    values: dict[str, list[Tensor]] = {}
    for spec in specs(model.shape):
        if spec.name not in stored or stored[spec.name].shape[0] != spec.shape[0]:
            raise ValueError(f"{directory} does not hold this model's {spec.name}")
        tensor, scale = stored[spec.name], stored.get(spec.name.removesuffix(".weight") + ".scale")
        if spec.name in model.routes or spec.name in model.biases:
            model.buffer(spec.name).copy_(tensor)
            continue
        if scale is not None:
            tensor = (dequantise_fp4_weight if spec.storage == "fp4" else dequantise_fp8_weight)(tensor, scale)
        head, experts, tail = spec.name.partition(".experts.")
        name = f"{head}.experts.{tail.split('.')[1]}" if experts else spec.name
        values.setdefault(name, []).append(tensor.float())
    with torch.no_grad():
        for key, stack in model.stacks.items():
            for target, name in zip(stack, model.names[key], strict=True):
                target.copy_(torch.stack(values[name]) if ".experts." in name else values[name][0])
