"""What is known of a run at one moment, reduced to what `health` judges by; and the reader that keeps it.

Ages are on the watcher's steady clock: a record's own time stamp says how old it was when it was first seen, bounded by
how long ago the watcher looked before. A wall clock that jumps by an hour then neither hides nor invents a stall.
"""

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from nsa.observe import names
from nsa.observe.events import Event, Kind, event_of
from nsa.observe.heartbeat import Beat
from nsa.observe.watch.processes import writes_to
from nsa.observe.watch.tail import Tail

SPAN_S = 30.0
"""Trends over hours are kept as means over at least this long."""
_RECORDS, _SPANS, _FIRST_SPANS, _LOSSES, _EVENTS = 256, 240, 20, 20_000, 256
_FIRST_READ_BYTES, _OTHER_RANKS_BYTES = 16 << 20, 2 << 20
"""How much of a long heartbeat file a new watcher reads; the loss, which needs the longest past, is in rank 0's."""
_NEW_PROCESS = (Kind.START, Kind.RESTART)


class Moment(NamedTuple):
    wall: float
    steady: float


def clock() -> Moment:
    return Moment(time.time(), time.monotonic())


@dataclass(frozen=True)
class Facts:
    """From env.json; None is not known."""

    host: str | None = None
    world: int | None = None
    local_world: int | None = None
    """Ranks 0 to this run on `host`."""
    steps: int | None = None
    log_every: int | None = None
    save_every: int | None = None
    eval_every: int | None = None
    l_sel: int | None = None
    dataset: str | None = None
    loader_timeout_s: float | None = None

    @classmethod
    def from_env(cls, env: dict[str, Any]) -> Self:
        config = env.get("config", {})
        train, data = config.get("train", {}), config.get("data", {})
        return cls(
            host=env.get("host"),
            world=env.get("world_size"),
            local_world=env.get("local_world_size"),
            steps=train.get("steps"),
            log_every=train.get("log_every"),
            save_every=train.get("save_every"),
            eval_every=train.get("eval_every"),
            l_sel=config.get("nsa", {}).get("l_sel"),
            dataset=data.get("dataset"),
            loader_timeout_s=data.get("loader_timeout_s"),
        )


@dataclass
class Span:
    """Progress records in a row, together at least SPAN_S of training."""

    seconds: float
    toks_per_s: float
    host_mem_rss: float
    gpu_mem_alloc: float

    def add(self, other: "Span") -> None:
        together = self.seconds + other.seconds
        self.toks_per_s = (self.toks_per_s * self.seconds + other.toks_per_s * other.seconds) / together
        self.seconds = together
        self.host_mem_rss, self.gpu_mem_alloc = other.host_mem_rss, other.gpu_mem_alloc


