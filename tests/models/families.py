"""Random small models of every family that runs as a network, made by Transformers, and one engine to try each on.

Each file `family_*.py` beside this one has RECIPES: name -> Recipe.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import Tensor, nn

from lamina import LLM, SamplingParams
from lamina.engine.engine import Group

#: an fp32 answer may differ by so much (logits) from Transformers'
TOLERANCE = 1e-4
#: a token whose lead over the next is smaller may fall either way
TIE = 1e-4
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Recipe:
    """One random model.

    config     name of the class in Transformers; values  its fields.   model  name of the class, AutoModelForCausalLM if empty.
    borders    lengths around which something changes (windows, chunks): each is tried at -1, 0 and +1.
    exact      the bits of an answer never depend on cuts and company; else logits agree to TOLERANCE.
    text       attribute of the model that answers, where the model itself does not.
    cache      of the engine; in fp32, because Transformers keeps keys and values so.   seed  of weights and prompts.
    scale      of every random matrix, beside 1 / sqrt(width).   fixed  name parts of parameters that keep their first values.
    budgets    tokens of a step that are tried.   llm  other settings of the engine.
    edit       changes the model and the files that it saved, where a release is unlike what Transformers writes.
    is_long    options of a family that another recipe has too: `make test` only compares its scores with Transformers'.
    """

    config: str
    values: dict[str, object]
    model: str = ""
    borders: tuple[int, ...] = (64, 128)
    exact: bool = True
    cache: str = "64MiB"
    seed: int = 0
    scale: float = 1.0
    text: str = ""
    fixed: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (1, 7, 64, 129)
    llm: dict[str, object] = field(default_factory=dict)
    edit: Callable[[nn.Module, Path], None] | None = None
    is_long: bool = False

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths that are tried."""
        return sorted({1, 2, *(border + step for border in self.borders for step in (-1, 0, 1) if border + step > 0)})


def recipes() -> dict[str, Recipe]:
    """Those of all files."""
    found: dict[str, Recipe] = {}
    for path in sorted(FOLDER.glob("family_*.py")):
        name = f"lamina_tests_{path.stem}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        found |= sys.modules[name].RECIPES
    return found


def build(recipe: Recipe) -> nn.Module:
    """The model in fp32; every parameter and buffer random, also those that Transformers leaves at zero."""
    config = getattr(transformers, recipe.config)(**recipe.values, attn_implementation="eager")
    torch.manual_seed(recipe.seed)
    if recipe.model:
        model = getattr(transformers, recipe.model)(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if any(part in name for part in recipe.fixed):
                continue
            noise = torch.randn(values.shape, generator=generator)
            if "norm" in name or values.dim() < 2:
                values.add_(0.2 * noise)
            elif "embed" in name:
                values.copy_(noise)
            else:
                values.copy_(noise * recipe.scale * values.shape[-1] ** -0.5)
        for name, values in model.state_dict().items():
            if name.endswith("_correction_bias"):  # of a router; a buffer
                values.add_(0.2 * torch.randn(values.shape, generator=generator))
    return model


def token_ids(length: int, seed: int, vocab_size: int) -> list[int]:
    """Random ids that are no control tokens."""
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits_of(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """[T, V]: one unpadded forward pass of Transformers."""
    found: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return found


class Bench:
    """A model, its checkpoint, and an engine whose numbers are recorded."""

    def __init__(self, driving: ModuleType, directory: Path, recipe: Recipe) -> None:
        self.driving, self.recipe, self.directory = driving, recipe, directory
        self.model = build(recipe)
        self.model.save_pretrained(directory)
        if recipe.edit is not None:
            with torch.no_grad():
                recipe.edit(self.model, directory)
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr]
        settings: dict[str, object] = {"cache_format": "fp32", "index_format": "fp32", "cache_bytes": recipe.cache} | recipe.llm
        self.engine = LLM(str(directory), **settings).engine  # type: ignore[arg-type]
        self.full_budget = self.engine.scheduler.max_step_tokens
        self.recorder = driving.Recorder(self.engine)
        self.known: dict[tuple[int, ...], Tensor] = {}

    @property
    def granule(self) -> int:
        """A hit may end at multiples of this."""
        layout = self.engine.worker.layout
        return 1 if layout.has_state else layout.block_tokens

    def ids(self, length: int, seed: int = 1) -> list[int]:
        """A prompt."""
        return token_ids(length, self.recipe.seed * 1000 + seed, self.vocab_size)

    def reset(self, max_step_tokens: int | None = None) -> None:
        """Nothing is remembered and all memory is NaN; steps have `max_step_tokens`, or as many as fit."""
        self.driving.wipe(self.engine)
        self.recorder.forget()
        self.engine.scheduler.max_step_tokens = max_step_tokens or self.full_budget

    def serve(self, prompts: list[list[int]], max_tokens: int = 6, prompt_logprobs: int | None = None) -> list[Group]:
        """Greedy answers."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        groups: list[Group] = self.driving.serve(self.engine, prompts, params)
        return groups

    def reference(self, ids: Sequence[int]) -> Tensor:
        """Transformers' logits [T, V]."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = logits_of(self.model.get_submodule(self.recipe.text), ids)
        return self.known[key]

    def check(self, group: Group) -> None:
        """Every score that was recorded for a finished group is Transformers', and so is every token, ties excepted."""
        for request in group.requests:
            want = self.reference(request.tokens[:-1])
            rows = {p: row for (owner, p), row in (self.recorder.prompt | self.recorder.logits).items() if owner == request.id}
            assert len(rows) >= len(request.tokens) - len(request.prompt)
            for position, row in rows.items():
                worst = float((row - want[position]).abs().max())
                assert worst <= TOLERANCE, f"position {position} of {len(want)}: logits differ by {worst}"
            for position in range(len(request.prompt) - 1, len(request.tokens) - 1):
                top = want[position].topk(2)
                if float(top.values[0] - top.values[1]) > TIE:
                    assert request.tokens[position + 1] == int(top.indices[0]), f"token {position + 1}"

    def scores(self, group: Group) -> list[Tensor]:
        """The scores of a group's drawn tokens, in order."""
        request = group.requests[0]
        return [self.recorder.logits[request.id, p] for p in range(len(request.prompt) - 1, len(request.tokens) - 1)]

    def check_scores(self, group: Group, known: list[Tensor]) -> None:
        """The drawn tokens' scores are the known ones: bit for bit if exact, else within the tolerance."""
        found = self.scores(group)
        assert len(found) == len(known)
        for number, (one, other) in enumerate(zip(found, known, strict=True)):
            if self.recipe.exact:
                assert self.driving.same_bits(one, other), f"scores of token {number}: {float((one - other).abs().max())}"
            else:
                assert float((one - other).abs().max()) <= TOLERANCE, f"scores of token {number}"
