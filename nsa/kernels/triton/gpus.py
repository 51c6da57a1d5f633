"""GPUs that the kernels are judged for, and which one is here."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

KIB = 1024


@dataclass(frozen=True)
class KernelGpu:
    target: GPUTarget
    shared_limit: int
    """Bytes one program may have."""
    shared_per_unit: int
    registers_per_unit: int = 65536
    warps_per_unit: int = 64

    @property
    def copies_asynchronously(self) -> bool:
        """From global to shared memory, past the registers."""
        return self.target.backend == "cuda"


GPUS = {
    "sm_80": KernelGpu(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB),
    "sm_86": KernelGpu(GPUTarget("cuda", 86, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "sm_89": KernelGpu(GPUTarget("cuda", 89, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "sm_90": KernelGpu(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB),
    "sm_100": KernelGpu(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB),
    "sm_120": KernelGpu(GPUTarget("cuda", 120, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "gfx942": KernelGpu(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 4 * 512 * 64, 32),
}


def gpu_here() -> str:
    """The current GPU as the tables name it: sm_80, gfx942; empty where there is none."""
    return _name(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def limits_here() -> KernelGpu:
    """Of the current GPU: from the table, or what the driver says of one that is not in it."""
    if known := GPUS.get(gpu_here()):
        return known
    properties: Any = torch.cuda.get_device_properties()
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return KernelGpu(triton.runtime.driver.active.get_current_target(), shared, shared)


@cache
def _name(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"
