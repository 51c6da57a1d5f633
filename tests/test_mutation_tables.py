"""Every mutation of tests/mutations can be planted: its text occurs exactly once in its file, and its tests exist."""

import importlib
from pathlib import Path

import pytest

from tests.mutations import Mutation

ROOT = Path(__file__).parents[1]
TABLES = sorted(path.stem for path in (ROOT / "tests" / "mutations").glob("[!_]*.py"))
MUTATIONS = [m for table in TABLES for m in importlib.import_module(f"tests.mutations.{table}").MUTATIONS]


def test_there_are_tables():
    assert {"core", "cpu", "drill", "triton"} <= set(TABLES)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_can_be_planted(mutation: Mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    words = [word.partition("::")[0] for word in mutation.tests if word.startswith("tests/")]
    assert words
    assert all((ROOT / word).exists() for word in words)


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
