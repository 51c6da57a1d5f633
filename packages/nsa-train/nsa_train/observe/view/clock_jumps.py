"""Corrects the time stamps of a run whose clock was set while it ran.

A record holds the time since the record before it on a clock that cannot be set (`step_s`). Where the time stamps tell
otherwise by more than `clock_skew_s` and go back before or after, the wall clock has jumped. A jump ahead alone may be
a machine that was suspended: it stays. Events have no such second time: each takes the correction that puts it closest
to the event before it, since they are written in the order in which they happen.
"""

import copy
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from nsa_train.observe.events import RunEvent
from nsa_train.observe.view.run_data import RankSeries
from nsa_train.observe.watch.conditions import HealthLimits


class ClockSegment(NamedTuple):
    """Time stamps from `begin` to `end` are wrong; adding `offset` corrects them."""

    begin: float
    end: float
    offset: float


def correct_clock(lead: RankSeries, events: Sequence[RunEvent]) -> tuple[RankSeries, Sequence[RunEvent]]:
    """The same series and events if no clock has jumped."""
    if not any(after < before - HealthLimits.clock_skew_s for before, after in pairwise(lead.ts)):
        return lead, events
    corrected, segments = _correct_rows(lead)
    return corrected, _correct_events(events, segments)


def _jump_s(lead: RankSeries, row: int) -> float:
    """How far the clock jumped between two rows; 0 where it did not, or where that is not known.

    Rows of two processes or on both sides of a rollback have no measured time between them.
    """
    elapsed = lead.ts[row] - lead.ts[row - 1]
    if lead.step[row] != lead.step[row - 1] + lead.steps[row]:
        return 0.0
    jump = elapsed - lead.column("step_s")[row] * lead.steps[row]
    return jump if abs(jump) > HealthLimits.clock_skew_s else 0.0


def _correct_rows(lead: RankSeries) -> tuple[RankSeries, list[ClockSegment]]:
    firsts = {process.first_row for process in lead.processes}
    times, offsets = array("d"), array("d")
    offset, lowest_after = 0.0, _lowest_after(lead.ts)
    for row, ts in enumerate(lead.ts):
        if row in firsts:
            offset = _offset_of_start(ts, offset, times[-1] if row else -math.inf)
        elif (jump := _jump_s(lead, row)) < 0 or offset > 0 or lowest_after[row] < ts - HealthLimits.clock_skew_s:
            offset -= jump
        times.append(ts + offset)
        offsets.append(offset)
    found = copy.copy(lead)
    found.ts, found.processes = times, []
    for process, following in zip(lead.processes, [*lead.processes[1:], None], strict=True):
        end_row = following.first_row if following is not None else len(lead)
        rows = range(process.first_row, end_row)
        at_begin, at_end = (offsets[rows[0]], offsets[rows[-1]]) if rows else (0.0, 0.0)
        # A clock may be wrong in the middle of a process only: its first and last records are those of these rows.
        found.processes.append(replace(process, begin=process.begin + at_begin, last=process.last + at_end))
    return found, _segments(lead, offsets)


def _lowest_after(times: "array[float]") -> "array[float]":
    """The lowest time stamp after each row."""
    found, lowest = array("d", bytes(8 * len(times))), math.inf
    for row in range(len(times) - 1, -1, -1):
        found[row], lowest = lowest, min(lowest, times[row])
    return found


def _offset_of_start(ts: float, offset: float, before: float) -> float:
    """Of a new process: its clock is as wrong as before, or right again, whichever makes the shorter pause."""
    possible = [each for each in (offset, 0.0) if ts + each >= before]
    return min(possible, key=lambda each: ts + each) if possible else 0.0


def _segments(lead: RankSeries, offsets: "array[float]") -> list[ClockSegment]:
    """One for each series of rows with the same correction. An event may come a step before or after its row."""
    found: list[ClockSegment] = []
    for row, offset in enumerate(offsets):
        if abs(offset) < 1.0:
            continue
        ts, near_s = lead.ts[row], HealthLimits.clock_skew_s
        if found and row and offsets[row - 1] == offset:
            found[-1] = found[-1]._replace(end=ts + near_s)
        else:
            found.append(ClockSegment(ts - near_s, ts + near_s, offset))
    return found


def _correct_events(events: Sequence[RunEvent], segments: Sequence[ClockSegment]) -> list[RunEvent]:
    found: list[RunEvent] = []
    for event in events:
        if not found:
            found.append(event)
            continue
        possible = [event.ts, *(event.ts + each.offset for each in segments if each.begin <= event.ts <= each.end)]
        found.append(replace(event, ts=min(possible, key=lambda ts: abs(ts - found[-1].ts))))
    return found
