"""The script in docs/ledger.md runs as it stands."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_ledger_script_runs() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "ledger.md").read_text(), re.S)
    names: dict[str, object] = {}
    exec(compile(script, "docs/ledger.md", "exec"), names)
    assert "again" in names
