"""Devices by name; architecture, driver and runtime version of a GPU, as records of checks and benchmarks name them."""

import subprocess
from functools import cache
from pathlib import Path

import torch

from nsa.errors import ConfigError


def device_named(name: str | torch.device | None) -> torch.device:
    """The device of this machine with this name; None is a GPU if there is one, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: it must be cpu, cuda or cuda:N.") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = torch.accelerator.device_count() if accelerator is not None and accelerator.type == device.type else 0
    if device.type != "cpu" and (device.index or 0) >= present:
        raise ConfigError(
            f"device is {str(device)!r}, which torch {torch.__version__} does not see here ({present} devices of this "
            f"kind are visible). Use cpu, or check `nsa doctor`."
        )
    return device


def architecture_of(device: torch.device | int) -> str:
    """E.g. sm_80, or gfx942 with its features."""
    properties = torch.cuda.get_device_properties(device)
    return str(properties.gcnArchName) if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def runtime_version() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


@cache
def driver_version() -> str:
    """From the kernel module, else from the vendor's tool; PyTorch does not have it."""
    module = Path("/sys/module") / ("amdgpu" if torch.version.hip else "nvidia") / "version"
    if module.is_file():
        return module.read_text(encoding="utf-8").strip()
    commands = (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion", "--csv"],
    )
    for words in commands[1:] if torch.version.hip else commands[:1]:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[-1].rpartition(",")[2].strip()
    return "unknown"
