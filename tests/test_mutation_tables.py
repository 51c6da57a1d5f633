"""Every mutation of tests/mutations can be planted: its text occurs exactly once in its file, and its tests exist."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.mutations import Mutation, MutationTableError, load_table, load_tables

ROOT = Path(__file__).parents[1]
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


@pytest.fixture(scope="module")
def mutations() -> list[Mutation]:
    tables = load_tables()
    assert {table.name for table in tables if table.mutations} >= {"core", "cpu", "drill", "triton"}
    return [mutation for table in tables for mutation in table.mutations]


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / file).read_bytes()).body if isinstance(node, ast.FunctionDef)}


def obstacles(mutation: Mutation) -> Iterator[str]:
    """Reasons why a mutation cannot be planted, or why its tests cannot catch it."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        yield f"{mutation.name}: its text occurs {count} times in {mutation.file}"
    if mutation.new == mutation.old:
        yield f"{mutation.name}: it changes nothing"
    words = [word for word in mutation.tests if word.startswith("tests/")]
    if not words:
        yield f"{mutation.name}: it names no test"
    for word in words:
        file, _, test = word.partition("::")
        if not (ROOT / file).exists():
            yield f"{mutation.name}: there is no {file}"
        elif test and test.partition("[")[0] not in functions(file):
            yield f"{mutation.name}: {file} has no {test}"


@pytest.mark.nightly  # a row is the text of a line: renaming a variable must not fail the gate
def test_every_mutation_can_be_planted_and_its_tests_exist(mutations):
    assert [obstacle for mutation in mutations for obstacle in obstacles(mutation)] == []


def test_names_are_unique(mutations):
    assert [name for name, count in Counter(mutation.name for mutation in mutations).items() if count > 1] == []


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
