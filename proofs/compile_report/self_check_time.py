"""Measure how long compiling the kernels of the self-check takes, without a GPU.

    python -m proofs.compile_report.self_check_time [--shape base] [--dtype bf16] [--threads 1] sm_80 sm_90

Compiles what the self-check compiles on that GPU, with an empty cache, ptxas included, and runs nothing. On a
busy machine only the CPU seconds mean something. The longest kernel is the least that any number of threads needs.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton

from nsa.bench.case import SHAPES, TORCH_DTYPES
from nsa.check.cases import self_check_case
from nsa.check.kernel_call import CPU
from nsa.check.kernel_checks import compile_ahead, parts
from nsa.kernels.triton import tuning
from proofs.ptx_emulator.driver import EmulatorDriver


@dataclass(frozen=True)
class KernelTime:
    name: str
    seconds: float
    python_seconds: float
    """Seconds to build the first representation: these hold the interpreter's lock, so threads cannot share them."""


@contextmanager
def compiled_for(gpu: str) -> Iterator[list[KernelTime]]:
    """Inside, kernels are compiled for a GPU that is not present, with an empty cache; yields what each took."""
    runtime, here = triton.runtime.driver, tuning.gpu_here
    before = runtime._active, triton.knobs.cache.dir, triton.knobs.compilation.listener
    kernels: list[KernelTime] = []

    def listen(*, src: Any, times: Any, **_: Any) -> None:
        kernels.append(KernelTime(src.name, times.total / 1e6, times.ir_initialization / 1e6))

    with tempfile.TemporaryDirectory() as empty:
        triton.knobs.cache.dir, triton.knobs.compilation.listener = empty, listen
        runtime.set_active(EmulatorDriver(gpu))
        tuning.gpu_here = lambda: gpu
        try:
            yield kernels
        finally:
            runtime._active, triton.knobs.cache.dir, triton.knobs.compilation.listener = before
            tuning.gpu_here = here


def measure(gpu: str, shape: str, dtype: str, threads: int) -> str:
    case = self_check_case(SHAPES[shape].kernel, small=False)
    every = list(parts(case, CPU, TORCH_DTYPES[dtype], "triton"))
    with compiled_for(gpu) as kernels:
        began, before = time.perf_counter(), os.times()
        compile_ahead(every, threads)
        wall, after = time.perf_counter() - began, os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    slowest = sorted(kernels, key=lambda kernel: -kernel.seconds)[:3]
    longest = ", ".join(f"{kernel.name} {kernel.seconds:.1f}" for kernel in slowest)
    python = sum(kernel.python_seconds for kernel in kernels)
    return (
        f"{gpu} {shape} {dtype}, {threads} threads: {wall:.1f} s ({cpu:.1f} s of CPU time, {python:.1f} s in Python), "
        f"{len(kernels)} kernels, longest: {longest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="+", metavar="GPU")
    parser.add_argument("--shape", default="base", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=sorted(TORCH_DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for gpu in args.gpus:
        print(measure(gpu, args.shape, args.dtype, args.threads), flush=True)


if __name__ == "__main__":
    main()
