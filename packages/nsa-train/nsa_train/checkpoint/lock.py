"""Single-writer lock of a run folder: flock on `.lock`, whose content names the holder.

The kernel releases the lock when its process dies, so no stale lock remains. The content of the file does remain, which
shows the next run that the last one did not end cleanly.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from nsa.errors import CheckpointError
from nsa.files import try_lock, unlock
from nsa_train.names import LOCK

_RETRY_S = 0.1


@dataclass(frozen=True)
class _LockHolder:
    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """Held from `acquire` to `release` or to the death of the process; forked children do not keep it alive."""

    def __init__(self, run_folder: Path) -> None:
        self.file = run_folder / LOCK
        self.died: _LockHolder | None = None
        """The last holder, if it died without releasing."""
        self._descriptor: int | None = None

    def acquire(self, *, wait_s: float = 0.0) -> Self:
        """Take the lock, waiting up to `wait_s` for the ranks of a killed run to exit."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + wait_s
        try:
            while not try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{self.file.parent} is in use by {_read(descriptor) or 'an unknown process'}: two runs in one "
                        f"folder would overwrite each other's checkpoints. Stop that run, or set train.out_dir to "
                        f"another folder."
                    )
                time.sleep(_RETRY_S)
            self.died = _read(descriptor)
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            _write(descriptor, json.dumps(asdict(_LockHolder(os.getpid(), socket.gethostname(), now))))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self._forget)
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            _write(self._descriptor, "")
            unlock(self._descriptor)  # at once, even if a child was forked a moment ago
            self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self if self._descriptor is not None else self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def holder(run_folder: Path) -> _LockHolder | None:
    """The process that holds a run folder now, or None. For reports only: `acquire` decides."""
    try:
        descriptor = os.open(run_folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(descriptor) else _read(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> _LockHolder | None:
    try:
        return _LockHolder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
