"""Tensor names as data: how a file's names become the names a model asks for. Which model's, the table's owner says."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lamina.base.errors import WeightError

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Rename:
    """Replaces the first match of `pattern` by `replacement` (both in the language of `re.sub`)."""

    pattern: str
    replacement: str


@dataclass(frozen=True, slots=True)
class Split:
    """One stored tensor that serves many names: `[E, parts * R, ...]`, entry e and the p-th R rows belong to `parts[p]`.

    `pattern` must match a whole renamed name; each part is a template for `Match.expand` in which `{index}` stands for e.
    """

    pattern: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a canonical tensor lies inside a stored one: all of it (index None), or rows start..stop of entry `index`."""

    name: str
    index: int | None = None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class NameScheme:
    """The names a model accepts. `renames` are applied in order, each once; canonical names must come out unchanged.

    Numbers between dots (layers, experts) come through in their order, and no rename may look at their values.
    ignored         prefixes of renamed names that are known and not used.
    weight_suffix   a tensor `X` + weight_suffix that is stored quantised has its scales in `X` + scale_suffix.
    """

    renames: tuple[Rename, ...] = ()
    splits: tuple[Split, ...] = ()
    ignored: tuple[str, ...] = ()
    weight_suffix: str = ".weight"
    scale_suffix: str = ".scale"

    def rename(self, stored: str) -> str:
        """The name after all renames; a fused tensor keeps a name of its own."""
        return self.rename_all((stored,))[0]

    def rename_all(self, stored: Iterable[str]) -> list[str]:
        """`rename` of each; names that differ only in their numbers are renamed once, as a checkpoint has 10^5 of them."""
        known: dict[str, str] = {}
        names = []
        for name in stored:
            skeleton = _INDEX.sub("0", name)
            if skeleton not in known:
                known[skeleton] = self._apply(skeleton)
            numbers = iter(_INDEX.findall(name))
            between = _INDEX.split(known[skeleton])
            names.append("".join(text + next(numbers, "") for text in between))
        return names

    def is_ignored(self, name: str) -> bool:
        """Whether a renamed name is one the model knows and does not use."""
        return name.startswith(self.ignored)

    def places(self, name: str, shape: tuple[int, ...]) -> tuple[Place, ...]:
        """The canonical tensors inside the tensor that `rename` called `name`, of `shape`; one, unless it is fused.

        Raises WeightError if a fused tensor cannot be cut evenly.
        """
        for split in self.splits:
            match = re.fullmatch(split.pattern, name)
            if match is not None:
                return _cut(split, match, shape)
        return (Place(name),)

    def scale_name(self, name: str) -> str:
        """The canonical name of the scales of the quantised tensor `name`."""
        return name.removesuffix(self.weight_suffix) + self.scale_suffix

    def _apply(self, name: str) -> str:
        for rename in self.renames:
            name = re.sub(rename.pattern, rename.replacement, name, count=1)
        return name


def _cut(split: Split, match: re.Match[str], shape: tuple[int, ...]) -> tuple[Place, ...]:
    num_parts = len(split.parts)
    if len(shape) < 2 or 0 in shape or shape[1] % num_parts:
        raise WeightError(f"tensor {match.string!r}: expected [entries, rows divisible by {num_parts}, ...], found {list(shape)}")
    rows = shape[1] // num_parts
    templates = tuple(match.expand(part) for part in split.parts)
    return tuple(
        Place(template.replace("{index}", str(index)), index, part * rows, (part + 1) * rows)
        for index in range(shape[0])
        for part, template in enumerate(templates)
    )
