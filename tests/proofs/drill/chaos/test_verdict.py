"""The verdict of a chaos drill must be able to fail: each kind of trouble, in fabricated run folders, fails it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nsa_train import names
from nsa_train.record.events import EventKind, LauncherAction, add_event
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.record_files import JsonLines
from proofs.drill.chaos.fault_classes import ChaosFault
from proofs.drill.chaos.observations import Observation, RunObserver
from proofs.drill.chaos.schedule import ChaosPlan, PlannedFault
from proofs.drill.chaos.verdict import ChaosVerdict, PlayedFault, evaluate, found_in_calm_run, read_outcome

BEGAN = 1_000_000.0
STEPS = 40
KILL = PlannedFault(0, ChaosFault.RANK_KILLED, 12, 1)
PAUSE = PlannedFault(1, ChaosFault.RANK_PAUSED, 30, 0)
PLAN = ChaosPlan(1, 300.0, 0.5, STEPS, 10, (KILL, PAUSE), {})


class FakeRuns:
    """A calm run, and one with a killed rank at second 20 and a paused one at second 80."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calm, self.run = folder, folder / "calm", folder / "run"
        self.now = BEGAN
        self.observer = RunObserver(folder, self.run, clock=lambda: self.now)
        for run in (self.calm, self.run):
            self.train(run, 1, 12)
        self.train(self.run, 11, STEPS, began=BEGAN + 40, pid=2)
        self.train(self.calm, 13, STEPS)
        for run in (self.calm, self.run):
            self.finish(run, np.float32(1.5))
        self.event(21, EventKind.ERROR, launcher=LauncherAction.RESTARTED, why="rank 1 was killed by SIGKILL")
        self.event(40, EventKind.RESTART, world=2)
        self.event(40, EventKind.LOST_STEPS, steps=2)
        self.played = [
            PlayedFault(KILL, BEGAN + 20, BEGAN + 20, BEGAN + 41),
            PlayedFault(PAUSE, BEGAN + 80, BEGAN + 86, BEGAN + 87),
        ]

    def train(self, run: Path, first: int, last: int, began: float = BEGAN, pid: int = 1) -> None:
        for rank in range(2):
            lines = JsonLines(run / names.heartbeat(rank))
            for number, step in enumerate(range(first, last + 1)):
                values = {"loss": 5 - step / 100, "grad_norm": 1.0, "step_s": 1.0, "dt_fetch_s": 0.0}
                beat = HeartbeatRecord(
                    ts=began + number, iso="", pid=pid, rank=rank, step=step, msg=names.PROGRESS, **values
                )
                lines.append(beat.to_line())
            lines.close()

    def finish(self, run: Path, weight: np.float32) -> None:
        save_file({"w": np.full(3, weight)}, run / names.MODEL_SAFETENSORS)

    def event(self, second: float, kind: EventKind, **details: object) -> None:
        """Write an event and let the drill see it at that second."""
        add_event(self.run, kind, ts=BEGAN + second, step=1, **details)
        self.see(second)

    def see(self, second: float) -> None:
        self.now = BEGAN + second
        self.observer.update()

    def evaluate(self, plan: ChaosPlan = PLAN) -> ChaosVerdict:
        outcome = read_outcome(plan, self.run, self.calm)
        return evaluate(plan, self.played, self.observer.observations, outcome)


@pytest.fixture
def runs(tmp_path: Path) -> FakeRuns:
    return FakeRuns(tmp_path)


def only_unmet(verdict: ChaosVerdict) -> str:
    assert not verdict.holds
    assert len(verdict.unmet) == 1, verdict.unmet
    return verdict.unmet[0]


def test_a_run_as_planned_holds(runs):
    verdict = runs.evaluate()
    assert verdict.unmet == []
    killed, paused = verdict.played
    assert (killed.named_at, paused.named_at) == (BEGAN + 21, None)
    assert killed.named_by.startswith("launcher:restarted")


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        (EventKind.ERROR, {"error": "RuntimeError: surprise", "failure_code": "unexpected"}),
        (EventKind.ERROR, {"launcher": LauncherAction.GAVE_UP, "why": "rank 0 crashed with 1"}),
        (EventKind.RESTART, {"world": 2}),
        (EventKind.STALL, {"condition": "heartbeat_stall"}),
        (EventKind.FINDING, {"condition": "loss_divergence"}),
        (EventKind.HALT, {"reason": "nobody asked"}),
        (EventKind.SKIPPED_STEP, {"reason": "gradient norm is nan"}),
        (EventKind.CHECKPOINT_REJECTED, {"problem": "step10: SHA-256"}),
        (EventKind.COPY_FAILED, {"error": "s3://chaos/run/step10 already holds a checkpoint"}),
    ],
)
@pytest.mark.parametrize("second", [10, 82, 150])
def test_an_event_without_its_fault(runs, kind, details, second):
    """Places the event before, long after, and during a fault that the run must absorb."""
    runs.event(second, kind, **details)
    assert only_unmet(runs.evaluate()).startswith("not explained by a fault")


