"""Drill scenarios: SIGKILL of a rank or of the trainer, SIGTERM, a stale halt file."""

import os
import signal
import time

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.record.events import EventKind, LauncherAction
from proofs.drill import artifacts
from proofs.drill.harness import SAVE_EVERY, DrillHarness
from proofs.drill.result import DrillResult, finish

_MIDDLE = SAVE_EVERY + 2
_GONE_S = 3.0


def killed_rank(harness: DrillHarness, result: DrillResult) -> None:
    launched = harness.launch(nproc=2)
    pid = harness.wait_for_step(_MIDDLE, launched, rank=1)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    event = harness.wait_for(
        "the launcher's record", lambda: artifacts.launcher_verdicts(harness.run_folder), launched
    )[0]
    result.detected(f"launcher: {event.details.get('why')}", event.ts - at, within_s=30)
    result.require_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    cause = (event.details.get("rank"), event.details.get("code"))
    result.require_equal("the launcher's cause", cause, (1, -signal.SIGKILL))
    result.left_behind = (
        f"verified checkpoint {artifacts.newest_good_step(harness.run_folder)}, event, logs of each cycle"
    )
    finish(harness, result, launched, ranks=2, same_as_undisturbed=True, fault_at=at)
    result.resumed = f"by the launcher: {result.resumed}"


def killed_trainer(harness: DrillHarness, result: DrillResult) -> None:
    watchdog = harness.watch(gone_s=_GONE_S)
    process = harness.train()
    harness.wait_for_step(_MIDDLE, process)
    at = time.time()
    process.send(signal.SIGKILL)
    result.require_equal("exit code", process.wait(), -signal.SIGKILL)
    event = harness.wait_for(
        "the watchdog's finding", lambda: artifacts.findings_of(harness.run_folder, "process_gone"), watchdog
    )[0]
    result.detected("watchdog: process_gone", event.ts - at, within_s=_GONE_S + harness.slack_s)
    # The watchdog counts from the last beat, which on a slow machine is well before the kill.
    result.require(
        event.ts - artifacts.last_beat_at(harness.run_folder) >= _GONE_S - 1, f"found before {_GONE_S:g} s were over"
    )
    harness.wait_for("the anomaly file", lambda: "process_gone" in artifacts.anomaly(harness.run_folder), watchdog)
    result.require(
        not (harness.run_folder / names.HALT).exists(),
        "a halt file for a process that has exited: it would block the resume",
    )
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"verified checkpoint {step}, {names.ANOMALY}, event"
    watchdog.kill()
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def sigterm(harness: DrillHarness, result: DrillResult) -> None:
    process = harness.train()
    harness.wait_for_step(_MIDDLE, process)
    at = time.time()
    process.send(signal.SIGTERM)
    result.require_equal("exit code", process.wait(), ExitCode.PREEMPTED)
    events = artifacts.events(harness.run_folder, EventKind.STOP)
    result.require(events, "no stop event")
    if events:
        result.detected(f"run: {events[-1].details.get('reason')}", events[-1].ts - at, within_s=10)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require_equal("step of the newest verified checkpoint", step, artifacts.last_step(harness.run_folder))
    result.require(artifacts.beats(harness.run_folder, msg=names.STOPPED), "no final record in the heartbeat")
    result.left_behind = f"exit {ExitCode.PREEMPTED}, verified checkpoint of its last step {step}"
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def stale_halt(harness: DrillHarness, result: DrillResult) -> None:
    harness.run_folder.mkdir(parents=True)
    (harness.run_folder / names.HALT).write_text("halt: left over from another day\n", encoding="utf-8")
    at = time.time()
    process = harness.train()
    result.require_equal("exit code", process.wait(), ExitCode.HALTED)
    result.detected("run, before its first step", time.time() - at, within_s=120)
    result.require("left over from another day" in process.output(), "the refusal does not quote the file")
    result.require_equal("steps taken", artifacts.last_step(harness.run_folder), 0)
    result.left_behind = f"exit {ExitCode.HALTED}, the file, nothing else"
    result.require((harness.run_folder / names.HALT).exists(), "the halt file is gone")
    finish(harness, result, harness.train("--clear-halt"), same_as_undisturbed=True)
