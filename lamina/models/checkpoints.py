"""What a checkpoint of each family that runs holds, known from its headers and its config."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from lamina.models import deepseek_v4_names, deepseek_v4_tensors
from lamina.models.families import NETWORKS
from lamina.models.needed import Needed
from lamina.weights.names import NameScheme


@dataclass(frozen=True, slots=True)
class Contents:
    """How a checkpoint's tensors are named, and those that its config asks for, given the names of those that are there."""

    names: NameScheme
    needed: Callable[[frozenset[str]], Iterator[Needed]]


#: families that run, by model_type of config.json
RUNNING = frozenset(("deepseek_v4", *NETWORKS))


def contents_of(values: Mapping[str, object]) -> Contents:
    """Of a config.json whose model_type is one of RUNNING. Raises ConfigError naming the field for what does not run."""
    kind = str(values["model_type"])
    if kind == "deepseek_v4":
        return Contents(deepseek_v4_names.NAMES, lambda stored: deepseek_v4_tensors.needed_tensors(values))
    network = NETWORKS[kind](values)

    def needed(stored: frozenset[str]) -> Iterator[Needed]:
        from lamina.models.network_tensors import needed_tensors  # needs torch

        return needed_tensors(network, stored)

    return Contents(network.names, needed)
