"""The spellings by which clients ask for thoughts."""

import pytest

from lamina.base.errors import ConfigError
from lamina.chat.thinking import thinking_options


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (None, None)),
        ({"thinking": None, "enable_thinking": None, "reasoning_effort": None, "chat_template_kwargs": None}, (None, None)),
        ({"thinking": True}, (True, None)),
        ({"enable_thinking": False}, (False, None)),
        ({"thinking": False, "enable_thinking": True}, (True, None)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, None)),
        ({"thinking": {"type": "disabled"}}, (False, None)),
        ({"reasoning_effort": "none", "thinking": True}, (False, "none")),
        ({"reasoning_effort": "minimal"}, (None, "minimal")),
        ({"reasoning_effort": "xhigh", "thinking": False}, (False, "xhigh")),
        ({"reasoning": {"effort": "low"}}, (None, "low")),
        ({"thinking": True, "chat_template_kwargs": {"thinking": False, "reasoning_effort": "max", "x": 1}}, (False, "max")),
    ],
)
def test_spellings(values: dict[str, object], expected: tuple[bool | None, str | None]) -> None:
    assert thinking_options(values) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"thinking": "yes"}, "thinking"),
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"thinking": {"type": "so"}}, "thinking.type"),
        ({"chat_template_kwargs": {"thinking": []}}, "thinking"),
        ({"reasoning_effort": "whatever"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning": {"effort": "HIGH"}}, "reasoning.effort"),
        ({"chat_template_kwargs": {"reasoning_effort": ""}}, "chat_template_kwargs.reasoning_effort"),
    ],
)
def test_refusals(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        thinking_options(values)  # type: ignore[arg-type]
    assert caught.value.field == field
