"""`nsa doctor` for a GPU that is not there: what it prints, nothing is computed."""

from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nsa.kernels import registry
from nsa.kernels.registry import BACKENDS
from nsa.kernels.self_check import KernelVerdict
from nsa_train.cli.main import app


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr("nsa.kernels.gpu_versions.device_named", torch.device)
    monkeypatch.delenv("NSA_KERNEL", raising=False)
    monkeypatch.setattr("sys.dont_write_bytecode", False)


def doctor(*words):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_triton_is_not_called_slow_on_a_gpu(gpu):
    said = doctor("--device", "cuda")
    assert "cuda (NVIDIA A100-SXM4-80GB)" in said
    assert "kernels on cuda in bf16:" in said
    (row,) = {line for line in said.split("compressed ")[1:] if line.startswith("triton")}
    assert "slow" not in row
    assert "reference can only by name: plain PyTorch, for checking, slow" in said


def test_the_portable_backend_on_a_gpu_is_warned_about_unless_requested(gpu, monkeypatch):
    assert "WARNING: slow kernels: all branches run on the portable backend, not on triton" in doctor(
        "--device", "cuda"
    )
    monkeypatch.setenv("NSA_KERNEL", "portable")
    said = doctor("--device", "cuda")
    assert "WARNING" not in said
    assert "compressed portable chosen requested by NSA_KERNEL" in said
    monkeypatch.setenv("NSA_KERNEL", "triton")
    assert "compressed triton chosen requested by NSA_KERNEL" in doctor("--device", "cuda")


@pytest.mark.parametrize(
    ("verdict", "said", "chosen"),
    [
        (
            KernelVerdict(True, "", "/cache/a100.json"),
            "passed, record in /cache/a100.json",
            "triton",
        ),
        (
            KernelVerdict(False, "dq [bold]: 0.3 (at most 0.02)", "/cache/a100.json"),
            "FAILED (dq [bold]: 0.3 (at most 0.02)), record in /cache/a100.json",
            "portable",
        ),
        (KernelVerdict(False, "there is no GPU here", checked=False), "not done: there is no GPU here", "portable"),
    ],
    ids=["passed", "failed", "no GPU"],
)
def test_the_verdict_of_the_check_and_its_record_are_printed(gpu, monkeypatch, verdict, said, chosen):
    checked = replace(BACKENDS["triton"], verify=lambda device, dtype, shape: verdict)
    monkeypatch.setitem(BACKENDS, "triton", checked)
    monkeypatch.setattr(registry, "_plan_once", registry._plan)
    output = doctor("--device", "cuda")
    assert f"check of Triton on this GPU: {said}" in output
    assert f"kernels on cuda in bf16: {chosen}" in output
    assert ("WARNING" in output) == (chosen == "portable")
    if verdict.evidence and not verdict.passed:
        warning = output.partition("WARNING: ")[2]
        assert "failed its check on this GPU: dq [bold]: 0.3 (at most 0.02) (evidence: /cache/a100.json)" in warning


def test_no_check_is_made_for_backends_requested_by_name(gpu, monkeypatch):
    checked = replace(BACKENDS["triton"], verify=lambda *_: pytest.fail("a check was made"))
    monkeypatch.setitem(BACKENDS, "triton", checked)
    monkeypatch.setenv("NSA_KERNEL", "triton")
    assert "check of Triton on this GPU: not needed" in doctor("--device", "cuda")


def test_interpreted_triton_is_called_slow_on_a_cpu(monkeypatch):
    monkeypatch.setattr("nsa.kernels.triton._interpreted", lambda: True)
    assert "triton can only by name: interpreted, for checking, slow" in doctor()


def test_packages_that_every_start_compiles_anew_are_warned_about(monkeypatch, tmp_path):
    """Images set PYTHONDONTWRITEBYTECODE, and some installers compile nothing: each rank then starts 15 s later."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path))
    said = doctor("--device", "cpu")
    assert "WARNING: every start compiles torch" in said
    assert "PYTHONDONTWRITEBYTECODE is set" in said
    assert f"python -m compileall -q {Path(torch.__file__).parents[1]}" in said
    bytecode = Path(cache_from_source(torch.__file__))
    bytecode.parent.mkdir(parents=True)
    bytecode.touch()
    assert "every start" not in doctor("--device", "cpu")
    bytecode.unlink()
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert "every start" not in doctor("--device", "cpu"), "the first start keeps it"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert f"{Path(torch.__file__).parent} cannot be written" in doctor("--device", "cpu")
