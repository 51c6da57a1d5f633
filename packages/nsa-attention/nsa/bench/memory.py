"""Peak memory of forward and backward above the inputs, measured in a separate process.

On a CPU resident memory; on a GPU what PyTorch's allocator has allocated.
"""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nsa.bench.case import SHAPES, TORCH_DTYPES, BenchCase, BenchTask
from nsa.bench.implementations import BenchImplementation, all_implementations
from nsa.bench.machine import pinned
from nsa.child_process import ChildFailed, ChildProcess, answer_parent
from nsa.errors import ConfigError

_WARM_LENGTH = 256


def measure_memory(
    implementation: BenchImplementation, task: BenchTask, shape: str, *, threads: int, timeout_s: float
) -> dict[str, Any]:
    """Peak memory above what the inputs take, in MiB."""
    answer: dict[str, Any] = dict(
        length=task.length, dtype=task.dtype, shape=shape, implementation=implementation.name, peak_mib=None, absent=""
    )
    if reason := implementation.refusal(task):
        return answer | {"absent": reason}
    try:
        with ChildProcess("it", ["-m", "nsa.bench.memory"]) as child:
            child.send(
                name=implementation.name, shape=shape, length=task.length, dtype=task.dtype, threads=threads,
                device_name=task.device,
            )  # fmt: skip
            for message in child.messages(limit_s=timeout_s):
                answer |= message
    except ChildFailed as error:
        answer["absent"] = str(error)
    return answer


def _measure_peak(
    send: Callable[..., None], *, name: str, shape: str, length: int, dtype: str, threads: int, device_name: str
) -> None:
    """Measure in a process that has done nothing else."""
    implementation = all_implementations()[name]
    task = BenchTask("attention", SHAPES[shape], length, dtype, backward=True, device=device_name)
    device = torch.device(device_name)
    with pinned(threads):
        warm = BenchCase(task.shape, _WARM_LENGTH, TORCH_DTYPES[dtype], device=device)
        implementation.make["attention"](warm, replace(task, length=_WARM_LENGTH)).forward_backward()
        case = BenchCase(task.shape, length, TORCH_DTYPES[dtype], device=device)
        runner = implementation.make["attention"](case, task)
        del warm
        gc.collect()
        before = _reset_peak_mib(device)
        results = runner.forward_backward()
        peak = _status_mib("VmHWM") if device.type == "cpu" else torch.cuda.max_memory_allocated(device) / 2**20
        del results
    send(peak_mib=peak - before)


def _reset_peak_mib(device: torch.device) -> float:
    """Reset the process's peak memory to its current memory and return that.

    On a CPU the allocator first returns freed memory to the system: reused, it would not count.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ConfigError(f"/proc/self/status has no {field}: memory is measured by it. Run this on Linux.")


if __name__ == "__main__":
    answer_parent(_measure_peak)
