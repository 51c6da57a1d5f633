"""`nsa doctor` for a GPU that is not there: what it prints, nothing is computed."""

import pytest
from typer.testing import CliRunner

from nsa.cli.main import app


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.delenv("NSA_KERNEL", raising=False)


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
    assert "WARNING: slow kernels: all branches run on the portable backend, not on triton" in doctor("--device", "cuda")
    monkeypatch.setenv("NSA_KERNEL", "portable")
    said = doctor("--device", "cuda")
    assert "WARNING" not in said
    assert "compressed portable chosen requested by NSA_KERNEL" in said
    monkeypatch.setenv("NSA_KERNEL", "triton")
    assert "compressed triton chosen requested by NSA_KERNEL" in doctor("--device", "cuda")


def test_interpreted_triton_is_called_slow_on_a_cpu(monkeypatch):
    monkeypatch.setattr("nsa.kernels.triton._interpreted", lambda: True)
    assert "triton can only by name: interpreted, for checking, slow" in doctor()
