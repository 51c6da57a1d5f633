"""Tables of planted bugs are read strictly.

Whether each row fits the source is not tested here: `python -m proofs.mutation_drill --check` lists those that do not.
"""

import re
from collections import Counter

import pytest

from tests.mutations import Mutation, MutationTableError, load_table, load_tables

ROW = """
about = "Bugs."
[[group]]
breaks = "a rule"
tests = ["test_names.py"]
[[group.mutation]]
name = "geometry: a bug"
function = "Geometry"
find = '$a < $b'
replace = '$a <= $b'
"""


def test_names_are_unique():
    names = Counter(mutation.name for table in load_tables() for mutation in table.mutations)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_table_has_mutations():
    assert [table.name for table in load_tables() if not table.mutations] == []


def test_rows_name_no_private_definition():
    """Their names change freely: a row names a public definition that uses them, `$name` in a pattern is any name."""
    rows = [mutation for table in load_tables() for mutation in table.mutations]
    private = re.compile(r"""(?<![\w$"'])_[A-Za-z]\w*""")
    assert [row.name for row in rows if private.search(f"{row.function}\n{row.find}\n{row.replace}")] == []


def test_a_row_becomes_a_mutation(tmp_path):
    (tmp_path / "bugs.toml").write_text(ROW)
    (table,) = load_tables(tmp_path)
    expected = Mutation("geometry: a bug", "a rule", "Geometry", "$a < $b", "$a <= $b", ("test_names.py",))
    assert table == ("bugs", "Bugs.", [expected])


def test_a_row_states_its_own_property(tmp_path):
    path = tmp_path / "bugs.toml"
    path.write_text(ROW + 'breaks = "another rule"\nwhich = 2\n')
    (mutation,) = load_table(path).mutations
    assert (mutation.breaks, mutation.which) == ("another rule", 2)


@pytest.mark.parametrize("field", ["about", "breaks", "tests", "name", "function", "find", "replace"])
def test_a_missing_field_is_named_with_its_place(tmp_path, field):
    path = tmp_path / "bugs.toml"
    path.write_text("\n".join(line for line in ROW.splitlines() if not line.startswith(f"{field} =")))
    with pytest.raises(MutationTableError, match=rf"bugs\.toml.*: no {field}\."):
        load_table(path)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("find = ", "expect = 'c'\nfind = ", "expect"),
        ('["test_names.py"]', '"test_names.py"', "tests"),
        ("find = ", "which = 'second'\nfind = ", "which"),
    ],
)
def test_unknown_and_mistyped_fields_are_refused(tmp_path, old, new, field):
    path = tmp_path / "bugs.toml"
    path.write_text(ROW.replace(old, new))
    with pytest.raises(MutationTableError, match=field):
        load_table(path)