def test_a_fault_explains_only_its_own_kinds(runs):
    runs.event(30, EventKind.HALT, reason="nobody asked")
    assert "nobody asked" in only_unmet(runs.evaluate())


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        (EventKind.COPY_FAILED, {"error": "An error occurred (503)"}),
        (EventKind.FINDING, {"condition": "copy_failed", "message": "at step 10: An error occurred (503)"}),
    ],
)
def test_errors_of_the_store_are_named_by_the_failed_copy(runs, kind, details):
    store = PlannedFault(2, ChaosFault.STORE_ERRORS, 35, 0)
    runs.played.append(PlayedFault(store, BEGAN + 120, BEGAN + 126, BEGAN + 127))
    runs.event(121, EventKind.COPIED, address="s3://chaos/run/step10")
    runs.event(124, kind, **details)
    verdict = runs.evaluate(replace(PLAN, faults=(KILL, PAUSE, store)))
    assert (verdict.unmet, verdict.played[2].named_at) == ([], BEGAN + 124)


def test_a_resolved_finding_needs_no_explanation(runs):
    runs.event(150, EventKind.FINDING, condition="heartbeat_stall", over=True)
    assert runs.evaluate().holds


def test_a_problem_in_a_log(runs):
    log = runs.run / "logs" / "cycle0" / "rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text("resuming from step10\nValueError: surprise\n", encoding="utf-8")
    runs.see(150)
    assert "ValueError: surprise" in only_unmet(runs.evaluate())


def test_a_watchdog_that_crashes(runs):
    log = runs.folder / "3-watch.log"
    log.write_text("CRITICAL run_failed: OSError: quoted\nTraceback (most recent call last):\n", encoding="utf-8")
    runs.see(150)
    assert "3-watch.log: Traceback" in only_unmet(runs.evaluate())


def test_a_damaged_record(runs):
    with (runs.run / names.EVENTS).open("a") as file:
        file.write('{"ts": 1, "event": \n')
    runs.see(150)
    assert "cannot be read" in only_unmet(runs.evaluate())


def test_a_fault_that_nobody_reports(runs):
    runs.observer.observations[:] = [
        each for each in runs.observer.observations if not each.kind.startswith("launcher")
    ]
    assert only_unmet(runs.evaluate()) == "fault 0 (rank_killed) was reported by nobody"


def test_a_late_report(runs):
    first = next(each for each in runs.observer.observations if each.kind.startswith("launcher"))
    runs.played[0].continued_at = BEGAN + 200
    runs.observer.observations[:] = [replace(first, at=BEGAN + 120)]
    assert "was reported after 100 s" in only_unmet(runs.evaluate())


def test_one_report_is_not_the_report_of_two_faults(runs):
    second = replace(KILL, number=2)
    runs.played.insert(1, PlayedFault(second, BEGAN + 20.5, BEGAN + 20.5, BEGAN + 41))
    plan = replace(PLAN, faults=(KILL, second, PAUSE))
    assert only_unmet(runs.evaluate(plan)) == "fault 2 (rank_killed) was reported by nobody"


def test_a_run_that_does_not_continue(runs):
    runs.played[1].continued_at = None
    assert only_unmet(runs.evaluate()) == "the run did not continue after fault 1 (rank_paused)"


def test_a_fault_that_was_not_played(runs):
    del runs.played[1]
    assert only_unmet(runs.evaluate()) == "fault 1 (rank_paused) was not played"


def test_a_lost_step(runs):
    path = runs.run / names.heartbeat(1)
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"step":20,' not in line]
    path.write_text("".join(lines), encoding="utf-8")
    assert "1 steps of rank 1 have no record, the first is 20" in only_unmet(runs.evaluate())


def test_another_loss(runs):
    path = runs.run / names.heartbeat(0)
    path.write_text(path.read_text().replace('"loss":4.7,', '"loss":4.7000001,'), encoding="utf-8")
    assert "another loss" in only_unmet(runs.evaluate())


def test_other_weights(runs):
    runs.finish(runs.run, np.nextafter(np.float32(1.5), np.float32(2)))
    assert "not bitwise equal" in only_unmet(runs.evaluate())


def test_low_goodput_of_a_long_run(runs):
    assert "goodput is" in only_unmet(runs.evaluate(replace(PLAN, duration_s=3600.0)))


def test_a_run_that_does_not_finish(runs):
    verdict = evaluate(PLAN, runs.played, runs.observer.observations, None)
    assert only_unmet(verdict) == "the run did not finish"
    shutil.rmtree(runs.run)


def test_noise_of_the_calm_run_needs_no_fault(runs, tmp_path):
    calm, spiked = tmp_path / "noisy", (150, 154, 158)
    lines = JsonLines(calm / names.heartbeat(0))
    for step in range(1, 201):
        norm = 9.0 if step in spiked else 1.0 + 0.1 * (step % 3)
        fields = {"loss": 5.0, "grad_norm": norm, "step_s": 1.0, "dt_fetch_s": 0.0}
        beat = HeartbeatRecord(ts=BEGAN + step, iso="", pid=1, rank=0, step=step, msg=names.PROGRESS, **fields)
        lines.append(beat.to_line())
    lines.close()
    noise = Observation(BEGAN + 200, "finding:grad_spikes", "gradient norm spiked 3 times", 160)
    assert found_in_calm_run(calm, noise)
    assert not found_in_calm_run(runs.calm, noise)
    assert not found_in_calm_run(calm, replace(noise, step=120))
    assert not found_in_calm_run(calm, replace(noise, kind="finding:process_gone"))
    runs.observer.observations.append(noise)
    outcome = read_outcome(PLAN, runs.run, runs.calm)
    observations = runs.observer.observations
    assert not evaluate(PLAN, runs.played, observations, outcome).holds
    assert evaluate(PLAN, runs.played, observations, outcome, lambda each: found_in_calm_run(calm, each)).holds
