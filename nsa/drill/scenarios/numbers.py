"""Numbers that go wrong: a gradient that is no number, gates that no longer mix."""

import json

from nsa.drill import artifacts
from nsa.drill.fault import FaultKind as FaultKind
from nsa.drill.harness import DrillHarness
from nsa.drill.result import DrillResult
from nsa.drill.scenarios.resume import finish
from nsa.errors import ExitCode, NonFiniteError
from nsa.observe import names
from nsa.observe.events import EventKind


def nan_gradient(stage: DrillHarness, row: DrillResult) -> None:
    """One NaN is skipped, a streak is gone back from, a streak that does not end stops the run."""
    settings = ["train.save_every=5", "train.max_skipped=2"]
    process = stage.train(*settings, fault=stage.fault(FaultKind.NAN_GRADIENT, also=(3,), first_batch=12))
    row.demand_equal("exit code", process.end(), NonFiniteError.exit_code)
    skipped = artifacts.beats(stage.run, msg=names.SKIPPED)
    row.demand(skipped, "no step was skipped")
    if skipped:
        row.detected("run: judge, before the optimizer step", skipped[0].ts - stage.injected_at(), within_s=5)
    row.demand_equal("steps skipped", [beat.step for beat in skipped][:2], [4, 13])
    back = artifacts.events(stage.run, EventKind.ROLLBACK)
    row.demand_equal("steps gone back from", [event.step for event in back], [14])
    step = artifacts.newest_good_step(stage.run)
    row.demand_equal("newest verified checkpoint", step, 10)
    row.left_behind = (
        f"{len(skipped)} skipped, 1 rollback, exit {NonFiniteError.exit_code}, verified checkpoint {step} without NaN"
    )
    finish(stage, row, stage.train("--resume", *settings))
    if not row.unmet:
        row.demand(artifacts.finite_weights(stage.run), "the weights at the end are not all finite")


def gate_collapse(stage: DrillHarness, row: DrillResult) -> None:
    """Every gate takes one branch from step 11 on: the watchdog halts, and the run goes on from before it."""
    settings = ["train.steps=2000", "train.save_every=5", "train.keep_checkpoints=500"]
    stage.watch()
    process = stage.train(*settings, fault=stage.fault(FaultKind.GATE_COLLAPSE, first_batch=10))
    row.demand_equal("exit code", process.end(), ExitCode.HALTED)
    conditions = ("gate_collapse_critical", "gate_entropy_critical")
    told = artifacts.found(stage.run, *conditions)
    row.demand(told, "the watchdog found no collapse")
    if told:
        row.detected(
            f"watchdog: {told[0].details['condition']}", told[0].ts - stage.injected_at(), within_s=stage.slack_s
        )
    row.demand(any(name in artifacts.anomaly(stage.run) for name in conditions), "the anomaly file does not tell")
    details = stage.run / names.GATE_COLLAPSE
    row.demand(details.exists() and json.loads(details.read_text()), f"no {names.GATE_COLLAPSE}")
    row.demand(artifacts.events(stage.run, EventKind.HALT), "no halt event")
    row.demand_equal(
        "newest verified checkpoint", artifacts.newest_good_step(stage.run), artifacts.last_step(stage.run)
    )
    row.left_behind = (
        f"exit {ExitCode.HALTED}, {names.ANOMALY}, {names.GATE_COLLAPSE}, verified checkpoints 5 and 10 before it"
    )
    before = stage.run / names.CHECKPOINTS / "step10"
    stage.run = stage.folder / "again"
    finish(stage, row, stage.train(*settings, "train.steps=40", "--resume-from", str(before)))
    healthy = artifacts.beats(stage.run)[-1:]
    row.demand(healthy and (healthy[0].gate_entropy_mean or 0) > 0.5, "the gates are still collapsed after the resume")
