"""`.HALT`, the file that stops a run: who asks, why, and since when. It is never overwritten and never just deleted."""

import errno
import time
from dataclasses import dataclass
from pathlib import Path

from nsa.files import create_atomic, replace_file
from nsa.observe import names, records
from nsa.observe.events import EventKind, add_event

_MOST_BYTES = 1 << 16
_SOMETHING_ELSE = (errno.EINVAL, errno.ELOOP, errno.EACCES, errno.ENXIO)
"""A folder, a pipe, a loop of links or a file of somebody else: it is there, so it asks, without saying why."""


@dataclass(frozen=True)
class HaltRequest:
    reason: str
    by: str | None
    """Who wrote it, where that is known."""
    since: float

    def describe(self, now: float) -> str:
        return f"{self.reason}; written {age(now - self.since)} ago{f' by {self.by}' if self.by else ''}"


def read(folder: Path) -> HaltRequest | None:
    """What `.HALT` says, or None without one; an empty file counts, and so does what `echo` wrote."""
    path = folder / names.HALT
    try:
        since = path.lstat().st_mtime
        lines = records.read_text(path, _MOST_BYTES).splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _SOMETHING_ELSE:
            raise
        return HaltRequest(f"something that cannot be read ({error.strerror})", None, since)
    by = [line.removeprefix("by:").strip() for line in lines if line.startswith("by:")]
    said = " ".join(line.strip() for line in lines if not line.startswith("by:"))
    return HaltRequest(said.strip().removeprefix("halt:").strip() or "no reason given", by[0] if by else None, since)


def ask(folder: Path, reason: str, by: str) -> bool:
    """Write `.HALT`, whole from its first moment; False if there is one already."""
    return create_atomic(folder / names.HALT, f"halt: {reason}\nby: {by}\n")


def put_aside(folder: Path, *, now: float, step: int) -> Path | None:
    """Give `.HALT` a name that nobody obeys, and write that down; None without one."""
    asked = read(folder)
    aside = folder / f"{names.HALT}.cleared-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    try:
        replace_file(folder / names.HALT, aside)
    except FileNotFoundError:
        return None
    reason, by = (asked.reason, asked.by) if asked is not None else (None, None)
    add_event(folder, EventKind.HALT_CLEARED, ts=now, step=step, reason=reason, by=by, aside=aside.name)
    return aside


def age(seconds: float) -> str:
    """5 s, 12 min, 3.1 h, 2.4 days."""
    seconds = max(0.0, seconds)
    for unit, length in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
