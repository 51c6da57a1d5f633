"""Target hardware of estimates and preflight: `--target` names, GPUs or CPU cores and host memory of this machine."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsa.errors import ConfigError
from nsa.gpus import GIB, GPUS, GpuSpec, find_gpu
from nsa_train.config.layer import nearest
from nsa_train.config.model_sections import RuntimeConfig

if TYPE_CHECKING:
    import torch

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62  # v1 writes a huge number where v2 writes "max"


@dataclass(frozen=True)
class HostMemory:
    """Bytes."""

    total: int
    available: int
    """Can be allocated now without swapping."""


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> HostMemory:
    """The smaller of the machine's memory and the cgroup limits of this process."""
    if not (proc / "meminfo").exists():  # not Linux: free memory is unknown
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostMemory(installed, installed)
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, available = 1024 * kib["MemTotal"], 1024 * kib["MemAvailable"]
    for limit, used in _limits(proc, cgroups):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def process_memory(pid: int, proc: Path = _PROC) -> int:
    """Anonymous and shared memory of a process and its descendants, in bytes; 0 if it has exited."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    rows = (line.split() for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))
    descendants = sum(process_memory(child, proc) for child in _children(pid, proc))
    return sum(1024 * int(words[1]) for words in rows) + descendants


def _children(pid: int, proc: Path) -> list[int]:
    pids: list[int] = []
    for file in (proc / str(pid) / "task").glob("*/children"):
        try:
            pids += [int(word) for word in file.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # exited in the meantime
            continue
    return pids


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage of every cgroup from this process's own up to the root; versions 2 and 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without cgroups
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, limit_file, use_file, reclaimable = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_file, use_file = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        folder = root / group.lstrip("/")
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            limit, used = _number(level / limit_file), _number(level / use_file)
            if limit is not None and limit < _V1_UNLIMITED:
                yield limit, (used or 0) - _statistic(level / "memory.stat", reclaimable)


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", or if the container hides the file."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(file: Path, name: str) -> int:
    """One line of memory.stat, e.g. the page cache that the kernel can reclaim."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


CPU = "cpu"
_HERE = "here"
RANKS_PER_NODE = 8
"""GPUs that a node of rented hardware has, unless `--gpus-per-node` says otherwise."""


@dataclass(frozen=True)
class HardwareDevice:
    """One GPU, as in `nsa.gpus`, or all cores of a machine."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: float
    usd_per_hour: float
    """Rent of one device per hour, in round figures (assumed). `--price` replaces it."""
    node_gb_s: float = 5.0
    network_gb_s: float = 1.0
    """Speeds of receiving from ranks of the same node, and of other nodes (both assumed)."""

    @classmethod
    def from_gpu(cls, gpu: GpuSpec) -> "HardwareDevice":
        return cls(**{field.name: getattr(gpu, field.name) for field in fields(cls)})

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU


@dataclass(frozen=True)
class HardwareTarget:
    """The hardware that a run is checked against."""

    device: HardwareDevice
    count: int = 1
    here: bool = False
    """Whether it is this machine, so that a dry run can be a real one."""
    ranks_per_node: int = RANKS_PER_NODE
    """Devices that fast links join."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.device.memory_gib * GIB)

    def data_ranks(self, ranks_per_row: int) -> int:
        """Shares of a global batch, if so many devices work on the same rows."""
        return max(1, self.count // ranks_per_row)

    def flops(self, precision: str) -> float:
        """Peak FLOP/s of one device in a run's precision."""
        return 1e12 * (self.device.fp32_tflops if precision == "fp32" else self.device.bf16_tflops)

    def __str__(self) -> str:
        return self.device.name if self.count == 1 else f"{self.device.name}:{self.count}"


DEVICES = {name: HardwareDevice.from_gpu(gpu) for name, gpu in GPUS.items()}
DEVICES[CPU] = HardwareDevice(CPU, 16.0, 0.05, 0.05, 20, 0.10)
_CORE_TFLOPS = 0.05  # one core's vector units, in round figures


def parse_target(text: str, runtime_device: str = "auto", option: str = "--target") -> HardwareTarget:
    """`NAME` or `NAME:COUNT`, e.g. a100-80gb:2; `here` is this machine, as `runtime.device` makes use of it."""
    name, colon, count = text.strip().lower().partition(":")
    if name not in (_HERE, *DEVICES):
        guess = nearest(name, (_HERE, *DEVICES))
        hint = f"Did you mean {guess}?" if guess else "Choose one."
        raise ConfigError(f"{option} {text} names no hardware that is known: {_HERE}, {', '.join(DEVICES)}. {hint}")
    if colon and (not count.isdecimal() or int(count) < 1):
        raise ConfigError(f"{option} {text}: the number after the colon must be 1 or more. Write e.g. {name}:2.")
    ranks = int(count) if colon else 1
    return hardware_here(runtime_device, ranks) if name == _HERE else HardwareTarget(DEVICES[name], ranks)


def hardware_here(device: str = "auto", ranks: int = 1, ranks_here: int | None = None) -> HardwareTarget:
    """Describe this machine as a run with this `runtime.device` and so many ranks, in all and here, would use it."""
    import torch

    if device != CPU and torch.cuda.is_available():
        return HardwareTarget(_gpu_here(torch.cuda.get_device_properties(0)), ranks, here=True)
    cores = len(os.sched_getaffinity(0))
    memory_gib = host_memory().total / GIB
    tflops = cores * _CORE_TFLOPS
    cpu = replace(DEVICES[CPU], memory_gib=memory_gib / (ranks_here or ranks), bf16_tflops=tflops, fp32_tflops=tflops)
    return HardwareTarget(cpu, ranks, here=True)


def peak_flops(runtime: RuntimeConfig, device: "torch.device") -> float | None:
    """Peak FLOP/s of one device of this run; None for a GPU that is not known and for a CPU, unless a setting says."""
    import torch

    if runtime.peak_tflops is not None:
        return 1e12 * runtime.peak_tflops
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = find_gpu(properties.name, properties.total_memory / GIB)
    return None if gpu is None else HardwareTarget(HardwareDevice.from_gpu(gpu)).flops(runtime.precision)


def _gpu_here(properties: object) -> HardwareDevice:
    """The known device of that name with the memory that is really there; an unknown one is rated as the slowest."""
    name: str = getattr(properties, "name", "")
    memory_gib = getattr(properties, "total_memory", 0) / GIB
    known = find_gpu(name, memory_gib)
    slowest = min((device for device in DEVICES.values() if device.is_gpu), key=lambda device: device.bf16_tflops)
    gpu = DEVICES[known.name] if known else replace(slowest, name=name)
    return replace(gpu, memory_gib=memory_gib)
