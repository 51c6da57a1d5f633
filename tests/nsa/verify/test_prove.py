from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from nsa.check.prove import AUTOCAST_LIMIT, autocast_error, prove
from nsa.core.nsa_attention import NSAAttention
from nsa.kernels import cpu, ops
from nsa.kernels.registry import BackendRequest
from nsa_train.cli.main import app

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_claim_holds_here(dtype):
    proofs = list(prove(CPU, dtype, n_heads=3, n_kv_groups=1, d_k=16, d_v=8))
    assert len(proofs) == 8
    assert [proof for proof in proofs if not proof.holds] == []


def test_a_kernel_that_leaks_the_future_is_found_out(monkeypatch):
    def leaky(x):
        if x.branch != "sliding":
            return honest(x)
        return honest(x._replace(pos_BS=x.pos_BS + 1, geometry=replace(x.geometry, w=x.geometry.w + 1)))

    honest = cpu.attend_forward
    monkeypatch.setattr(cpu, "attend_forward", leaky)
    result = CliRunner().invoke(app, ["doctor", "--prove", "--dtype", "fp32", "--n-heads", "2", "--d-k", "16"])
    assert result.exit_code == 1
    assert "FAILS  values that differ when the future changes" in result.output


def test_autocast_inside_a_kernel_is_found_out(monkeypatch):
    def error():
        torch.manual_seed(0)
        module = NSAAttention(48, 3, 1, 16, 8, w=200, kernels=BackendRequest(*["portable"] * 4))
        return autocast_error(module, "sliding", torch.randn(1, 200, 48))

    assert error() <= AUTOCAST_LIMIT
    monkeypatch.setattr(ops, "autocast_off", lambda x: nullcontext())
    assert error() > AUTOCAST_LIMIT


def test_doctor_names_a_kernel_for_every_branch():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for branch in ("compressed", "select", "selected", "sliding"):
        assert f"{branch:12}cpu        chosen" in result.output
    assert CliRunner().invoke(app, ["doctor", "--dtype", "int3"]).exit_code == 2
