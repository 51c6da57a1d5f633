"""Self-check: runs again what decides whether `auto` takes the Triton kernels on this GPU, and rewrites the records."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from nsa.bench.shapes import SHAPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded, fact
from nsa.check.gpu_check.sizes import CheckSizes
from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.self_check.record import RecordStore, key_for, recorded
from nsa.kernels.self_check.verification import CheckRequest, verify

_REHEARSED = ("sliding", "mix, 3 gates per group in float32")  # parts that are quick when interpreted


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    run = _on_gpu if scope.is_gpu else _rehearsed
    yield GpuCheck("self-check", "Triton kernels, before 'auto' takes them", lambda: run(scope))


def _rehearsed(scope: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    key = key_for(scope.device, torch.float32, scope.module.shape.kernel, parts=_REHEARSED)
    with tempfile.TemporaryDirectory() as folder:
        yield from _checked(CheckRequest(scope.device, key, Path(folder)))


def _on_gpu(scope: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    """The base shape in bf16, and every shape and dtype that was checked on a GPU of this name before."""
    device, folder = torch.device("cuda", torch.cuda.current_device()), cache_folder()
    gpu = torch.cuda.get_device_name(device)
    for dtype, shape, tuned in dict.fromkeys(((torch.bfloat16, SHAPES["base"].kernel, False), *recorded(folder, gpu))):
        yield from _checked(CheckRequest(device, key_for(device, dtype, shape, tuned=tuned), folder))


def _checked(request: CheckRequest) -> Iterator[CheckResult | MeasuredTable]:
    key = request.key
    groups, heads, d_k, d_v = key.shape
    what = f"{key.dtype}, {heads} heads/group, {groups} groups, {d_k}/{d_v}, blocks {key.geometry}"
    verdict = verify(request, rerun=True)
    store = RecordStore(request.folder, key)
    record = store.read()
    wrong = sum(not figure.right for figure in record.figures) if record else 0
    failed = max(wrong, int(not verdict.passed))
    yield bounded(f"figures that do not hold, {what}", failed, 0, verdict.reason)
    if record:
        yield fact(f"seconds, {what}", ", ".join(f"{name} {took:g}" for name, took in record.seconds.items()))
        yield fact(f"record, {what}", store.path.name)
