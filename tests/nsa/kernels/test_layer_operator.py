"""A layer as one operator: the results of its branches one by one, and gradients through every output."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.core.branches import BranchKeys
from nsa.core.functional import nsa_attention
from nsa.core.layer_kinds import ThreeBranches
from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels.checkpoint_policy import keep_operators
from nsa.kernels.registry import BACKENDS, KernelShape, backend_request
from tests.backends import RUN_HERE

GEOMETRY = Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12)
LENGTH, GROUPS, HEADS, K, V = 40, 2, 3, 16, 24
WITH_LAYER = [name for name in RUN_HERE if BACKENDS[name].layer is not None]
STRATEGY = ThreeBranches(KernelShape(GROUPS, HEADS, K, V, GEOMETRY), backend_request("reference"), 0.25)


def leaves(shared: bool) -> list[Tensor]:
    """Queries, gates, keys and values of the branches. shared: the window's are those of the selected branch."""
    pos, start, first, begin, _ = packed_layout(torch.tensor([0, 17, 40]), LENGTH, GEOMETRY)
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, requires_grad=True)

    q, gates = tensor(LENGTH, GROUPS, HEADS, K), tensor(LENGTH, GROUPS, HEADS, 3)
    k_cmp, v_cmp = tensor(begin.shape[1], GROUPS, K), tensor(begin.shape[1], GROUPS, V)
    k, v = tensor(LENGTH, GROUPS, K), tensor(LENGTH, GROUPS, V)
    k_win, v_win = (k, v) if shared else (tensor(LENGTH, GROUPS, K), tensor(LENGTH, GROUPS, V))
    return [q, gates, k_cmp, v_cmp, pos, first, k, v, pos, start, k_win, v_win, pos, start]


def attended(backend: str, whole: bool, shared: bool, through: str) -> list[Tensor]:
    """Output, blocks, log-sum-exps and the gradients of all inputs. through: the outputs that have a gradient."""
    q, gates, *keys = leaves(shared)
    plan = ThreeBranches(STRATEGY.shape, backend_request(backend), 0.25).plan(q.device, q.dtype)
    assert plan.layer is not None
    branches = tuple(BranchKeys(*keys[i : i + 4]) for i in (0, 4, 8))
    out = STRATEGY.attend(plan if whole else plan._replace(layer=None), q, gates, branches)
    assert out.blocks is not None
    seen = [torch.where(x > -torch.inf, x, 0).sum() for x in out.lse]
    loss = {"out": out.out.square().sum(), "lse": seen[0] + 2 * seen[2]}
    inputs = [x for x in (q, gates, *keys) if x.requires_grad]
    total = sum(loss[name] for name in through.split())
    gradients = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [out.out, out.blocks, *out.lse, *gradients]


@pytest.mark.parametrize(("shared", "through"), [(False, "out lse"), (True, "out")])
@pytest.mark.parametrize("backend", WITH_LAYER)
def test_equals_the_branches_one_by_one(backend, shared, through):
    together, apart = (attended(backend, whole, shared, through) for whole in (True, False))
    for x, y in zip(together[:5], apart[:5], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    for x, y in zip(together[5:], apart[5:], strict=True):  # summed in the same order, but for what is absent
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def attend(backend: str, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    out = nsa_attention(q, k, v, gates, geometry=GEOMETRY, kernels=backend)
    assert isinstance(out, Tensor)
    return out.square().sum()


def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((GROUPS * HEADS, K), (GROUPS, K), (GROUPS, K), (GROUPS * HEADS, 3))
    inputs = [torch.randn(1, LENGTH, *shape, generator=generator, requires_grad=True) for shape in shapes]
    return torch.autograd.grad(run(*inputs), inputs)


def under_autocast(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cast(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(*inputs)

    return cast


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "checkpointed": lambda run: lambda *x: checkpoint(run, *x, use_reentrant=False),
    "selectively": lambda run: lambda *x: checkpoint(run, *x, use_reentrant=False, context_fn=keep_operators),
    "autocast": under_autocast,
    "compiled": lambda run: torch.compile(run, fullgraph=True),
}


@pytest.mark.nightly  # interpreted: half a minute of CPU time each
@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("backend", WITH_LAYER)
def test_gradients_are_those_of_a_plain_call(backend, how):
    def run(*inputs: Tensor) -> Tensor:
        return attend(backend, *inputs)

    transformed = gradients(TRANSFORMS[how](run))
    for got, plain, exact in zip(
        transformed, gradients(run), gradients(lambda *x: attend("reference", *x)), strict=True
    ):
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
