"""The table of what could go wrong on a GPU: every test that it names exists, and every row has a status."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "GPU_RISKS.md"
STATUSES = ("shown", "part: ", "GPU: ", "open: ", "not done, ", "not yet")


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in table if len(row) == 4 and row[3] != "status"]


def test_every_row_has_a_status_and_what_is_shown_names_where():
    assert len(rows()) >= 30
    for what, _, shown_by, status in rows():
        assert status.startswith(STATUSES), what
        if status.startswith("shown"):
            assert "tests/" in shown_by, what


def test_every_named_test_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 20
    for file, function in named:
        assert (ROOT / file).is_file(), file
        if function:
            assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{function}"


def test_the_pinned_triton_is_the_one_that_is_named():
    assert '"triton==3.7.1;' in (ROOT / "packages/nsa-train/pyproject.toml").read_text()
    assert "pins 3.7.1" in PAGE.read_text(encoding="utf-8")
