"""Can this machine run that checkpoint? Judged from headers, config.json and what the machine says of itself. Needs no torch.

`diagnose` collects reasons (any of them means no) and limits (it runs, but). Nothing in the directory is trusted: every
sentence is one line, shortened where a file could make it long, and no tensor data is read.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lamina.base.errors import ConfigError, LaminaError, WeightError
from lamina.base.sizes import GiB, MiB, format_bytes
from lamina.memory.layout import Layout, make_layout
from lamina.models.checkpoints import RUNNING, contents_of
from lamina.models.description import Choices, Description
from lamina.models.families import FAMILIES, NETWORKS, describe
from lamina.models.files import generation_end_tokens, is_gguf, list_stored, missing_library, model_name, read_config
from lamina.models.needed import Findings, check_tensors
from lamina.plan.facts import printable
from lamina.weights.headers import INDEX, Stored, read_header

#: the versions of torch that pyproject.toml asks for: from, and below
TORCH_VERSIONS = ((2, 11), (2, 15))
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SHORT_REQUEST = 4096
_SHOWN_NAMES, _MOST_FILES, _LONGEST, _MOST_INDEX_BYTES = 3, 2_000, 400, 256 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; what is not known is None. torch: whether torch can use it."""

    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    torch: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine says of itself; what is not known is None.

    cores            that this process may use.   memory_bytes  of the machine or of its container, available_bytes now.
    torch_backend    what torch was built for: cpu, cuda 12.8, rocm 6.4.   torch_problem  what it complains of, if of anything.
    devices          what the engine can compute on here.
    """

    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    available_bytes: int | None
    gpus: tuple[Gpu, ...]
    python: str
    lamina: str
    torch: str | None
    torch_backend: str | None = None
    torch_problem: str | None = None
    triton: str | None = None
    devices: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True, slots=True)
class TokenizerFound:
    """The tokenizer of a checkpoint as the engine reads it: None tokens where there is none."""

    num_tokens: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool of pages holds: the longest single request, and how many requests of 4,096 tokens (or the model's limit)."""

    cache_bytes: int
    page_bytes: int
    block_tokens: int
    slot_pages: int
    pages: int
    most_tokens: int
    short_tokens: int
    short_requests: int
    full_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFound:
    """A checkpoint as far as it could be judged; None where that was not far enough.

    runs            the family can be computed with, not only planned.   num_params, planned_bytes  of the weights, by the config.
    num_files, num_tensors, stored_bytes  as the headers have them.   loaded_bytes  of the weights in the machine's memory.
    device          cpu or cuda: what it was judged for.   gpu_bytes  of the weights in a GPU's memory, as they are stored.
    """

    name: str
    exists: bool = True
    model_type: str | None = None
    is_known: bool = False
    runs: bool = False
    num_params: int | None = None
    max_positions: int | None = None
    cache_format: str | None = None
    index_format: str | None = None
    num_files: int | None = None
    num_tensors: int | None = None
    stored_bytes: int | None = None
    planned_bytes: int | None = None
    tensors: Findings | None = None
    loaded_bytes: int | None = None
    capacity: Capacity | None = None
    tokenizer: TokenizerFound = field(default_factory=TokenizerFound)
    device: str = "cpu"
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict: yes unless there is a reason against it. Limits are worth knowing and change nothing."""

    reasons: tuple[str, ...]
    limits: tuple[str, ...]
    machine: Machine
    model: ModelFound | None

    @property
    def is_yes(self) -> bool:
        """Whether it runs."""
        return not self.reasons


@dataclass(slots=True)
class _Notes:
    """Reasons and limits, as they come up."""

    reasons: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def no(self, sentence: str) -> None:
        self.reasons.append(_line(sentence))

    def limit(self, sentence: str) -> None:
        self.limits.append(_line(sentence))


def diagnose(
    machine: Machine, directory: Path | None, cache_bytes: int, choices: Choices, tokenizer: TokenizerFound | None = None,
    device: str = "auto",
) -> Report:  # fmt: skip
    """What speaks against running the checkpoint in `directory` (None: any) on this machine. Raises nothing for what it finds.

    cache_bytes  memory for what requests remember.   tokenizer  what the engine made of tokenizer.json.
    device       cpu, cuda, or auto: a GPU that can be used, else the CPU.
    """
    notes = _Notes()
    _judge_machine(machine, notes)
    if device == "cuda" and "cuda" not in machine.devices:
        notes.no("--device cuda: there is no GPU here that can be used")
    model = None if directory is None else _Model(directory, machine, choices, notes, device).judge(cache_bytes, tokenizer)
    return Report(tuple(notes.reasons), tuple(notes.limits), machine, model)


def _judge_machine(machine: Machine, notes: _Notes) -> None:
    low, high = (".".join(map(str, version)) for version in TORCH_VERSIONS)
    if machine.torch is None:
        notes.no(f"torch cannot be imported: {machine.torch_problem or 'it is not installed'}")
        return
    if not TORCH_VERSIONS[0] <= _version(machine.torch) < TORCH_VERSIONS[1]:
        notes.limit(f"torch {machine.torch} is not one of the versions this was made for: from {low}, below {high}")
    if machine.torch_problem is not None:
        notes.limit(f"torch says: {machine.torch_problem}")
    idle = [gpu for gpu in machine.gpus if not gpu.torch]
    if idle and machine.torch_backend == "cpu":
        notes.limit(f"torch {machine.torch} is built for the CPU: it cannot use {_gpu_count(idle)}")
    elif idle:
        notes.limit(f"torch cannot use {_gpu_count(idle)} (CUDA_VISIBLE_DEVICES, or the driver)")
    if machine.gpus and machine.devices == ("cpu",):
        needed = "a GPU needs compute capability 8.0, a torch built for CUDA, and Triton"
        notes.limit(f"{_gpu_count(machine.gpus)} would stay idle: {needed}")
    elif len(usable := [gpu for gpu in machine.gpus if gpu.torch]) > 1:
        notes.limit(f"this version computes on one GPU: {_gpu_count(usable[1:])} would stay idle")


class _Model:
    """Judges one checkpoint step by step; each step needs what the one before found."""

    def __init__(self, directory: Path, machine: Machine, choices: Choices, notes: _Notes, device: str) -> None:
        self.directory = directory
        self.machine = machine
        self.choices = choices
        self.notes = notes
        self.wanted = device
        usable = [gpu for gpu in machine.gpus if gpu.torch]
        self.gpu = usable[0] if usable and device != "cpu" and "cuda" in machine.devices else None

    def judge(self, cache_bytes: int, tokenizer: TokenizerFound | None) -> ModelFound:
        name = printable(model_name(_real(self.directory))) or "/"
        if not self.directory.is_dir() and not is_gguf(self.directory):
            self.notes.no(f"{str(self.directory)!r} is no directory: give one that holds {_CONFIG} and *.safetensors")
            return ModelFound(name, exists=False)
        values, tensors = self._config(), self._tensors()
        model_type = values.get("model_type") if values is not None else None
        known = isinstance(model_type, str) and model_type in FAMILIES
        runs = isinstance(model_type, str) and model_type in RUNNING
        description = self._description(values)
        if description is not None and not runs:
            running = ", ".join(sorted(RUNNING))
            self.notes.no(f"{model_type} can be planned (`lamina plan`) but not run by this version, which runs {running}")
        findings = None
        if tensors is not None and values is not None and description is not None and runs:
            findings = self._findings(values, tensors)
        planned = sum(part.nbytes for part in description.weights) if description is not None else None
        params = sum(part.num_params for part in description.weights) if description is not None else None
        loaded_bytes = 4 * params if runs and params is not None else None
        if findings is not None and findings.is_complete:
            loaded_bytes = findings.loaded_bytes
        capacity = self._capacity(description, cache_bytes) if description is not None else None
        stored_bytes = sum(tensor.nbytes for tensor in tensors) if tensors is not None else None
        gpu_bytes = self._gpu_bytes(stored_bytes, findings, params)
        if capacity is not None and loaded_bytes is not None:
            self._judge_memory(loaded_bytes, gpu_bytes, capacity)
        if planned is not None and stored_bytes is not None and not runs:
            self._compare_sizes(planned, stored_bytes)
        self._judge_extras(description, tokenizer)
        return ModelFound(
            name=name, model_type=printable(model_type)[:80] if isinstance(model_type, str) else None, is_known=known, runs=runs,
            num_params=params, planned_bytes=planned,
            max_positions=description.max_positions if description is not None else None,
            cache_format=description.cache_format if description is not None else None,
            index_format=description.index_format if description is not None else None,
            num_files=len({tensor.path for tensor in tensors}) if tensors is not None else None,
            num_tensors=len(tensors) if tensors is not None else None, stored_bytes=stored_bytes, tensors=findings,
            loaded_bytes=loaded_bytes, capacity=capacity, tokenizer=tokenizer or TokenizerFound(),
            device="cpu" if self.gpu is None else "cuda", gpu_bytes=gpu_bytes,
        )  # fmt: skip

    def _config(self) -> Mapping[str, object] | None:
        try:
            return read_config(self.directory)
        except (ConfigError, WeightError, OSError) as error:
            self.notes.no(_told(error))
            return None

    def _description(self, values: Mapping[str, object] | None) -> Description | None:
        if values is None:
            return None
        try:
            found = describe(values, self.choices)
            own = self._choices(values, found)
            return found if own == self.choices else describe(values, own)
        except ConfigError as error:
            where = "" if error.field in ("cache_format", "index_format") else f"{_CONFIG}: "
            self.notes.no(where + str(error))
            return None

    def _choices(self, values: Mapping[str, object], found: Description) -> Choices:
        """The user's, with the formats that the engine takes on this machine where none is named."""
        if values.get("model_type") not in NETWORKS:
            return self.choices
        own = "fp32" if self.gpu is None else "bf16"
        index = self.choices.index_format or (own if found.index_format is not None else None)
        return replace(self.choices, cache_format=self.choices.cache_format or own, index_format=index)

    def _tensors(self) -> list[Stored] | None:
        """What the headers list; None if a file is not what it says, and then every such file has its reason."""
        try:
            tensors = list_stored(self.directory)
        except (ConfigError, WeightError, OSError) as error:
            told = [_told(error)]
        else:
            self._judge_links({tensor.path for tensor in tensors})
            library = missing_library(tensors)
            if library is not None:
                self.notes.no(f"quantised tensors of a GGUF file are read by a library: pip install 'lamina[{library}]'")
            return tensors
        absent = _absent_files(self.directory)
        if absent:
            count = _count(len(absent), "file that is not there", "files that are not there")
            told = [f"{INDEX} names {count}: {_names(absent)}", *(one for one in told if not one.startswith("shard "))]
        for path in sorted(self.directory.glob("*.safetensors"))[:_MOST_FILES]:
            try:
                if path.is_file():
                    read_header(path)
            except (WeightError, OSError) as error:
                told.append(_told(error))
        for sentence in dict.fromkeys(told):
            self.notes.no(sentence)
        return None

    def _judge_links(self, paths: set[Path]) -> None:
        """Files that are links to elsewhere are read like others; a hub cache keeps its blobs two folders up."""
        home, outside = _real(self.directory), []
        homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        for path in sorted({*paths, self.directory / _CONFIG}):
            target = _real(path)
            if path.is_symlink() and not any(target.is_relative_to(place) for place in homes):
                outside.append(f"{path.name} -> {target}")
        if outside:
            count = _count(len(outside), "file is a link", "files are links")
            self.notes.limit(f"{count} to elsewhere: {_names(outside)}")

    def _findings(self, values: Mapping[str, object], tensors: Sequence[Stored]) -> Findings | None:
        try:
            contents = contents_of(values)
            stored = frozenset(contents.names.rename_all(tensor.name for tensor in tensors))
            found = check_tensors(tensors, contents.names, contents.needed(stored))
        except ConfigError as error:
            self.notes.no(f"{_CONFIG}: {error}")
            return None
        if found.missing:
            more = "" if found.is_complete else " at least; the search ended there"
            count = _count(len(found.missing), "tensor is missing", "tensors are missing")
            self.notes.no(f"{count}{more}: {_names([repr(name) for name in found.missing])}")
        for sentence in found.wrong[:_SHOWN_NAMES]:
            self.notes.no(sentence)
        if len(found.wrong) > _SHOWN_NAMES:
            more = _count(len(found.wrong) - _SHOWN_NAMES, "more tensor is", "more tensors are")
            self.notes.no(f"{more} not what {_CONFIG} asks for")
        if found.unused:
            count = _count(len(found.unused), "tensor is", "tensors are")
            self.notes.no(f"{count} not used by this model: {_names([repr(name) for name in found.unused])}")
        if found.ignored:
            count, size = _count(found.ignored, "tensor", "tensors"), format_bytes(found.ignored_bytes)
            self.notes.limit(f"{count} ({size}) will not be used unless you give --draft auto: draft blocks")
        return found

    def _capacity(self, description: Description, cache_bytes: int) -> Capacity | None:
        try:
            layout = make_layout(description.memories, description.hidden)
        except ConfigError as error:
            self.notes.no(f"{_CONFIG}: {error}")
            return None
        limit, page = description.max_positions, layout.page_bytes
        pages, least = cache_bytes // page, layout.pages_for(1)
        if pages < least:
            has = f"--cache-bytes {format_bytes(cache_bytes)} holds {pages} pages of {format_bytes(page)}"
            self.notes.no(f"{has}, one request needs {least}: give at least {format_bytes(least * page)} ({least * page})")
        found = _measure(layout, cache_bytes, limit)
        if pages >= least and found.most_tokens < limit:
            has = f"{format_bytes(cache_bytes)} of cache holds a request of {found.most_tokens:,} tokens"
            self.notes.limit(f"{has}; the model's {limit:,} take --cache-bytes {_size(found.full_bytes)}")
        return found

    def _gpu_bytes(self, stored_bytes: int | None, findings: Findings | None, params: int | None) -> int | None:
        """Of the weights on a GPU: as stored, without those that are not used; what a GGUF file has quantised as bf16."""
        if self.gpu is None:
            return None
        if is_gguf(self.directory) or stored_bytes is None:
            return None if params is None else 2 * params
        return stored_bytes - (findings.ignored_bytes if findings is not None else 0)

    def _judge_memory(self, loaded_bytes: int, gpu_bytes: int | None, capacity: Capacity) -> None:
        """Of the GPU, where there is one to be used; else, and where that is too small, of the machine."""
        total, free = self.machine.memory_bytes, self.machine.available_bytes
        on_cpu = _need("weights as fp32", loaded_bytes, capacity)
        if self.gpu is not None and gpu_bytes is not None and self.gpu.memory_bytes is not None:
            most, used = self.gpu.memory_bytes, self.gpu.used_bytes or 0
            need, what = gpu_bytes + capacity.cache_bytes, _need("weights as stored", gpu_bytes, capacity)
            if need <= most:
                if need > most - used:
                    self.notes.limit(f"{what}, only {format_bytes(max(0, most - used))} of the GPU are free now")
                return
            words = f"{what}, the GPU has {format_bytes(most)}"
            if self.wanted == "cuda" or (total is not None and loaded_bytes + capacity.cache_bytes > total):
                self.notes.no(words)
                if self.wanted == "cuda":
                    return
            else:
                self.notes.limit(f"{words}: it runs with --device cpu")
        need = loaded_bytes + capacity.cache_bytes
        if total is not None and need > total:
            self.notes.no(f"{on_cpu}, the machine has {format_bytes(total)}")
        elif free is not None and need > free:
            self.notes.limit(f"{on_cpu}, only {format_bytes(free)} are free now")

    def _compare_sizes(self, planned_bytes: int, stored_bytes: int) -> None:
        """Without a list of the family's tensors, the sum alone can be compared."""
        if abs(stored_bytes - planned_bytes) > planned_bytes // 50:
            sizes = f"{format_bytes(stored_bytes)} of tensors, {_CONFIG} implies {format_bytes(planned_bytes)}"
            self.notes.limit(f"the files hold {sizes}")

    def _judge_extras(self, description: Description | None, tokenizer: TokenizerFound | None) -> None:
        if (self.directory / _GENERATION).is_file():
            try:
                generation_end_tokens(self.directory, 1 << 62 if description is None else description.vocab_size)
            except (ConfigError, OSError) as error:
                self.notes.no(_told(error))
        if tokenizer is not None and tokenizer.problem is not None:
            self.notes.no(tokenizer.problem)
        elif tokenizer is None or tokenizer.num_tokens is None:
            self.notes.limit("no tokenizer.json: prompts must be token ids")
        elif description is not None and tokenizer.num_tokens > description.vocab_size:
            has = f"tokenizer.json has {tokenizer.num_tokens:,} tokens"
            self.notes.no(f"{has}, more than vocab_size of {_CONFIG}: {description.vocab_size:,}")


