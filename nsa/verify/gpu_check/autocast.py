"""Autocast check: kernels compute in their inputs' dtype under autocast, and a module is as accurate as PyTorch's.

The portable backend is checked too: it is the default on a GPU, and autocast would change its matrix products.
"""

from collections.abc import Iterator
from functools import partial

import torch

from nsa.kernels.registry import BACKENDS, BRANCHES
from nsa.verify.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, needs_gpu
from nsa.verify.gpu_check.kernel_call import KernelCall
from nsa.verify.gpu_check.parity import FP32_LIMIT, relative_rms
from nsa.verify.gpu_check.sizes import BACKEND, CheckSizes, attention, tokens
from nsa.verify.prove import AUTOCAST_LIMIT, autocast_error

_CHECKED = (BACKEND, "portable")


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for backend in _CHECKED:
        yield GpuCheck("autocast", f"kernels in fp32, {backend}", partial(_kernels, scope, backend))
    yield GpuCheck("autocast", "bf16 from fp32 weights", partial(_module, scope))


def _kernels(scope: CheckSizes, backend: str) -> Iterator[CheckResult | MeasuredTable]:
    sizes = next(sizes for sizes, dtypes in scope.kernels if "fp32" in dtypes)
    call = KernelCall(sizes, torch.float32)
    figures: dict[str, float] = {}
    q, k = (x.to(scope.device) for x in (call.q_BSGRK, call.compressed[0]))
    pos, first = (x.to(scope.device) for x in (call.layout.pos_BS, call.layout.first_BS))
    with torch.autocast(scope.device.type, torch.bfloat16):
        for branch in (branch for branch in BRANCHES if branch != "select"):
            got = call.by_kernel(backend, branch, scope.device)
            truth = zip(("out", "dq", "dk", "dv"), got, call.truth(branch), strict=True)
            figures |= {f"{branch} {name}": relative_rms(x, exact) for name, x, exact in truth}
        idx_BSGN = BACKENDS[backend].functions.select(q, k, pos, first, **call.choosing)
    worst = max(figures, key=lambda name: figures[name])
    yield bounded(f"outputs and gradients in fp32, {backend}, relative RMS", figures[worst], FP32_LIMIT, worst)
    with_others = (idx_BSGN != BACKENDS[backend].functions.select(q, k, pos, first, **call.choosing)).any(-1)
    yield bounded(f"queries that choose other blocks, {backend}", int(with_others.sum()), 0)


def _module(scope: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    claim = "bf16 from fp32 weights, window over everything, × PyTorch attention's error"
    if not scope.is_gpu:  # Triton's interpreter computes bf16 products wrongly
        yield needs_gpu(claim)
        return
    module = attention(scope, torch.float32, w=scope.module.length)
    yield bounded(claim, autocast_error(module, "sliding", tokens(scope, torch.float32)), AUTOCAST_LIMIT)
