"""Processes that are killed, asked to leave, or told not to start."""

import os
import signal
import time

from nsa.drill import artifacts
from nsa.drill.harness import SAVE_EVERY, DrillHarness
from nsa.drill.result import DrillResult
from nsa.drill.scenarios.resume import finish
from nsa.errors import ExitCode
from nsa.observe import names
from nsa.observe.events import EventKind, LauncherAction

_MIDDLE = SAVE_EVERY + 2
_GONE_S = 3.0


def killed_rank(stage: DrillHarness, row: DrillResult) -> None:
    launched = stage.launch(nproc=2)
    pid = stage.wait_for_step(_MIDDLE, launched, rank=1)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    event = stage.wait_for("the launcher's record", lambda: artifacts.launcher_verdicts(stage.run), launched)[0]
    row.detected(f"launcher: {event.details.get('why')}", event.ts - at, within_s=30)
    row.demand_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    cause = (event.details.get("rank"), event.details.get("code"))
    row.demand_equal("the launcher's cause", cause, (1, -signal.SIGKILL))
    row.left_behind = f"verified checkpoint {artifacts.newest_good_step(stage.run)}, event, logs of each cycle"
    finish(stage, row, launched, ranks=2, like_calm=True)
    row.resumed = f"by the launcher: {row.resumed}"


def killed_trainer(stage: DrillHarness, row: DrillResult) -> None:
    watchdog = stage.watch(gone_s=_GONE_S)
    process = stage.train()
    stage.wait_for_step(_MIDDLE, process)
    at = time.time()
    process.send(signal.SIGKILL)
    row.demand_equal("exit code", process.end(), -signal.SIGKILL)
    event = stage.wait_for("the watchdog's finding", lambda: artifacts.found(stage.run, "process_gone"), watchdog)[0]
    row.detected("watchdog: process_gone", event.ts - at, within_s=_GONE_S + stage.slack_s)
    # The watchdog counts from the last beat, which on a slow machine is well before the kill.
    row.demand(event.ts - artifacts.last_beat_at(stage.run) >= _GONE_S - 1, f"found before {_GONE_S:g} s were over")
    stage.wait_for("the anomaly file", lambda: "process_gone" in artifacts.anomaly(stage.run), watchdog)
    row.demand(not (stage.run / names.HALT).exists(), "a halt file for a run that is gone: it only hinders the resume")
    step = artifacts.newest_good_step(stage.run)
    row.demand(step, "no verified checkpoint")
    row.left_behind = f"verified checkpoint {step}, {names.ANOMALY}, event"
    watchdog.kill()
    finish(stage, row, stage.train("--resume"), like_calm=True)


def sigterm(stage: DrillHarness, row: DrillResult) -> None:
    process = stage.train()
    stage.wait_for_step(_MIDDLE, process)
    at = time.time()
    process.send(signal.SIGTERM)
    row.demand_equal("exit code", process.end(), ExitCode.PREEMPTED)
    told = artifacts.events(stage.run, EventKind.STOP)
    row.demand(told, "no stop event")
    if told:
        row.detected(f"run: {told[-1].details.get('reason')}", told[-1].ts - at, within_s=10)
    step = artifacts.newest_good_step(stage.run)
    row.demand_equal("step of the newest verified checkpoint", step, artifacts.last_step(stage.run))
    row.demand(artifacts.beats(stage.run, msg=names.STOPPED), "no last word in the heartbeat")
    row.left_behind = f"exit {ExitCode.PREEMPTED}, verified checkpoint of its last step {step}"
    finish(stage, row, stage.train("--resume"), like_calm=True)


def stale_halt(stage: DrillHarness, row: DrillResult) -> None:
    stage.run.mkdir(parents=True)
    (stage.run / names.HALT).write_text("halt: left over from another day\n", encoding="utf-8")
    at = time.time()
    process = stage.train()
    row.demand_equal("exit code", process.end(), ExitCode.HALTED)
    row.detected("run, before its first step", time.time() - at, within_s=120)
    row.demand("left over from another day" in process.said(), "the refusal does not say what the file says")
    row.demand_equal("steps taken", artifacts.last_step(stage.run), 0)
    row.left_behind = f"exit {ExitCode.HALTED}, the file, nothing else"
    row.demand((stage.run / names.HALT).exists(), "the halt file is gone")
    finish(stage, row, stage.train("--clear-halt"), like_calm=True)
