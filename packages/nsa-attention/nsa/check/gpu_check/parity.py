"""Parity and autocast checks: kernels against the reference in fp64 on the CPU: outputs, gradients, selected blocks.

In fp32 the error itself is bounded. In half precision it may be twice the error of plain PyTorch operators for the
same formula on the same device, every intermediate rounded to that dtype.

Under autocast kernels compute in their inputs' dtype, and a module is as accurate as PyTorch's. The portable backend is
checked there too: it runs where Triton does not, and autocast would change its matrix products.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, needs_gpu
from nsa.check.gpu_check.sizes import BACKEND, CheckSizes, KernelSizes, attention, tokens
from nsa.check.prove import AUTOCAST_LIMIT, autocast_error
from nsa.kernels.registry import BACKENDS, BRANCHES
from nsa.kernels.self_check.comparison import FP32_LIMIT, HALF_LIMIT, SELECTION_LIMIT, blocks_error, relative_rms
from nsa.kernels.self_check.kernel_call import NAMES, KernelCall

_AUTOCAST_BACKENDS = (BACKEND, "portable")


def parity_checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    dtypes = dict.fromkeys(dtype for _, dtypes in scope.kernels for dtype in dtypes)
    for dtype in dtypes:
        for branch in (branch for branch in BRANCHES if branch != "select"):
            yield GpuCheck("parity", f"{branch}, {dtype}", partial(_attention, scope, branch, dtype))
        yield GpuCheck("parity", f"choice of blocks, {dtype}", partial(_selection, scope, dtype))


def _sizes(scope: CheckSizes, dtype: str) -> Iterator[KernelSizes]:
    return (sizes for sizes, dtypes in scope.kernels if dtype in dtypes)


def _attention(scope: CheckSizes, branch: str, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    from triton.runtime.errors import OutOfResources

    worst: dict[str, tuple[float, str]] = {}
    too_large = []
    for sizes in _sizes(scope, dtype):
        try:
            figures = _figures(sizes.call(TORCH_DTYPES[dtype]), branch, scope.device)
        except OutOfResources as error:  # nothing was launched, so the other sizes can still be checked
            too_large.append(f"{sizes}: {error}")
            continue
        for name, figure in zip(NAMES, figures, strict=True):
            kind = "output" if name == "out" else "gradients"
            if kind not in worst or not figure <= worst[kind][0]:  # NaN is the worst
                worst[kind] = (figure, f"{name}: {sizes}")
    limit, unit = (FP32_LIMIT, "relative RMS") if dtype == "fp32" else (HALF_LIMIT, "× plain PyTorch's error")
    for kind in ("output", "gradients"):
        figure, where = worst.get(kind, (torch.inf, "nothing could be checked"))
        yield bounded(f"{branch} {kind}, {dtype}, {unit}", figure, limit, where)
    yield bounded(f"{branch}, {dtype}, sizes that do not fit on the GPU", len(too_large), 0, "; ".join(too_large))


def _figures(call: KernelCall, branch: str, device: torch.device) -> list[float]:
    truth = call.truth(branch)
    ours = [relative_rms(x, exact) for x, exact in zip(call.by_kernel(BACKEND, branch, device), truth, strict=True)]
    if call.dtype == torch.float32:
        return ours
    plain = [relative_rms(x, exact) for x, exact in zip(call.by_plain_pytorch(branch, device), truth, strict=True)]
    return [mine / max(its, torch.finfo(torch.float64).tiny) for mine, its in zip(ours, plain, strict=True)]


def _selection(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    worst, where = 0.0, ""
    for sizes in _sizes(scope, dtype):
        call = sizes.call(TORCH_DTYPES[dtype])
        q, k = (x.to(scope.device) for x in (call.q_BSGRK, call.compressed[0]))
        pos, first = (x.to(scope.device) for x in (call.layout.pos_BS, call.layout.first_BS))
        choices = {"with the compressed branch": _with_the_compressed_branch(call, q, k, pos, first)}
        if dtype == "fp32":  # the module uses the call above; this one has its own log-sum-exp
            choices["alone"] = BACKENDS[BACKEND].functions.select(q, k, pos, first, **call.choosing)
        for how, idx_BSGN in choices.items():
            error = blocks_error(q, k, pos, first, idx_BSGN, sizes.shape.geometry, call.scale).max().item()
            if not error <= worst:
                worst, where = error, f"{how}: {sizes}"
    yield bounded(f"scores of other blocks than the reference's, {dtype}, relative", worst, SELECTION_LIMIT, where)


def _with_the_compressed_branch(call: KernelCall, q: Tensor, k: Tensor, pos: Tensor, first: Tensor) -> Tensor:
    """As in the module: one pass computes the branch's output and the selection."""
    both = BACKENDS[BACKEND].compressed_and_select
    assert both is not None
    return both(q, k, call.compressed[1].to(q.device), pos, first, **call.choosing)[1]


def autocast_checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for backend in _AUTOCAST_BACKENDS:
        yield GpuCheck("autocast", f"kernels in fp32, {backend}", partial(_autocast_kernels, scope, backend))
    yield GpuCheck("autocast", "bf16 from fp32 weights", partial(_autocast_module, scope))


def _autocast_kernels(scope: CheckSizes, backend: str) -> Iterator[CheckResult | MeasuredTable]:
    sizes = next(sizes for sizes, dtypes in scope.kernels if "fp32" in dtypes)
    call = sizes.call(torch.float32)
    figures: dict[str, float] = {}
    q, k = (x.to(scope.device) for x in (call.q_BSGRK, call.compressed[0]))
    pos, first = (x.to(scope.device) for x in (call.layout.pos_BS, call.layout.first_BS))
    with torch.autocast(scope.device.type, torch.bfloat16):
        for branch in (branch for branch in BRANCHES if branch != "select"):
            got = call.by_kernel(backend, branch, scope.device)
            truth = zip(NAMES, got, call.truth(branch), strict=True)
            figures |= {f"{branch} {name}": relative_rms(x, exact) for name, x, exact in truth}
        idx_BSGN = BACKENDS[backend].functions.select(q, k, pos, first, **call.choosing)
    worst = max(figures, key=lambda name: figures[name])
    yield bounded(f"outputs and gradients in fp32, {backend}, relative RMS", figures[worst], FP32_LIMIT, worst)
    with_others = (idx_BSGN != BACKENDS[backend].functions.select(q, k, pos, first, **call.choosing)).any(-1)
    yield bounded(f"queries that choose other blocks, {backend}", int(with_others.sum()), 0)


def _autocast_module(scope: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    claim = "bf16 from fp32 weights, window over everything, × PyTorch attention's error"
    if not scope.is_gpu:  # Triton's interpreter computes bf16 products wrongly
        yield needs_gpu(claim)
        return
    module = attention(scope, torch.float32, w=scope.module.length)
    yield bounded(claim, autocast_error(module, "sliding", tokens(scope, torch.float32)), AUTOCAST_LIMIT)
