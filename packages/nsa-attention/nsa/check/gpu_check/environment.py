"""Environment check: hardware and software versions, and whether every kernel can run here."""

from collections.abc import Iterator

import torch

from nsa.bench.case import TORCH_DTYPES
from nsa.bench.machine import describe_device, describe_machine, triton_version
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, fact, needs_gpu
from nsa.check.gpu_check.sizes import BACKEND, CheckSizes
from nsa.kernels.registry import BACKENDS, BRANCHES


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    yield GpuCheck("environment", "software and hardware", lambda: _environment(scope))


def _environment(scope: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    machine = describe_machine()
    commit = (machine["commit"] or "unknown")[:10] + (" with changes" if machine["uncommitted_changes"] else "")
    if scope.is_gpu:
        gpu = describe_device(scope.device)
        yield MeasuredTable(gpu, [], [], "gpu")
        yield fact("GPU", f"{gpu['name']}, {gpu['units']} units, {gpu['memory_gib']} GiB")
        yield fact("capability, driver", f"{gpu['capability']}, {gpu['driver']}")
        yield fact("runtime", gpu["runtime"])
    else:
        yield needs_gpu("GPU, capability, driver")
    yield fact("torch, triton", f"{torch.__version__}, {triton_version()}")
    yield fact("nsa, commit", f"{machine['nsa']}, {commit}")
    yield _kernels_can_run(scope)


def _kernels_can_run(scope: CheckSizes) -> CheckResult:
    refused = {}
    for sizes, dtypes in scope.kernels:
        for branch in BRANCHES:
            for dtype in dtypes:
                if reason := BACKENDS[BACKEND].why_not(branch, scope.device, TORCH_DTYPES[dtype], sizes.shape.kernel):
                    refused[f"{branch}, {dtype}, {sizes}"] = reason
    note = "; ".join(f"{what}: {why}" for what, why in list(refused.items())[:2])
    return bounded("kernels that cannot run here", len(refused), 0, note)
