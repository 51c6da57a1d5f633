"""Causality check of the module: later tokens change no bit of earlier outputs and get no gradient from them."""

from collections.abc import Iterator
from functools import partial

import torch

from nsa.bench.case import TORCH_DTYPES
from nsa.verify.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded
from nsa.verify.gpu_check.sizes import CheckSizes, attention, tokens

_LARGE = 30.0  # the changed future is this many times larger than the past, and still finite in fp16


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("causality", f"forward, {dtype}", partial(_outputs, scope, dtype))
        yield GpuCheck("causality", f"backward, {dtype}", partial(_gradients, scope, dtype))


def _outputs(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module, x = attention(scope, TORCH_DTYPES[dtype]), tokens(scope, TORCH_DTYPES[dtype])
    changed, ignored = 0, []
    with torch.no_grad():
        clean = module(x)
        for cut in scope.module.cuts:
            other = x.clone()
            other[:, cut:] = _LARGE * tokens(scope, TORCH_DTYPES[dtype], seed=2)[:, cut:]
            out = module(other)
            changed += int((out[:, :cut] != clean[:, :cut]).sum())
            if torch.equal(out[:, cut:], clean[:, cut:]):
                ignored.append(cut)
    yield bounded(f"values before a changed token that change, {dtype}", changed, 0)
    yield bounded(f"changed tokens that change nothing after them, {dtype}", len(ignored), 0)


def _gradients(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module, x = attention(scope, TORCH_DTYPES[dtype]), tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    after, before = 0, 0
    out = module(x)
    for cut in scope.module.cuts:
        (dx,) = torch.autograd.grad(out[:, :cut].float().square().sum(), x, retain_graph=True)
        after += int((dx[:, cut:] != 0).sum())
        before += int((dx[:, :cut] == 0).all())
    yield bounded(f"gradients that reach a later token, {dtype}", after, 0)
    yield bounded(f"losses without any gradient, {dtype}", before, 0)
