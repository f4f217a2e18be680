"""Where a plan comes from: a config.json, a directory with one (and perhaps weights), or the JSON of an earlier plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lamina.base.errors import ConfigError
from lamina.models.description import Description, WeightPart
from lamina.models.families import describe
from lamina.models.files import find_checkpoint, is_gguf, model_name, read_config
from lamina.plan.budget import weight_lines
from lamina.plan.facts import PlanFacts, printable, read_facts
from lamina.plan.records import Mesh, Plan, PlanOptions
from lamina.plan.report import choices_of, make_plan, plan_json
from lamina.plan.stored import has_weights, num_experts, stored_parts

_CONFIG = "config.json"
#: a JSON object with these is a plan, and no config
_PLAN_KEYS = ("layout_id", "memories", "workloads")
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """A model as it was found.

    name    for people.   values  the JSON object.   directory  where the weights are, None if only the config counts.
    """

    name: str
    values: Mapping[str, object]
    directory: Path | None = None

    @property
    def is_plan(self) -> bool:
        """Whether this is what `lamina plan --json` printed, and no config."""
        return all(key in self.values for key in _PLAN_KEYS)

    def plan(self, options: PlanOptions) -> Plan:
        """The plan for these options. Raises ConfigError, and WeightError for weights that are not what they say."""
        if self.is_plan:
            raise ConfigError("model", self.name, "a config.json or a directory with one; a plan can only be compared: --diff")
        description = self._describe(options)
        weights = None
        if self.directory is not None:
            weights = stored_parts(self.directory, self.values, options.draft_tokens > 0)
        plan = make_plan(description, options, self.name, weights, num_experts(self.values))
        if not plan.budget.missing_bytes:
            return plan
        needed = self._gpus_needed(plan, description.weights if weights is None else weights)
        return replace(plan, budget=replace(plan.budget, gpus_needed=needed))

    def _describe(self, options: PlanOptions) -> Description:
        """The model for these options; what cannot be shared by tp GPUs is said in the words of the options."""
        choices = choices_of(options)
        try:
            return describe(self.values, choices)
        except ConfigError as error:
            if error.field != "tensor_parallel":
                raise
            name = "tp" if options.tp is not None else "gpus"
            raise ConfigError(name, error.value, f"{error.allowed}, or --dp for several replicas") from None

    def facts(self, options: PlanOptions) -> PlanFacts:
        """What a comparison needs: read from a plan as it is, or planned for these options from a config."""
        return read_facts(self.values if self.is_plan else plan_json(self.plan(options)))

    def _gpus_needed(self, plan: Plan, weights: Sequence[WeightPart]) -> int | None:
        """The fewest GPUs of one tensor-parallel group on which the weights leave room for the shortest request."""
        usable, space = plan.budget.usable_bytes or 0, plan.budget.workspace_bytes or 0
        least = min((line.bytes_per_request for line in plan.workloads), default=0)
        for gpus in range(plan.mesh.tp + 1, _MOST_GPUS + 1):
            used = sum(line.gpu_bytes for line in weight_lines(weights, Mesh(gpus, gpus)))
            if used + space + least <= usable and self._divides(plan.options, gpus):
                return gpus
        return None

    def _divides(self, options: PlanOptions, gpus: int) -> bool:
        """Whether the model can be shared by so many GPUs."""
        try:
            self._describe(replace(options, gpus=gpus, tp=gpus, dp=1, ep=None))
        except ConfigError:
            return False
        return True


def open_source(path: Path) -> Source:
    """The model or plan at `path`: a JSON file, a GGUF file, or a directory with config.json; its tensors then count exactly.

    Raises ConfigError, in one line, for what is missing, too large, no UTF-8, no JSON object or nested too deeply.
    """
    path = find_checkpoint(path)
    if path.is_dir() or is_gguf(path):
        values = read_config(path, _CONFIG)
        return Source(_name(path.resolve()), values, path if has_weights(path) else None)
    if not path.is_file():
        raise ConfigError("model", str(path), f"a {_CONFIG}, a directory that holds one, or a plan's JSON")
    values = read_config(path.absolute().parent, path.name)
    model = values.get("model")
    if isinstance(model, str) and "layout_id" in values:
        return Source(printable(model), values)
    return Source(_name(path.resolve().parent if path.name == _CONFIG else path.resolve().with_suffix("")), values)


def _name(path: Path) -> str:
    return printable(model_name(path) or str(path))
