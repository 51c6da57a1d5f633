"""docs/FAULTS.md: all 29 faults, every scenario of the drill in it, and nothing that does not exist."""

import re
from pathlib import Path

from proofs.drill.suite import NODE_SCENARIOS, SCENARIOS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "FAULTS.md").read_text(encoding="utf-8")
NO_FAULT = {"healthy"}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_29_faults_are_there_in_order_each_with_a_command():
    assert sorted({int(row[0]) for row in rows()}) == list(range(1, 30))
    for row in rows():
        assert len(row) == 7, row
        assert row[2].startswith(("`python -m proofs.drill ", "`pytest tests/")), row
        assert all(row), row


def test_every_scenario_is_in_the_page_and_every_name_in_it_is_a_scenario():
    named = set(re.findall(r"--only (\w+)", PAGE))
    assert named <= SCENARIOS.keys() | NODE_SCENARIOS.keys()
    assert named | NO_FAULT >= SCENARIOS.keys()
    for name in NODE_SCENARIOS:
        assert f"`{name}`" in PAGE or name in named


def test_every_named_test_exists():
    files = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert files
    for file in files:
        assert (ROOT / file).is_file(), file
