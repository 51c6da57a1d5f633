"""Host memory available to this process: /proc/meminfo and cgroup (container) limits."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
