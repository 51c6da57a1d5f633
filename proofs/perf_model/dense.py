"""Dense attention baseline, and the rule that converts FLOPs and exponentials to time for every kernel.

Per score, matrix products and an exponential follow each other: one after the other they take tensor + exponential
time. Published dense attention takes `stretch` times that at rows of 128 (less than 1 where it overlaps them). The
same stretch times every kernel of ours, and dense attention at other widths: FlashAttention-3's published backward at
rows of 64 comes out within 2 %.
"""

from proofs.perf_model.gpus import EXPONENTIALS_PER_CLOCK, GpuModel
from proofs.perf_model.work import LaunchSizes

_PUBLISHED_WIDTH = 128
_PRODUCTS = {False: 2, True: 5}
"""Matrix products per score: forward, and backward, where scores are computed again."""


def serial_s(gpu: GpuModel, dtype: str, flops: float, exponentials: float) -> float:
    return flops / gpu.flops_per_s(dtype) + exponentials / (EXPONENTIALS_PER_CLOCK * gpu.unit_clocks_per_s)


def stretch(gpu: GpuModel, backward: bool) -> float:
    share = gpu.published.backward if backward else gpu.published.forward
    flops = 2.0 * _PRODUCTS[backward] * _PUBLISHED_WIDTH
    return flops / gpu.flops_per_s("bf16") / share / serial_s(gpu, "bf16", flops, 1.0)


def dense_s(gpu: GpuModel, sizes: LaunchSizes, backward: bool) -> float:
    """Causal, forward or backward alone; masked scores do not count, as in published numbers."""
    s, n = sizes.shape, sizes.length
    scores = s.n_heads * n * (n + 1) / 2
    products = 6 * s.d_k + 4 * s.d_v if backward else 2 * (s.d_k + s.d_v)
    return stretch(gpu, backward) * serial_s(gpu, sizes.dtype, scores * products, scores)