@dataclass
class RankLog:
    """One rank's present process: a new one, or one that went back to a checkpoint, begins anew."""

    rank: int
    last: Beat
    last_at: float
    """Steady time at which the newest beat was written, as well as it can be known; so are all `_at`."""
    step_at: float
    """Of the first beat that told the newest step."""
    progress: deque[Beat] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    skipped: deque[Beat] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) on the way to the present step, of earlier processes too; thinned out when there are too many."""
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_SPANS))
    first_spans: list[Span] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last.msg in names.ENDINGS

    @property
    def step_s(self) -> float:
        """The usual time of a step, 0 if not known."""
        times = sorted(beat.step_s for beat in self.progress if beat.step_s is not None)
        return times[len(times) // 2] if times else 0.0

    def add(self, beat: Beat, at: float) -> None:
        if beat.pid != self.last.pid or beat.msg == names.START:
            for kept in (self.progress, self.skipped, self.spans, self.first_spans):
                kept.clear()
            self._go_back(beat, at)
        elif beat.msg == names.ROLLED_BACK:
            self.progress.clear()  # its steps come again
            self._go_back(beat, at)
        elif beat.step != self.last.step:
            self.step_at = at
        self.last, self.last_at = beat, at
        if beat.msg == names.SKIPPED:
            self.skipped.append(beat)
        elif beat.msg == names.PROGRESS:
            self._add_progress(beat)

    def _go_back(self, beat: Beat, at: float) -> None:
        self.step_at = at
        self.losses = [(step, loss) for step, loss in self.losses if step <= beat.step]

    def _add_progress(self, beat: Beat) -> None:
        if self.progress and beat.step_s is not None and beat.toks_per_s is not None:
            # The first record of a process tells of compiling and filling buffers, not of the run.
            seconds = beat.step_s * max(1, beat.step - self.progress[-1].step)
            span = Span(seconds, beat.toks_per_s, beat.host_mem_rss or 0.0, beat.gpu_mem_alloc or 0.0)
            if self.spans and self.spans[-1].seconds < SPAN_S:
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
class History:
    facts: Facts = Facts()
    ranks: dict[int, RankLog] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    started_at: float | None = None
    """Steady time of the newest start the events tell of."""
    failure: Event | None = None
    """The error that ended the run since its newest start, and that no launcher answers by starting it again."""
    evaluation_failure: Event | None = None
    """The newest evaluation since the newest start, if it failed."""
    saved_step: int = 0
    """Of the newest checkpoint on the way to the present step; without one, where the run began."""
    gone: frozenset[int] = frozenset()
    """Ranks whose process is known not to exist any more. Of ranks on other hosts nothing is known."""

    def add(self, beat: Beat, at: float) -> None:
        log = self.ranks.get(beat.rank)
        if log is None:
            log = self.ranks[beat.rank] = RankLog(beat.rank, last=beat, last_at=at, step_at=at)
        log.add(beat, at)

    def add_event(self, event: Event, at: float) -> None:
        self.events.append(event)
        if event.kind in _NEW_PROCESS:
            self.started_at, self.saved_step, self.failure = at, event.step, None
            self.evaluation_failure = None
        elif event.kind in (Kind.EVALUATION, Kind.EVALUATION_FAILED):
            self.evaluation_failure = event if event.kind == Kind.EVALUATION_FAILED else None
        elif event.kind == Kind.SAVE:
            self.saved_step = max(event.step, self.saved_step)
        elif event.kind == Kind.ERROR:
            self.failure = event if event.details.get("launcher") != "restarted" else None
        elif event.kind == Kind.LOST_STEPS:  # went back to an older one than the newest
            self.saved_step = min(event.step, self.saved_step)

    @property
    def present(self) -> dict[int, RankLog]:
        """Ranks that have spoken since the newest start; what others said last was of an earlier life."""
        began = self.started_at
        return {rank: log for rank, log in sorted(self.ranks.items()) if began is None or log.last_at >= began}

    @property
    def first(self) -> RankLog | None:
        """The rank that speaks for the run: loss, gradient norm and tokens/s are the same on all."""
        return next(iter(self.present.values()), None)

    @property
    def step(self) -> int:
        return max((log.last.step for log in self.ranks.values()), default=0)


class HistoryReader:
    """Keeps the history of a run folder up to date; each call costs what was written since the last."""

    def __init__(self, folder: Path, clock: Callable[[], Moment] = clock, host: str | None = None) -> None:
        self.folder = folder
        self.history = History()
        self.now = clock()
        """The moment of the last look; judge by its steady time."""
        self._clock = clock
        self._host = host or socket.gethostname()
        self._tails: dict[Path, Tail] = {}
        self._events = Tail(folder / names.EVENTS)
        self._looked: float | None = None

    def update(self) -> History:
        history = self.history
        self.now = self._clock()
        history.facts = self._facts()
        for path in sorted(self.folder.glob(names.HEARTBEATS)):
            if path not in self._tails:
                most = _FIRST_READ_BYTES if path.name == names.heartbeat(0) else _OTHER_RANKS_BYTES
                self._tails[path] = Tail(path, most)
        for tail in self._tails.values():
            for beat in _beats(tail.read()):
                history.add(beat, self._written_at(beat.ts))
        for event in filter(None, map(event_of, self._events.read())):
            history.add_event(event, self._written_at(event.ts))
        history.gone = frozenset(self._gone())
        self._looked = self.now.steady
        return history

    def close(self) -> None:
        for tail in (*self._tails.values(), self._events):
            tail.close()

    def local(self) -> Iterator[RankLog]:
        """Ranks whose process is, or was, on this host."""
        facts = self.history.facts
        if facts.host != self._host:
            return
        here = facts.local_world if facts.local_world is not None else facts.world or 1
        yield from (log for rank, log in sorted(self.history.ranks.items()) if rank < here)

    def _written_at(self, ts: float) -> float:
        age = max(0.0, self.now.wall - ts)
        if self._looked is not None:
            age = min(age, self.now.steady - self._looked)
        return self.now.steady - age

    def leaving(self) -> list[int]:
        """Ranks of this host that have had their last word and are still there, saving."""
        return [log.rank for log in self.local() if log.ended and self._is_there(log)]

    def _gone(self) -> Iterator[int]:
        for log in self.local():
            if not log.ended and self._is_there(log) is False:
                yield log.rank

    def _is_there(self, log: RankLog) -> bool | None:
        pid = log.last.pid
        return writes_to(pid, (self.folder / names.stackdump(log.rank, pid), self.folder / names.heartbeat(log.rank)))

    def _facts(self) -> Facts:
        try:
            env = json.loads((self.folder / names.ENV).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return self.history.facts
        return Facts.from_env(env)


def _beats(records: Iterable[dict[str, Any]]) -> Iterator[Beat]:
    for record in records:
        whole = all(isinstance(record.get(name), int) for name in ("pid", "rank", "step"))
        if whole and isinstance(record.get("ts"), (int, float)) and isinstance(record.get("msg"), str):
            yield Beat.from_dict({"iso": "", **record})
