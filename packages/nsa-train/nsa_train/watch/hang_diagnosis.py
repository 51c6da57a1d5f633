"""Hang diagnosis: collects stack dumps and flight-recorder traces from all ranks on this host.

SIGUSR1 makes a rank write both. It is sent only to a process that has its stack dump file open: the signal would end a
process that does not handle it, and the pid may have been reused.
"""

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record import record_files
from nsa_train.watch.history import RankLog
from nsa_train.watch.run_reader import writes_to

_POLL_S = 0.1
_LAST = "last_enqueued_collective"
_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk or a driver", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead", "X": "dead", "I": "idle",
}  # fmt: skip
_CLOCK_TICK_NS = 20_000_000  # file times are those of the kernel's last tick


def diagnose_hang(folder: Path, logs: Iterable[RankLog], wait_s: float = 5.0) -> Iterator[str]:
    """Request the dumps of these ranks, wait `wait_s` for all together, and yield log lines about the result."""
    requested: dict[int, tuple[int, int]] = {}
    began = time.time_ns()
    for log in logs:
        rank, pid = log.rank, log.last.pid
        dump = folder / names.stackdump(rank, pid)
        if log.ended:
            continue
        if writes_to(pid, (dump,)) is not True:
            yield f"rank {rank}: process {pid} is not running, no stack dump"
            continue
        size = dump.stat().st_size
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
            requested[rank] = (pid, size)
    silent = _wait(folder, requested, wait_s)
    for rank, (pid, _) in requested.items():
        if rank in silent:
            yield f"rank {rank}: process {pid} wrote no stack dump; its state: {_state_of(pid)}"
        else:
            yield f"rank {rank}: stack dump of process {pid}: {names.stackdump(rank, pid)}"
    traces = dict(_collectives(folder, requested, began))
    if traces:
        yield f"last collectives of ranks {sorted(traces)}: {names.COLLECTIVES}"
    yield from _ranks_behind(traces)


def _wait(folder: Path, requested: Mapping[int, tuple[int, int]], left_s: float) -> set[int]:
    """Ranks without a stack dump when the time is up."""
    while True:
        sizes = {rank: _size(folder / names.stackdump(rank, pid)) for rank, (pid, _) in requested.items()}
        silent = {rank for rank, (_, before) in requested.items() if sizes[rank] <= before}
        if not silent or left_s <= 0:
            break
        left_s -= _POLL_S
        time.sleep(_POLL_S)
    if requested:
        time.sleep(10 * _POLL_S)  # the collectives are written shortly after the stacks
    return silent


def _collectives(
    folder: Path, requested: Mapping[int, tuple[int, int]], since_ns: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank, (pid, _) in requested.items():
        path = folder / names.collectives(rank, pid)
        # A single process has none; a rank that cannot respond may have an older one.
        if path.exists() and path.stat().st_mtime_ns >= since_ns - _CLOCK_TICK_NS:
            record, _ = record_files.read_section(path)
            if record is not None:
                yield rank, record


def _ranks_behind(traces: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Name, per process group, the ranks that have not reached the collective at which the others wait."""
    for backend in ("gloo", "nccl"):
        groups = {rank: _part(_part(record, backend), "pg_status") for rank, record in traces.items()}
        for group in sorted({name for status in groups.values() for name in status}):
            last_ids = {
                rank: str(_part(status, group).get(_LAST)) for rank, status in groups.items() if group in status
            }
            reached = {rank: int(number) for rank, number in last_ids.items() if re.fullmatch(r"[0-9]{1,18}", number)}
            if not reached:
                continue
            furthest = max(reached.values())
            if behind := sorted(rank for rank, number in reached.items() if number < furthest):
                waiting = sorted(set(reached) - set(behind))
                yield (
                    f"{backend} group {group}: ranks {waiting} are at collective {furthest}, ranks {behind} have "
                    f"not reached it"
                )


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state_of(pid: int) -> str:
    """Kernel state of the process, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    letter = text.rpartition(")")[2].split()[0]  # the name before it may contain spaces and brackets
    return _STATES.get(letter, letter)
