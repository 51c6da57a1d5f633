import pytest
import torch

from nsa.errors import KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernels import registry
from nsa.kernels.interface import constant_when_traced
from nsa.kernels.registry import BACKENDS, BRANCHES, BackendRequest, KernelBackend, KernelShape, check_names, plan

CPU, SHAPE = torch.device("cpu"), KernelShape(2, 6, 64, 64, Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512))


def test_auto_never_takes_the_reference():
    choices = plan(BackendRequest(), CPU, torch.float32, SHAPE).choices
    assert [c.branch for c in choices] == list(BRANCHES)
    assert all(c.backend != "reference" for c in choices)


def test_a_named_backend_is_taken_and_the_reason_says_so():
    made = plan(BackendRequest(sliding="reference"), CPU, torch.float32, SHAPE)
    assert made.functions.sliding is BACKENDS["reference"].functions.sliding
    assert {c.branch: c.reason for c in made.choices}["sliding"] == "requested by name"


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
