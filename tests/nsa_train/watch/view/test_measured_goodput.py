"""Wall time by cause, from events and beats that are built by hand."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.run_data import _LEAD_COLUMNS, EvaluationRecord, RankSeries
from nsa_train.watch.view.measured_goodput import HOW_MEASURED, Goodput, TimeCause, goodput
from tests.nsa_train.record.beats import a_beat, progress


def series(beats: Iterable[HeartbeatRecord]) -> RankSeries:
    rank_series = RankSeries(0, _LEAD_COLUMNS)
    for beat in beats:
        rank_series.add(beat.as_dict())
    return rank_series


def steps(
    first: int, last: int, begin: float, *, step_s: float = 1.0, fetch: float = 0.0, pid: int = 1000
) -> list[HeartbeatRecord]:
    """One record per step; step `first` ends at `begin`."""
    return [
        progress(step, begin + (step - first) * step_s, dt_fetch_s=fetch, pid=pid) for step in range(first, last + 1)
    ]  # fmt: skip


def started(step: int, ts: float, pid: int = 1000) -> HeartbeatRecord:
    return a_beat(names.START, step, ts, pid=pid)


def spent(measured: Goodput | None) -> dict[TimeCause, float]:
    assert measured is not None
    assert sum(measured.seconds.values()) == pytest.approx(measured.total)
    assert all(seconds >= -1e-9 for seconds in measured.seconds.values())
    return {cause: seconds for cause, seconds in measured.seconds.items() if seconds > 1e-9}


def test_a_plain_run_is_start_up_and_steps():
    beats = [started(0, 5.0), *steps(1, 101, 10.0)]
    measured = goodput(series(beats), [RunEvent(0.0, EventKind.START, 0, {})])
    assert spent(measured) == {TimeCause.START_UP: 10.0, TimeCause.PRODUCTIVE: 100.0}
    assert measured is not None
    assert measured.share(TimeCause.PRODUCTIVE) == pytest.approx(100 / 110)


def test_a_killed_run_counts_repeated_steps_and_downtime():
    beats = [started(0, 0.0), *steps(1, 21, 0.0), started(10, 50.0, 2), *steps(11, 31, 54.0, pid=2)]
    events = [RunEvent(0.0, EventKind.START, 0, {}), RunEvent(48.0, EventKind.RESTART, 10, {})]
    assert spent(goodput(series(beats), events)) == {
        TimeCause.PRODUCTIVE: 9.0 + 20.0, TimeCause.LOST: 11.0, TimeCause.DOWN: 28.0, TimeCause.START_UP: 6.0,
    }  # fmt: skip


def test_evaluations_are_taken_off_the_steps():
    beats = [*steps(1, 10, 0.0), *steps(11, 20, 17.0)]
    measured = goodput(series([started(0, 0.0), *beats]), [], [EvaluationRecord(10, 2.0, 7.0, 16.5)])
    assert spent(measured) == {TimeCause.PRODUCTIVE: pytest.approx(19.0), TimeCause.EVALUATION: 7.0}


def test_a_save_costs_what_it_adds_to_its_interval():
    beats = [*steps(1, 10, 0.0), *steps(11, 20, 14.0)]
    events = [RunEvent(18.5, EventKind.SAVE, 10, {})]  # written three steps later
    seconds = spent(goodput(series([started(0, 0.0), *beats]), events))
    assert seconds == {TimeCause.PRODUCTIVE: pytest.approx(19.0), TimeCause.CHECKPOINT: pytest.approx(4.0)}


def test_the_time_of_a_stop_counts_as_saving():
    beats = [started(0, 0.0), *steps(1, 10, 0.0), a_beat(names.STOPPED, 10, 9.5)]
    seconds = spent(goodput(series(beats), [RunEvent(14.0, EventKind.SAVE, 10, {})]))
    assert seconds == {TimeCause.PRODUCTIVE: 9.0, TimeCause.CHECKPOINT: 5.0}


def test_a_long_silence_within_a_process_is_a_stall():
    beats = [started(0, 0.0), *steps(1, 50, 0.0), *steps(51, 60, 650.0)]
    assert spent(goodput(series(beats), [])) == {
        TimeCause.PRODUCTIVE: pytest.approx(59.0),
        TimeCause.STALL: pytest.approx(600.0),
    }


@pytest.mark.parametrize(
    ("condition", "expected"),
    [("heartbeat_stall", {TimeCause.STALL: 300.0, TimeCause.DOWN: 20.0}), ("process_gone", {TimeCause.DOWN: 320.0})],
)
def test_the_last_finding_of_the_watchdog_distinguishes_a_hang_from_downtime(condition, expected):
    beats = [started(0, 0.0), *steps(1, 11, 0.0), started(11, 330.0, 2), *steps(12, 12, 330.0, pid=2)]
    events = [
        RunEvent(200.0, EventKind.STALL, 11, {"condition": condition}),
        RunEvent(310.0, EventKind.ERROR, 11, {"launcher": "restart"}),
        RunEvent(330.0, EventKind.RESTART, 11, {}),
    ]
    seconds = spent(goodput(series(beats), events))
    assert {cause: seconds[cause] for cause in expected} == expected
    assert seconds[TimeCause.PRODUCTIVE] == 10.0


def test_waiting_for_data_is_the_sample_times_the_steps():
    assert spent(goodput(series([started(0, 0.0), *steps(1, 11, 0.0, fetch=0.25)]), [])) == {
        TimeCause.PRODUCTIVE: pytest.approx(7.5), TimeCause.DATA: pytest.approx(2.5),
    }  # fmt: skip


def test_more_waiting_than_there_is_time_is_all_of_the_time():
    assert spent(goodput(series([started(0, 0.0), *steps(1, 11, 0.0, fetch=9.0)]), [])) == {TimeCause.DATA: 10.0}


def test_skipped_steps_are_not_productive():
    events = [RunEvent(4.5, EventKind.SKIPPED_STEP, 5, {})]
    seconds = spent(goodput(series([started(0, 0.0), *steps(1, 11, 0.0)]), events))
    assert seconds == {TimeCause.PRODUCTIVE: 9.0, TimeCause.SKIPPED: 1.0}


def test_a_process_that_died_before_its_first_beat_counts():
    events = [
        RunEvent(0.0, EventKind.START, 0, {}),
        RunEvent(30.0, EventKind.ERROR, 0, {}),
        RunEvent(40.0, EventKind.START, 0, {}),
    ]
    measured = goodput(series([started(0, 45.0), *steps(1, 6, 50.0)]), events)
    assert spent(measured) == {TimeCause.START_UP: 40.0, TimeCause.DOWN: 10.0, TimeCause.PRODUCTIVE: 5.0}
    assert measured is not None
    assert len(measured.lives) == 2


@pytest.mark.parametrize("again", [1, 2])
def test_resuming_a_run_that_is_done_costs_nothing(again):
    beats = [started(0, 0.0), *steps(1, 10, 0.0), a_beat(names.DONE, 10, 12.0)]
    events = [RunEvent(0.0, EventKind.START, 0, {}), RunEvent(12.0, EventKind.DONE, 10, {})]
    evaluations = [EvaluationRecord(10, 2.0, 1.0, 10.5)]
    once = goodput(series(beats), events, evaluations)
    for number in range(1, again + 1):
        begin = 1000.0 * number
        beats += [started(10, begin + 1, number), a_beat(names.DONE, 10, begin + 30, pid=number)]
        events += [RunEvent(begin, EventKind.RESTART, 10, {}), RunEvent(begin + 5, EventKind.SAVE, 10, {})]
        evaluations.append(EvaluationRecord(10, 2.0, 20.0, begin + 28))
    assert spent(goodput(series(beats), events, evaluations)) == spent(once)
    more = [*beats, started(10, 4000.0, 9), *steps(11, 20, 4001.0, pid=9)]
    assert spent(goodput(series(more), events, evaluations))[TimeCause.PRODUCTIVE] > spent(once)[TimeCause.PRODUCTIVE]


def test_a_run_without_records_has_no_goodput():
    assert goodput(series([]), []) is None


def test_a_start_alone_has_no_share_of_anything():
    measured = goodput(series([started(0, 5.0)]), [RunEvent(5.0, EventKind.START, 0, {})])
    assert measured is not None
    assert measured.total == 0
    assert measured.share(TimeCause.PRODUCTIVE) == 0


def test_every_cause_says_how_it_is_known():
    assert set(HOW_MEASURED) == set(TimeCause)


@pytest.mark.parametrize("seed", range(40))
def test_the_causes_share_out_the_whole_time_whatever_happened(seed):
    """Kills, rollbacks, saves, evaluations, stalls, skips and clocks that step back a little."""
    rng = random.Random(seed)
    now, at, beats, events, evaluations = 0.0, 0, [], [RunEvent(0.0, EventKind.START, 0, {})], []
    for life in range(rng.randrange(1, 5)):
        if life:
            now += rng.uniform(0, 300)
            at = rng.randrange(0, at + 1)
            events.append(RunEvent(now, EventKind.RESTART, at, {}))
        now += rng.uniform(0, 5)
        beats.append(started(at, now, life))
        for _ in range(rng.randrange(0, 60)):
            now += rng.choice([1.0, 1.0, 1.0, 0.2, 400.0 if rng.random() < 0.05 else 2.0, -0.001])
            at += rng.randrange(1, 4)
            fetch = rng.choice([0.01, 3.0, math.nan])
            beats.append(progress(at, now, dt_fetch_s=fetch, pid=life))
            what = rng.random()
            if what < 0.1:
                events.append(RunEvent(now + rng.uniform(0, 3), EventKind.SAVE, at, {}))
            elif what < 0.2:
                evaluations.append(EvaluationRecord(at, 2.0, rng.uniform(0, 9), now))
            elif what < 0.3:
                events.append(RunEvent(now, EventKind.SKIPPED_STEP, at, {}))
            elif what < 0.35:
                at = max(0, at - 5)
                beats.append(a_beat(names.ROLLED_BACK, at, now, pid=life))
        if rng.random() < 0.5:
            beats.append(a_beat(rng.choice(names.ENDINGS), at, now, pid=life))
    measured = goodput(series(beats), sorted(events, key=lambda event: event.ts), evaluations)
    assert measured is not None
    assert sum(measured.seconds.values()) == pytest.approx(measured.total, abs=1e-3)
    assert min(measured.seconds.values()) > -1.0


HOUR_S = 3600.0


def with_clock(beats: list[HeartbeatRecord], ahead_s: float, first: int, last: int) -> list[HeartbeatRecord]:
    """Return the records with the time stamps of some steps by a clock that is ahead."""
    return [replace(beat, ts=beat.ts + ahead_s if first <= beat.step <= last else beat.ts) for beat in beats]


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize(("first", "last"), [(20, 40), (20, 61)])
def test_goodput_is_not_known_if_the_clock_was_set_back(ahead_s, first, last):
    """A clock that is set within a process, or before the next one starts."""
    beats = [started(0, 0.0), *with_clock(steps(1, 61, 0.0), ahead_s, first, last)]
    beats += [started(60, 80.0, 2), *steps(61, 90, 84.0, pid=2)]
    assert goodput(series(beats), [RunEvent(0.0, EventKind.START, 0, {})]) is None


def test_a_machine_that_was_suspended_is_a_stall():
    """The clock jumps ahead and stays: the time has passed."""
    beats = [started(0, 0.0), *with_clock(steps(1, 100, 0.0), HOUR_S, 51, 100)]
    assert spent(goodput(series(beats), []))[TimeCause.STALL] == pytest.approx(HOUR_S)
