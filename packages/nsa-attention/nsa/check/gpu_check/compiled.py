"""torch.compile check: one graph, same results as eager; and no host synchronization in a step."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, needs_gpu
from nsa.check.gpu_check.near_ties import ForwardRecorder, RecordedForward, compared, compared_gradients, limit
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("compile", f"one graph, {dtype}", partial(_compiled, scope, dtype))
    dtype = scope.module_dtypes[-1]
    for packed in (False, True):
        name = f"host waits{', packed documents' * packed}, {dtype}"
        yield GpuCheck("compile", name, partial(_host_waits, scope, dtype, packed))


def _compiled(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module = attention(scope, TORCH_DTYPES[dtype], ForwardRecorder())
    x = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    compiled: Callable[[Tensor], Tensor] = torch.compile(module, fullgraph=True, backend=scope.compiler)
    got = RecordedForward.of(module, compiled(x))
    want = RecordedForward.of(module, module(x))
    claim = f"compiled ({scope.compiler}) = eager, {dtype}"
    yield from compared(claim, module, got, want)
    yield compared_gradients(claim, module, x, got, want, limit(TORCH_DTYPES[dtype]))


def _host_waits(scope: CheckSizes, dtype: str, packed: bool) -> Iterator[CheckResult | MeasuredTable]:
    """PyTorch's sync debug mode raises at the first synchronizing call, which ends this check as failed."""
    claim = f"calls that make the host wait, forward and backward{', packed documents' * packed}, {dtype}"
    if not scope.is_gpu:
        yield needs_gpu(claim)
        return
    module = attention(scope, TORCH_DTYPES[dtype])
    x, n = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_(), scope.module.length
    ends = torch.tensor([0, 1, n // 3, n // 3, n], dtype=torch.int32, device=scope.device) if packed else None
    _step(module, x, ends)  # compiling a kernel may synchronize
    torch.cuda.synchronize(scope.device)
    torch.cuda.set_sync_debug_mode("error")
    _step(module, x, ends)
    torch.cuda.set_sync_debug_mode("default")
    yield bounded(claim, 0, 0)


def _step(module: torch.nn.Module, x: Tensor, cu_doc_lens: Tensor | None) -> None:
    out = module(x, cu_doc_lens=cu_doc_lens)
    torch.autograd.grad(out, (x, *module.parameters()), torch.ones_like(out))
