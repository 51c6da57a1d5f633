"""What the machine and the algorithm allow: measured peaks, least work, and the share of it that was reached."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa.bench.case import TORCH_DTYPES, Task
from nsa.bench.machine import pinned

BACKWARD_FACTOR = 2.5  # five matrix products against forward's two: the scores are computed again
_MATRIX, _STREAM_BYTES, _REPEATS = 2048, 1 << 29, 5


@dataclass(frozen=True)
class Peaks:
    """The best of several tries: what the machine can do when left alone."""

    threads: int
    fp32_gflops: float
    bf16_gflops: float
    copy_gb_s: float
    """Bytes read plus bytes written."""
    read_gb_s: float

    def gflops(self, dtype: str) -> float:
        return self.fp32_gflops if dtype == "fp32" else self.bf16_gflops


def measure_peaks(threads: int) -> Peaks:
    with pinned(threads):
        fp32, bf16 = _matmul_gflops(torch.float32), _matmul_gflops(torch.bfloat16)
        source = torch.ones(_STREAM_BYTES // 4)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source))
        read_s = _best_s(source.sum)
    return Peaks(threads, fp32, bf16, 2 * source.nbytes / copy_s / 1e9, source.nbytes / read_s / 1e9)


def _matmul_gflops(dtype: torch.dtype) -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2 * _MATRIX**3 / _best_s(lambda: a @ b) / 1e9


def _best_s(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def flops(task: Task, kind: str) -> float:
    """Least operations; multiply-adds count two. Selection costs none: it can share the branch's scores."""
    s, n = task.shape, task.length
    per_read = 2 * s.n_heads * (s.d_k + s.d_v)
    if task.op == "decode":
        return per_read * (n if kind == "dense" else s.geometry.reads(n))
    total = s.geometry.total_reads(n)
    if kind == "dense":
        forward = per_read * n * (n + 1) / 2
    elif task.part == "select":
        forward = 2 * s.n_heads * s.d_k * total["compressed"]
    else:
        forward = per_read * (sum(total.values()) if task.part == "all" else total[task.part])
    return forward * (1 + BACKWARD_FACTOR if task.backward else 1)


def bytes_read(task: Task, kind: str) -> float:
    """Keys and values that one decoded token reads from memory, each once per group."""
    s, n = task.shape, task.length
    reads = n if kind == "dense" else s.geometry.reads(n)
    return reads * s.n_kv_groups * (s.d_k + s.d_v) * TORCH_DTYPES[task.dtype].itemsize


def allowed(task: Task) -> tuple[str, float]:
    """The ratio over dense that the least work allows, and what bounds it: arithmetic, or bytes when decoding."""
    if task.op == "decode":
        return "bytes", bytes_read(task, "dense") / bytes_read(task, "nsa")
    return "FLOPs", flops(task, "dense") / flops(task, "nsa")


def achieved(task: Task, kind: str, seconds: float, peaks: Peaks) -> float:
    """The share of the machine's peak, counted in least work: bandwidth when decoding, else arithmetic."""
    if task.op == "decode":
        return bytes_read(task, kind) / seconds / 1e9 / peaks.read_gb_s
    return flops(task, kind) / seconds / 1e9 / peaks.gflops(task.dtype)
