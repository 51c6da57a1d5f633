"""Drill scenarios: SIGTERM twice, SIGHUP, a halt file in the middle of a run, a clock that jumps."""

import signal
import time

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.record.events import EventKind
from proofs.drill import artifacts
from proofs.drill.harness import SAVE_EVERY, STEPS, DrillHarness
from proofs.drill.inject import FaultKind
from proofs.drill.result import DrillResult, finish

_MIDDLE = SAVE_EVERY + 2
_JUMP_S = 3600.0


def sigterm_twice(harness: DrillHarness, result: DrillResult) -> None:
    """The second signal comes while the first is handled: the save is completed."""
    _stopped(harness, result, signal.SIGTERM, signal.SIGTERM)


def sighup(harness: DrillHarness, result: DrillResult) -> None:
    """Send the signals of a terminal that is closed."""
    _stopped(harness, result, signal.SIGHUP)


def _stopped(harness: DrillHarness, result: DrillResult, *signals: signal.Signals) -> None:
    process = harness.train()
    harness.wait_for_step(_MIDDLE, process)
    at = time.time()
    for number in signals:
        process.send(number)
        harness.pause(0.02)
    result.require_equal("exit code", process.wait(), ExitCode.PREEMPTED)
    events = artifacts.events(harness.run_folder, EventKind.STOP)
    result.require_equal("stop events", len(events), 1)
    if events:
        result.detected(f"run: {events[-1].details.get('reason')}", events[-1].ts - at, within_s=10)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require_equal("step of the newest verified checkpoint", step, artifacts.last_step(harness.run_folder))
    result.left_behind = f"exit {ExitCode.PREEMPTED}, verified checkpoint of its last step {step}"
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def halt_mid_run(harness: DrillHarness, result: DrillResult) -> None:
    """Somebody writes the halt file while two ranks train: both save at the same step and exit."""
    launched = harness.launch(nproc=2)
    harness.wait_for_step(_MIDDLE, launched)
    at = time.time()
    (harness.run_folder / names.HALT).write_text("halt: drill\n", encoding="utf-8")
    result.require_equal("exit code of the launcher", launched.wait(), ExitCode.HALTED)
    events = artifacts.events(harness.run_folder, EventKind.HALT)
    result.require(events, "no halt event")
    if events:
        result.detected(f"run: {names.HALT} at a step boundary, all ranks", events[0].ts - at, within_s=harness.slack_s)
    steps = [artifacts.last_step(harness.run_folder, rank) for rank in (0, 1)]
    result.require_equal("last steps of the two ranks", len(set(steps)), 1)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require_equal("step of the newest verified checkpoint", step, steps[0])
    result.left_behind = f"exit {ExitCode.HALTED}, verified checkpoint of its last step {step}"
    again = harness.launch("--resume", "--clear-halt", nproc=2)
    finish(harness, result, again, ranks=2, same_as_undisturbed=True, fault_at=at)


def clock_jump(harness: DrillHarness, result: DrillResult) -> None:
    """The clock of the run's machine jumps an hour ahead, then two back: the watchdog reports it and halts nothing."""
    harness.watch()
    fault = harness.fault(FaultKind.CLOCK_JUMP, first_batch=10, seconds=_JUMP_S)
    process = harness.train(fault=fault)
    result.require_equal("exit code", process.wait(), 0)
    events = harness.wait_for("the watchdog's finding", lambda: artifacts.findings_of(harness.run_folder, "clock_skew"))
    # Both ends by the clock of the drill, which did not jump.
    result.detected("watchdog: clock_skew", events[0].ts - harness.injected_at(), within_s=harness.slack_s)
    others = {str(e.details.get("condition")) for e in artifacts.findings(harness.run_folder)} - {"clock_skew"}
    result.require_equal("other findings", sorted(others), [])
    result.require(not (harness.run_folder / names.HALT).exists(), "a halt file because of a clock")
    result.require_equal("last step", artifacts.last_step(harness.run_folder), STEPS)
    result.left_behind = "a warning, no halt file"
    same = artifacts.same_end(harness.run_folder, harness.undisturbed(1))
    result.require(same, "the weights or losses differ from those of an undisturbed run")
    result.resumed = "never stopped, bitwise equal to an undisturbed run" if same else "never stopped"
