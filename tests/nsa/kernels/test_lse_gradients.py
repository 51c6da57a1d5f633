"""A returned log-sum-exp is differentiable: partial results merged by it have the gradients of the whole."""

import pytest
import torch

from nsa.kernels.registry import BACKENDS, BRANCHES
from tests.backends import RUN_HERE
from tests.nsa.kernels.test_backends import REFERENCE, Case

ATTENTION = [branch for branch in BRANCHES if branch != "select"]
on_every_backend = pytest.mark.parametrize("backend", RUN_HERE)
in_every_branch = pytest.mark.parametrize("branch", ATTENTION)


def halves(case, functions, branch, q, k, v):
    """Attention over the first and the second half of the keys, merged by their log-sum-exps."""
    middle, outs, lses = k.shape[1] // 2, [], []
    start, first = case.start, case.first
    for begin, end in ((0, middle), (middle, k.shape[1])):
        case.start, case.first = start - begin, first - begin
        out, lse = case.run(functions, branch, q, k[:, begin:end], v[:, begin:end], return_lse=True)
        outs.append(out)
        lses.append(lse)
    case.start, case.first = start, first
    share = torch.stack(lses).softmax(0)
    share = share.where(share.isfinite(), 0)  # of rows that see nothing at all
    return (torch.stack(outs) * share[..., None]).sum(0)


@on_every_backend
@in_every_branch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_halves_merged_by_their_log_sum_exps_have_the_gradients_of_the_whole(backend, branch, dtype):
    if backend == "triton" and dtype == torch.bfloat16:
        dtype = torch.float16  # Triton's interpreter multiplies bf16 wrongly
    case = Case("cached", "tiny", (6, 2), dtype)
    want = case.out_and_gradients(REFERENCE, branch, torch.float64)
    q, k, v = case.inputs(branch)
    out = halves(case, BACKENDS[backend].functions, branch, q, k, v)
    got = [out, *torch.autograd.grad((out * case.weight_of(out)).sum(), (q, k, v))]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error <= tolerance, name


@on_every_backend
@in_every_branch
@pytest.mark.parametrize("layout", ["cached", "packed"])
def test_gradients_of_the_log_sum_exp_alone(backend, branch, layout):
    """Includes rows that see nothing: their log-sum-exp is −inf and has no gradient."""
    if backend == "triton" and layout == "packed":
        layout = "cached"  # minutes in the interpreter
    case = Case(layout, "tiny", (6, 2), torch.float32)

    def gradients(functions, dtype=None):
        q, k, v = case.inputs(branch, dtype)
        lse = case.run(functions, branch, q, k, v, return_lse=True)[1]
        return torch.autograd.grad((lse * case.weight_of(lse)).sum(), (q, k, v), allow_unused=True)

    dq, dk, dv = gradients(BACKENDS[backend].functions)
    want_q, want_k, _ = gradients(REFERENCE, torch.float64)
    torch.testing.assert_close(dq.double(), want_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dk.double(), want_k, atol=1e-5, rtol=1e-5)
    assert dv is None or (dv == 0).all()


@on_every_backend
def test_compiled_with_a_gradient_of_the_log_sum_exp(backend):
    functions, case = BACKENDS[backend].functions, Case("cached", "tiny", (4, 2), torch.float32)

    def merged(q, k, v):
        return halves(case, functions, "compressed", q, k, v)

    results = []
    for run in (merged, torch.compile(merged, fullgraph=True, backend="aot_eager")):
        leaves = case.inputs("compressed")
        out = run(*leaves)
        results.append([out, *torch.autograd.grad((out * case.weight_of(out)).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