def _need(what: str, weight_bytes: int, capacity: Capacity) -> str:
    both = f"{what} ({format_bytes(weight_bytes)}) and cache ({format_bytes(capacity.cache_bytes)})"
    return f"{both} need {format_bytes(weight_bytes + capacity.cache_bytes)}"


def _measure(layout: Layout, cache_bytes: int, limit: int) -> Capacity:
    pages, short = cache_bytes // layout.page_bytes, min(_SHORT_REQUEST, limit)
    fits = pages >= layout.pages_for(1)
    return Capacity(
        cache_bytes=cache_bytes, page_bytes=layout.page_bytes, block_tokens=layout.block_tokens, slot_pages=layout.slot_pages,
        pages=pages, most_tokens=min(layout.most_tokens(pages, limit) + 1, limit) if fits else 0, short_tokens=short,
        short_requests=pages // max(1, layout.peak_pages(short)), full_bytes=layout.peak_pages(limit) * layout.page_bytes,
    )  # fmt: skip


def _absent_files(directory: Path) -> list[str]:
    """Plain file names of the index that are not there, in order."""
    path = directory / INDEX
    try:
        if not path.is_file() or path.stat().st_size > _MOST_INDEX_BYTES:
            return []
        weight_map = json.loads(path.read_bytes()).get("weight_map")
        files = {file for file in weight_map.values() if isinstance(file, str) and Path(file).name == file and "\0" not in file}
        return sorted(repr(file) for file in files if not (directory / file).exists())
    except (OSError, ValueError, AttributeError, RecursionError):
        return []  # what is wrong with the index itself has been said


def _size(num_bytes: int) -> str:
    """A size that --cache-bytes understands and that is not too small."""
    return f"{-(-num_bytes // MiB)}MiB" if num_bytes < 10 * GiB else f"{-(-num_bytes // GiB)}GiB"


def _real(path: Path) -> Path:
    """Where a path leads, links followed; a circle of links leads to itself."""
    return Path(os.path.realpath(path))


def _told(error: LaminaError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error)
    return str(error)


def _line(sentence: str) -> str:
    """One printable line of bounded length."""
    line = printable(" ".join(sentence.split()))
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _names(names: Sequence[str]) -> str:
    """The first few, shortened, and how many more."""
    shown = ", ".join(name if len(name) <= 80 else name[:79] + "…" for name in names[:_SHOWN_NAMES])
    return shown + (f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _gpu_count(gpus: Sequence[Gpu]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"


def _version(text: str) -> tuple[int, int]:
    """(major, minor) of a version; (0, 0) where there is none."""
    numbers = text.split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(number.isdecimal() for number in numbers) else (0, 0)
