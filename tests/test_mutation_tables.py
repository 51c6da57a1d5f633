"""Every mutation of tests/mutations can be planted: its text occurs exactly once in its file, and its tests exist."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import Mutation, MutationTableError, load_table, load_tables

ROOT = Path(__file__).parents[1]
TABLES = load_tables()
MUTATIONS = [mutation for table in TABLES for mutation in table.mutations]

ROW = """
about = "Bugs."
[[file]]
path = "nsa/geometry.py"
tests = ["tests/test_names.py"]
[[file.mutation]]
name = "geometry: a bug"
old = 'a'
new = 'b'
"""


def test_there_are_tables():
    assert {table.name for table in TABLES if table.mutations} >= {"core", "cpu", "drill", "triton"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_can_be_planted(mutation: Mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    words = [word.partition("::")[0] for word in mutation.tests if word.startswith("tests/")]
    assert words
    assert all((ROOT / word).exists() for word in words)


@cache
def decorators(file: str) -> dict[str, list[str]]:
    """Decorators of each test function of a file, as text."""
    functions = [node for node in ast.parse((ROOT / file).read_bytes()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [ast.unparse(decorator) for decorator in node.decorator_list] for node in functions}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_that_it_names_are_run(mutation: Mutation):
    for word in mutation.tests:
        file, _, test = word.partition("::")
        if test:
            marks = decorators(file)[test.partition("[")[0]]
            assert "slow" in mutation.tests or "pytest.mark.slow" not in marks, "pytest runs it with -m slow only"


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_a_row_becomes_a_mutation(tmp_path):
    (tmp_path / "bugs.toml").write_text(ROW)
    (table,) = load_tables(tmp_path)
    expected = Mutation("geometry: a bug", "nsa/geometry.py", "a", "b", ("tests/test_names.py",))
    assert table == ("bugs", "Bugs.", [expected])


@pytest.mark.parametrize("field", ["about", "path", "tests", "name", "old", "new"])
def test_a_missing_field_is_named_with_its_place(tmp_path, field):
    path = tmp_path / "bugs.toml"
    path.write_text("\n".join(line for line in ROW.splitlines() if not line.startswith(f"{field} =")))
    with pytest.raises(MutationTableError, match=rf"bugs\.toml.*: no {field}\."):
        load_table(path)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [("new = 'b'", "new = 'b'\nexpect = 'c'", "expect"), ('["tests/test_names.py"]', '"tests/test_names.py"', "tests")],
)
def test_unknown_and_mistyped_fields_are_refused(tmp_path, old, new, field):
    path = tmp_path / "bugs.toml"
    path.write_text(ROW.replace(old, new))
    with pytest.raises(MutationTableError, match=field):
        load_table(path)
