"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_readme_example_runs(example):
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    assert "attention" not in names or {"y", "out"} <= names.keys()


def test_the_attention_in_your_own_block_takes_a_dozen_lines():
    (usage,) = [example for example in EXAMPLES if "nsa_attention" in example]
    assert len([line for line in usage.splitlines() if line.strip()]) <= 12
