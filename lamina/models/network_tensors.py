"""Which tensors a network takes: it is built from tensors that have shapes and no memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lamina.layers.entries import StoreKey
from lamina.models.needed import Needed
from lamina.models.network import Network
from lamina.models.network_model import load_network
from lamina.ops.store import EntryCodec, Store
from lamina.weights.loader import StoredTensor

_NOWHERE = torch.device("meta")


class _Recorder:
    """Stands where a checkpoint is expected. stored  canonical names of the tensors that are there."""

    def __init__(self, stored: frozenset[str]) -> None:
        self.stored = stored
        self.needed: list[Needed] = []

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds it."""
        return name in self.stored

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Notes a tensor."""
        self.needed.append(Needed(name, shape))
        return torch.empty(shape, device=_NOWHERE)

    def take_int(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Notes a tensor of integers."""
        self.needed.append(Needed(name, shape, is_integer=True))
        return torch.empty(shape, dtype=torch.int64, device=_NOWHERE)

    def take_stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Notes a tensor."""
        return StoredTensor("plain", self.take(name, shape))

    def finish(self) -> None:
        """All were noted."""


def needed_tensors(network: Network, stored: frozenset[str] = frozenset()) -> Iterator[Needed]:
    """The tensors that loading takes, in its order. stored  names of those that are there: some networks do without one."""
    recorder = _Recorder(stored)

    def store(key: StoreKey, codec: EntryCodec) -> Store:
        return Store(codec, tuple(torch.empty(1, 1, 1, device=_NOWHERE) for _ in key.fields))

    with _NOWHERE:
        load_network(network, recorder, torch.float32, store, "fp32", "fp32")
    return iter(recorder.needed)
