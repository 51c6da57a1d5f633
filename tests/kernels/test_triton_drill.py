"""A planted bug of tests/mutations/triton.toml is caught by interpreted tests; two more are slow, the drill has all."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")

from tools.mutation_drill import CAUGHT, chosen, copied_checkout, plant

SAMPLE = [
    "triton: past rescaled in the first half of the values only",
    pytest.param("triton: a query's blocks share a slot", marks=pytest.mark.slow),
    pytest.param("triton: last piece of a window is not added", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_caught(name):
    (mutation,) = chosen(["triton"], name)
    with copied_checkout() as copy:
        result = plant(mutation, copy)
    assert result.verdict == CAUGHT, result.reason
