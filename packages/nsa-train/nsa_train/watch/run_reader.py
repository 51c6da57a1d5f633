"""Reader that follows a run folder: history for health checks, all data for charts, and which processes run.

Ages are on the reader's monotonic clock: a record's time stamp gives its age when it is first read, bounded by the time
since the previous read. A wall clock that jumps by an hour then neither hides nor invents a stall.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.record.events import parse_event
from nsa_train.record.heartbeat_record import HeartbeatRecord, beat_fields, beat_of_fields, heartbeat_files
from nsa_train.record.record_files import RecordTail, Unreadable, read_section
from nsa_train.record.run_data import RunData
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.history import RankLog, RunFacts, RunHistory

_HISTORY_BYTES, _HISTORY_BYTES_OF_OTHER_RANKS = 16 << 20, 2 << 20
"""How much of a long heartbeat file the history begins with; the loss, which needs the longest, is in rank 0's."""


class ClockReading(NamedTuple):
    wall: float
    steady: float


def clock() -> ClockReading:
    return ClockReading(time.time(), time.monotonic())


class RunReader:
    """Keeps the history of a run up to date, and with `whole` also its data, from the first record on.

    `update` reads only what was appended since the last call.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], ClockReading] = clock,
        host: str | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.folder = folder
        self.history = RunHistory()
        self.data = RunData(folder)
        """Empty unless `whole`."""
        self.env: dict[str, Any] = {}
        self.now = clock()
        """Clock at the last update; pass its `steady` time to `examine`."""
        self._clock, self._whole = clock, whole
        self._host = host or socket.gethostname()
        self._tails: dict[int, RecordTail[dict[str, Any]]] = {}
        self._events = RecordTail(folder / names.EVENTS, parse_event)
        self._last_update: float | None = None
        self._ahead_before: dict[int, float] = {}

    def update(self) -> RunHistory:
        history, self.now = self.history, self._clock()
        env, env_damaged = read_section(self.folder / names.ENV)
        if env is not None:  # else keep earlier values
            self.env = env
            history.facts, env_damaged = RunFacts.from_env(env)
        for rank, path in heartbeat_files(self.folder):
            if rank not in self._tails:
                last_bytes = None if self._whole else _history_bytes(rank)
                self._tails[rank] = RecordTail(path, beat_fields(rank), last_bytes)
        for rank, tail in self._tails.items():
            self._read_beats(rank, tail)
        for event in self._events.stream():
            history.add_event(event, self._written_at(event.ts, self._events.path))
            if self._whole:
                self.data.events.append(event)
        unreadable = {tail.path.name: tail.unreadable for tail in self._all_tails()}
        history.unreadable = Unreadable({**unreadable, names.ENV: int(env_damaged)})
        history.gone = frozenset(log.rank for log in self.local() if not log.ended and self._is_running(log) is False)
        if self._whole:
            self.data.read_other_files(self.env)
            self.data.unreadable = Unreadable({**self.data.unreadable, **history.unreadable})
        self._last_update = self.now.steady
        return history

    def close(self) -> None:
        for tail in self._all_tails():
            tail.close()

    def _all_tails(self) -> list[RecordTail[Any]]:
        return [*self._tails.values(), self._events]

    def local(self) -> Iterator[RankLog]:
        """Ranks whose process runs or ran on this host."""
        facts = self.history.facts
        if facts.host != self._host:
            return
        here = facts.local_world if facts.local_world is not None else facts.world or 1
        yield from (log for rank, log in sorted(self.history.ranks.items()) if rank < here)

    def leaving(self) -> list[int]:
        """Ranks of this host that have written their final record but still run, saving."""
        return [log.rank for log in self.local() if log.ended and self._is_running(log)]

    def processes(self) -> list[int]:
        """Process ids of the running ranks on this host."""
        return [log.last.pid for log in self.local() if self._is_running(log) is not False]

    def _read_beats(self, rank: int, tail: RecordTail[dict[str, Any]]) -> None:
        first = self._last_update is None
        for values in tail.stream():
            if self._whole:
                self.data.add(rank, values)
                if first and tail.unread_bytes > _history_bytes(rank):
                    continue
            beat = beat_of_fields(values)
            self.history.add(beat, self._written_at(beat.ts, tail.path), self._ahead_s(beat))

    def _ahead_s(self, beat: HeartbeatRecord) -> float:
        """Seconds ahead of this clock; after the first update of two heartbeats in a row, since a clock may be set."""
        ahead, before = max(0.0, beat.ts - self.now.wall), self._ahead_before.get(beat.rank, 0.0)
        self._ahead_before[beat.rank] = ahead
        return ahead if self._last_update is None else min(ahead, before)

    def _written_at(self, ts: float, path: Path) -> float:
        if ts - self.now.wall > HealthLimits.clock_skew_s:  # not trusted: use the file's modification time
            with suppress(OSError):
                ts = path.stat().st_mtime
        age = max(0.0, self.now.wall - ts)
        if self._last_update is not None:
            age = min(age, self.now.steady - self._last_update)
        return self.now.steady - age

    def _is_running(self, log: RankLog) -> bool | None:
        pid = log.last.pid
        return writes_to(pid, (self.folder / names.stackdump(log.rank, pid), self.folder / names.heartbeat(log.rank)))


def load(folder: Path) -> RunData:
    """All data of a run folder."""
    require_run(folder)
    with closing(RunReader(folder, whole=True)) as reader:
        reader.update()
        return reader.data


def require_run(folder: Path) -> None:
    """Raise for a folder that is not a run folder."""
    if not heartbeat_files(folder) and not any((folder / name).exists() for name in (names.EVENTS, names.ENV)):
        what = "holds no run" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"{folder} {what}: it contains no {names.heartbeat(0)}, {names.EVENTS} or {names.ENV}. Give a run "
            f"folder (train.out_dir)."
        )


def _history_bytes(rank: int) -> int:
    return _HISTORY_BYTES if rank == 0 else _HISTORY_BYTES_OF_OTHER_RANKS


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
        with suppress(PermissionError):  # it exists, and is another user's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return None
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


def _is_for_writing(descriptor: Path) -> bool:
    info = descriptor.parent.parent / "fdinfo" / descriptor.name
    try:
        flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    except (OSError, StopIteration):
        return False
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
