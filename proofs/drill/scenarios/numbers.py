"""Drill scenarios: NaN and spiking gradients, collapsed gates, replicas that drift apart."""

import json

from nsa.errors import ExitCode, NonFiniteError, ReplicaError
from nsa_train import names
from nsa_train.record.events import EventKind
from proofs.drill import artifacts
from proofs.drill.harness import DrillHarness
from proofs.drill.inject import FaultKind
from proofs.drill.result import DrillResult, finish


def nan_gradient(harness: DrillHarness, result: DrillResult) -> None:
    """One NaN step is skipped, a series is rolled back, an endless series stops the run."""
    settings = ["train.save_every=5", "train.max_skipped=2"]
    process = harness.train(*settings, fault=harness.fault(FaultKind.NAN_GRADIENT, also=(3,), first_batch=12))
    result.require_equal("exit code", process.wait(), NonFiniteError.exit_code)
    skipped = artifacts.beats(harness.run_folder, msg=names.SKIPPED)
    result.require(skipped, "no step was skipped")
    if skipped:
        result.detected(
            "run: bad-step policy, before the optimizer step", skipped[0].ts - harness.injected_at(), within_s=5
        )
    result.require_equal("steps skipped", [beat.step for beat in skipped][:2], [4, 13])
    back = artifacts.events(harness.run_folder, EventKind.ROLLBACK)
    result.require_equal("steps rolled back from", [event.step for event in back], [14])
    step = artifacts.newest_good_step(harness.run_folder)
    result.require_equal("newest verified checkpoint", step, 10)
    result.left_behind = (
        f"{len(skipped)} skipped, 1 rollback, exit {NonFiniteError.exit_code}, verified checkpoint {step} without NaN"
    )
    finish(harness, result, harness.train("--resume", *settings))
    if not result.unmet:
        result.require(artifacts.finite_weights(harness.run_folder), "the weights at the end are not all finite")


def gate_collapse(harness: DrillHarness, result: DrillResult) -> None:
    """Every gate takes one branch from step 11 on: the watchdog halts the run, which resumes from before it."""
    settings = ["train.steps=2000", "train.save_every=5", "train.keep_checkpoints=500"]
    harness.watch()
    process = harness.train(*settings, fault=harness.fault(FaultKind.GATE_COLLAPSE, first_batch=10))
    result.require_equal("exit code", process.wait(), ExitCode.HALTED)
    conditions = ("gate_collapse_critical", "gate_entropy_critical")
    events = artifacts.findings_of(harness.run_folder, *conditions)
    result.require(events, "the watchdog found no collapse")
    if events:
        result.detected(
            f"watchdog: {events[0].details['condition']}",
            events[0].ts - harness.injected_at(),
            within_s=harness.slack_s,
        )
    result.require(
        any(name in artifacts.anomaly(harness.run_folder) for name in conditions), "the anomaly file does not name it"
    )
    details = harness.run_folder / names.GATE_COLLAPSE
    result.require(details.exists() and json.loads(details.read_text()), f"no {names.GATE_COLLAPSE}")
    result.require(artifacts.events(harness.run_folder, EventKind.HALT), "no halt event")
    result.require_equal(
        "newest verified checkpoint",
        artifacts.newest_good_step(harness.run_folder),
        artifacts.last_step(harness.run_folder),
    )
    result.left_behind = (
        f"exit {ExitCode.HALTED}, {names.ANOMALY}, {names.GATE_COLLAPSE}, verified checkpoints 5 and 10 before it"
    )
    before = harness.run_folder / names.CHECKPOINTS / "step10"
    harness.run_folder = harness.folder / "again"
    finish(harness, result, harness.train(*settings, "train.steps=40", "--resume-from", str(before)))
    healthy = artifacts.beats(harness.run_folder)[-1:]
    result.require(
        healthy and (healthy[0].gate_entropy_mean or 0) > 0.5, "the gates are still collapsed after the resume"
    )


def gradient_spike(harness: DrillHarness, result: DrillResult) -> None:
    """The gradients of one step are a thousand times as large: the step is skipped, and the loss does not jump."""
    settings = ["train.spike_sigma=6", "train.skip_window=20"]
    fault = harness.fault(FaultKind.GRADIENT_SPIKE, first_batch=10**9, also=(20,))
    process = harness.train(*settings, fault=fault)
    result.require_equal("exit code", process.wait(), 0)
    skipped = artifacts.beats(harness.run_folder, msg=names.SKIPPED)
    result.require_equal("steps skipped", [beat.step for beat in skipped], [21])
    if skipped:
        result.detected(
            "run: bad-step policy, before the optimizer step", skipped[0].ts - harness.injected_at(), within_s=5
        )
    losses = [beat.loss or 0.0 for beat in artifacts.beats(harness.run_folder)]
    result.require(max(losses[20:]) < 1.2 * max(losses[10:20]), "the loss jumped after the spike")
    result.left_behind = "1 step skipped, exit 0"
    result.resumed = "never stopped"


def replica_drift(harness: DrillHarness, result: DrillResult) -> None:
    """One bit of one weight of rank 1 flips: both ranks stop before differing weights are saved."""
    settings = ["train.replica_check_every=2"]
    launched = harness.launch(*settings, nproc=2, fault=harness.fault(FaultKind.REPLICA_DRIFT, rank=1, first_batch=10))
    result.require_equal("exit code of the launcher", launched.wait(), ReplicaError.exit_code)
    errors = artifacts.events(harness.run_folder, EventKind.ERROR)
    result.require(errors, "no error event")
    if errors:
        result.detected("run: weights of replicas differ", errors[0].ts - harness.injected_at(), within_s=30)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step is not None and step <= 10, f"the newest checkpoint is step {step}, after the flip")
    result.left_behind = f"exit {ReplicaError.exit_code}, verified checkpoint {step} from before the flip"
    again = harness.launch("--resume", *settings, nproc=2)
    finish(harness, result, again, ranks=2, same_as_undisturbed=True, fault_at=harness.injected_at())
