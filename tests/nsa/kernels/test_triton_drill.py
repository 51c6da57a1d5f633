"""Three planted bugs of tests/mutations/triton.toml are caught by interpreted tests; the drill has all of them."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")

from proofs.mutation_drill import CAUGHT, chosen, copied_checkout, plant

pytestmark = pytest.mark.nightly

SAMPLE = [
    "triton: past rescaled in the first half of the values only",
    "triton: a query's blocks share a slot",
    "triton: last piece of a window is not added",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_bug_is_caught(name):
    (mutation,) = chosen(["triton"], name)
    with copied_checkout() as copy:
        result = plant(mutation, copy)
    assert result.verdict == CAUGHT, result.reason
