"""Numbers of rotary positions that cannot be calculated with: one line that names the field, before anything is loaded."""

import math

import pytest

from lamina.base.errors import ConfigError
from lamina.models.config_fields import ConfigFields
from lamina.models.network_fields import read_rope
from lamina.models.registry import blueprint
from lamina.models.rope import rope_frequencies

DIM = 8
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 4096,
}  # fmt: skip
KINDS: tuple[dict[str, object], ...] = ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, YARN, LLAMA3, LONG)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        (YARN | {"rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        (YARN | {"factor": 0}, "factor"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        (YARN | {"attention_factor": "x"}, "attention_factor"),
        (YARN | {"beta_slow": -1}, "beta_slow"),
        (YARN | {"truncate": "yes"}, "truncate"),
        (LLAMA3 | {"low_freq_factor": 0}, "low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        (LONG | {"short_factor": [None] * 4}, "short_factor"),
        (LONG | {"long_factor": [0] * 4}, "long_factor"),
        (LONG | {"long_factor": [1.0] * 3}, "long_factor"),
        (LONG | {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        # the factors would change for the keys of a request that grows beyond 1024 tokens
        (LONG | {"original_max_position_embeddings": 1024}, "original_max_position_embeddings"),
    ],
)
def test_numbers_that_are_refused(scaling: dict[str, object], named: str) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ConfigError) as refused:
            blueprint(LLAMA | {name: scaling}, "fp32", "fp32")
        assert refused.value.field == f"{name}.{named}" and "\n" not in str(refused.value)


@pytest.mark.parametrize("scaling", KINDS, ids=[str(kind["rope_type"]) for kind in KINDS])
def test_junk_is_refused_or_calculated_with(scaling: dict[str, object]) -> None:
    junk: tuple[object, ...] = (
        0, -1, 1, 1.0, 2**70, 10**400, 1e308, math.inf, math.nan, "", "x", True, [], [None], [0] * 4, [1.0] * 4, {}, None,
    )  # fmt: skip
    fields = {*scaling, "rope_theta", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale", "attention_factor", "truncate"}
    for field in sorted(fields):
        for value in junk:
            try:
                rope = read_rope(ConfigFields({"rope_parameters": scaling | {field: value}}), DIM, 4096, 1e4)
                frequencies, factor = rope_frequencies(rope)
            except ConfigError as refused:
                assert refused.field and len(str(refused)) < 500
            else:
                assert bool(frequencies.isfinite().all()) and math.isfinite(factor)
