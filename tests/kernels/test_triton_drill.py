"""Three bugs of tests/mutations/triton.py, planted: interpreted tests catch them. The mutation drill plants all."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")

from tests.mutations.triton import MUTATIONS
from tools.mutation_drill import plant

SAMPLE = [
    "triton: past rescaled in the first half of the values only",
    "triton: a query's blocks share a slot",
    "triton: last piece of a window is not added",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_caught(name):
    (mutation,) = (m for m in MUTATIONS if m.name == name)
    caught, by = plant(mutation)
    assert caught, by
