"""Peak memory of forward and backward above the inputs, measured in a separate process.

On a CPU resident memory; on a GPU what PyTorch's allocator has allocated.
"""

import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nsa.bench.case import SHAPES, TORCH_DTYPES, BenchCase, BenchTask
from nsa.bench.implementations import BenchImplementation, all_implementations
from nsa.bench.machine import pinned
from nsa.errors import ConfigError

_WARM_LENGTH = 256


def measure_memory(
    implementation: BenchImplementation, task: BenchTask, shape: str, *, threads: int, timeout_s: float
) -> dict[str, Any]:
    """Peak memory above what the inputs take, in MiB."""
    answer: dict[str, Any] = dict(
        length=task.length, dtype=task.dtype, shape=shape, contender=implementation.name, peak_mib=None, absent=""
    )
    if reason := implementation.refusal(task):
        return answer | {"absent": reason}
    arguments = json.dumps([implementation.name, shape, task.length, task.dtype, threads, task.device])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nsa.bench.memory", arguments], capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return answer | {"absent": f"not done after {timeout_s:.0f} s"}
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return answer | {"absent": last_line[0]}
    return answer | {"peak_mib": json.loads(done.stdout)}


def peak_above_inputs_mib(
    name: str, shape: str, length: int, dtype: str, threads: int, device_name: str = "cpu"
) -> float:
    """Call this in a process that has done nothing else."""
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
        peak = _peak_mib(device)
        del results
    return peak - before


def _peak_mib(device: torch.device) -> float:
    return _status_mib("VmHWM") if device.type == "cpu" else torch.cuda.max_memory_allocated(device) / 2**20


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
    sys.stdout.write(json.dumps(peak_above_inputs_mib(*json.loads(sys.argv[1]))))
