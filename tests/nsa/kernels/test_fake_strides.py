"""Fake tensors of the operators have the shapes, dtypes and strides of the real ones, also for permuted inputs.

Inductor plans memory by them: a wrong stride is read as wrong numbers.
"""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from nsa.core.branches import BRANCH_ORDER
from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels import ops
from nsa.kernels.registry import BACKENDS
from tests.backends import RUN_HERE

GEOMETRY = Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12)
LENGTH, GROUPS, HEADS, K, V = 40, 2, 3, 16, 24
REST = (GEOMETRY.ints, 0.25)
CHECKS = ("test_schema", "test_faketensor")
WITH_OPERATORS = [name for name in RUN_HERE if name in ops._KERNELS]
FUSED = [name for name in WITH_OPERATORS if BACKENDS[name].compressed_and_select is not None]
WHOLE = [name for name in WITH_OPERATORS if BACKENDS[name].layer is not None]
LAYOUTS = ("contiguous", "heads_first", "width_outside")


def tensor(layout: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, tokens, …, width] with axes in another order in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    if layout == "heads_first":  # as attention libraries keep them
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "width_outside":
        return values.movedim(-1, 1).contiguous().movedim(1, -1)
    return values


def rows(layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, dout, lse, gates and the log-sum-exps' gradient."""
    heads = (1, LENGTH, GROUPS, HEADS)
    return (
        tensor(layout, *heads, K), tensor(layout, *heads, V), tensor("contiguous", *heads),
        tensor(layout, *heads, 3), tensor("contiguous", *heads),
    )  # fmt: skip


POS, START, FIRST, BEGIN, _ = packed_layout(torch.tensor([0, 17, 40]), LENGTH, GEOMETRY)


def keys(branch: str, layout: str) -> tuple[Tensor, Tensor]:
    n = BEGIN.shape[1] if branch == "compressed" else LENGTH
    return tensor(layout, 1, n, GROUPS, K), tensor(layout, 1, n, GROUPS, V)


def chosen(branch: str) -> Tensor | None:
    if branch != "selected":
        return None
    own = POS[..., None, None].expand(1, LENGTH, GROUPS, 4) // GEOMETRY.l_sel
    block = torch.arange(4, dtype=torch.int32).expand(1, LENGTH, GROUPS, 4)
    return torch.where(block <= own, block, -1).to(torch.int32)


def branch_inputs(branch: str, layout: str) -> tuple[Tensor | None, ...]:
    """Return the arguments of `nsa::attend` for a branch."""
    return rows(layout)[0], *keys(branch, layout), chosen(branch), POS, FIRST if branch == "compressed" else START


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("branch", ["sliding", "compressed", "selected"])
@pytest.mark.parametrize("backend", WITH_OPERATORS)
def test_attention_and_its_gradients(backend, branch, layout):
    inputs = branch_inputs(branch, layout)
    opcheck(ops._attend, (*inputs, branch, *REST, backend), test_utils=CHECKS)
    _, dout, _, _, dlse = rows(layout)
    out, lse = ops._attend(*inputs, branch, *REST, backend)
    for gradient in (None, dlse):
        back = (dout, *inputs, out, lse, gradient, branch, *REST, backend)
        opcheck(ops._attend_backward, back, test_utils=CHECKS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", WITH_OPERATORS)
def test_selection(backend, layout):
    opcheck(
        ops._select, (rows(layout)[0], keys("compressed", layout)[0], POS, FIRST, *REST, backend), test_utils=CHECKS
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", FUSED)
def test_compressed_attention_with_selection_and_the_gate_mix(backend, layout):
    q, dout, _, gates, _ = rows(layout)
    inputs = (q, *keys("compressed", layout), POS, FIRST, *REST, backend)
    opcheck(ops._compressed_and_select, inputs, test_utils=CHECKS)
    opcheck(ops._mix, (gates, dout, dout, dout, backend), test_utils=CHECKS)
    opcheck(ops._mix_backward, (dout, gates, dout, dout, dout, backend), test_utils=CHECKS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", WHOLE)
def test_a_whole_layer_and_its_gradients(backend, layout):
    q, dout, dlse, gates, _ = rows(layout)
    places = {"compressed": (POS, FIRST)}
    branches = [(*keys(branch, layout), *places.get(branch, (POS, START))) for branch in BRANCH_ORDER]
    inputs = (q, gates, *(x for branch in branches for x in branch))
    rest = (*REST, False, backend)
    opcheck(ops._attend_layer, (*inputs, *rest), test_utils=CHECKS)
    _, *outputs = ops._attend_layer(*inputs, *rest)
    for gradients in ((None, None, None), (dlse, None, dlse)):
        back = (dout, *gradients, *outputs, *inputs, *rest)
        opcheck(ops._attend_layer_backward, back, test_utils=CHECKS)
