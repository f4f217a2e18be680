"""A network takes exactly the parameters that its description counts: two readings of the same shipped config."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.base.errors import ConfigError
from lamina.models.families import NETWORKS, describe
from lamina.models.network import Branch
from lamina.models.network_tensors import needed_tensors

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
LARGE = ("deepseek-v3", "deepseek-v3.2", "qwen3-next-80b", "bamba-9b", "qwen3-30b-a3b")
REFUSED = {"ministral-3-8b": "weight_block_size"}
NAMES = [
    pytest.param(path.stem, marks=[pytest.mark.long] if path.stem in LARGE else [])
    for path in sorted(CONFIGS.glob("*.json"))
    if json.loads(path.read_text())["model_type"] in NETWORKS
]


def test_a_part_that_nothing_builds_is_refused() -> None:
    network = NETWORKS["llama"](json.loads((CONFIGS / "llama-3.1-8b.json").read_text()))
    with pytest.raises(ConfigError, match="layers='str' is not valid: one of AltUpLayer, Attention"):
        list(needed_tensors(replace(network, layers=((Branch("tide", None),),))))


@pytest.mark.parametrize("name", NAMES)
def test_a_network_takes_what_the_plan_counts(name: str) -> None:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    make = NETWORKS[values["model_type"]]
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            make(values)
        return
    needed = list(needed_tensors(make(values)))
    assert len({one.name for one in needed}) == len(needed)
    assert sum(math.prod(one.shape) for one in needed) == sum(part.num_params for part in describe(values).weights)
