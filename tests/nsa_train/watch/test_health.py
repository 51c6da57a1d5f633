"""Every condition is found where it holds, alone, and nothing is found in a run that is well."""

import math
import random
from dataclasses import replace

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, RunEvent
from nsa_train.watch.conditions import CONDITIONS, AlertLevel, HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.history import RunFacts
from nsa_train.watch.status import RunPhase, phase
from tests.nsa_train.record.beats import a_beat, a_run
from tests.nsa_train.watch import recorded
from tests.nsa_train.watch.recorded import HEALTHY, UNWELL, Recording, record

LIMITS = HealthLimits()


def conditions_in(recording: Recording, limits: HealthLimits = LIMITS) -> set[str]:
    return {finding.name for finding in examine(recording.history(), now=recording.end, limits=limits)}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_run_that_is_well_at_any_moment(name):
    recording = HEALTHY[name]()
    moments = sorted({beat.ts + 0.5 for log in recording.beats.values() for beat in log})
    for moment in [*moments[:: max(1, len(moments) // 40)], recording.end]:
        now = recording.at(moment)
        assert examine(now.history(), now=moment, limits=LIMITS) == []


@pytest.mark.parametrize(("name", "which"), [(name, i) for name in UNWELL for i in range(len(UNWELL[name]))])
def test_every_condition_is_found_and_no_other(name, which):
    recording = UNWELL[name][which]()
    expected = {name} | ({"steps_skipped"} if name == "loss_nonfinite" and which == 2 else set())
    assert conditions_in(recording) == expected


def test_messages_have_the_values_and_levels_come_from_the_table():
    recording = UNWELL["heartbeat_stall"][0]()
    (finding,) = examine(recording.history(), now=recording.end, limits=LIMITS)
    assert all(value in finding.message for value in ("181 s", "step 150", "180 s"))
    assert (finding.rank, finding.step, finding.level) == (0, 150, AlertLevel.CRITICAL)


def test_critical_comes_first():
    recording = record(a_run(80, lambda step: {"dt_fetch_s": 9.0, "gate_entropy_mean": 0.1, "reads_pred": 1}))
    levels = [finding.level for finding in examine(recording.history(), now=recording.end, limits=LIMITS)]
    assert levels == sorted(levels, key=lambda level: level != AlertLevel.CRITICAL)
    assert len(set(levels)) == 2


@pytest.mark.parametrize("limits", [replace(LIMITS, stall_s=1000.0), replace(LIMITS, stall_steps=100.0)])
def test_a_stall_is_measured_by_the_runs_own_steps_too(limits):
    assert conditions_in(UNWELL["heartbeat_stall"][0](), limits) == set()


@pytest.mark.parametrize("word", names.ENDINGS)
def test_a_process_that_recorded_its_end_is_not_stalled(word):
    beats = a_run(50)
    recording = record([*beats, a_beat(word, 50, beats[-1].ts)], after_s=1e5)
    assert conditions_in(recording) == ({"run_failed"} if word == names.FAILED else set())


def test_a_dead_process_is_not_reported_as_hung_and_has_time_to_be_restarted():
    recording = replace(record(a_run(150), after_s=299.0), gone=frozenset({0}))
    assert conditions_in(recording) == set()
    assert phase(recording.history(), []) == RunPhase.GONE


@pytest.mark.parametrize(
    ("launcher", "later_s", "expected"),
    [("restarted", 0.0, set()), ("restarted", 600.0, {"heartbeat_stall"}), (None, 0.0, {"heartbeat_stall"})],
)
def test_a_rank_of_another_host_that_its_launcher_starts_again_gets_the_time_of_a_start(launcher, later_s, expected):
    """A watchdog on another machine cannot see that the process is gone; it would halt the run that recovers."""
    recording = record(a_run(150), after_s=190.0)
    last = recording.beats[0][-1].ts
    event = RunEvent(last + 5, EventKind.ERROR, 150, {"why": "rank 0 was killed by SIGKILL", "launcher": launcher})
    events = [*recording.events, *([event] if launcher else [])]
    assert conditions_in(replace(recording, events=events, end=recording.end + later_s)) == expected


def test_a_rank_without_any_record_is_reported():
    recording = record(a_run(350), world=2)
    (finding,) = examine(recording.history(), now=recording.end, limits=LIMITS)
    assert (finding.name, finding.rank) == ("heartbeat_stall", 1)


def test_an_error_is_forgotten_when_the_run_is_started_again():
    failed = UNWELL["run_failed"][0]()
    again = record([*failed.beats[0], *a_run(0, first=51, began=failed.end + 60, pid=3000)])
    again.beats[0].pop()  # the start is in the events, the process has not spoken yet
    assert conditions_in(again) == set()
    assert phase(again.history(), []) == RunPhase.STARTING


def test_a_single_spike_or_odd_batch_is_no_finding():
    assert conditions_in(recorded._at([120], loss=9.0)) == set()
    assert (
        conditions_in(recorded._at([150], gate_entropy_mean=0.1, gate_collapse_frac=0.5, gate_max_mean=0.99)) == set()
    )


def test_a_failed_evaluation_is_named_until_the_next_one_succeeds():
    recording = recorded.evaluated_again()
    (finding,) = examine(recording.at(recording.end - 200).history(), now=recording.end - 200, limits=LIMITS)
    assert finding.name == "evaluation_failed"
    assert "100: x" in finding.message
    assert conditions_in(recording) == set()


def test_a_failed_copy_is_named_until_a_later_one_is_made():
    failed = recorded._copies(EventKind.COPY_FAILED, EventKind.COPY_FAILED)
    (finding,) = examine(failed.history(), now=failed.end, limits=LIMITS)
    assert (finding.name, finding.level, "step 20: 403" in finding.message) == ("copy_failed", AlertLevel.WARNING, True)
    assert conditions_in(recorded._copies(EventKind.COPY_FAILED, EventKind.COPIED)) == set()


def test_a_restart_makes_no_copy_and_a_run_without_a_store_needs_none():
    failed = recorded._copies(EventKind.COPY_FAILED)
    again = record(
        [*failed.beats[0], *a_run(5, first=11, began=failed.end + 60, pid=3000)], checkpoint_store="s3://bucket/run"
    )
    again.events = sorted([*again.events, failed.events[-1]], key=lambda event: event.ts)
    assert conditions_in(again) == {"copy_failed"}
    assert conditions_in(replace(again, facts=replace(again.facts, checkpoint_store=None))) == set()


def test_nodes_are_missing_until_the_ranks_start_and_not_for_a_node_that_would_join_them():
    (waited,) = UNWELL["nodes_missing"]
    recording = waited()
    assert conditions_in(recording) == {"nodes_missing"}
    waiting = recording.events[-1]
    started = replace(recording, events=[*recording.events, RunEvent(waiting.ts, EventKind.RESTART, 50, {"world": 2})])
    assert "nodes_missing" not in conditions_in(started)
    gave_up = RunEvent(waiting.ts, EventKind.ERROR, 50, {"launcher": "given up", "why": "alone"})
    assert "nodes_missing" not in conditions_in(replace(recording, events=[*recording.events, gave_up]))
    recording.events[-1] = replace(waiting, ts=recording.beats[0][-2].ts)  # and the ranks have gone on since
    assert conditions_in(recording) == set()


def test_a_rise_is_no_plateau_and_a_plateau_no_rise():
    """Uses a window in which both conditions are evaluated."""
    noise = [0.05 * (-1) ** step for step in range(1301)]
    flat = record(a_run(1300, lambda step: {"loss": 4.0 + noise[step]}))
    up = record(a_run(1300, lambda step: {"loss": 4.0 + noise[step] + max(0, step - 900) * 0.003}))
    assert conditions_in(flat) == {"loss_plateau"}
    assert conditions_in(up) == {"loss_divergence"}


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_divergence(seed):
    """Correlated noise around a loss that has stopped falling, up to a tenth of it."""
    rng, drift = random.Random(seed), 0.0

    def change(step):
        nonlocal drift
        drift = 0.9 * drift + rng.gauss(0, 0.05)
        return {"loss": 2.5 + drift + rng.gauss(0, 0.1)}

    assert "loss_divergence" not in conditions_in(record(a_run(900, change)))


def test_a_slow_rank_counts_only_where_it_costs_something():
    recording = recorded.two_ranks(1.6)
    recording.beats = {
        rank: [replace(b, forward_s=b.forward_s and b.forward_s / 20) for b in log]
        for rank, log in recording.beats.items()
    }
    assert conditions_in(recording) == set()


def test_a_straggler_is_found_while_the_others_are_records_ahead():
    recording = recorded.two_ranks(1.6)
    del recording.beats[1][-2:]
    assert conditions_in(recording) == {"straggler"}


def test_a_rank_that_waits_for_a_straggler_is_none():
    (finding,) = examine(recorded.two_ranks(3.0).history(), now=recorded.two_ranks().end, limits=LIMITS)
    assert finding.rank == 1


def test_a_step_up_of_memory_is_no_creep():
    recording = record(a_run(400, lambda step: {"host_mem_rss": 4000.0 if step < 200 else 6000.0}))
    assert conditions_in(recording) == set()


def test_a_rollback_repeats_steps_without_alarm_and_leaves_its_cause_behind():
    before = a_run(100, lambda step: {"loss": 9.0} if step in (94, 96, 98) else {})
    assert conditions_in(record(before)) == {"loss_spike"}
    back = a_beat(names.ROLLED_BACK, 60, before[-1].ts + 30, detail="step 100: loss is nan; back to step 60")
    again = a_run(40, first=61, began=back.ts)[1:]
    recording = record([*before, back, *again])
    assert conditions_in(recording) == set()
    assert [step for step, _ in recording.history().ranks[0].losses] == list(range(1, 101))


@pytest.mark.parametrize(
    ("launcher", "expected"), [(None, {"run_failed"}), ("given up", {"run_failed"}), ("restarted", set())]
)
def test_an_end_that_only_the_events_tell_of_is_found_unless_it_is_started_again(launcher, expected):
    """E.g. a checkpoint that cannot be read: the process ends before its first beat."""
    details = {"why": "rank 0 crashed with 1", "launcher": launcher} if launcher else {"error": "OSError: disk"}
    events = [
        RunEvent(recorded.BEGAN, EventKind.START, 0, {}),
        RunEvent(recorded.BEGAN + 9, EventKind.ERROR, 0, details),
    ]
    recording = Recording({}, recorded.BEGAN + 60, events=events)
    assert conditions_in(recording) == expected
    assert phase(recording.history(), []) == (RunPhase.FAILED if expected else RunPhase.STARTING)
    assert conditions_in(replace(recording, end=recorded.BEGAN + 1e4)) == (expected or {"heartbeat_stall"})


@pytest.mark.parametrize(
    ("recording", "expected"),
    [
        (recorded.noisy(), RunPhase.RUNNING),
        (recorded.finished(), RunPhase.FINISHED),
        (recorded.compiling(), RunPhase.STARTING),
        (UNWELL["heartbeat_stall"][0](), RunPhase.HUNG),
        (UNWELL["run_failed"][0](), RunPhase.FAILED),
        (UNWELL["process_gone"][0](), RunPhase.GONE),
        (Recording({}, 0.0), RunPhase.EMPTY),
    ],
)
def test_the_phase_is_one_word(recording, expected):
    history = recording.history()
    assert phase(history, examine(history, now=recording.end, limits=LIMITS)) == expected


def test_every_limit_named_in_a_rule_exists():
    values = {name: getattr(LIMITS, name) for name in HealthLimits.__dataclass_fields__}
    for condition in CONDITIONS.values():
        assert "{" not in condition.rule.format(**values)


def test_missing_numbers_are_no_finding():
    bare = [a_beat(names.START, 0, recorded.BEGAN)]
    bare += [a_beat(names.PROGRESS, step, recorded.BEGAN + step, loss=1 / step) for step in range(1, 150)]
    assert conditions_in(record(bare)) == set()
    assert math.isfinite(record(bare).end)


@pytest.mark.parametrize(("trainable", "findings"), [(["*"], {"loss_plateau"}), (["*.phi_k.*"], set())])
def test_a_loss_that_does_not_fall_is_no_finding_where_parameters_are_frozen(trainable, findings):
    flat = record(a_run(1100, lambda step: {"loss": 4.0}))
    of_run, damaged = RunFacts.from_env({"config": {"train": {"trainable": trainable}}})
    assert not damaged
    flat.facts = replace(flat.facts, trainable=of_run.trainable)
    assert conditions_in(flat) == findings
