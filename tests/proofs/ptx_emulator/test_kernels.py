"""Compiled kernels in the emulator: right numbers and no finding, forward, backward and decode, at the base shape."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from proofs.compile_report.report import MODELS, jobs
from proofs.ptx_emulator.__main__ import main
from proofs.ptx_emulator.cases import CASES, run_case
from proofs.ptx_emulator.counts import CLASSES, by_class, class_of, idle_stores, unknown_instructions
from proofs.ptx_emulator.driver import EmulatorDriver, emulated
from proofs.ptx_emulator.findings import FindingLog
from proofs.ptx_emulator.global_memory import arenas_of
from proofs.ptx_emulator.machine import Machine
from proofs.ptx_emulator.parser import parse
from tests.proofs.ptx_emulator.ptx_snippets import at, module

QUICK = {
    "sm_80": ("sliding", "sliding_plain", "compressed", "selected", "selected_plain", "select", "decode", "mix"),
    "sm_90": ("sliding", "sliding_plain", "selected", "selected_plain", "mix"),
}
EVERY = [(gpu, case) for gpu in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120") for case in CASES]
EVERY += [("sm_100", "decode"), ("sm_100", "mix")]  # the others have tcgen05
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")


def check(driver: EmulatorDriver, case: str, dtype: torch.dtype) -> None:
    figures = run_case(case, dtype)
    assert not driver.log.take()
    assert all(figure.holds for figure in figures), figures


@pytest.mark.nightly
@pytest.mark.parametrize(("gpu", "case"), [(gpu, case) for gpu, cases in QUICK.items() for case in cases])
def test_right_and_without_a_finding(gpu, case):
    with emulated(gpu) as driver:
        check(driver, case, BF16)
        if case == "sliding":
            counts = driver.instruction_counts()
            assert by_class(counts["range_forward_kernel"])["mma"] > 0
            assert ("wgmma" in str(counts["range_forward_kernel"])) == (gpu == "sm_90")


@pytest.mark.nightly
@pytest.mark.parametrize(("gpu", "case"), EVERY)
def test_every_case_is_right_and_without_a_finding(gpu, case):
    with emulated(gpu) as driver:
        check(driver, case, BF16)


@pytest.mark.nightly
def test_the_cases_run_every_kernel():
    with emulated("sm_80") as driver:
        for case in CASES:
            run_case(case, BF16)
        assert {name for name, _ in driver.machines} == {
            job.function.fn.__name__ for job in jobs(MODELS["base"], "sm_80")
        }


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_other_dtypes(case, dtype):
    with emulated("sm_80") as driver:
        check(driver, case, dtype)


def test_the_backend_is_refused_on_the_cpu_outside_of_the_emulator():
    from nsa.kernels.registry import BACKENDS
    from tests.backends import ANY

    why_not = BACKENDS["triton"].why_not
    with emulated("sm_80"):
        assert why_not("sliding", torch.device("cpu"), BF16, ANY) is None
    assert why_not("sliding", torch.device("cpu"), BF16, ANY)


def test_copies_of_stores_that_store_nothing_are_listed():
    """Two stores of which the second is for threads from 32 on: with 32 threads it stores nothing."""
    body = at(0, 4) + "\tst.global.b32 [%rd80], %r90;\n\tsetp.gt.s32 %p1, %r90, 31;\n"
    body += "\t@%p1 st.global.b32 [%rd80], %r91;\n"

    def launched(threads):
        machine, out = Machine(parse(module(body, 1, threads)), FindingLog()), np.zeros(64, np.int32)
        addresses = np.array([out.ctypes.data], np.uint64)
        machine.launch((1, 1, 1), addresses, 0, arenas_of([(out.ctypes.data, out.ctypes.data + out.nbytes)]))
        return machine

    small, large = launched(32), launched(64)
    ((idle,), total) = idle_stores([small])
    assert idle.startswith("store 1 of 2")
    assert total == 2
    assert idle_stores([large]) == idle_stores([small, large]) == ([], 2)


def test_unknown_instructions_are_counted():
    ptx = "\ttcgen05.mma.cta_group::1.kind::f16 [ %r1 ], %rd2;\n\t@%p1 add.s32 %r1, %r2, %r3;\n"
    ptx += "\tbar.sync 0;\n\tret;\n$L1:\n"
    assert unknown_instructions(2 * ptx) == {"tcgen05.mma.cta_group::1.kind::f16": 2}


def test_instruction_classes():
    assert class_of("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16") == "mma"
    assert class_of("wgmma.wait_group.sync.aligned") == "barrier"
    assert class_of("fma.rn.f32") == "fp32"
    assert class_of("add.s64") == "integer"
    assert class_of("ld.shared.v4.b32") == "shared"
    assert by_class({"add.s32": 3, "ex2.approx.ftz.f32": 2}) == dict.fromkeys(CLASSES, 0) | {"integer": 3, "special": 2}


def test_commands(capsys, tmp_path):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*CASES, "range_dkv", "mix_backward"))
    assert main(["run", "mix", "--json", str(tmp_path / "counts.json")]) == 0
    printed = capsys.readouterr().out
    assert "mix: right, 0 findings" in printed
    assert "mix_backward_kernel" in (tmp_path / "counts.json").read_text()
    assert main(["ptx", "mix_forward_kernel", "--case", "mix"]) == 0
    assert ".entry mix_forward_kernel(" in capsys.readouterr().out
    assert main(["ptx", "nothing", "--case", "mix"]) == 1
