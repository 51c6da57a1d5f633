"""Incremental reader that reduces a run's records to the state needed by health checks.

Ages are on the reader's monotonic clock: a record's time stamp gives its age when it is first read, bounded by the time
since the previous read. A wall clock that jumps by an hour then neither hides nor invents a stall.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from nsa_train import names
from nsa_train.record import records
from nsa_train.record.events import EventKind, LauncherAction, RunEvent, parse_event
from nsa_train.record.heartbeat_file import beat_parser
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.tail import RecordTail
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.processes import writes_to

_SPAN_S = 30.0
"""Trends over hours are kept as means over spans of at least this length."""
_RECORDS, _SPANS, _FIRST_SPANS, _LOSSES, _EVENTS = 256, 240, 20, 20_000, 256
_FIRST_READ_BYTES, _OTHER_RANKS_BYTES = 16 << 20, 2 << 20
"""How much of a long heartbeat file a new reader reads; the loss, which needs the longest history, is in rank 0's."""
_NEW_PROCESS = (EventKind.START, EventKind.RESTART)


class ClockReading(NamedTuple):
    wall: float
    steady: float


def clock() -> ClockReading:
    return ClockReading(time.time(), time.monotonic())


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run from env.json; None where not known."""

    host: str | None = None
    world: int | None = None
    local_world: int | None = None
    """Number of ranks on `host`; they are the lowest ranks."""
    steps: int | None = None
    log_every: int | None = None
    save_every: int | None = None
    eval_every: int | None = None
    checkpoint_store: str | None = None
    """Where checkpoints are copied to."""
    trainable: tuple[str, ...] | None = None
    """Patterns of the parameters that are trained."""
    dataset: str | None = None
    loader_timeout_s: float | None = None

    @classmethod
    def from_env(cls, env: dict[str, Any]) -> tuple[Self, bool]:
        """The settings, and whether something in the file could not be read."""
        env_fields, bad = records.fields(env, _OF_ENV)
        config, bad_config = records.fields((env_fields or {}).pop("config", {}), _OF_CONFIG)
        facts = {_FACT_OF.get(name, name): value for name, value in (env_fields or {}).items()}
        for name, checks in _OF_SECTIONS.items():
            values, bad_section = records.fields((config or {}).get(name, {}), checks)
            facts |= values or {}
            bad |= bad_section
        return cls(**facts), bad or bad_config


_OF_ENV = {
    "host": records.text,
    "world_size": records.rank_number,
    "local_world_size": records.rank_number,
    "config": records.section,
}
_OF_CONFIG = dict.fromkeys(("train", "data"), records.section)
_OF_SECTIONS: dict[str, dict[str, records.Check]] = {
    "train": {
        **dict.fromkeys(("steps", "log_every", "save_every", "eval_every"), records.whole),
        "trainable": records.texts,
        "checkpoint_store": records.text,
    },
    "data": {"dataset": records.text, "loader_timeout_s": records.amount},
}
_FACT_OF = {"world_size": "world", "local_world_size": "local_world"}


@dataclass
class ProgressSpan:
    """Consecutive progress records, together at least `_SPAN_S` seconds of training."""

    seconds: float
    toks_per_s: float
    host_mem_rss: float
    gpu_mem_alloc: float
    gpu_mem_reserved: float

    def add(self, other: "ProgressSpan") -> None:
        together = self.seconds + other.seconds
        self.toks_per_s = (self.toks_per_s * self.seconds + other.toks_per_s * other.seconds) / together
        self.seconds = together
        self.host_mem_rss, self.gpu_mem_alloc = other.host_mem_rss, other.gpu_mem_alloc
        self.gpu_mem_reserved = other.gpu_mem_reserved


@dataclass
class RankLog:
    """Records of one rank's current process; a restart or a rollback clears them."""

    rank: int
    last: HeartbeatRecord
    last_at: float
    """Monotonic time at which the newest heartbeat was written, as far as known; the same for all `_at`."""
    step_at: float
    """Time of the first heartbeat with the newest step."""
    ahead_s: float = 0.0
    """How far the newest time stamp was ahead of the local clock when it was read."""
    progress: deque[HeartbeatRecord] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    skipped: deque[HeartbeatRecord] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    began_step: int = 0
    """Step at which the current process started or resumed."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) up to the current step, including earlier processes; thinned when there are too many."""
    spans: deque[ProgressSpan] = field(default_factory=lambda: deque(maxlen=_SPANS))
    first_spans: list[ProgressSpan] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last.msg in names.ENDINGS

    @property
    def step_s(self) -> float:
        """Median step time, 0 if not known."""
        times = sorted(beat.step_s for beat in self.progress if beat.step_s is not None)
        return times[len(times) // 2] if times else 0.0

    def add(self, beat: HeartbeatRecord, at: float, ahead_s: float = 0.0) -> None:
        if beat.pid != self.last.pid or beat.msg == names.START:
            for series in (self.progress, self.skipped, self.spans, self.first_spans):
                series.clear()
            self.began_step = beat.step if beat.msg == names.START else max(0, beat.step - 1)
            self._rewind(beat, at)
        elif beat.msg == names.ROLLED_BACK:
            self.progress.clear()  # its steps are repeated
            self._rewind(beat, at)
        elif beat.step != self.last.step:
            self.step_at = at
        self.last, self.last_at, self.ahead_s = beat, at, ahead_s
        if beat.msg == names.SKIPPED:
            self.skipped.append(beat)
        elif beat.msg == names.PROGRESS:
            self._add_progress(beat)

    def _rewind(self, beat: HeartbeatRecord, at: float) -> None:
        self.step_at = at
        self.losses = [(step, loss) for step, loss in self.losses if step <= beat.step]

    def _add_progress(self, beat: HeartbeatRecord) -> None:
        if self.progress and beat.step_s is not None and beat.toks_per_s is not None:
            # The first record of a process measures compilation and warm-up.
            seconds = beat.step_s * max(1, beat.step - self.progress[-1].step)
            memory = (beat.host_mem_rss or 0.0, beat.gpu_mem_alloc or 0.0, beat.gpu_mem_reserved or 0.0)
            span = ProgressSpan(seconds, beat.toks_per_s, *memory)
            if self.spans and self.spans[-1].seconds < _SPAN_S:
                self.spans[-1].add(span)
            elif span.seconds > 0:
                self.spans.append(span)
                if len(self.first_spans) < _FIRST_SPANS:
                    self.first_spans.append(span)
        self.progress.append(beat)
        if beat.loss is not None:
            self.losses.append((beat.step, beat.loss))
            if len(self.losses) > _LOSSES:
                del self.losses[: len(self.losses) // 2 : 2]


@dataclass
class RunHistory:
    facts: RunFacts = RunFacts()
    ranks: dict[int, RankLog] = field(default_factory=dict)
    events: deque[RunEvent] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    started_at: float | None = None
    """Monotonic time of the newest start event."""
    restarted_at: float | None = None
    """Monotonic time at which a launcher last said that it starts the ranks again; None once they have started."""
    waiting: RunEvent | None = None
    """A launcher waits for other nodes; None once the ranks have started, or it gave up."""
    failure: RunEvent | None = None
    """The error that ended the run since its newest start, unless a launcher restarted it."""
    evaluation_failure: RunEvent | None = None
    """The newest evaluation since the newest start, if it failed."""
    copy_failure: RunEvent | None = None
    """The newest copy of a checkpoint to the object store, if it failed; a restart makes no copy and keeps it."""
    saved_step: int = 0
    """Step of the newest checkpoint up to the current step; without one, where the run began."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process no longer exists. For ranks on other hosts this is not known."""
    unreadable: records.Unreadable = field(default_factory=records.Unreadable)
    """Records that could not be read, by file."""

    def add(self, beat: HeartbeatRecord, at: float, ahead_s: float = 0.0) -> None:
        log = self.ranks.get(beat.rank)
        if log is None:
            log = self.ranks[beat.rank] = RankLog(beat.rank, last=beat, last_at=at, step_at=at)
        log.add(beat, at, ahead_s)

    def add_event(self, event: RunEvent, at: float) -> None:
        self.events.append(event)
        action = event.details.get("launcher")
        if action == LauncherAction.RESTARTED:
            self.restarted_at = at
        elif action is not None:
            self.waiting = event if action == LauncherAction.WAITING else None
        if event.kind in _NEW_PROCESS:
            self.started_at, self.saved_step, self.failure = at, event.step, None
            self.evaluation_failure = self.restarted_at = self.waiting = None
            if event.kind == EventKind.START:
                self.copy_failure = None
        elif event.kind in (EventKind.EVALUATION, EventKind.EVALUATION_FAILED):
            self.evaluation_failure = event if event.kind == EventKind.EVALUATION_FAILED else None
        elif event.kind in (EventKind.COPIED, EventKind.COPY_FAILED):
            self.copy_failure = event if event.kind == EventKind.COPY_FAILED else None
        elif event.kind == EventKind.SAVE:
            self.saved_step = max(event.step, self.saved_step)
        elif event.kind == EventKind.ERROR:
            self.failure = event if action != LauncherAction.RESTARTED else None
        elif event.kind == EventKind.LOST_STEPS:  # resumed from an older checkpoint than the newest
            self.saved_step = min(event.step, self.saved_step)

    @property
    def present(self) -> dict[int, RankLog]:
        """Ranks with a heartbeat since the newest start; other ranks' last records are of an earlier process."""
        began = self.started_at
        return {rank: log for rank, log in sorted(self.ranks.items()) if began is None or log.last_at >= began}

    @property
    def first(self) -> RankLog | None:
        """The lowest rank: loss, gradient norm and tokens/s are the same on all ranks."""
        return next(iter(self.present.values()), None)

    @property
    def step(self) -> int:
        return max((log.last.step for log in self.ranks.values()), default=0)


class HistoryReader:
    """Keeps the history of a run folder up to date; `update` reads only what was appended since the last call."""

    def __init__(self, folder: Path, clock: Callable[[], ClockReading] = clock, host: str | None = None) -> None:
        self.folder = folder
        self.history = RunHistory()
        self.now = clock()
        """Clock at the last update; pass its `steady` time to `examine`."""
        self._clock = clock
        self._host = host or socket.gethostname()
        self._tails: dict[Path, RecordTail[HeartbeatRecord]] = {}
        self._events = RecordTail(folder / names.EVENTS, parse_event)
        self._last_update: float | None = None
        self._ahead_before: dict[int, float] = {}

    def update(self) -> RunHistory:
        history = self.history
        self.now = self._clock()
        env_damaged = self._read_facts()
        for rank, path in records.heartbeat_files(self.folder):
            if path not in self._tails:
                most = _FIRST_READ_BYTES if rank == 0 else _OTHER_RANKS_BYTES
                self._tails[path] = RecordTail(path, beat_parser(rank), most)
        for tail in self._tails.values():
            for beat in tail.read():
                history.add(beat, self._written_at(beat.ts, tail.path), self._ahead_s(beat))
        for event in self._events.read():
            history.add_event(event, self._written_at(event.ts, self._events.path))
        history.unreadable = records.Unreadable({tail.path.name: tail.unreadable for tail in self._all_tails()})
        history.unreadable[names.ENV] = int(env_damaged)
        history.gone = frozenset(self._gone())
        self._last_update = self.now.steady
        return history

    def close(self) -> None:
        for tail in self._all_tails():
            tail.close()

    def local(self) -> Iterator[RankLog]:
        """Ranks whose process runs or ran on this host."""
        facts = self.history.facts
        if facts.host != self._host:
            return
        here = facts.local_world if facts.local_world is not None else facts.world or 1
        yield from (log for rank, log in sorted(self.history.ranks.items()) if rank < here)

    def _all_tails(self) -> Iterator[RecordTail[Any]]:
        yield from self._tails.values()
        yield self._events

    def _ahead_s(self, beat: HeartbeatRecord) -> float:
        """Seconds ahead of this clock; after the first update of two heartbeats in a row, since a clock may be set."""
        ahead, before = max(0.0, beat.ts - self.now.wall), self._ahead_before.get(beat.rank, 0.0)
        self._ahead_before[beat.rank] = ahead
        return ahead if self._last_update is None else min(ahead, before)

    def _written_at(self, ts: float, path: Path) -> float:
        if ts - self.now.wall > HealthLimits.clock_skew_s:  # not trusted: use the file's modification time
            ts = _modified(path, ts)
        age = max(0.0, self.now.wall - ts)
        if self._last_update is not None:
            age = min(age, self.now.steady - self._last_update)
        return self.now.steady - age

    def leaving(self) -> list[int]:
        """Ranks of this host that have written their final record but still run, saving."""
        return [log.rank for log in self.local() if log.ended and self._is_running(log)]

    def processes(self) -> list[int]:
        """Process ids of the running ranks on this host."""
        return [log.last.pid for log in self.local() if self._is_running(log) is not False]

    def _gone(self) -> Iterator[int]:
        for log in self.local():
            if not log.ended and self._is_running(log) is False:
                yield log.rank

    def _is_running(self, log: RankLog) -> bool | None:
        pid = log.last.pid
        return writes_to(pid, (self.folder / names.stackdump(log.rank, pid), self.folder / names.heartbeat(log.rank)))

    def _read_facts(self) -> bool:
        """Whether env.json could not be fully read; earlier values are kept then."""
        env, damaged = records.read_section(self.folder / names.ENV)
        if env is not None:
            self.history.facts, damaged = RunFacts.from_env(env)
        return damaged


def _modified(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise
