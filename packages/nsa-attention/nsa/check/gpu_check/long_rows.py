"""Long-row check: attention over 8,192 tokens against the portable backend on the same device, with gradients."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable
from nsa.check.gpu_check.near_ties import ForwardRecorder, RecordedForward, compared, compared_gradients, limit
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens
from nsa.kernels.registry import BackendRequest


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("long", f"{scope.long.length} tokens, {dtype}", partial(_against_portable, scope, dtype))


def _against_portable(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    scope = replace(scope, module=scope.long)
    module = attention(scope, TORCH_DTYPES[dtype], ForwardRecorder())
    x = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    got = RecordedForward.of(module, module(x))
    module.kernels = BackendRequest(*["portable"] * 4)
    want = RecordedForward.of(module, module(x))
    claim = f"{scope.long.length} tokens = portable, {dtype}"
    yield from compared(claim, module, got, want)
    # Sums over thousands of tokens round differently in two orders.
    most = limit(TORCH_DTYPES[dtype]) * (10 if dtype == "fp32" else 1)
    yield compared_gradients(claim, module, x, got, want, most)
