import pytest
import torch
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.guard.prove import prove
from nsa.kernels.portable import shared

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_claim_holds_here(dtype):
    proofs = list(prove(CPU, dtype, n_heads=3, n_kv_groups=1, d_k=16, d_v=8))
    assert len(proofs) == 7
    assert [proof for proof in proofs if not proof.holds] == []


def test_a_kernel_that_leaks_the_future_is_found_out(monkeypatch):
    def leaky(pos_BS, start_BS, sizes, n_keys):
        lo, hi = honest(pos_BS, start_BS, sizes, n_keys)
        return lo, (hi + 1).clamp(max=n_keys)

    honest = shared.window_bounds
    monkeypatch.setattr(shared, "window_bounds", leaky)
    result = CliRunner().invoke(app, ["doctor", "--prove", "--dtype", "fp32", "--n-heads", "2", "--d-k", "16"])
    assert result.exit_code == 1
    assert "FAILS  values that differ when the future changes" in result.output


def test_doctor_names_a_kernel_for_every_branch():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for branch in ("compressed", "select", "selected", "sliding"):
        assert f"{branch:12}portable   chosen" in result.output
    assert CliRunner().invoke(app, ["doctor", "--dtype", "int3"]).exit_code == 2
