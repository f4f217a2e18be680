"""Random small configs of every family: layer kinds and parameter counts equal those of Transformers' own classes.

A config is given to Transformers' class and, as the same dict, to `describe`; and once more as the class writes it out.
"""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from lamina.memory.kinds import Alias, Memory, Window
from lamina.models.description import Choices, Description
from lamina.models.families import describe

Values = dict[str, object]
FULL, WINDOW, CHUNK = "full_attention", "sliding_attention", "chunked_attention"
#: buffers that a checkpoint stores and we count as parameters; tid2eid, an integer table, is bytes only
COUNTED_BUFFERS = ("e_score_correction_bias",)


def number(draw: st.DrawFn, low: int, high: int) -> int:
    return draw(st.integers(low, high))


def common(draw: st.DrawFn, head_dim: bool = True) -> Values:
    """Sizes that every family has."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    values: Values = {
        "vocab_size": number(draw, 3, 40),
        "hidden_size": heads * 2 * number(draw, 1, 6),
        "intermediate_size": number(draw, 1, 30),
        "num_hidden_layers": number(draw, 1, 7),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0])),
        "max_position_embeddings": number(draw, 8, 5000),
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if head_dim:
        values["head_dim"] = 2 * number(draw, 1, 5)
    return values


def maybe(draw: st.DrawFn, **options: st.SearchStrategy[object]) -> Values:
    """Some of these fields."""
    return {name: draw(option) for name, option in options.items() if draw(st.booleans())}


def types_for(layers: int, *kinds: str) -> st.SearchStrategy[object]:
    return st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)


def layers_of(values: Mapping[str, object]) -> int:
    return int(str(values["num_hidden_layers"]))


def llama(draw: st.DrawFn) -> Values:
    return common(draw) | maybe(draw, attention_bias=st.booleans(), mlp_bias=st.booleans())


def windowed(draw: st.DrawFn, bias: bool = True) -> Values:
    """Qwen's three fields for windows."""
    values = common(draw, head_dim=bias) | {"sliding_window": number(draw, 1, 40)}
    values |= maybe(draw, use_sliding_window=st.booleans(), max_window_layers=st.integers(0, 8))
    return values | (maybe(draw, attention_bias=st.booleans()) if bias else {})


def qwen2(draw: st.DrawFn) -> Values:
    return windowed(draw, bias=False)


def qwen3_moe(draw: st.DrawFn) -> Values:
    values = windowed(draw) | {"num_experts": number(draw, 2, 6), "num_experts_per_tok": 2, "moe_intermediate_size": 7}
    layers = st.lists(st.integers(0, layers_of(values) - 1), max_size=3)
    values.pop("max_window_layers", None)
    return values | maybe(draw, decoder_sparse_step=st.integers(1, 3), mlp_only_layers=layers)


def mistral(draw: st.DrawFn) -> Values:
    return common(draw) | maybe(draw, sliding_window=st.none() | st.integers(1, 40))


def ministral(draw: st.DrawFn) -> Values:
    values = common(draw) | {"sliding_window": number(draw, 1, 40)}
    return values | maybe(draw, layer_types=types_for(layers_of(values), FULL, WINDOW))


def cohere2(draw: st.DrawFn) -> Values:
    values = common(draw, head_dim=False) | {"sliding_window": number(draw, 1, 40)} | maybe(draw, attention_bias=st.booleans())
    one_of = {"sliding_window_pattern": st.integers(1, 5), "layer_types": types_for(layers_of(values), FULL, WINDOW)}
    name = draw(st.sampled_from(sorted(one_of)))
    return values | maybe(draw, **{name: one_of[name]})


def gemma2(draw: st.DrawFn) -> Values:
    values = common(draw) | maybe(draw, attention_bias=st.booleans(), sliding_window=st.integers(1, 40))
    return values | maybe(draw, layer_types=types_for(layers_of(values), FULL, WINDOW))


def gemma3_text(draw: st.DrawFn) -> Values:
    values = common(draw) | maybe(draw, attention_bias=st.booleans(), sliding_window=st.integers(1, 40))
    return values | maybe(draw, sliding_window_pattern=st.integers(1, 5))


