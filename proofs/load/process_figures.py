"""Memory, open files and threads of processes, from /proc."""

import os
from collections.abc import Iterable
from pathlib import Path

FIGURES = ("MiB", "open files", "threads", "processes")


def process_figures(pids: Iterable[int]) -> dict[str, float]:
    """Resident memory, open files, threads and number of these processes together, without those that have exited."""
    figures = dict.fromkeys(FIGURES, 0.0)
    for pid in pids:
        path = Path(f"/proc/{pid}")
        try:
            pages = int((path / "statm").read_text().split()[1])
            files, threads = len(list((path / "fd").iterdir())), len(list((path / "task").iterdir()))
        except OSError:
            continue
        for name, value in zip(FIGURES, (pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads, 1), strict=True):
            figures[name] += value
    return figures


def of_group(group: int) -> list[int]:
    """Ids of the processes of a process group."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _group(int(path.name)) == group]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has exited
        return None
