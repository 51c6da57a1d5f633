"""Planted bugs are found by what they mean: in whatever file, whatever the variables are called."""

import pytest

from proofs.planting import PlantingError
from proofs.planting.find_tests import TestFiles
from proofs.planting.source_tree import SourceTree

WINDOW = '''"""Which keys a query sees."""
import torch

_LONGEST = 2**31


def visible(pos, keys, options):
    age = pos[:, None] - _places(keys)  # of each key
    seen = (age >= 0) & (
        age < options["w"]
    )
    if not seen.any():
        raise ValueError(f"{pos} sees nothing")
    return seen


def _places(keys):
    return torch.arange(keys.shape[1])[None, :]


class Cache:
    def append(self, k, v):
        self._write(k, v, at=self.length % self.n)
        self.length += 1

    def _write(self, k, v, *, at):
        self.k[at] = k
        self.v[at] = v
'''
GRID = """// Which keys a query sees.
constexpr int kMost = 64;

class Grid {
  int visible(const Problem& p, int pos) const {
    if (pos < 0) return 0;  // before the document
    return std::max(0, pos - p.w + 1);
  }
};
"""


@pytest.fixture
def tree(tmp_path):
    def of(**texts: str) -> SourceTree:
        for name, text in texts.items():
            file = tmp_path / name.replace("__", "/").replace("_h", ".h")
            file = file if file.suffix else file.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return SourceTree(tmp_path)

    return of


def changed_lines(tree: SourceTree, *row) -> list[str]:
    planted = tree.plant(*row)
    old, new = (tree.root / planted.path).read_text().splitlines(), planted.text.splitlines()
    assert len(old) == len(new), "line numbers stay"
    return [line.strip() for line, before in zip(new, old, strict=True) if line != before]


@pytest.mark.parametrize(
    ("function", "find", "replace", "line"),
    [
        ("visible", '$age < $options["w"]', '$age <= $options["w"]', '(age <= options[\'w\'])'),
        ("visible", "$_ >= 0", "True", 'seen = (True) & ('),
        ("visible", "not $seen.any()", "False", "if False:"),
        ("visible", "$keys.shape[1]", "$keys.shape[1] + 1", "return torch.arange((keys.shape[1] + 1))[None, :]"),
        ("visible", "raise ValueError($$text)", "raise KeyError($$text)", "raise KeyError(f\"{pos} sees nothing\")"),
        ("Cache.append", "self.length += 1", "pass", "pass"),
        ("Cache.append", "self.$write($*args, at=$$place)", "self.$write($*args, at=0)", "self._write(k, v, at=0)"),
        ("Cache.append", "self.$write($*args, **$*named)", "self.$write($*args)", "self._write(k, v)"),
        ("Cache.append", "$self.v[$at] = $v", "$self.k[$at] = $v", "self.k[at] = v"),
        ("Cache", "$_ % self.n", "$_ % (self.n - 1)", None),
        ("visible", "$x & $y", "$x | $y", None),
    ],
)  # fmt: skip
def test_what_differs_between_the_patterns_is_replaced(tree, function, find, replace, line):
    if line is None:
        with pytest.raises(PlantingError):
            tree(nsa__window=WINDOW).plant(function, find, replace)
    else:
        assert changed_lines(tree(nsa__window=WINDOW), function, find, replace) == [line]


def test_a_statement_of_several_lines_leaves_empty_ones(tree):
    row = ("visible", "if $$_:\n    raise $$error", "pass")
    assert changed_lines(tree(window=WINDOW), *row) == ["pass", ""]


def test_a_change_over_several_lines_keeps_line_numbers(tree):
    row = ("visible", "($$a) & ($$b)", "($$a) | ($$b)")
    assert changed_lines(tree(window=WINDOW), *row)[0] == "seen = ((age >= 0) | (age < options['w'])"


ROWS = [
    ("visible", '$age < $options["w"]', '$age <= $options["w"]'),
    ("visible", "torch.arange($keys.shape[1])", "torch.arange($keys.shape[0])"),
    ("Cache.append", "self.$write($k, $v, $at=$$place)", "self.$write($k, $k, $at=$$place)"),
    ("Cache.append", "self.k[$at] = $k", "pass"),
    ("visible", "$$pos[:, None] - $places($keys)", "$$pos[:, None] - $places($keys) - 1"),
]


@pytest.mark.parametrize("row", ROWS)
def test_renamed_variables_and_private_functions_do_not_break_a_row(tree, row):
    renamed = WINDOW
    for old, new in [("age", "distance"), ("keys", "rows"), ("seen", "mask"), ("_places", "_at"), ("_write", "_put")]:
        renamed = renamed.replace(old, new)
    assert len(changed_lines(tree(window=WINDOW), *row)) == len(changed_lines(tree(window=renamed), *row)) == 1