def gemma3n_text(draw: st.DrawFn) -> Values:
    values = common(draw) | {"sliding_window": number(draw, 1, 40), "vocab_size_per_layer_input": number(draw, 2, 9)}
    layers = layers_of(values)
    types = [str(kind) for kind in draw(types_for(layers, FULL, WINDOW))]
    shared = draw(st.integers(0, layers - 1).filter(lambda n: n == 0 or set(types) == set(types[: layers - n])))
    values |= {"layer_types": types, "num_kv_shared_layers": shared, "hidden_size_per_layer_input": number(draw, 1, 6)}
    if draw(st.booleans()):
        values["intermediate_size"] = [number(draw, 1, 9) for _ in range(layers)]
    return values | maybe(draw, laurel_rank=st.integers(1, 5), altup_num_inputs=st.integers(1, 4), attention_bias=st.booleans())


def gpt_oss(draw: st.DrawFn) -> Values:
    values = common(draw) | {"num_local_experts": number(draw, 1, 5), "num_experts_per_tok": 1}
    values |= maybe(draw, attention_bias=st.booleans(), sliding_window=st.integers(1, 40))
    return values | maybe(draw, layer_types=types_for(layers_of(values), FULL, WINDOW))


def llama4_text(draw: st.DrawFn) -> Values:
    values = common(draw) | {"num_local_experts": number(draw, 1, 4), "intermediate_size_mlp": number(draw, 1, 9)}
    layers = layers_of(values)
    choices = {
        "no_rope_layers": st.just([]) | st.lists(st.integers(0, 1), min_size=layers, max_size=layers),
        "no_rope_layer_interval": st.integers(1, 4),
        "layer_types": types_for(layers, FULL, CHUNK),
    }
    name = draw(st.sampled_from(sorted(choices)))
    values |= maybe(draw, **{name: choices[name]})
    values |= maybe(draw, attention_chunk_size=st.integers(1, 40) | (st.none() if "layer_types" not in values else st.just(7)))
    sparse = st.lists(st.integers(0, layers - 1), unique=True)
    return values | maybe(draw, attention_bias=st.booleans(), interleave_moe_layer_step=st.integers(1, 3), moe_layers=sparse)


def latent(draw: st.DrawFn, q_lora_rank: st.SearchStrategy[object]) -> Values:
    values = common(draw, head_dim=False)
    values["num_key_value_heads"] = values["num_attention_heads"]
    values |= {"q_lora_rank": draw(q_lora_rank), "kv_lora_rank": number(draw, 1, 9), "moe_intermediate_size": number(draw, 1, 9)}
    values |= {
        "qk_nope_head_dim": number(draw, 1, 5),
        "qk_rope_head_dim": 2 * number(draw, 1, 3),
        "v_head_dim": number(draw, 1, 5),
    }
    values |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": number(draw, 1, 3)}
    return values | maybe(draw, first_k_dense_replace=st.integers(0, 8), attention_bias=st.booleans())


def deepseek_v2(draw: st.DrawFn) -> Values:
    return latent(draw, st.none() | st.integers(1, 9)) | maybe(draw, mlp_bias=st.booleans())


def deepseek_v3(draw: st.DrawFn) -> Values:
    return latent(draw, st.none() | st.integers(1, 9))


def deepseek_v32(draw: st.DrawFn) -> Values:
    values = latent(draw, st.integers(1, 9)) | {"index_n_heads": number(draw, 1, 4), "index_head_dim": 8}
    return values | maybe(draw, mlp_layer_types=types_for(layers_of(values), "dense", "sparse"))


FAMILIES: dict[str, Callable[[st.DrawFn], Values]] = {
    "llama": llama, "qwen2": qwen2, "qwen3": windowed, "qwen3_moe": qwen3_moe, "mistral": mistral, "ministral": ministral,
    "ministral3": mistral, "cohere2": cohere2, "gemma2": gemma2, "gemma3_text": gemma3_text, "gemma3n_text": gemma3n_text,
    "gpt_oss": gpt_oss, "llama4_text": llama4_text, "deepseek_v2": deepseek_v2, "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
}  # fmt: skip


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def both(kind: str, values: Values) -> tuple[PreTrainedConfig, Description]:
    """Transformers' config and our description of the same fields; theirs, written out, is described alike."""
    config = AutoConfig.for_model(kind, **values)
    ours = describe({"model_type": kind, **values})
    assert describe(config.to_dict()) == ours
    return config, ours


