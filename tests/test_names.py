"""Names of files of a run are spelled in nsa_train/names.py alone; local names are nouns; docstrings stand alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_train import names

ROOT = Path(__file__).parents[1] / "packages"
RECORD_WORDS = ("START", "PROGRESS", "ALIVE", "HALTED", "STOPPED", "DONE", "FAILED", "SKIPPED", "ROLLED_BACK")
ARTIFACTS = {
    value for name, value in vars(names).items() if name.isupper() and type(value) is str and name not in RECORD_WORDS
}
PLAIN_WORDS = {"checkpoints", "evaluations", "latest", "tb", ".lock", names.TENSOR_FILES, names.TENSOR_INDEX}
"""Also ordinary words or endings: only as a part of a path are they the name of an artifact."""
CHECKOUT = Path(__file__).parents[1]
PYTHON_FOLDERS = ("packages", "tests", "proofs", "tools", "experiments", "bench", "scripts", "docs", "ops", "examples")
NO_NOUNS = {"found", "made", "given", "kept"}
OPENINGS = re.compile(r"(?:Of|The same|And)\b")
STEMS = ("heartbeat_rank", "stackdump_", "collectives_rank", ".saving-", ".replaced-", ".deleting-")


def spelled(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield from {node.right.value} & PLAIN_WORDS
        elif isinstance(node, ast.Constant) and type(node.value) is str:
            yield from {node.value} & (ARTIFACTS - PLAIN_WORDS)
        elif isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith(STEMS):
                yield str(first.value)


def refused_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each name that is no noun, and of each docstring that needs a sentence before it.

    Variables, parameters and functions count; fields of a class do not: files and other modules know them by name.
    """
    fields: set[int] = set()
    for node in ast.walk(tree):  # a class comes before what is in it
        if isinstance(node, ast.ClassDef):
            fields |= {id(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if OPENINGS.match(text):
                yield node.body[0].lineno, text.splitlines()[0]
        if isinstance(node, ast.Name):
            name = node.id if isinstance(node.ctx, ast.Store) and id(node) not in fields else ""
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler) else ""
        if name in NO_NOUNS:
            yield node.lineno, name


def test_local_names_are_nouns_and_docstrings_stand_alone():
    """A local name says what the value is; a docstring begins with a verb or with a noun phrase."""
    modules = [path for folder in PYTHON_FOLDERS for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    assert len(modules) > 500
    assert [
        f"{path.relative_to(CHECKOUT)}:{line}: {text}"
        for path in modules
        for line, text in refused_words(ast.parse(path.read_text("utf-8")))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1", "for _, made in []: pass", "[kept for kept in []]", "if given := 1: pass", "lambda *found: 0",
        "def f(*, given): pass", "def found(): pass", "with x as (made, y): pass",
        "class A:\n def f(self):\n  kept: int = 1", '"""Of a row."""',
        'def f():\n """The same, later."""', 'class A:\n """And then."""',
    ],
)  # fmt: skip
def test_a_refused_name_or_docstring_is_seen(source):
    assert len([*refused_words(ast.parse(source))]) == 1


@pytest.mark.parametrize(
    "source", ["class A:\n kept: int", "x.found = 1", "f(given=1)", "from hypothesis import given", '"""Often."""']
)
def test_fields_and_keywords_are_left_alone(source):
    assert [*refused_words(ast.parse(source))] == []


def test_no_other_module_spells_the_name_of_an_artifact():
    modules = [path for path in sorted(ROOT.rglob("*.py")) if path != Path(names.__file__)]
    assert len(modules) > 200
    assert [
        f"{path.relative_to(ROOT)}: {word!r}" for path in modules for word in spelled(path.read_text("utf-8"))
    ] == []


@pytest.mark.parametrize(
    "source", ["'env.json'", "run / 'checkpoints'", "f'heartbeat_rank{rank}.jsonl'", "x == '.HALT'"]
)
def test_a_second_spelling_is_seen(source):
    assert list(spelled(source))


def test_a_name_and_its_pattern_agree():
    for rank in (0, 7, 4096):
        assert names.rank_of_heartbeat(names.heartbeat(rank)) == rank
        assert names.is_known_file(names.trainer_state(rank))
    assert names.rank_of_heartbeat("heartbeat_rank01.jsonl") is None
    assert names.step_of(names.step_name(200)) == 200
    for known in (names.COMMIT, names.STATE, f"{names.TENSORS}/{names.TENSOR_INDEX}"):
        assert names.is_known_file(known)
    assert names.is_known_file(f"{names.TENSORS}/__0_0{names.TENSOR_FILES}")
