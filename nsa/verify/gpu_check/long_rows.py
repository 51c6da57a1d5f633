"""Long-row check: attention over 8,192 tokens against the portable backend on the same device, with gradients."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from nsa.bench.case import TORCH_DTYPES
from nsa.kernels.registry import BackendRequest
from nsa.kernels.self_check.comparison import relative_rms
from nsa.verify.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded
from nsa.verify.gpu_check.near_ties import RecordedForward, RecordingAttention, compared, limit, same_selection
from nsa.verify.gpu_check.sizes import CheckSizes, attention, tokens


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("long", f"{scope.long.length} tokens, {dtype}", partial(_against_portable, scope, dtype))


def _against_portable(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    scope = replace(scope, module=scope.long)
    module = attention(scope, TORCH_DTYPES[dtype], RecordingAttention)
    x = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    got_out = module(x)
    got = RecordedForward(got_out, module.idx_BSGN)
    module.kernels = BackendRequest(*["portable"] * 4)
    want_out = module(x)
    want = RecordedForward(want_out, module.idx_BSGN)
    claim = f"{scope.long.length} tokens = portable, {dtype}"
    yield from compared(claim, module, got, want)
    # Queries whose selection differs are left out of the loss, and so out of every gradient.
    dout = torch.ones_like(want_out) * same_selection(got, want)[..., None]
    leaves = {"x": x, **dict(module.named_parameters())}
    mine, its = (torch.autograd.grad(out, list(leaves.values()), dout) for out in (got_out, want_out))
    figures = {name: relative_rms(a, b) for name, a, b in zip(leaves, mine, its, strict=True)}
    worst = max(figures, key=lambda name: figures[name])
    # Sums over thousands of tokens round differently in two orders.
    most = 10 * limit(TORCH_DTYPES[dtype]) if dtype == "fp32" else limit(TORCH_DTYPES[dtype])
    yield bounded(f"{claim}, gradients, relative RMS", figures[worst], most, worst)
