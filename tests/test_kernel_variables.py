"""NSA_KERNEL and NSA_KERNEL_<BRANCH> in the library and in `nsa doctor`."""

import pytest
import torch
from typer.testing import CliRunner

from nsa import NSAAttention, nsa_attention
from nsa.errors import KernelUnavailable
from nsa.kernels.registry import BRANCHES, BackendRequest, backend_request
from nsa_train.cli.main import app
from tests.shapes import attention_args

CPU = torch.device("cpu")


def backends(module):
    return {choice.branch: choice.backend for choice in module.plan(CPU, torch.float32).choices}


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in ("NSA_KERNEL", *(f"NSA_KERNEL_{branch.upper()}" for branch in BRANCHES)):
        monkeypatch.delenv(name, raising=False)


def test_the_module_takes_the_variable_by_default(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL", "portable")
    assert set(backends(NSAAttention(**attention_args("tiny"))).values()) == {"portable"}
    assert set(backends(NSAAttention(**attention_args("tiny"), kernels="auto")).values()) == {"portable"}


def test_the_variable_of_a_branch_wins_over_the_one_for_all(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL", "portable")
    monkeypatch.setenv("NSA_KERNEL_SELECT", "reference")
    assert backend_request("auto") == BackendRequest("portable", "reference", "portable", "portable")


def test_an_argument_wins_over_the_variables(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL", "portable")
    assert backend_request("reference") == BackendRequest(*["reference"] * 4)
    assert backend_request({"sliding": "cpu"}) == BackendRequest("portable", "portable", "portable", "cpu")
    assert backend_request(BackendRequest()) == BackendRequest()  # as the settings of a run give it


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL", " ")
    assert backend_request("auto") == BackendRequest()


def test_the_functional_form_takes_the_variable_compiled_too(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL", "tritn")
    q, k, v = torch.randn(1, 40, 2, 8), *(torch.randn(1, 40, 1, 8) for _ in "kv")
    gates = torch.rand(1, 40, 2, 3)
    with pytest.raises(KernelUnavailable, match="environment NSA_KERNEL is 'tritn'"):
        nsa_attention(q, k, v, gates)
    monkeypatch.setenv("NSA_KERNEL", "portable")
    want = nsa_attention(q, k, v, gates, kernels="portable")
    got = torch.compile(nsa_attention, fullgraph=True, backend="aot_eager")(q, k, v, gates)
    assert torch.equal(got, want)


def test_errors_name_the_variable(monkeypatch):
    monkeypatch.setenv("NSA_KERNEL_SLIDING", "triton")
    with pytest.raises(KernelUnavailable, match=r"kernels\.sliding='triton' \(environment NSA_KERNEL_SLIDING\) cannot"):
        backends(NSAAttention(**attention_args("tiny")))
    with pytest.raises(KernelUnavailable, match=r"kernels\.select='triton' cannot"):
        backends(NSAAttention(**attention_args("tiny"), kernels={"select": "triton", "sliding": "cpu"}))


@pytest.mark.parametrize("prove", [[], ["--prove"]])
def test_doctor_checks_the_requested_backend(monkeypatch, prove):
    monkeypatch.setenv("NSA_KERNEL", "portable")
    words = ["doctor", "--dtype", "fp32", "--n-heads", "2", "--n-kv-groups", "1", "--d-k", "16", "--d-v", "16"]
    result = CliRunner().invoke(app, words + prove)
    assert result.exit_code == 0, result.output
    assert "compressed  portable   chosen  requested by NSA_KERNEL" in result.output
