"""Process checks: whether a pid is still the process that writes a run's files (pids are reused), and its state."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

_STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a disk or a driver", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead", "X": "dead", "I": "idle",
}  # fmt: skip


def writes_to(pid: int, files: Sequence[Path]) -> bool | None:
    """Whether the process exists and has one of the files open for writing; None where this cannot be determined.

    A zombie has no file open and counts as gone.
    """
    inodes = set()
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        inodes.add((status.st_dev, status.st_ino))
    if not Path("/proc/self/fd").exists():
        return None if _exists(pid) else False
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return False
    for descriptor in descriptors:
        try:
            status = descriptor.stat()
        except OSError:  # closed meanwhile
            continue
        if (status.st_dev, status.st_ino) in inodes and _is_for_writing(descriptor):
            return True
    return False


def state_of(pid: int) -> str:
    """Kernel state of the process, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    letter = text.rpartition(")")[2].split()[0]  # the name before it may contain spaces and brackets
    return _STATES.get(letter, letter)


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the signal could be sent."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_for_writing(descriptor: Path) -> bool:
    info = descriptor.parent.parent / "fdinfo" / descriptor.name
    try:
        flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    except (OSError, StopIteration):
        return False
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
