"""GPU specifications: compute capability, memory, bandwidth, peak FLOP/s, shared memory, L2 cache and assumed price.

The one table of GPUs: planning (`--target`), kernel tuning and the performance model read it. Needs no torch.
"""

from dataclasses import dataclass

_KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class GpuArchitecture:
    """Target of compiled kernels: sm_80, gfx942, and what one thread block and one SM (compute unit) may use."""

    name: str
    shared_limit: int
    """Bytes of shared memory of one thread block."""
    shared_per_unit: int
    """Bytes of shared memory of one SM."""
    registers_per_unit: int = 65536
    warps_per_unit: int = 64

    @property
    def backend(self) -> str:
        """Triton's name of the vendor's compiler."""
        return "hip" if self.name.startswith("gfx") else "cuda"

    @property
    def arch(self) -> int | str:
        """Value for Triton's GPUTarget: 80 for sm_80, else the name."""
        return self.name if self.backend == "hip" else int(self.name.removeprefix("sm_"))

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" else 32

    @property
    def copies_asynchronously(self) -> bool:
        """From global to shared memory without passing through registers."""
        return self.backend == "cuda"


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GpuArchitecture("sm_80", 163 * _KIB, 164 * _KIB),
        GpuArchitecture("sm_86", 99 * _KIB, 100 * _KIB, warps_per_unit=48),
        GpuArchitecture("sm_89", 99 * _KIB, 100 * _KIB, warps_per_unit=48),
        GpuArchitecture("sm_90", 227 * _KIB, 228 * _KIB),
        GpuArchitecture("sm_100", 227 * _KIB, 228 * _KIB),
        GpuArchitecture("sm_120", 99 * _KIB, 100 * _KIB, warps_per_unit=48),
        GpuArchitecture("gfx942", 64 * _KIB, 64 * _KIB, 4 * 512 * 64, 32),
    )
}


@dataclass(frozen=True)
class GpuClock:
    """SMs (compute units), boost clock and last-level cache; known for the GPUs of the performance model."""

    units: int
    clock_hz: float
    l2_bytes: int


@dataclass(frozen=True)
class GpuSpec:
    """One GPU. Peak FLOP/s are the vendors' figures for dense matrices, never reached; prices are assumptions.

    `memory_gib` is what the driver lets a process use, in GiB, which is less than the number in the name.
    """

    name: str
    """As `--target` takes it."""
    driver_name: str
    """Part of the name that the driver reports."""
    architecture: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    usd_per_hour: float
    """Assumed rent of one, in round figures."""
    clock: GpuClock | None = None
    node_gb_s: float = 32.0
    """Assumed: what one receives per second from the others of its node, by the vendors' figures for one direction
    (NVLink, Infinity Fabric; PCIe 4.0 if there is neither)."""
    network_gb_s: float = 1.5
    """Assumed: what one receives per second from other nodes; 100 Gbit/s Ethernet for eight, unless a node of this
    kind is sold with one network card per GPU."""


_A100, _H100 = GpuClock(108, 1.41e9, 40 * MIB), GpuClock(132, 1.83e9, 50 * MIB)
_B200, _MI300X = GpuClock(148, 1.85e9, 126 * MIB), GpuClock(304, 2.1e9, 256 * MIB)
# Where one driver name is part of another (A10 of A100, L4 of L40S), the longer one comes first.
GPUS = {
    gpu.name: gpu
    for gpu in (
        #       name         driver    architecture  GiB   bf16    fp32   GB/s   USD/h  clock, GB/s in the node, network
        GpuSpec("a100-40gb", "A100", "sm_80", 39.4, 312.0, 19.5, 1555, 1.30, _A100, 300, 25),
        GpuSpec("a100-80gb", "A100", "sm_80", 79.2, 312.0, 19.5, 2039, 1.80, _A100, 300, 25),
        GpuSpec("h100-80gb", "H100", "sm_90", 79.2, 989.0, 67.0, 3350, 3.00, _H100, 450, 50),
        GpuSpec("h200", "H200", "sm_90", 139.8, 989.0, 67.0, 4800, 3.80, None, 450, 50),
        GpuSpec("b200", "B200", "sm_100", 178.3, 2250.0, 75.0, 8000, 5.50, _B200, 900, 50),
        GpuSpec("mi300x", "MI300X", "gfx942", 191.5, 1307.0, 163.4, 5300, 2.50, _MI300X, 448, 50),
        GpuSpec("rtx3090", "3090", "sm_86", 23.7, 71.0, 35.6, 936, 0.30),
        GpuSpec("rtx4090", "4090", "sm_89", 23.6, 165.0, 82.6, 1008, 0.50),
        GpuSpec("rtx5090", "5090", "sm_120", 31.4, 209.0, 104.8, 1792, 0.90, None, 64),
        GpuSpec("rtxa6000", "A6000", "sm_86", 47.5, 155.0, 38.7, 768, 0.60),
        GpuSpec("l40s", "L40S", "sm_89", 44.4, 362.0, 91.6, 864, 1.00),
        GpuSpec("l4", "L4", "sm_89", 22.0, 121.0, 30.3, 300, 0.60),
        GpuSpec("a10", "A10", "sm_86", 22.1, 125.0, 31.2, 600, 0.75),
    )
}


def find_gpu(driver_name: str, memory_gib: float) -> GpuSpec | None:
    """The GPU that a driver reports by this name; among those of one name (A100), the nearest in memory."""
    known = next((gpu.driver_name for gpu in GPUS.values() if gpu.driver_name in driver_name), None)
    same = [gpu for gpu in GPUS.values() if gpu.driver_name == known]
    return min(same, key=lambda gpu: abs(gpu.memory_gib - memory_gib), default=None)
