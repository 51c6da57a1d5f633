"""Second-device check: kernels on cuda:1 while cuda:0 is the current device give the bits of cuda:0."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, fact, needs_gpu
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes[:1]:
        yield GpuCheck("devices", f"second device, {dtype}", partial(_second_device, scope, dtype))


def _second_device(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    claim = f"values on the second device that differ from the first, {dtype}"
    if not scope.is_gpu:
        yield needs_gpu(claim)
        return
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    if len(names) < 2:
        yield fact(claim, "not checked: needs two GPUs")
        return
    if names[0] != names[1]:  # other tile sizes, so other bits
        yield fact(claim, f"not checked: {names[0]} and {names[1]} differ")
        return
    yield bounded(claim, differing_bits(scope, dtype, torch.device("cuda:0"), torch.device("cuda:1")), 0)


def differing_bits(scope: CheckSizes, dtype: str, first: torch.device, second: torch.device) -> int:
    """Values of output and gradients that differ between two devices; the current device stays as it is."""
    rows = []
    for device in (first, second):
        here = replace(scope, device=device)
        module = attention(here, TORCH_DTYPES[dtype])
        x = tokens(here, TORCH_DTYPES[dtype]).requires_grad_()
        out = module(x)
        gradients = torch.autograd.grad(out.float().square().sum(), (x, *module.parameters()))
        rows.append([value.detach().cpu() for value in (out, *gradients)])
    return sum(int((a != b).sum()) for a, b in zip(*rows, strict=True))
