from dataclasses import replace

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernels import registry
from nsa.kernels.interface import constant_when_traced
from nsa.kernels.registry import (
    BACKENDS,
    BRANCHES,
    BackendRequest,
    KernelBackend,
    KernelShape,
    check_names,
    plan,
)
from nsa.kernels.self_check import KernelVerdict
from tests.shapes import attention_args

CPU, SHAPE = torch.device("cpu"), KernelShape(2, 6, 64, 64, Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512))


def test_auto_never_takes_the_reference():
    choices = plan(BackendRequest(), CPU, torch.float32, SHAPE).choices
    assert [c.branch for c in choices] == list(BRANCHES)
    assert all(c.backend != "reference" for c in choices)


def test_a_named_backend_is_taken_and_the_reason_says_so():
    kernel_plan = plan(BackendRequest(sliding="reference"), CPU, torch.float32, SHAPE)
    assert kernel_plan.functions.sliding is BACKENDS["reference"].functions.sliding
    assert {c.branch: c.reason for c in kernel_plan.choices}["sliding"] == "requested by name"


def test_a_named_backend_that_cannot_run_is_refused_with_its_reason(monkeypatch):
    sulky = KernelBackend("sulky", BACKENDS["reference"].functions, lambda *_: "it needs a moon")
    monkeypatch.setitem(BACKENDS, "sulky", sulky)
    with pytest.raises(KernelUnavailable, match=r"kernels\.selected='sulky'.*it needs a moon"):
        plan(BackendRequest(selected="sulky"), CPU, torch.float32, SHAPE)


def test_auto_passes_over_a_backend_that_cannot_run_and_says_why(monkeypatch):
    sulky = KernelBackend("sulky", BACKENDS["reference"].functions, lambda *_: "it needs a moon")
    monkeypatch.setattr(registry, "BACKENDS", {"sulky": sulky, **BACKENDS})
    monkeypatch.setattr(registry, "_plan_once", registry._plan)
    choice = plan(BackendRequest(), CPU, torch.float32, SHAPE).choices[0]
    assert (choice.backend, choice.reason) == ("cpu", "sulky: it needs a moon")


def test_no_backend_for_integers():
    with pytest.raises(KernelUnavailable, match=r"kernels\.compressed"):
        plan(BackendRequest(), CPU, torch.int64, SHAPE)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(KernelUnavailable, match=r"kernels\.select\b"):
        check_names(BackendRequest(select="tritn"))


def test_constants_of_tracing_are_marked_as_torch_marks_them():
    def function() -> None: ...

    marked = vars(torch.compiler.assume_constant_result(function)).copy()
    vars(function).clear()
    assert vars(constant_when_traced(function)) == marked


def checked_by(verdict, monkeypatch) -> list[tuple[torch.device, torch.dtype, KernelShape]]:
    """Triton as it would be on a GPU with this verdict, shown on the CPU: the calls of its check."""
    calls = []

    def verify(device, dtype, shape):
        calls.append((device, dtype, shape))
        return verdict

    backend = replace(BACKENDS["triton"], why_not=lambda *_: None, verify=verify)
    monkeypatch.setattr(registry, "_VERIFIED_ON", ("cpu",))
    monkeypatch.setattr(registry, "BACKENDS", {"triton": backend, "portable": BACKENDS["portable"]})
    monkeypatch.setattr(registry, "_plan_once", registry._plan)
    return calls


def test_auto_takes_a_backend_that_passes_its_check_and_says_so(monkeypatch):
    calls = checked_by(KernelVerdict(True, ""), monkeypatch)
    kernel_plan = plan(BackendRequest(), CPU, torch.bfloat16, SHAPE)
    assert {(c.backend, c.reason, c.verified) for c in kernel_plan.choices} == {
        ("triton", "verified on this GPU", True)
    }
    assert kernel_plan.decoder is BACKENDS["triton"].decoder
    assert set(calls) == {(CPU, torch.bfloat16, SHAPE)}


def test_auto_passes_over_a_backend_that_fails_its_check_and_names_the_evidence(monkeypatch):
    checked_by(KernelVerdict(False, "sliding dk: 0.3 (at most 1e-05)", "/cache/record.json"), monkeypatch)
    for choice in plan(BackendRequest(), CPU, torch.float32, SHAPE).choices:
        assert (choice.backend, choice.verified) == ("portable", False)
        assert "sliding dk: 0.3" in choice.reason
        assert "/cache/record.json" in choice.reason


def test_a_named_backend_is_not_checked(monkeypatch):
    calls = checked_by(KernelVerdict(False, "wrong"), monkeypatch)
    kernel_plan = plan(BackendRequest(*["triton"] * 4), CPU, torch.float32, SHAPE)
    assert {(c.backend, c.reason, c.verified) for c in kernel_plan.choices} == {("triton", "requested by name", False)}
    assert calls == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows a machine without a GPU")
def test_without_a_gpu_nothing_is_checked_and_auto_on_cuda_is_portable():
    pytest.importorskip("triton", reason="it is in the dev extra")
    for choice in plan(BackendRequest(), torch.device("cuda"), torch.bfloat16, SHAPE).choices:
        assert choice.backend == "portable"
        assert "there is no GPU here" in choice.reason


@pytest.mark.parametrize("passed", [True, False])
def test_the_verdict_is_a_constant_of_tracing(passed, monkeypatch):
    """One graph, with the kernels of the verdict, although the check is first needed while tracing."""
    calls = checked_by(KernelVerdict(passed, "wrong"), monkeypatch)
    torch._dynamo.reset()
    attention = NSAAttention(**attention_args("tiny", (3, 1)))

    def named(x):
        kernel_plan = attention.plan(x.device, x.dtype)
        return x + 1 if kernel_plan.choices[0].backend == "triton" else x - 1

    compiled = torch.compile(named, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1.0 if passed else -1.0] * 2
    assert calls


def test_auto_on_a_cpu_never_checks_triton(monkeypatch):
    def verify(*_):
        raise AssertionError("checked")

    monkeypatch.setattr(
        registry,
        "BACKENDS",
        {**BACKENDS, "triton": replace(BACKENDS["triton"], verify=verify, why_not=lambda *_: None)},
    )
    monkeypatch.setattr(registry, "_plan_once", registry._plan)
    assert {c.backend for c in plan(BackendRequest(), CPU, torch.float32, SHAPE).choices} <= {"cpu", "portable"}
