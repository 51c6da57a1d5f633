"""Compiled kernels in the emulator: right numbers and no finding, forward, backward and decode, at the base shape."""

import pytest
import torch

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from proofs.compile_report.report import MODELS, jobs
from proofs.ptx_emulator.__main__ import main
from proofs.ptx_emulator.cases import CASES
from proofs.ptx_emulator.counts import CLASSES, by_class, class_of
from proofs.ptx_emulator.driver import EmulatorDriver, emulated

QUICK = {
    "sm_80": ("sliding", "sliding_plain", "compressed", "selected", "selected_plain", "select", "decode", "mix"),
    "sm_90": ("sliding", "sliding_plain", "selected", "selected_plain", "mix"),
}
EVERY = [(gpu, case) for gpu in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120") for case in CASES]
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")


def check(driver: EmulatorDriver, case: str, dtype: torch.dtype) -> None:
    figures = CASES[case](dtype)
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
            CASES[case](BF16)
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
