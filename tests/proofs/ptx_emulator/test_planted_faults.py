"""Faults planted in PTX: findings or numbers show them, and those that are missed are explained."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from proofs.ptx_emulator.driver import emulated
from proofs.ptx_emulator.fault_drill import FaultResult, PtxFault, drill, load_faults, markdown, run_fault

FAULTS = load_faults()
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
KINDS = {"barrier", "wait", "mask", "address", "bounds", "fragment", "fence", "arithmetic"}
SAMPLE = {  # name: findings; None: numbers show it
    "mask of a load dropped (mix_forward)": "out_of_bounds",
    "barrier after the wait of the loop removed (range_forward)": "shared_race",
    "barrier before the next copy removed (range_forward)": "shared_race",
    "wait for the keys of the loop weakened (range_forward)": "read_before_wait",
    "commit in the loop skipped (range_forward)": "read_before_wait",
    "load one element further (range_forward)": "misaligned",
    "shared memory 1024 bytes too small (range_forward)": "out_of_bounds",
    "fragment of the keys swapped (range_forward)": None,
    "term of a sum left out (mix_backward)": None,
}


def key(fault: PtxFault) -> str:
    return f"{fault.name} ({fault.kernel})"


def test_the_table():
    assert len(FAULTS) >= 40
    assert len({(fault.name, fault.kernel, fault.gpu) for fault in FAULTS}) == len(FAULTS)
    assert {fault.kind for fault in FAULTS} == KINDS
    assert len({fault.kernel for fault in FAULTS}) >= 10
    missed = [fault for fault in FAULTS if fault.missed_because]
    assert len(missed) <= 0.1 * len(FAULTS)


@pytest.mark.nightly
def test_a_sample_is_caught():
    chosen = {key(fault): fault for fault in FAULTS if fault.gpu == "sm_80" and key(fault) in SAMPLE}
    assert set(chosen) == set(SAMPLE)
    with emulated("sm_80") as driver:
        for name, fault in chosen.items():
            result = run_fault(driver, fault)
            if SAMPLE[name] is None:
                assert result.wrong_numbers, name
            else:
                assert SAMPLE[name] in result.findings, name
            assert not driver.log.take()


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.gpu} {key(fault)}")
def test_every_fault_is_caught_or_explained(fault):
    (result,) = drill([fault])
    assert result.caught == (not fault.missed_because)


def test_a_fault_that_does_not_apply_is_an_error():
    fault = PtxFault("nothing", "mix_forward", "mix", "mask", pattern="no such instruction")
    with pytest.raises(LookupError):
        list(drill([fault]))


def test_the_table_of_the_docs():
    fault = PtxFault("barrier removed", "kernel", "mix", "barrier", missed_because="it is redundant")
    text = markdown([FaultResult(fault, (), False), FaultResult(fault, ("shared_race",), True)])
    assert "**missed**: it is redundant" in text
    assert "shared race, numbers" in text
    assert "1 of 2 caught (50%)" in text
