"""Quick correctness checks of attention on this device with the kernels that would run here (`nsa doctor --prove`).

Each compares with a definition (dense attention, the whole sequence, counted reads), not with another backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.bench.case import BenchShape
from nsa.check.cases import MODULE, ModuleCase
from nsa.check.comparison import PLAIN_FACTOR, CheckResult, bounded, tolerance, worst_row_error
from nsa.check.module_checks import causal_outputs, second_run, token_by_token
from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.core.rope import rotate
from nsa.kernels.precision import widest_float

_DENSE: dict[str, dict[str, Any]] = {"sliding": dict(w=MODULE.length), "selected": dict(n_sel=10)}
"""Sizes with which a branch attends to all keys."""
_SHARP = 2.0  # standard deviation of queries and keys: logits of ±10 and more, sensitive to rounded scores


def prove(
    device: torch.device, dtype: str, n_heads: int, n_kv_groups: int, d_k: int, d_v: int
) -> Iterator[CheckResult]:
    """Yield each result as soon as it is known."""
    shape = BenchShape(n_heads, n_kv_groups, d_k, d_v, MODULE.shape.geometry)
    case = replace(MODULE, shape=shape, device=device, dtype=dtype)
    yield _against_dense(case, "window over everything = dense attention", "sliding")
    yield _against_dense(case, "all blocks selected = dense attention", "selected")
    yield from token_by_token(case)
    yield _packed_against_alone(case)
    yield from causal_outputs(case)
    yield _read_difference(case)
    yield next(second_run(case))
    yield error_under_autocast(case)


@torch.no_grad()
def _against_dense(case: ModuleCase, claim: str, branch: str) -> CheckResult:
    """One branch alone (gate 1, others 0) against PyTorch attention in fp64 over that branch's keys and values."""
    module, x = case.attention(**_DENSE[branch]), case.tokens()
    assert module.gates is not None
    module.gates.proj.weight.zero_()
    module.gates.proj.bias.view(-1, len(BRANCH_ORDER)).fill_(-1e4)[:, BRANCH_ORDER.index(branch)] = 1e4
    dense = _dense(module, *(y.cpu().double() for y in _projected(module, branch, x)))
    want = F.linear(dense.flatten(2), module.w_out.weight.cpu().double())
    return bounded(f"{claim}, {case.dtype}", worst_row_error(module(x), want), tolerance(case.torch_dtype))


def error_under_autocast(case: ModuleCase) -> CheckResult:
    """Error of kernels under bf16 autocast from fp32 weights, by that of PyTorch's attention on the same inputs in the
    same mode: the worst of output, dq, dk and dv of branches that attend to all keys."""
    case = replace(case, dtype="fp32")
    errors = {branch: _autocast_error(case.attention(**_DENSE[branch]), branch, case.tokens()) for branch in _DENSE}
    branch = max(errors, key=lambda branch: errors[branch])
    return bounded("error under autocast, × PyTorch attention's", errors[branch], PLAIN_FACTOR, branch)


def _autocast_error(module: NSAAttention, branch: str, x: Tensor) -> float:
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        for weight in (module.w_q.weight, module.w_k.weight):
            weight *= _SHARP / (weight.std() * weight.shape[1] ** 0.5)
        q, k, v = _projected(module, branch, x)
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    truth = _output_and_gradients(_dense, module, [y.detach().cpu().double().requires_grad_() for y in leaves])
    with torch.autocast(x.device.type, torch.bfloat16):
        ours = _output_and_gradients(partial(_branch, branch=branch), module, leaves)
        plain = _output_and_gradients(_dense, module, leaves)
    return max(
        ((mine - want).norm() / (its - want).norm()).item() for mine, its, want in zip(ours, plain, truth, strict=True)
    )


def _projected(module: NSAAttention, branch: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A branch's queries [B, S, G, R, K], keys [B, S, G, K] and values [B, S, G, V]."""
    b, groups = BRANCH_ORDER.index(branch), module.n_kv_groups
    wide = widest_float(x.device)
    tables = module.rotary.tables(torch.arange(x.shape[1], device=x.device)[None], wide)
    q = rotate(module.w_q(x).unflatten(-1, (groups, -1, module.d_k)), tables)
    k, v = (
        w(x).unflatten(-1, (groups, -1, width)) for w, width in ((module.w_k, module.d_k), (module.w_v, module.d_v))
    )
    k, v = (streams[..., min(b, streams.shape[-2] - 1), :] for streams in (k, v))  # shared, or one per branch
    return q, rotate(k, tables), v


def _dense(module: NSAAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch attention, [B, S, G, R, V]; its fused kernels need one width for keys and values."""
    k, v = (y.repeat_interleave(module.strategy.shape.heads_per_group, 2) for y in (k, v))
    width = max(module.d_k, module.d_v)
    q, k, v = (F.pad(y.transpose(1, 2), (0, width - y.shape[-1])) for y in (q.flatten(2, 3), k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scale)[..., : module.d_v]
    return out.transpose(1, 2).unflatten(2, (module.n_kv_groups, -1))


def _branch(module: NSAAttention, q: Tensor, k: Tensor, v: Tensor, branch: str) -> Tensor:
    """One branch by the kernels that run here."""
    run, g = module.plan(q.device, q.dtype).functions, module.geometry
    pos_BS = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
    start_BS = torch.zeros_like(pos_BS)
    if branch == "sliding":
        out = run.sliding(q, k, v, pos_BS, start_BS, geometry=g, scale=module.scale)
    else:
        block_N, own_BS11 = torch.arange(g.n_sel, device=q.device), (pos_BS // g.l_sel)[..., None, None]
        idx_BSGN = block_N.where(block_N <= own_BS11, -1).expand(-1, -1, q.shape[2], -1).to(torch.int32)
        out = run.selected(q, k, v, idx_BSGN, pos_BS, start_BS, geometry=g, scale=module.scale)
    assert isinstance(out, Tensor)
    return out


def _output_and_gradients(run: Callable[..., Tensor], module: NSAAttention, leaves: list[Tensor]) -> list[Tensor]:
    out = run(module, *leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad((out * weight).sum(), leaves))]


@torch.no_grad()
def _packed_against_alone(case: ModuleCase) -> CheckResult:
    module, x = case.attention(), case.tokens()
    lengths = [5, 200, 1, case.length - 206]
    ends = torch.tensor([0, *lengths], device=x.device).cumsum(0).int()
    alone = torch.cat([module(part) for part in x.split(lengths, 1)], 1)
    error = worst_row_error(module(x, cu_doc_lens=ends), alone)
    return bounded(f"packed documents = each alone, {case.dtype}", error, tolerance(case.torch_dtype))


@torch.no_grad()
def _read_difference(case: ModuleCase) -> CheckResult:
    module = case.attention()
    with probing(module) as probes:
        module(case.tokens())
    figures = probes[""].figures
    difference = abs(int(figures["reads_act_total"]) - int(figures["reads_pred"]))
    return bounded(f"reads counted − reads predicted, {case.dtype}", difference, 0)
