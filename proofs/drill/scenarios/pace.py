"""Drill scenarios: a hung rank, a slow rank (straggler), and timing noise without a fault (false alarms)."""

import os
import signal
import time
from contextlib import suppress

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.record.events import EventKind
from proofs.drill import artifacts
from proofs.drill.data_server import write_jsonl
from proofs.drill.harness import DrillHarness
from proofs.drill.inject import FaultKind
from proofs.drill.result import DrillResult, finish

_STALL_S, _SAVE_EVERY = 4.0, 16
_COLLECTIVE_S = 15.0
_HEALTHY_STEPS, _HEALTHY_SAVE_EVERY, _SLOWEST_FETCH_S = 500, 50, 1.5


def hung_rank(harness: DrillHarness, result: DrillResult) -> None:
    """Rank 1 is stopped (SIGSTOP): rank 0 waits for it, and neither process can report it."""
    settings = [f"train.save_every={_SAVE_EVERY}", f"parallel.timeout_s={_COLLECTIVE_S:g}"]
    harness.watch(stall_s=_STALL_S)
    launched = harness.launch(*settings, nproc=2)
    # Right after a save: the watchdog allows more time where one is due.
    pid = harness.wait_for_step(_SAVE_EVERY + 2, launched, rank=1)
    os.kill(pid, signal.SIGSTOP)
    harness.at_end(lambda: _continue(pid))
    silent_since = time.time()
    event = harness.wait_for(
        "the watchdog's finding", lambda: artifacts.findings_of(harness.run_folder, "heartbeat_stall"), launched
    )[0]
    result.detected("watchdog: heartbeat_stall", event.ts - silent_since, within_s=_STALL_S + harness.slack_s)
    harness.wait_for("the anomaly file", lambda: "heartbeat_stall" in artifacts.anomaly(harness.run_folder), launched)
    result.require_equal("exit code of the launcher", launched.wait(), ExitCode.HALTED)
    waiting = [
        name
        for name, text in artifacts.stack_dumps(harness.run_folder).items()
        if "rank0" in name and "_fit_epoch" in text
    ]
    result.require(waiting, "no stack dump that shows where in its step rank 0 waits")
    result.require(list(harness.run_folder.glob(names.COLLECTIVES)), "no record of the last collectives")
    health_log = (harness.run_folder / names.HEALTH_LOG).read_text(encoding="utf-8")
    result.require(
        "rank 1" in health_log and "stopped by a signal" in health_log,
        "the watchdog does not report that rank 1 is stopped",
    )
    result.require((harness.run_folder / names.HALT).exists(), "no halt file")
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"stacks and collectives of rank 0, {names.ANOMALY}, {names.HALT}, verified checkpoint {step}"
    finish(
        harness,
        result,
        harness.launch(*settings, "--resume", "--clear-halt", nproc=2),
        ranks=2,
        same_as_undisturbed=True,
        fault_at=silent_since,
    )


def slow_rank(harness: DrillHarness, result: DrillResult) -> None:
    """Rank 1 computes a fifth of a second longer: a warning names it, and nothing is stopped."""
    harness.watch()
    launched = harness.launch(nproc=2, fault=harness.fault(FaultKind.SLOW_RANK, rank=1, seconds=0.1))
    result.require_equal("exit code", launched.wait(), 0)
    events = artifacts.findings_of(harness.run_folder, "straggler")
    result.require(events, "the watchdog found no straggler")
    if events:
        result.detected("watchdog: straggler", events[0].ts - harness.injected_at(), within_s=harness.slack_s)
        result.require_equal("the ranks it names", events[0].details.get("ranks"), [1])
    result.require(not (harness.run_folder / names.HALT).exists(), "a warning must not halt")
    result.require_equal(
        "last step", artifacts.last_step(harness.run_folder), artifacts.newest_good_step(harness.run_folder)
    )
    result.left_behind = "a warning that names rank 1"
    same = artifacts.same_end(harness.run_folder, harness.undisturbed(2))
    result.require(same, "the weights or losses differ from those of an undisturbed run")
    result.resumed = "never stopped, bitwise equal to an undisturbed run" if same else "never stopped"


def healthy(harness: DrillHarness, result: DrillResult) -> None:
    """No fault: ordinary timing noise must not raise a finding. 500 steps of real training; at ten times the learning
    rate the gates would collapse.
    """
    corpus = harness.folder / "corpus.jsonl"
    write_jsonl(corpus, 4000)
    settings = [
        f"train.steps={_HEALTHY_STEPS}",
        f"train.save_every={_HEALTHY_SAVE_EVERY}",
        "train.eval_every=100",
        "train.eval_batches=8",
    ]
    settings += ["data.dataset=local", f"data.path={corpus}", "data.held_out=0.05", "train.lr=1e-3"]
    watchdog = harness.watch()
    noise = harness.fault(FaultKind.BENIGN_NOISE, seconds=_SLOWEST_FETCH_S)
    process = harness.train(*settings, "train.log_every=5", fault=noise)
    pid = harness.wait_for_step(50, process)
    process.send(signal.SIGUSR1)
    harness.wait_for_step(120, process)
    process.send(signal.SIGUSR2)
    result.require_equal("exit code", process.wait(), 0)
    result.require_equal("last step", artifacts.last_step(harness.run_folder), _HEALTHY_STEPS)
    result.require_equal("newest verified checkpoint", artifacts.newest_good_step(harness.run_folder), _HEALTHY_STEPS)
    result.require(names.stackdump(0, pid) in artifacts.stack_dumps(harness.run_folder), "USR1 left no stacks")
    saves = [event.step for event in artifacts.events(harness.run_folder, EventKind.SAVE)]
    result.require(any(step % _HEALTHY_SAVE_EVERY for step in saves), "USR2 left no checkpoint")
    result.require(watchdog.running or watchdog.wait() == 0, "the watchdog itself failed")
    conditions = [str(event.details.get("condition")) for event in artifacts.findings(harness.run_folder)]
    result.require_equal("findings", conditions, [])
    result.require_equal("the anomaly file", artifacts.anomaly(harness.run_folder), "")
    result.require(not (harness.run_folder / names.HALT).exists(), "a halt file")
    slow = sum((beat.dt_fetch_s or 0) > 0.2 for beat in artifacts.beats(harness.run_folder))
    result.require(
        slow >= 5, f"only {slow} slow fetches: there was no noise, so the absence of findings proves nothing"
    )
    result.detected_by = ", ".join(conditions) or "nothing, as required"
    result.left_behind = (
        f"{len(artifacts.beats(harness.run_folder))} records, {slow} with a slow fetch, stacks, checkpoints"
    )
    result.resumed = "not needed"


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
