"""The model counts what the kernels' loops do: the real kernels are executed by Triton's interpreter and counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import import_path

# Half a minute: every kernel in the interpreter, fifteen times. A change to a kernel runs it in .ci/nightly --changed.
pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
AROUND = ("merge_slots", "add_slots", "add_pieces", "bounds", "seen_by", "sort_chunks",
          "place_chunks", "place_windows", "fill", "add_parts", "mix_backward")  # fmt: skip
"""Kernels without products of matrices."""
SPLIT = ("range_forward", "range_dq", "range_dkv", "selected_forward", "selected_backward")
"""Kernels with a loop without masks."""


@pytest.fixture(scope="module")
def comparisons() -> dict[str, dict[str, dict[str, list[float]]]]:
    done = subprocess.run(
        [sys.executable, "tests/proofs/perf_model/interpreted_loops.py"], cwd=ROOT, capture_output=True, text=True,
        timeout=250,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": import_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wrong(kernels: dict[str, dict[str, list[float]]]) -> list[str]:
    """Operations must be the same to the last one; bytes may miss what masks at the edges save."""
    return [
        f"{kernel}: {what} {counted} counted, {modelled} modelled"
        for kernel, figures in kernels.items()
        for what, (counted, modelled) in figures.items()
        if (not 0.95 <= modelled / counted <= 1.25 if what == "bytes" else counted != modelled)
    ]


def test_every_kernel_does_what_is_modelled(comparisons):
    assert len(comparisons["right"]) == 20
    assert wrong(comparisons["right"]) == []
    for kernel, figures in comparisons["right"].items():
        counts = {what: count for what, (count, _) in figures.items()}
        assert counts.pop("bytes") > 0, kernel
        assert (counts.pop("inner_trips") > 0) == (kernel.split()[0] in SPLIT), kernel
        assert (min(counts.values()) > 0) == (kernel.split()[0] not in AROUND), kernel


def test_a_planted_mistake_is_caught(comparisons):
    planted = comparisons.keys() - {"right"}
    assert len(planted) == 14
    assert [name for name in planted if not wrong(comparisons[name])] == []
