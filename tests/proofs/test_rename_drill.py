"""The rename drill renames a private function everywhere and a variable in its function, and nothing else."""

from proofs.rename_drill import PACKAGES, Renaming, candidates, mirroring_tests, rename

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


def test_tests_are_those_of_the_module_or_else_of_its_folder(tmp_path):
    for name in ("tests/nsa/core/test_rope_cache.py", "tests/nsa/core/test_other.py", "tests/nsa/check/test_some.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    package = tmp_path / PACKAGES / "nsa-attention/nsa"
    renamings = [Renaming(package / name, "_x", "_y", None) for name in ("core/rope.py", "check/deep/kernel.py")]
    words = mirroring_tests(tmp_path, renamings)
    assert [word for word in words if word.startswith("tests/nsa/")] == [
        "tests/nsa/check",
        "tests/nsa/core/test_rope_cache.py",
    ]
