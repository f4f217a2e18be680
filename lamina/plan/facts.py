"""A plan's JSON read back as records: what `diff` compares. Checked, since the file may come from anywhere."""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.errors import ConfigError

_CHOICES = ("gpu", "memory_bytes", "cache_bytes", "gpus", "tp", "ep", "dp", "draft", "gpu_memory_utilization", "max_step_tokens",
            "max_requests")  # fmt: skip
_MOST = 2**60


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """One line of memories, as in `records.MemoryLine`."""

    name: str
    kind: str
    layers: int
    format: str
    entry_bytes: int
    fixed_bytes: int
    lifetime: str


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """One line of workloads; memories: bytes by memory and padding, which add up to bytes_per_request."""

    context: int
    requests: int | None
    bytes_per_request: int
    fits: int | None
    memories: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What of a plan can change.

    choices    settings by name, as text.   weights  bytes on the fullest GPU by component.   usable_bytes, workspace_bytes,
    pool_bytes  None where no memory was given.
    """

    model: str
    layout_id: str
    choices: Mapping[str, str]
    memories: tuple[MemoryFacts, ...]
    weights: Mapping[str, int]
    usable_bytes: int | None
    workspace_bytes: int | None
    pool_bytes: int | None
    workloads: tuple[WorkloadFacts, ...]


def read_facts(values: Mapping[str, object]) -> PlanFacts:
    """The facts of what `report.plan_json` gave. Raises ConfigError naming the field that is not as it gives it."""
    plan = _Object(values, "plan")
    options, gpu = plan.nested("options"), plan.nested("gpu", optional=True)
    choices = {name: _shown(options.values.get(name)) for name in _CHOICES}
    for name in ("cache_format", "index_format", "block_tokens", "page_bytes", "slot_pages"):
        choices[name] = _shown(values.get(name))
    return PlanFacts(
        model=plan.text("model"),
        layout_id=plan.text("layout_id"),
        choices=choices,
        memories=tuple(_memory(line) for line in plan.items("memories")),
        weights=_weights(plan.items("weights")),
        usable_bytes=gpu.number("usable_bytes") if gpu else None,
        workspace_bytes=gpu.number("workspace_bytes") if gpu else None,
        pool_bytes=plan.optional("pool_bytes"),
        workloads=tuple(_workload(line) for line in plan.items("workloads")),
    )


def _memory(line: "_Object") -> MemoryFacts:
    return MemoryFacts(
        line.text("name"), line.text("kind"), line.number("layers"), line.text("format"), line.number("entry_bytes"),
        line.number("fixed_bytes_per_request"), line.text("lifetime"),
    )  # fmt: skip


def _weights(lines: list["_Object"]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for line in lines:
        name = line.text("component")
        totals[name] = totals.get(name, 0) + line.number("gpu_bytes")
    return totals


def _workload(line: "_Object") -> WorkloadFacts:
    rows = line.nested("memories")
    memories = {name: rows.number(name) for name in rows.values}
    total = line.number("bytes_per_request")
    if sum(memories.values()) != total:
        raise ConfigError(f"{line.name}.bytes_per_request", total, f"the sum of its memories, {sum(memories.values())}")
    return WorkloadFacts(line.number("context"), line.optional("requests"), total, line.optional("fits"), memories)


class _Object:
    """A JSON object and where it is in the file."""

    def __init__(self, values: Mapping[str, object], name: str) -> None:
        self.values = values
        self.name = name

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return printable(value)

    def number(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
            raise self._wrong(key, "a whole number of bytes or tokens")
        return value

    def optional(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.number(key)

    def nested(self, key: str, optional: bool = False) -> "_Object":
        value = self.values.get(key)
        if value is None and optional:
            value = {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return _Object(value, f"{self.name}.{key}")

    def items(self, key: str) -> list["_Object"]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        found = []
        for number, item in enumerate(value):
            if not isinstance(item, dict):
                raise ConfigError(f"{self.name}.{key}[{number}]", _brief(item), "an object")
            found.append(_Object(item, f"{self.name}.{key}[{number}]"))
        return found

    def __bool__(self) -> bool:
        return bool(self.values)

    def _wrong(self, key: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.name}.{key}", _brief(self.values.get(key)), f"{allowed}, as `lamina plan --json` writes it")


def printable(text: str) -> str:
    """The text without what could command a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _shown(value: object) -> str:
    return "-" if value is None else printable(str(value))


def _brief(value: object) -> object:
    """The value, or only its type where it could be long."""
    return value if value is None or isinstance(value, bool | int | float) else type(value).__name__
