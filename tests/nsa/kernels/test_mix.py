"""Mixing by gates: every backend's own way equals plain tensor operations, outputs and gradients."""

import pytest
import torch

from nsa.kernels import reference
from nsa.kernels.cpu import library
from nsa.kernels.registry import BACKENDS, BackendRequest, plan
from tests.backends import ANY, RUN_HERE

OWN = [name for name in RUN_HERE if BACKENDS[name].mix is not reference.mix]


def inputs(dtype, heads, per_group, width, tokens=37):
    torch.manual_seed(0)
    gates = torch.randn(2, tokens, 2, per_group, 3).softmax(-1)
    return [gates, *(torch.randn(2, tokens, 2, heads, width).to(dtype) for _ in range(3))]


def results(mix, tensors, dtype=None):
    tensors = [(x if dtype is None else x.to(dtype)).clone().requires_grad_() for x in tensors]
    out = mix(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def off(got, exact):
    return ((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "per_group", "width"), [(1, 1, 24), (6, 6, 192), (5, 1, 40), (16, 16, 128)])
@pytest.mark.parametrize("name", OWN)
def test_equals_fp64_as_closely_as_tensor_operations_do(name, heads, per_group, width, dtype):
    tensors = inputs(dtype, heads, per_group, width)
    exact = results(reference.mix, tensors, torch.float64)
    for got, plain, want in zip(
        results(BACKENDS[name].mix, tensors), results(reference.mix, tensors), exact, strict=True
    ):
        assert got.dtype == plain.dtype
        assert off(got, want) <= max(1e-6, 1.1 * off(plain, want))


@pytest.mark.parametrize(
    "isa", [isa for isa in library.ISAS if library.ISAS.index(isa) <= library.ISAS.index(library.best_isa())]
)
def test_every_instruction_set_and_any_number_of_threads(isa):
    tensors = inputs(torch.bfloat16, 6, 6, width=20, tokens=301)
    exact, before = results(reference.mix, tensors, torch.float64), torch.get_num_threads()
    library.force_isa(isa)
    try:
        mixed = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            mixed.append(results(BACKENDS["cpu"].mix, tensors))
    finally:
        library.force_isa(None)
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*mixed, strict=True))
    assert all(off(got, want) < 5e-3 for got, want in zip(mixed[0], exact, strict=True))


def test_branches_of_different_backends_are_mixed_by_tensor_operations():
    assert plan(BackendRequest(sliding="portable"), torch.device("cpu"), torch.float32, ANY).mix is reference.mix
    assert plan(BackendRequest(), torch.device("cpu"), torch.float32, ANY).mix is not reference.mix
