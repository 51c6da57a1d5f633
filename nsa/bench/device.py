"""Where contenders run: naming the device, waiting for it, its memory, and what a reader must know about it."""

import subprocess
import time
from typing import Any

import torch

from nsa.bench.machine import available_bytes
from nsa.bench.timing import Now
from nsa.errors import ConfigError

DEVICES = ("cpu", "cuda")
"""`cuda` is also what PyTorch calls an AMD GPU."""


def device_named(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError(f"--device is {name!r}: there is no such device. Use one of: {', '.join(DEVICES)}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device is {name!r} and torch {torch.__version__} sees no GPU here: nothing can be run on it. "
            f"Use --device cpu, or install torch's GPU build on a machine with a GPU and its driver."
        )
    return torch.device(name)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Now:
    """A clock that first waits until the device has done what it was given: a GPU works on after a call returns."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        wait_for(device)
        return time.perf_counter()

    return now


def free_bytes(device: torch.device) -> int:
    """Memory that contenders could have, what PyTorch's allocator holds in reserve included."""
    if device.type == "cpu":
        return available_bytes()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, capability, memory and software of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}",
        "units": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver(),
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "triton": triton_version(),
    }


def triton_version() -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return None
    return str(triton.__version__)


def _driver() -> str:
    """As the vendor's tool tells it: PyTorch does not know."""
    asked = (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion", "--csv"],
    )
    for words in asked[1:] if torch.version.hip else asked[:1]:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[-1].rpartition(",")[2].strip()
    return "unknown"
