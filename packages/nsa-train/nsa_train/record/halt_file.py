"""The `.HALT` file that stops a run: reads, writes and clears it. Never overwritten; cleared by renaming."""

import errno
import time
from dataclasses import dataclass
from pathlib import Path

from nsa.files import create_atomic, replace_file
from nsa_train import names
from nsa_train.record import record_files
from nsa_train.record.events import EventKind, add_event
from nsa_train.terminal_text import duration

_MAX_BYTES = 1 << 16
_NOT_A_FILE = (errno.EINVAL, errno.ELOOP, errno.EACCES, errno.ENXIO)
"""A folder, a pipe, a link loop or an unreadable file: it exists, so it halts, without a reason."""


@dataclass(frozen=True)
class HaltRequest:
    reason: str
    by: str | None
    """Who wrote it, if known."""
    since: float

    def describe(self, now: float) -> str:
        return f"{self.reason}; written {duration(now - self.since)} ago{f' by {self.by}' if self.by else ''}"


def read(folder: Path) -> HaltRequest | None:
    """Content of `.HALT`, or None without one; an empty file counts, and so does one written by hand with `echo`."""
    path = folder / names.HALT
    try:
        since = path.lstat().st_mtime
        lines = record_files.read_text(path, _MAX_BYTES).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        return HaltRequest(f"something that cannot be read ({error.strerror})", None, since)
    by = [line.removeprefix("by:").strip() for line in lines if line.startswith("by:")]
    reason = " ".join(line.strip() for line in lines if not line.startswith("by:"))
    return HaltRequest(reason.strip().removeprefix("halt:").strip() or "no reason given", by[0] if by else None, since)


def request(folder: Path, reason: str, by: str) -> bool:
    """Write `.HALT` atomically; False if there is one already."""
    return create_atomic(folder / names.HALT, f"halt: {reason}\nby: {by}\n")


def clear(folder: Path, *, now: float, step: int) -> Path | None:
    """Rename `.HALT` so that it no longer halts, and record the event; None without one."""
    halt = read(folder)
    aside = folder / f"{names.HALT}.cleared-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    try:
        replace_file(folder / names.HALT, aside)
    except FileNotFoundError:
        return None
    reason, by = (halt.reason, halt.by) if halt is not None else (None, None)
    add_event(folder, EventKind.HALT_CLEARED, ts=now, step=step, reason=reason, by=by, aside=aside.name)
    return aside
