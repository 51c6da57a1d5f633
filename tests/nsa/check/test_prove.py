from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from nsa.bench.case import BenchShape
from nsa.check import prove as prove_module
from nsa.check.cases import MODULE
from nsa.check.prove import error_under_autocast, prove
from nsa.kernels import cpu, ops
from nsa_train.cli.main import app

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_claim_holds_here(dtype):
    proofs = list(prove(CPU, dtype, n_heads=3, n_kv_groups=1, d_k=16, d_v=8))
    assert len(proofs) == 10
    assert [proof for proof in proofs if not proof.holds] == []


def test_a_kernel_that_reads_future_tokens_fails(monkeypatch):
    def leaky(x):
        if x.branch != "sliding":
            return honest(x)
        return honest(x._replace(pos_BS=x.pos_BS + 1, geometry=replace(x.geometry, w=x.geometry.w + 1)))

    honest = cpu.attend_forward
    monkeypatch.setattr(cpu, "attend_forward", leaky)
    result = CliRunner().invoke(app, ["doctor", "--prove", "--dtype", "fp32", "--n-heads", "2", "--d-k", "16"])
    assert result.exit_code == 1
    assert "FAILS  values before a changed token that change" in result.output


def test_autocast_inside_a_kernel_fails(monkeypatch):
    case = replace(MODULE, shape=BenchShape(3, 1, 16, 8, MODULE.shape.geometry), kernels="portable")
    monkeypatch.delitem(prove_module._DENSE, "selected")  # the dtypes that autocast makes would not even fit together
    assert error_under_autocast(case).holds
    monkeypatch.setattr(ops, "autocast_off", lambda x: nullcontext())
    assert not error_under_autocast(case).holds


def test_doctor_names_a_kernel_for_every_branch():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for branch in ("compressed", "select", "selected", "sliding"):
        assert f"{branch:12}cpu        chosen" in result.output
    assert CliRunner().invoke(app, ["doctor", "--dtype", "int3"]).exit_code == 2
