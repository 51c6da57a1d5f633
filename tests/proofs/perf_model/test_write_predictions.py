"""The table of modelled times that is shipped with the package is in step with the model."""

import json

import pytest

from nsa.bench.predictions import PREDICTIONS, kernel_predictions
from nsa.check.cases import KERNEL_LENGTHS, TIMED_LAYERS
from proofs.perf_model.gpus import GPUS
from proofs.perf_model.write_predictions import SPEED, entries, kernels

pytest.importorskip("triton", reason="it is in the dev extra")

WRITTEN = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
STALE = "predictions.json is stale: run python -m proofs.perf_model.write_predictions"


def key(entry):
    return entry["gpu"], entry["length"], entry["dtype"], entry["backward"]


def assert_in_step(new):
    written = {key(entry): entry for entry in WRITTEN["entries"]}
    for entry in new:
        for name in ("seconds", "dense_seconds"):
            assert written[key(entry)][name] == pytest.approx(entry[name], rel=2e-3), f"{STALE} ({key(entry)})"


def test_every_case_of_the_check_has_an_entry():
    cases = {(gpu, n, dtype, backward) for gpu in GPUS for n in SPEED.lengths for dtype in SPEED.dtypes
             for backward in SPEED.backward}  # fmt: skip
    assert [key(entry) for entry in WRITTEN["entries"]] == list(dict.fromkeys(map(key, WRITTEN["entries"])))
    assert {key(entry) for entry in WRITTEN["entries"]} == cases
    assert WRITTEN["shape"] == SPEED.shape_name


def test_entries_that_need_no_machine_code_are_in_step():
    assert_in_step(entries(lengths=(2048, 16_384), dtypes=("fp16",)))
    assert_in_step(entries(gpus=("mi300x",), lengths=(8192,)))


@pytest.mark.nightly
def test_every_entry_is_in_step():
    assert_in_step(entries())


def assert_kernels_in_step(new):
    written = {(e["gpu"], e["shape"], e["length"]): e["kernels"] for e in WRITTEN["kernels"]}
    for entry in new:
        where = entry["gpu"], entry["shape"], entry["length"]
        assert written[where] == pytest.approx(entry["kernels"], rel=2e-3), f"{STALE} {where}"


def test_kernels_that_need_no_machine_code_are_in_step():
    assert_kernels_in_step(kernels(gpus=("mi300x",), lengths=(2048,)))
    timed = {(gpu, name, length) for gpu in GPUS for name in TIMED_LAYERS for length in KERNEL_LENGTHS}
    assert set(kernel_predictions()) == timed


@pytest.mark.nightly  # minutes: the kernels of two layers compiled for three GPUs
def test_every_kernel_is_in_step():
    assert_kernels_in_step(kernels())