@pytest.mark.parametrize("row", ROWS)
def test_a_moved_file_does_not_break_a_row(tree, row):
    lines = changed_lines(tree(packages__nsa_attention__nsa__core__attention=WINDOW), *row)
    assert len(lines) == 1


def test_reformatted_code_does_not_break_a_row(tree):
    text = WINDOW.replace("age >= 0", "(age  >=  # its own\n        0)")
    assert tree(window=text).plant("visible", "$age >= 0", "$age > 0").line == 9


def test_a_name_of_two_modules_needs_its_module(tree):
    files = tree(nsa__reference=WINDOW, nsa__portable=WINDOW, tests__test_window=WINDOW)
    with pytest.raises(PlantingError, match=r"ambiguous: portable\.visible .*reference\.visible .*Put the name"):
        files.plant("visible", "$age >= 0", "$age > 0")
    assert str(files.plant("reference.visible", "$age >= 0", "$age > 0").path) == "nsa/reference.py"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("hidden", "$a < $b", "$a > $b"), "nothing is named hidden"),
        (("visible", "$a > $b", "$a < $b"), "matches 0 places in visible, not one"),
        (("Cache", "self.$x[$at] = $y", "pass"), "matches 2 places in Cache, not one"),
        (("Cache", "self.$x[$at] = $y", "pass", 3), "there is no number 3"),
        (("visible", "$a < $b", "$a < $b"), "changes nothing"),
        (("visible", "$age >= 0", "$age >= $b"), "placeholders that `find` does not bind: b"),
        (("visible", "$age >= 0", "distance >= 0"), "uses distance, which window.py does not have"),
        (("visible", "$age >=", "$age"), "is no Python"),
        (("visible", "if not $_:\n    ...", "if True:\n    x = 1\n    ..."), r"contains `\.\.\.`"),
    ],
)
def test_what_cannot_be_planted_has_a_reason(tree, row, message):
    with pytest.raises(PlantingError, match=message):
        tree(window=WINDOW).plant(*row)


def test_the_second_match(tree):
    assert changed_lines(tree(window=WINDOW), "Cache", "self.$x[$at] = $y", "pass", 2) == ["pass"]
    assert tree(window=WINDOW).plant("Cache", "self.$x[$at] = $y", "pass", 2).line == 28


@pytest.mark.parametrize(
    ("function", "find", "replace", "line"),
    [
        ("Grid.visible", "$pos - $p.w + 1", "$pos - $p.w", "return std::max(0, pos - p.w );"),
        ("visible", "if ($pos < 0) return 0;", ";", ";  // before the document"),
        ("kMost", "= 64;", "= 32;", "constexpr int kMost = 32;"),
        ("visible", "$pos<0", "$pos<=0", "if (pos <= 0) return 0;  // before the document"),
    ],
)
def test_tokens_of_a_cpp_function_are_replaced(tree, function, find, replace, line):
    assert changed_lines(tree(grid_h=GRID), function, find, replace) == [line]
    assert changed_lines(tree(grid_h=GRID.replace("pos", "place")), function, find, replace) != []


def test_a_part_of_what_matches_is_a_match_of_its_own(tree):
    with pytest.raises(PlantingError, match="matches 2 places in total"):
        tree(sums="def total(a, b, c):\n    return a + b + c\n").plant("total", "$$x + $$y", "$$x - $$y")


def test_cpp_patterns_match_once_too(tree):
    with pytest.raises(PlantingError, match="matches 3 places in visible"):
        tree(grid_h=GRID).plant("visible", "0", "1")
    with pytest.raises(PlantingError, match=r"does not bind: \$y"):
        tree(grid_h=GRID).plant("visible", "$pos < 0", "$pos < $y")


def test_tests_are_named_as_far_as_they_are_unique(tmp_path):
    for path in ("tests/nsa/core/test_loss.py", "packages/a/tests/model/test_loss.py", "tests/nsa/core/test_rope.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("def test_it():\n    pass\n")
    files = TestFiles(tmp_path)
    assert files.arguments(("test_rope.py::test_it[1]", "-k", "x")) == [
        "tests/nsa/core/test_rope.py::test_it[1]",
        "-k",
        "x",
    ]
    assert files.arguments(("model/test_loss.py",)) == ["packages/a/tests/model/test_loss.py"]
    assert files.arguments(("test_rope.py", "-k", "test_it and nsa-8"))[1:] == ["-k", "test_it and nsa-8"]
    for words, message in [
        (["test_loss.py"], "2 test files are named"),
        (["test_gone.py"], "0 test files"),
        (["test_rope.py::test_gone"], "has no test_gone"),
        (["test_rope.py", "-k", "x or test_gone"], "-k test_gone selects no test of test_rope.py"),
    ]:
        with pytest.raises(PlantingError, match=message):
            files.arguments(tuple(words))
