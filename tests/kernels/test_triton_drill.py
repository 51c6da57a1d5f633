"""Three bugs of tests/mutations/triton.py, planted: the interpreted tests catch them. The drill plants them all."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")

from tests.mutations.triton import MUTATIONS

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutation_drill.py"
SAMPLE = [
    "triton: past rescaled in the first half of the values only",
    "triton: a query's blocks share a slot",
    "triton: last piece of a window is not added",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_caught(name):
    spec = importlib.util.spec_from_file_location("mutation_drill", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    drill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drill)
    (mutation,) = (m for m in MUTATIONS if m.name == name)
    caught, by = drill.plant(mutation)
    assert caught, by


def test_every_bug_can_be_planted():
    root = SCRIPT.parents[1]
    counts = {m.name: (root / m.file).read_text().count(m.old) for m in MUTATIONS}
    assert {name: n for name, n in counts.items() if n != 1} == {}
