"""History of a run: its records reduced to the state that health checks and Prometheus metrics need.

Times named `_at` are on the monotonic clock of the reader, see `run_reader`.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Self

from nsa_train import names
from nsa_train.record import record_files, value_checks
from nsa_train.record.events import EventKind, LauncherAction, RunEvent
from nsa_train.record.heartbeat_record import HeartbeatRecord

_SPAN_S = 30.0
"""Trends over hours are kept as means over spans of at least this length."""
_RECORDS, _SPANS, _FIRST_SPANS, _LOSSES = 256, 240, 20, 20_000
_NEW_PROCESS = (EventKind.START, EventKind.RESTART)


def _fact(place: str, check: value_checks.Check) -> Any:
    """Define a fact by its place in env.json and its check; it is None where it is not known."""
    return field(default=None, metadata={"place": place, "check": check})


def _of_train(name: str, check: value_checks.Check = value_checks.whole) -> Any:
    return _fact(f"config.train.{name}", check)


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run from env.json; None where not known."""

    host: str | None = _fact("host", value_checks.text)
    world: int | None = _fact("world_size", value_checks.rank_number)
    local_world: int | None = _fact("local_world_size", value_checks.rank_number)
    """Number of ranks on `host`; they are the lowest ranks."""
    steps: int | None = _of_train("steps")
    log_every: int | None = _of_train("log_every")
    save_every: int | None = _of_train("save_every")
    eval_every: int | None = _of_train("eval_every")
    checkpoint_store: str | None = _of_train("checkpoint_store", value_checks.text)
    """Where checkpoints are copied to."""
    trainable: tuple[str, ...] | None = _of_train("trainable", value_checks.texts)
    """Patterns of the parameters that are trained."""
    dataset: str | None = _fact("config.data.dataset", value_checks.text)

    def is_substituted(self, beat: HeartbeatRecord) -> bool:
        """Whether a rank trains on synthetic data although a dataset is configured."""
        return bool(beat.synthetic) and self.dataset not in (None, "synthetic")

    @classmethod
    def from_env(cls, env: dict[str, Any]) -> tuple[Self, bool]:
        """The settings, and whether something in the file could not be read."""
        facts, damaged = {}, False
        for fact in fields(cls):
            value: Any = env
            for key in fact.metadata["place"].split("."):
                damaged |= not isinstance(value, (dict, NoneType))
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                facts[fact.name] = fact.metadata["check"](value)
                damaged |= facts[fact.name] is None
        return cls(**facts), damaged


@dataclass
class _ProgressSpan:
    """Consecutive progress records, together at least `_SPAN_S` seconds of training."""

    seconds: float
    toks_per_s: float
    host_mem_rss: float
    gpu_mem_alloc: float
    gpu_mem_reserved: float

    def add(self, other: "_ProgressSpan") -> None:
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
    """Time at which the newest heartbeat was written, as far as known."""
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
    spans: deque[_ProgressSpan] = field(default_factory=lambda: deque(maxlen=_SPANS))
    first_spans: list[_ProgressSpan] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.last.msg in names.ENDINGS

    @property
    def step_s(self) -> float:
        """Median step time, 0 if not known."""
        times = sorted(beat.step_s for beat in self.progress if beat.step_s is not None)
        return times[len(times) // 2] if times else 0.0

    def skipped_step_of(self, beat: HeartbeatRecord) -> bool:
        """Whether the optimizer did not run for the step of this record, by its own record or by the count of them.

        Skipped steps have a progress record like any other.
        """
        if any(skip.step == beat.step for skip in self.skipped):
            return True
        earlier = [past for past in self.progress if past.step < beat.step]
        before = (earlier[-1].nonfinite_steps if earlier else 0) or 0
        return (beat.nonfinite_steps or 0) > before

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
            span = _ProgressSpan(seconds, beat.toks_per_s, *memory)
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
    started_at: float | None = None
    """Time of the newest start event."""
    restarted_at: float | None = None
    """Time at which a launcher last said that it starts the ranks again; None once they have started."""
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
    skipped: Counter[int] = field(default_factory=Counter)
    """Number of skipped steps by rank. Counts are of the whole run, across processes."""
    nonfinite: Counter[int] = field(default_factory=Counter)
    """Number of skipped steps with a loss or gradient norm that is not finite, by rank."""
    bad_losses: Counter[int] = field(default_factory=Counter)
    """Number of records with a non-finite loss of steps that were not skipped, by rank."""
    bad_norms: Counter[int] = field(default_factory=Counter)
    event_counts: Counter[EventKind] = field(default_factory=Counter)
    lost_steps: int = 0
    saved_ts: float | None = None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    unreadable: record_files.Unreadable = field(default_factory=record_files.Unreadable)
    """Records that could not be read, by file."""

    def add(self, beat: HeartbeatRecord, at: float, ahead_s: float = 0.0) -> None:
        log = self.ranks.get(beat.rank)
        if log is None:
            log = self.ranks[beat.rank] = RankLog(beat.rank, last=beat, last_at=at, step_at=at)
        log.add(beat, at, ahead_s)
        bad_loss, bad_norm = not is_finite(beat.loss), not is_finite(beat.grad_norm)
        if beat.msg == names.SKIPPED:
            self.skipped[beat.rank] += 1
            self.nonfinite[beat.rank] += bad_loss or bad_norm
        elif (bad_loss or bad_norm) and beat.msg == names.PROGRESS and not log.skipped_step_of(beat):
            self.bad_losses[beat.rank] += bad_loss
            self.bad_norms[beat.rank] += bad_norm

    def add_event(self, event: RunEvent, at: float) -> None:
        self.event_counts[event.kind] += 1
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
            self.eval_loss = event.details.get("val_loss", self.eval_loss)
            self.eval_accuracy = event.details.get("val_accuracy", self.eval_accuracy)
        elif event.kind in (EventKind.COPIED, EventKind.COPY_FAILED):
            self.copy_failure = event if event.kind == EventKind.COPY_FAILED else None
        elif event.kind == EventKind.SAVE:
            self.saved_step, self.saved_ts = max(event.step, self.saved_step), event.ts
        elif event.kind == EventKind.ERROR:
            self.failure = event if action != LauncherAction.RESTARTED else None
        elif event.kind == EventKind.LOST_STEPS:  # resumed from an older checkpoint than the newest
            self.saved_step = min(event.step, self.saved_step)
            self.lost_steps += event.details.get("steps", 0)

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


def is_finite(value: float | None) -> bool:
    """Whether a recorded value is finite; one that was not recorded is no bad value."""
    return value is None or math.isfinite(value)
