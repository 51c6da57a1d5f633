"""The machine a benchmark runs on: CPU, GPU, software, load and free memory; pinning, and interleaved timing.

Subjects are timed in turns (A B C A B C …), so that other load on the machine affects all of them alike. Every sample
is kept and reported. A time is the median, its spread the quartiles. A ratio is the median of the ratios within each
round, whose two sides ran next to each other.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from nsa import __version__
from nsa.errors import ConfigError
from nsa.files import git_commit
from nsa.kernels.gpu_versions import architecture_of, driver_version, runtime_version

# The instruction sets that decide how fast attention can be.
_ISA_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")

Now = Callable[[], float]

_PRIORITY = 50
_LONGEST_PAUSE_S = 30.0


def describe_machine() -> dict[str, Any]:
    commit, modified = git_commit(Path(__file__)) or (None, None)
    cpuinfo = _cpuinfo()
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    return {
        "cpu": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "cores": len(available_cores()),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "nsa": __version__,
        "commit": commit,
        "uncommitted_changes": modified,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def available_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_bytes() -> int:
    """Memory available without swapping."""
    return _meminfo("MemAvailable")


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Set the number of threads and pin the process to as many cores, the lowest-numbered available ones."""
    cores, threads_before = available_cores(), torch.get_num_threads()
    if threads > len(cores):
        raise ConfigError(
            f"--threads is {threads} and this process may use {len(cores)} cores: threads that share a core slow "
            f"each other down. Set --threads {len(cores)} or fewer."
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(cores)[:threads])
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)


@contextmanager
def real_time_priority() -> Iterator[None]:
    """Run every thread of this process before all ordinary work, then leave the cores to that work for as long.

    The kernel leaves other work 5 % of each core meanwhile (`kernel.sched_rt_runtime_us`).
    """
    begin = time.perf_counter()
    _schedule_threads(os.SCHED_FIFO, _PRIORITY)
    try:
        yield
    finally:
        _schedule_threads(os.SCHED_OTHER, 0)
        time.sleep(min(_LONGEST_PAUSE_S, time.perf_counter() - begin))


def require_real_time() -> None:
    """Refuse where threads of this process may not have real-time priority."""
    try:
        _schedule_threads(os.SCHED_FIFO, _PRIORITY)
    except (AttributeError, PermissionError) as error:
        raise ConfigError(
            f"--real-time needs real-time priority, which this process may not have here ({error}). Run as root or "
            "with CAP_SYS_NICE on Linux, or without it on an idle machine."
        ) from error
    _schedule_threads(os.SCHED_OTHER, 0)


def _schedule_threads(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _meminfo(field: str) -> int:
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(
        f"/proc/meminfo has no {field}: benchmarks need it to protect the machine's memory. Run them on Linux."
    )


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Now:
    """A clock that synchronizes with the device first: a GPU continues to work after a call returns."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        wait_for(device)
        return time.perf_counter()

    return now


def free_bytes(device: torch.device) -> int:
    """Free memory, including what PyTorch's allocator has reserved and not used."""
    if device.type == "cpu":
        return available_bytes()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, capability, memory and software of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": architecture_of(device),
        "units": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "runtime": runtime_version(),
        "triton": triton_version(),
    }


def triton_version() -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return None
    return str(triton.__version__)


_MAX_ROUNDS = 100
_CALIBRATION_S = 0.02  # a sample lasts at least this long: short calls are repeated inside it


@dataclass(frozen=True)
class TimingSpread:
    median: float
    low: float
    high: float
    """Quartiles; both equal the median where there is one sample."""

    @property
    def noise(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def spread(samples: list[float]) -> TimingSpread:
    if len(samples) == 1:
        return TimingSpread(samples[0], samples[0], samples[0])
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return TimingSpread(median(samples), low, high)


def ratio(of: list[float], to: list[float]) -> TimingSpread:
    """`of` divided by `to`, round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


def interleave(
    subjects: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int = 1,
    max_rounds: int = _MAX_ROUNDS,
    repeat: bool = False,
    around_round: Callable[[], AbstractContextManager[object]] = nullcontext,
    now: Now = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each subject, one sample per round, in rounds until the next one would exceed the budget.

    Subjects must be warm. `repeat` lets a sample hold many calls of a short subject. What `around_round` does before
    and after each round is neither in a sample nor in the budget.
    """
    begin = now()
    calls = {name: _calls_per_sample(subject, now) if repeat else 1 for name, subject in subjects.items()}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    spent = now() - begin
    for done in range(1, max_rounds + 1):
        with around_round():
            round_begin = now()
            for name, subject in subjects.items():
                start = now()
                for _ in range(calls[name]):
                    subject()
                samples[name].append((now() - start) / calls[name])
            took = now() - round_begin
        spent += took
        if done >= min_rounds and spent + took > budget_s:
            break
    return samples


def _calls_per_sample(subject: Callable[[], object], now: Now) -> int:
    calls = 1
    while True:
        start = now()
        for _ in range(calls):
            subject()
        if now() - start >= _CALIBRATION_S or calls >= 1 << 16:
            return calls
        calls *= 2
