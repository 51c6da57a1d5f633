"""Roofline: measured peaks of the machine, least FLOPs and bytes of a task, and the share of peak reached."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa.bench.case import CPU, TORCH_DTYPES, BenchTask
from nsa.bench.machine import Now, clock_of, pinned

BACKWARD_FACTOR = 2.5  # five matrix products against forward's two: the scores are computed again
_MATRIX, _STREAM_BYTES, _REPEATS = {"cpu": 2048, "cuda": 8192}, 1 << 29, 5


@dataclass(frozen=True)
class MachinePeaks:
    """Peak arithmetic and bandwidth, the best of several tries."""

    threads: int
    fp32_gflops: float
    bf16_gflops: float
    copy_gb_s: float
    """Bytes read plus bytes written."""
    read_gb_s: float
    fp16_gflops: float | None = None
    """None on a CPU, where it is not used for training and may take minutes."""
    device: str = "cpu"

    def gflops(self, dtype: str) -> float | None:
        return {"fp32": self.fp32_gflops, "bf16": self.bf16_gflops, "fp16": self.fp16_gflops}[dtype]


def measure_peaks(threads: int, device: torch.device = CPU) -> MachinePeaks:
    now = clock_of(device)
    with pinned(threads):
        fp32, bf16 = _matmul_gflops(torch.float32, device, now), _matmul_gflops(torch.bfloat16, device, now)
        fp16 = None if device.type == "cpu" else _matmul_gflops(torch.float16, device, now)
        source = torch.ones(_STREAM_BYTES // 4, device=device)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source), now)
        read_s = _best_s(source.sum, now)
    copied, read = 2 * source.nbytes / copy_s / 1e9, source.nbytes / read_s / 1e9
    return MachinePeaks(threads, fp32, bf16, copied, read, fp16, device.type)


def _matmul_gflops(dtype: torch.dtype, device: torch.device, now: Now) -> float:
    n = _MATRIX[device.type]
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    return 2 * n**3 / _best_s(lambda: a @ b, now) / 1e9


def _best_s(run: Callable[[], object], now: Now) -> float:
    run()
    best = float("inf")
    for _ in range(_REPEATS):
        start = now()
        run()
        best = min(best, now() - start)
    return best


def flops(task: BenchTask, kind: str) -> float:
    """Least operations; multiply-adds count two. Selection costs none: it can reuse the compressed branch's scores."""
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


def bytes_read(task: BenchTask, kind: str) -> float:
    """Keys and values that one decoded token reads from memory, each once per group."""
    s, n = task.shape, task.length
    reads = n if kind == "dense" else s.geometry.reads(n)
    return reads * s.n_kv_groups * (s.d_k + s.d_v) * TORCH_DTYPES[task.dtype].itemsize


def allowed(task: BenchTask) -> tuple[str, float]:
    """The ratio over dense that the least work allows, and what bounds it: arithmetic, or bytes when decoding."""
    if task.op == "decode":
        return "bytes", bytes_read(task, "dense") / bytes_read(task, "nsa")
    return "FLOPs", flops(task, "dense") / flops(task, "nsa")


def achieved(task: BenchTask, kind: str, seconds: float, peaks: MachinePeaks) -> float | None:
    """The share of the device's peak, in least work: bandwidth when decoding, else arithmetic, if it is known."""
    if task.op == "decode":
        return bytes_read(task, kind) / seconds / 1e9 / peaks.read_gb_s
    peak = peaks.gflops(task.dtype)
    return flops(task, kind) / seconds / 1e9 / peak if peak else None
