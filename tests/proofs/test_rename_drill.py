"""The rename drill renames a private function everywhere and a variable in its function, and nothing else."""

from proofs.rename_drill import PACKAGES, Renaming, candidates, rename

SOURCE = '''"""Text."""


def _helper(first):
    total = first + 1
    return total


def answer(given):
    return _helper(given)
'''


def test_names_are_renamed_where_they_stand(tmp_path):
    file = tmp_path / PACKAGES / "one.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    other = tmp_path / "test_one.py"
    other.write_text("from one import _helper\n\ntotal = _helper(1)\n")
    functions, variables = candidates(tmp_path)
    assert [each.old for each in functions] == ["_helper"]
    assert [(each.old, each.lines) for each in variables] == [("total", (4, 6))]
    for each in (*functions, *variables):
        rename(tmp_path, each._replace(new="x" * len(each.old)))
    assert other.read_text() == "from one import xxxxxxx\n\ntotal = xxxxxxx(1)\n"
    names: dict[str, object] = {}
    exec(file.read_text(), names)
    assert names["answer"](2) == 3
    assert "total" not in file.read_text()


def test_a_name_that_is_also_a_word_of_a_text_is_left(tmp_path):
    file = tmp_path / PACKAGES / "one.py"
    file.parent.mkdir()
    file.write_text(SOURCE.replace("return total", "return total, 'total'"))
    assert candidates(tmp_path)[1] == []
    assert Renaming(file, "_helper", "", None) in candidates(tmp_path)[0]
