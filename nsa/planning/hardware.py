"""What a run may be judged for: devices with their memory, speed and an assumed price. No torch but to look around."""

import os
from dataclasses import dataclass, replace

from nsa.config.layer import nearest
from nsa.errors import ConfigError
from nsa.planning.host_memory import host_memory

GIB = 2**30
CPU = "cpu"
HERE = "here"
RANKS_PER_NODE = 8
"""GPUs that a node of rented hardware has; only hsdp without parallel.shard_ranks asks."""


@dataclass(frozen=True)
class HardwareDevice:
    """One GPU, or all cores of a machine. Peaks are the vendors' dense figures, never reached; prices are assumptions.

    `memory_gib` is what the driver lets a process see, in GiB, which is less than the number in the name.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    usd_per_hour: float
    """Assumed: what one costs per hour to rent, in round figures. `--price` replaces it."""

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU


@dataclass(frozen=True)
class HardwareTarget:
    """The hardware that a run is judged for."""

    device: HardwareDevice
    count: int = 1
    here: bool = False
    """Whether it is this machine, so that a dry run can be a real one."""

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return int(self.device.memory_gib * GIB)

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of one device in a run's precision."""
        return 1e12 * (self.device.fp32_tflops if precision == "fp32" else self.device.bf16_tflops)

    def __str__(self) -> str:
        return self.device.name if self.count == 1 else f"{self.device.name}:{self.count}"


DEVICES = {
    device.name: device
    for device in (
        #       name       GiB     bf16   fp32   GB/s   USD/h
        HardwareDevice("a100-40gb", 39.4, 312.0, 19.5, 1555, 1.30),
        HardwareDevice("a100-80gb", 79.2, 312.0, 19.5, 2039, 1.80),
        HardwareDevice("h100-80gb", 79.2, 989.0, 67.0, 3350, 3.00),
        HardwareDevice("h200", 139.8, 989.0, 67.0, 4800, 3.80),
        HardwareDevice("b200", 178.3, 2250.0, 75.0, 8000, 5.50),
        HardwareDevice("mi300x", 191.5, 1307.0, 163.4, 5300, 2.50),
        HardwareDevice("rtx3090", 23.7, 71.0, 35.6, 936, 0.30),
        HardwareDevice("rtx4090", 23.6, 165.0, 82.6, 1008, 0.50),
        HardwareDevice("rtx5090", 31.4, 209.0, 104.8, 1792, 0.90),
        HardwareDevice("rtxa6000", 47.5, 155.0, 38.7, 768, 0.60),
        HardwareDevice("l40s", 44.4, 362.0, 91.6, 864, 1.00),
        HardwareDevice("l4", 22.0, 121.0, 30.3, 300, 0.60),
        HardwareDevice("a10", 22.1, 125.0, 31.2, 600, 0.75),
        HardwareDevice(CPU, 16.0, 0.05, 0.05, 20, 0.10),
    )
}
# How drivers call them, most particular first.
_DRIVER_NAMES = {
    "MI300X": "mi300x", "B200": "b200", "H200": "h200", "H100": "h100-80gb", "A100": "a100-80gb", "L40S": "l40s",
    "A6000": "rtxa6000", "5090": "rtx5090", "4090": "rtx4090", "3090": "rtx3090", "A10": "a10", "L4": "l4",
}  # fmt: skip
_CORE_TFLOPS = 0.05  # one core's vector units, in round figures


def parse_target(text: str, runtime_device: str = "auto") -> HardwareTarget:
    """`NAME` or `NAME:COUNT`, e.g. a100-80gb:2; `here` is this machine, as `runtime.device` makes use of it."""
    name, colon, count = text.strip().lower().partition(":")
    if name not in (HERE, *DEVICES):
        guess = nearest(name, (HERE, *DEVICES))
        hint = f"Did you mean {guess}?" if guess else "Choose one."
        raise ConfigError(f"--target {text} names no hardware that is known: {HERE}, {', '.join(DEVICES)}. {hint}")
    if colon and (not count.isdecimal() or int(count) < 1):
        raise ConfigError(f"--target {text}: after the colon stands how many there are. Write e.g. {name}:2.")
    ranks = int(count) if colon else 1
    return hardware_here(runtime_device, ranks) if name == HERE else HardwareTarget(DEVICES[name], ranks)


def hardware_here(device: str = "auto", ranks: int = 1, ranks_here: int | None = None) -> HardwareTarget:
    """This machine, as a run with this `runtime.device` and so many ranks, here and in all, would use it."""
    import torch

    if device != CPU and torch.cuda.is_available():
        return HardwareTarget(_gpu_here(torch.cuda.get_device_properties(0)), ranks, here=True)
    cores = len(os.sched_getaffinity(0))
    memory_gib = host_memory().total / GIB
    tflops = cores * _CORE_TFLOPS
    found = replace(DEVICES[CPU], memory_gib=memory_gib / (ranks_here or ranks), bf16_tflops=tflops, fp32_tflops=tflops)
    return HardwareTarget(found, ranks, here=True)


def _gpu_here(properties: object) -> HardwareDevice:
    """The known device of that name with the memory that is really there; an unknown one is judged as the slowest."""
    name: str = getattr(properties, "name", "")
    memory_gib = getattr(properties, "total_memory", 0) / GIB
    known = next((key for part, key in _DRIVER_NAMES.items() if part in name), None)
    if known == "a100-80gb" and memory_gib < 60:
        known = "a100-40gb"
    slowest = min((device for device in DEVICES.values() if device.is_gpu), key=lambda device: device.bf16_tflops)
    found = DEVICES[known] if known else replace(slowest, name=name)
    return replace(found, memory_gib=memory_gib)
