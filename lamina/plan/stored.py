"""The weights of a checkpoint as its files' headers list them: exact bytes, by component. No tensor is read."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lamina.models.description import WeightPart
from lamina.models.files import is_gguf, list_stored
from lamina.plan.budget import UNUSED
from lamina.weights.headers import Stored

#: the first pattern that is found in a tensor's name says its component, and how that is divided over GPUs
_COMPONENTS = tuple(
    (re.compile(pattern, re.ASCII), component, split)
    for pattern, component, split in (
        (r"\bexperts\b", "experts", "expert"),
        (r"indexer", "index", "none"),
        (r"compressor", "compressor", "none"),
        (r"\bhc_", "hyper-connections", "none"),
        (r"vision|visual|audio|multi_modal|projector", "other senses", "none"),
        (r"\bwq_a\b|\bwkv\b|q_a_proj|kv_a_proj", "low-rank projections", "none"),
        (r"shared_expert", "shared experts", "tensor"),
        (r"norm", "norms", "none"),
        (r"embed", "embedding", "tensor"),
        (r"\blm_head\b|^head\b", "head", "tensor"),
        (r"router|\bgate\b(?!_)", "router", "none"),
        (r"linear_attn", "linear attention", "tensor"),
        (r"mamba|\bmixer\b|conv1d|\bssm", "mamba", "tensor"),
        (r"attn|attention", "attention", "tensor"),
        (r"mlp|ffn|feed_forward|proj", "mlp", "tensor"),
    )
)
_OTHER = ("other", "none")
_LAYER = re.compile(r"\blayers\.(\d+)\.", re.ASCII)


def has_weights(directory: Path) -> bool:
    """Whether there is any safetensors file, index or GGUF file to read."""
    if is_gguf(directory):
        return True
    return any(path.name.endswith((".safetensors", ".safetensors.index.json")) for path in directory.iterdir())


def stored_parts(directory: Path, values: Mapping[str, object], with_drafts: bool) -> tuple[WeightPart, ...]:
    """The components of the checkpoint in `directory`; their bytes add up to those of all its tensors.

    values       its config.json: layers past its number are draft blocks.   with_drafts  False: those are not loaded.
    Raises WeightError, in one line, for files that are not what they say.
    """
    return _parts(list_stored(directory), _num_layers(values), with_drafts)


def _parts(tensors: Iterable[Stored], num_layers: int | None, with_drafts: bool) -> tuple[WeightPart, ...]:
    totals: dict[tuple[str, str], list[int]] = {}
    for tensor in tensors:
        component, split = _component(tensor.name)
        if _is_draft(tensor.name, num_layers):
            component = "draft experts" if split == "expert" else "draft blocks"
            split = UNUSED if not with_drafts else "expert" if split == "expert" else "tensor"
        count = totals.setdefault((component, split), [0, 0])
        count[0] += math.prod(tensor.shape)
        count[1] += tensor.nbytes
    return tuple(WeightPart(component, params, size, split) for (component, split), (params, size) in totals.items())


def _component(name: str) -> tuple[str, str]:
    for pattern, component, split in _COMPONENTS:
        if pattern.search(name):
            return component, split
    return _OTHER


def _is_draft(name: str, num_layers: int | None) -> bool:
    """Draft blocks have names of their own, or follow the last layer."""
    if name.startswith("mtp.") or ".mtp." in name:
        return True
    layer = _LAYER.search(name)
    return layer is not None and num_layers is not None and int(layer.group(1)) >= num_layers


def num_experts(values: Mapping[str, object]) -> int | None:
    """Routed experts of a layer, as the families' configs spell it; None where there is none or where layers may differ."""
    return _first_count(values, ("n_routed_experts", "num_local_experts", "num_experts"))


def _num_layers(values: Mapping[str, object]) -> int | None:
    return _first_count(values, ("num_hidden_layers",))


def _first_count(values: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """The first of the fields that is a positive integer, in the config's text part or in the config itself."""
    text = values.get("text_config")
    for source in (text if isinstance(text, dict) else {}, values):
        for name in names:
            count = source.get(name)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None
