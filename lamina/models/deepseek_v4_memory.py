"""DeepSeek-V4: what its layers remember, and what its weights weigh. The engine and the memory plan share this list; no torch.

Every memory is replicated under tensor parallelism: one vector per token is key and value of all heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.base.formats import attention_entry, index_key, vector
from lamina.memory.kinds import Field, Fold, Log, Memory, Window
from lamina.models.attention_memory import check_choices, check_heads, entry_format, replicated_note, unused_index_note
from lamina.models.deepseek_v4_config import Config, Draft, parse_config, parse_draft
from lamina.models.deepseek_v4_weights import weights
from lamina.models.description import Choices, Description

INDEXED = 4  # the ratio whose entries overlap and are chosen by an index


def entries_name(ratio: int) -> str:
    """The memory of entries that stand for `ratio` tokens each."""
    return f"c{ratio}"


@dataclass(frozen=True, slots=True)
class Formats:
    """How entries and index keys are stored."""

    cache_format: str
    index_format: str


def memories(config: Config, formats: Formats, draft: Draft | None = None) -> tuple[Memory, ...]:
    """What each layer remembers, and after the layers what each draft block does, if `draft` is given.

    A draft block is a window alone. An MTP block's row of position p needs token p + 1, so its rows lag one token behind;
    a DSpark stage's rows need only the main model's outputs at p, so they do not.
    """
    entry = entry_format(formats.cache_format, attention_entry(formats.cache_format, config.head_dim, config.rope_dim))
    kept: list[Memory] = []
    for layer, ratio in enumerate(config.ratios):
        kept.append(Window("window", layer, entry, config.window))
        if ratio:
            kept.append(Log(entries_name(ratio), layer, entry, ratio))
        if ratio == INDEXED:
            index = entry_format(formats.index_format, index_key(formats.index_format, config.index_dim))
            kept.append(Log("index", layer, index, ratio))
            kept.append(Fold(f"{entries_name(ratio)}_fold", layer, _states(config.head_dim, True), ratio, carry=("open",)))
            kept.append(Fold("index_fold", layer, _states(config.index_dim, True), ratio, carry=("open",)))
        elif ratio:
            kept.append(Fold(f"{entries_name(ratio)}_fold", layer, _states(config.head_dim, False), ratio))
    if draft is not None:
        for block in range(draft.blocks):
            kept.append(Window("draft_window", config.num_layers + block, entry, config.window, lag=0 if draft.taps else 1))
    return tuple(kept)


def _states(width: int, overlapping: bool) -> tuple[Field, ...]:
    """Running softmax of `width` channels (largest, sum of weights, weighted sum): the open entry's, and the next one's."""
    names = ("open", "next") if overlapping else ("open",)
    return tuple(Field(name, dtype, shape) for name in names for _, dtype, shape in vector("fp32", 3 * width))


def hidden_field(config: Config, draft: Draft | None = None) -> Field:
    """The final hidden vector that a slot keeps for its last token.

    An MTP block lags behind, so that it needs the last token's residual streams too.
    """
    streams = config.streams if draft is not None and draft.blocks and not draft.taps else 0
    return Field("hidden", "fp32", ((1 + streams) * config.hidden_size,))


def describe(values: Mapping[str, object], choices: Choices) -> Description:
    """The description of a DeepSeek-V4 config.json; default formats fp8 and, for the index, fp4."""
    check_choices(choices)
    config = parse_config(values)
    check_heads(config.num_heads, choices.tensor_parallel)
    stored = parse_draft(values, config)
    draft = stored if choices.draft_tokens else None
    formats = Formats(choices.cache_format or "fp8", choices.index_format or "fp4")
    notes = []
    if choices.draft_tokens and not stored.blocks:
        notes.append("the config has no draft block: drafts are taken to come from outside the model")
    if stored.blocks and not choices.draft_tokens:
        notes.append(f"{stored.blocks} draft block(s) of the checkpoint are left out, because draft_tokens is 0")
    index_format = formats.index_format if INDEXED in config.ratios else None
    said = (*notes, *replicated_note(choices), *(unused_index_note(choices) if index_format is None else ()))
    return Description(
        model_type="deepseek_v4", memories=memories(config, formats, draft), hidden=hidden_field(config, draft),
        max_positions=config.max_positions, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        cache_format=formats.cache_format, index_format=index_format, weights=weights(values, config, draft), notes=said,
    )  # fmt: skip
