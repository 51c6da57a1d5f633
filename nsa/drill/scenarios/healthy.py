"""Drill scenario without a fault: ordinary timing noise must not raise a finding (false alarms)."""

import signal

from nsa import names
from nsa.drill import artifacts
from nsa.drill.corpus import write_jsonl
from nsa.drill.harness import DrillHarness
from nsa.drill.inject import FaultKind
from nsa.drill.result import DrillResult
from nsa.observe.events import EventKind

_STEPS, _SAVE_EVERY, _SLOWEST_FETCH_S = 500, 50, 1.5


def healthy(harness: DrillHarness, result: DrillResult) -> None:
    """500 steps of real training; at ten times the learning rate the gates would collapse."""
    corpus = harness.folder / "corpus.jsonl"
    write_jsonl(corpus, 4000)
    settings = [
        f"train.steps={_STEPS}",
        f"train.save_every={_SAVE_EVERY}",
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
    result.require_equal("last step", artifacts.last_step(harness.run_folder), _STEPS)
    result.require_equal("newest verified checkpoint", artifacts.newest_good_step(harness.run_folder), _STEPS)
    result.require(names.stackdump(0, pid) in artifacts.stack_dumps(harness.run_folder), "USR1 left no stacks")
    saves = [event.step for event in artifacts.events(harness.run_folder, EventKind.SAVE)]
    result.require(any(step % _SAVE_EVERY for step in saves), "USR2 left no checkpoint")
    result.require(watchdog.running or watchdog.wait() == 0, "the watchdog itself failed")
    found = [str(event.details.get("condition")) for event in artifacts.findings(harness.run_folder)]
    result.require_equal("findings", found, [])
    result.require_equal("the anomaly file", artifacts.anomaly(harness.run_folder), "")
    result.require(not (harness.run_folder / names.HALT).exists(), "a halt file")
    slow = sum((beat.dt_fetch_s or 0) > 0.2 for beat in artifacts.beats(harness.run_folder))
    result.require(
        slow >= 5, f"only {slow} slow fetches: there was no noise, so the absence of findings proves nothing"
    )
    result.detected_by = ", ".join(found) or "nothing, as required"
    result.left_behind = (
        f"{len(artifacts.beats(harness.run_folder))} records, {slow} with a slow fetch, stacks, checkpoints"
    )
    result.resumed = "not needed"
