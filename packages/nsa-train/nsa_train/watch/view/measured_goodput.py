"""Goodput: attributes the wall time of a run to causes (productive steps, data, checkpoints, stalls, downtime).

The causes add up to the whole time. `HOW_MEASURED` states how each is measured or estimated.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from nsa_train import names
from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.run_data import EvaluationRecord, RankSeries
from nsa_train.watch.conditions import CONDITIONS, HealthLimits


class TimeCause(StrEnum):
    PRODUCTIVE = "productive steps"
    LOST = "repeated steps"
    SKIPPED = "skipped steps"
    DATA = "waiting for data"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoints"
    START_UP = "start-up"
    STALL = "stalls"
    DOWN = "down"


HOW_MEASURED: Mapping[TimeCause, str] = {
    TimeCause.PRODUCTIVE: "time between records minus everything below",
    TimeCause.LOST: "measured between records; steps after the last record of a killed process count as down",
    TimeCause.SKIPPED: "number of skipped steps × the step time around them",
    TimeCause.DATA: "sampled: the wait for the last batch of each record × the steps of that record",
    TimeCause.EVALUATION: "measured, from val.csv",
    TimeCause.CHECKPOINT: "estimated: extra time compared with neighbouring steps, and the time after the last step",
    TimeCause.START_UP: "measured, from the start event to the first step; includes compilation",
    TimeCause.STALL: "time beyond the usual step time if it exceeds the stall limit, or as found by the watchdog",
    TimeCause.DOWN: "from the last record of a process to the next start event; includes program start",
}

_GONE = CONDITIONS["process_gone"].name
_Spent = dict[TimeCause, float]
_STARTS = (EventKind.START, EventKind.RESTART)
_ENDS = (EventKind.SAVE, EventKind.HALT, EventKind.STOP, EventKind.DONE, EventKind.ERROR)


class _ProcessLifetime(NamedTuple):
    """Lifetime of one process on the wall clock, from its start event to its last sign of life."""

    begin: float
    rows: range
    end: float
    last_step: int = 0
    ending: str | None = None
    first_step: float = math.inf
    """Time of its first step; `end` if it made none."""


@dataclass
class Goodput:
    begin: float
    end: float
    seconds: dict[TimeCause, float]
    lives: list[_ProcessLifetime] = field(default_factory=list)

    @property
    def total(self) -> float:
        return self.end - self.begin

    def share(self, cause: TimeCause) -> float:
        return self.seconds[cause] / self.total if self.total > 0 else 0.0


def goodput(
    lead: RankSeries,
    events: Sequence[RunEvent],
    evaluations: Sequence[EvaluationRecord] = (),
) -> Goodput | None:
    """Attribute time to causes, up to the last record; None for a run without records, or whose clock was set back."""
    if any(after < before - HealthLimits.clock_skew_s for before, after in pairwise(lead.ts)):
        return None
    spans = _spans(lead, events)
    while len(spans) > 1 and spans[-2].ending == names.DONE and not spans[-1].rows:
        spans.pop()  # started again after the run was done, and found nothing to do: neither down nor start-up
    if not spans:
        return None
    spent = dict.fromkeys(TimeCause, 0.0)
    intervals = _RowIntervals(lead, events, [each for each in evaluations if each.ts <= spans[-1].end])
    lives = []
    for span, after in zip(spans, [*spans[1:], None], strict=True):
        first = lead.ts[span.rows[0]] if span.rows else span.end
        spent[TimeCause.START_UP] += first - span.begin
        intervals.attribute(span.rows, spent)
        if span.rows:
            intervals.attribute_end(span, spent)
        lives.append(span._replace(first_step=first))
        if after is not None:
            _attribute_gap(span.end, after.begin, events, spent)
    result = Goodput(spans[0].begin, spans[-1].end, spent, lives)
    assert math.isclose(sum(spent.values()), result.total, rel_tol=1e-6, abs_tol=1e-3), (spent, result.total)
    return result


def _spans(lead: RankSeries, events: Sequence[RunEvent]) -> list[_ProcessLifetime]:
    """Combines heartbeats and start events of each process; a process that died before its first heartbeat counts."""
    begins = sorted(event.ts for event in events if event.kind in _STARTS)
    lives = lead.processes
    row_ends = [*(process.first_row for process in lives[1:]), len(lead)][: len(lives)]
    spans = []
    for number, (process, row_end) in enumerate(zip(lives, row_ends, strict=True)):
        earlier = lives[number - 1].last if number else -math.inf
        mine = [ts for ts in begins if earlier < ts <= process.begin]
        spans += [_ProcessLifetime(ts, range(0), ts) for ts in mine[:-1]]
        begin = mine[-1] if mine else process.begin
        spans.append(
            _ProcessLifetime(begin, range(process.first_row, row_end), process.last, process.last_step, process.ending)
        )
    latest = lives[-1].last if lives else -math.inf
    spans += [_ProcessLifetime(ts, range(0), ts) for ts in begins if ts > latest]
    followers: list[_ProcessLifetime | None] = [*spans[1:], None]
    return [_with_last_event(span, after, events) for span, after in zip(spans, followers, strict=False)]


def _with_last_event(
    span: _ProcessLifetime, after: _ProcessLifetime | None, events: Sequence[RunEvent]
) -> _ProcessLifetime:
    """Extend a span to the event of its last save, which may come after the last heartbeat of the process.

    Events of the launcher about a dead process do not count.
    """
    until = after.begin if after else math.inf
    signs = [
        event.ts
        for event in events
        if span.begin <= event.ts < until and event.kind in _ENDS and "launcher" not in event.details
    ]
    return span._replace(end=max([span.end, *signs]))


class _RowIntervals:
    """Attributes the time between consecutive rows to causes."""

    def __init__(
        self,
        lead: RankSeries,
        events: Sequence[RunEvent],
        evaluations: Sequence[EvaluationRecord],
    ) -> None:
        self._lead = lead
        self._evaluated = _sums(lead, [(each.ts, each.seconds) for each in evaluations])
        self._skipped = _sums(lead, [(event.ts, 1.0) for event in events if event.kind == EventKind.SKIPPED_STEP])
        self._saved = {_row_of_save(lead, event) for event in events if event.kind == EventKind.SAVE}
        self._pace = self._usual_pace()

    def _usual_pace(self) -> float:
        """Median seconds per step."""
        lead = self._lead
        firsts = {process.first_row for process in lead.processes}
        paces = [
            (lead.ts[row] - lead.ts[row - 1]) / lead.steps[row]
            for row in range(1, len(lead))
            if row not in firsts and row - 1 not in self._saved and row - 1 not in self._evaluated
        ]
        return statistics.median(paces) if paces else 0.0

    def attribute(self, rows: range, spent: _Spent) -> None:
        """Attribute all intervals of a process. Most contain only steps; those are summed here, for speed."""
        lead, fetches = self._lead, self._lead.column("dt_fetch_s")
        special = self._saved | self._evaluated.keys() | self._skipped.keys()
        limit, waited, stepped = HealthLimits.stall_s, 0.0, 0.0
        for row in rows[:-1]:
            duration, steps, fetch = lead.ts[row + 1] - lead.ts[row], lead.steps[row + 1], fetches[row + 1]
            if row in special or lead.superseded[row + 1] or not 0 <= duration <= limit or not math.isfinite(fetch):
                self._attribute(row, duration, steps, fetch, bool(lead.superseded[row + 1]), spent)
                continue
            wait = min(duration, fetch * steps)
            waited += wait
            stepped += duration - wait
        spent[TimeCause.DATA] += waited
        spent[TimeCause.PRODUCTIVE] += stepped

    def attribute_end(self, span: _ProcessLifetime, spent: _Spent) -> None:
        """Attribute the time from the last row to the end of the process: unrecorded steps, then saving and exiting."""
        lead, row = self._lead, span.rows[-1]
        duration, steps = span.end - lead.ts[row], max(0, span.last_step - lead.step[row])
        evaluated = min(duration, self._evaluated.get(row, 0.0))
        stepping = min(duration - evaluated, steps * self._pace)
        left = duration - evaluated - stepping
        spent[TimeCause.EVALUATION] += evaluated
        spent[TimeCause.LOST if lead.superseded[row] else TimeCause.PRODUCTIVE] += stepping
        leaving = span.ending in (names.DONE, names.HALTED, names.STOPPED) or row in self._saved
        spent[TimeCause.CHECKPOINT if leaving else TimeCause.STALL] += left

    def _attribute(self, row: int, duration: float, steps: int, fetch: float, superseded: bool, spent: _Spent) -> None:
        evaluated = min(duration, self._evaluated.get(row, 0.0))
        spent[TimeCause.EVALUATION] += evaluated
        left = duration - evaluated
        if row in self._saved:
            saving = max(0.0, left - steps * self._pace_around(row))
            spent[TimeCause.CHECKPOINT] += saving
            left -= saving
        elif left - steps * self._pace > HealthLimits.stall_s:
            spent[TimeCause.STALL] += left - steps * self._pace
            left = steps * self._pace
        if superseded:
            spent[TimeCause.LOST] += left
            return
        waited = min(left, fetch * steps) if math.isfinite(fetch) else 0.0
        skipped = (left - waited) * min(1.0, self._skipped.get(row, 0.0) / steps)
        spent[TimeCause.DATA] += waited
        spent[TimeCause.SKIPPED] += skipped
        spent[TimeCause.PRODUCTIVE] += left - waited - skipped

    def _pace_around(self, row: int) -> float:
        """Seconds per step of the neighbouring intervals: speed drifts over a run."""
        lead = self._lead
        paces = [
            (lead.ts[end] - lead.ts[end - 1] - self._evaluated.get(end - 1, 0.0)) / lead.steps[end]
            for end in (row, row + 2)
            if 0 < end < len(lead) and end - 1 not in self._saved and lead.steps[end] > 0
        ]
        return max(0.0, statistics.fmean(paces)) if paces else self._pace


def _sums(lead: RankSeries, timed: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Sums of amounts, by the row they follow."""
    sums: defaultdict[int, float] = defaultdict(float)
    for ts, amount in timed:
        # An amount at the time of a record belongs to the interval before it.
        sums[max(0, bisect_left(lead.ts, ts) - 1)] += amount
    return dict(sums)


def _row_of_save(lead: RankSeries, event: RunEvent) -> int:
    """The row at which the save began; the event is written when it is complete."""
    row = bisect_right(lead.ts, event.ts) - 1
    while row > 0 and lead.step[row] > event.step:
        row -= 1
    return row


def _attribute_gap(last: float, begin: float, events: Sequence[RunEvent], spent: _Spent) -> None:
    """Attribute the time between two processes: down, or stalled until the end if the watchdog found a stall."""
    inside = [event for event in events if last < event.ts < begin]
    ended = next((event.ts for event in inside if event.kind in (EventKind.ERROR, EventKind.STOP)), begin)
    stalled = any(event.kind == EventKind.STALL and event.details.get("condition") != _GONE for event in inside)
    hung = ended - last if stalled else 0.0
    spent[TimeCause.STALL] += hung
    spent[TimeCause.DOWN] += begin - last - hung