def expected_memories(config: PreTrainedConfig) -> list[tuple[str, str, int | None, int | None]]:
    """(kind, name, size, reset) of each layer from the cache that Transformers would make."""
    names = {FULL: "kv", WINDOW: "window", CHUNK: "chunk"}
    found: list[tuple[str, str, int | None, int | None]] = []
    types, options = get_layer_types_and_kwargs(config)
    for layer, (kind, option) in enumerate(zip(types, options, strict=True)):
        if kind == "dummy":
            found.append(("alias", names[config.layer_types[layer]], None, None))
        elif kind == "indexed_attention":
            found += [("log", "latent", None, None), ("log", "index", None, None)]
        elif "deepseek" in config.model_type:
            found.append(("log", "latent", None, None))
        elif kind == FULL:
            found.append(("log", "kv", None, None))
        else:
            size = option["sliding_window"]
            found.append(("window", names[kind], size, size if kind == CHUNK else None))
    return found


def told(memory: Memory) -> tuple[str, str, int | None, int | None]:
    """The same of one of our memories."""
    is_window = isinstance(memory, Window)
    return memory.kind, memory.name, memory.size if is_window else None, memory.reset if is_window else None


@pytest.mark.parametrize("kind", FAMILIES)
def test_layer_kinds(kind: str) -> None:
    @examples(25)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        config, ours = both(kind, data.draw(st.composite(FAMILIES[kind])()))
        assert [told(memory) for memory in ours.memories] == expected_memories(config)
        assert ours.max_positions == config.max_position_embeddings and ours.vocab_size == config.vocab_size
        for memory in ours.memories:
            if isinstance(memory, Alias):  # the layer that stores what layers of this type read
                assert config.kv_sharing_modes[memory.of_layer] == "store"
                assert config.layer_types[memory.of_layer] == config.layer_types[memory.layer]
        assert (ours.hidden is None) == all(memory.kind in ("log", "alias") for memory in ours.memories)

    check()


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameter_counts(kind: str) -> None:
    """Every parameter and stored buffer, tied ones once; bytes are two each in bf16, router biases four."""

    @examples(6)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        config, ours = both(kind, data.draw(st.composite(FAMILIES[kind])()))
        params, buffers = counts(config)
        assert sum(part.num_params for part in ours.weights) == params + buffers
        assert sum(part.nbytes for part in ours.weights) == 2 * params + 4 * buffers

    check()


def counts(config: PreTrainedConfig) -> tuple[int, int]:
    """(parameters, elements of the buffers that count) of the model that Transformers makes of a config, without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith(COUNTED_BUFFERS))
    return sum(parameter.numel() for parameter in model.parameters()), buffers


@pytest.mark.parametrize("kind", [*FAMILIES, "gemma3", "gemma3n", "llama4", "mistral3"])
def test_defaults_are_those_of_the_config_class(kind: str) -> None:
    """A config that says nothing but its type (Ministral's class cannot do without head_dim), and what the class makes of it."""
    given_fields: Values = {"head_dim": 128} if kind == "ministral" else {}
    config = AutoConfig.for_model(kind, **given_fields)
    ours = describe({"model_type": kind, **given_fields})
    assert ours == describe(config.to_dict())
    text = config.get_text_config()
    assert (ours.vocab_size, ours.hidden_size) == (text.vocab_size, text.hidden_size)
    assert [told(memory) for memory in ours.memories] == expected_memories(text)
    params, buffers = counts(text)
    assert sum(part.num_params for part in ours.weights) == params + buffers


@pytest.mark.parametrize("recipe", ["flash", "pro", "narrow", "blocks"])
def test_deepseek_v4(recipe: str, random_models: ModuleType) -> None:
    """Every parameter and the router biases; the tables of hash-routed layers are counted in bytes alone, 8 an element."""
    values = random_models.RECIPES[recipe].config | {"model_type": "deepseek_v4"}
    ours = describe(values)
    model = random_models.build(random_models.RECIPES[recipe])
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("tid2eid")]
    # Transformers gives hash-routed layers no bias; the parameters of the draft block are not in its model
    params = sum(parameter.numel() for parameter in model.parameters()) + sum(bias.numel() for bias in biases)
    assert sum(part.num_params for part in ours.weights) == params
    router = next(part for part in ours.weights if part.component == "router")
    scores = sum(p.numel() for name, p in model.named_parameters() if name.endswith("mlp.gate.weight"))
    assert router.nbytes == 2 * scores + 4 * sum(bias.numel() for bias in biases) + 8 * sum(table.numel() for table in tables)
    assert describe(values, Choices(draft_tokens=1)).memories[: len(ours.memories)] == ours.memories
