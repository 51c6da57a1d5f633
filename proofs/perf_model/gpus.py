"""GPUs of the performance model: L2 bandwidth and published attention speed, added to the table in `nsa.gpus`."""

from dataclasses import dataclass

from nsa.errors import ConfigError
from nsa.gpus import GPUS as SPECS
from nsa.gpus import GpuClock, GpuSpec

EXPONENTIALS_PER_CLOCK = 16
"""Operations per clock of one multiprocessor or compute unit: CUDA programming guide's throughput table; a quarter of a
CDNA SIMD's rate."""
SCHEDULERS = 4
"""Instructions that an NVIDIA multiprocessor issues per clock, for a warp each."""
MEMORY_SHARE = 0.85
"""Share of the vendor's memory bandwidth that streaming kernels reach: assumed, the same for all kernels."""
L2_SHARE = 0.6
"""Share of the cache's width times clock that loads reach: assumed, the same for all kernels."""
LAUNCH_S = 5e-6
"""One launch from Python after another: assumed. A CUDA graph would save most of it."""
HOST_US = (209.0, 567.0)
"""Host time of a layer, forward and both passes, in microseconds: `python -m tools.bench_host_time`, one row, on the
machine of docs/experiments/2026-11-19-first-gpu-hour.md."""
SORT_CLOCKS = 50.0
"""Multiprocessor clocks per key of torch's sort of short rows (3 Gkeys/s on an A100): assumed."""
SCAN_S = 0.120e-3 / 65536
"""Per element of one long row under torch's cummax, a single block: 0.120 ms for 65,536 (PaddlePaddle/Paddle 79670)."""


@dataclass(frozen=True)
class PublishedSpeed:
    """Best published share of peak of dense attention, assumed to be at head dim 128 and long sequences."""

    name: str
    forward: float
    backward: float
    source: str
    triton_slowdown: float
    """Slowdown of attention written in Triton on the same GPU."""
    triton_source: str


@dataclass(frozen=True)
class MeasuredTerms:
    """What the model assumes or leaves out, measured on a GPU (`proofs.perf_model.fit`)."""

    launch_s: float
    """Host time of a launch that does nothing, from Python."""
    gap_s: float
    """Between two kernels in a CUDA graph."""
    triton_share: float
    """Time of arithmetic in our kernels over its bound."""
    dense_share: dict[bool, float]
    """Time of dense attention over its modelled one, by whether backward is in it."""
    host_s: dict[tuple[str, bool], float]
    """Host time of a layer by name, forward or with backward."""
    tails_s: dict[tuple[str, str], tuple[float, float]]
    """Seconds beyond all bounds by layer and kernel: for every call, and for every token."""

    def tail_s(self, layer: str, kernel: str, length: int) -> float:
        fixed, per_token = self.tails_s.get((layer, kernel), (0.0, 0.0))
        return fixed + per_token * length


@dataclass(frozen=True)
class GpuModel:
    name: str
    device: GpuSpec
    l2_bytes_per_s: float
    """Width times clock: upper limit of loads that hit the cache."""
    l2_source: str
    published: PublishedSpeed

    @property
    def clock(self) -> GpuClock:
        assert self.device.clock is not None, f"nsa.gpus has no clock of {self.device.name}"
        return self.device.clock

    @property
    def unit_clocks_per_s(self) -> float:
        """Clocks per second of all multiprocessors or compute units together."""
        return self.clock.units * self.clock.clock_hz

    @property
    def memory_bytes_per_s(self) -> float:
        return self.device.bandwidth_gb_s * 1e9 * MEMORY_SHARE

    @property
    def cache_bytes_per_s(self) -> float:
        return self.l2_bytes_per_s * L2_SHARE

    def flops_per_s(self, dtype: str) -> float:
        return 1e12 * (self.device.fp32_tflops if dtype == "fp32" else self.device.bf16_tflops)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuModel(
            "a100", SPECS["a100-80gb"], 5120 * 1.41e9,
            "NVIDIA A100 whitepaper: 40 MB, 5,120 bytes per clock",
            PublishedSpeed("FlashAttention-2", 0.73, 0.63, "arXiv 2307.08691, 4.1: up to 73 % forward, 63 % backward",
                      1.3, "arXiv 2307.08691, 4.1: 1.3 to 2.5 times slower; the least is taken"),
        ),
        GpuModel(
            "h100", SPECS["h100-80gb"], 5120 * 1.83e9,
            "50 MB (NVIDIA H100 whitepaper), width as A100's: assumed",
            PublishedSpeed("FlashAttention-3", 0.75, 561 / 989, "arXiv 2407.08608: 740 TFLOP/s forward, 561 backward",
                      620.73 / 476.753, "pytorch/benchmark 2391: 477 against 621 TFLOP/s"),
        ),
        GpuModel(
            "b200", SPECS["b200"], 2 * 5120 * 1.85e9,
            "two dies of H100's width: assumed; NVIDIA publishes none",
            PublishedSpeed("FlashAttention-4", 0.71, 1359.8 / 2250,
                      "together.ai/blog/flashattention-4: 1,605; Dao-AILab/flash-attention 2280: 1,360 backward",
                      2.7, "together.ai/blog/flashattention-4: up to 2.7 times slower"),
        ),
        GpuModel(
            "mi300x", SPECS["mi300x"], 17.2e12,
            "AMD CDNA 3 whitepaper: Infinity Cache, 256 MB, 17.2 TB/s; a die's own 4 MB do not hold a group's keys",
            PublishedSpeed("dense attention", 0.45, 0.30, "assumed: no figure with a source was found",
                      1.0, "assumed: the dense figure is no better known"),
        ),
    )
}  # fmt: skip


def gpu_named(name: str) -> GpuModel:
    if name not in GPUS:
        raise ConfigError(f"--gpu is {name!r}: there is no model of it. Use one of: {', '.join(GPUS)}.")
    return GPUS[name]
