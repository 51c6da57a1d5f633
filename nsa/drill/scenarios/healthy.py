"""Nothing wrong, and all the unrest of a healthy machine: the watchdog must be silent."""

import signal

from nsa.drill import artifacts
from nsa.drill.corpus import write_jsonl
from nsa.drill.fault import FaultKind as FaultKind
from nsa.drill.harness import DrillHarness
from nsa.drill.result import DrillResult
from nsa.observe import names
from nsa.observe.events import EventKind

_STEPS, _SAVE_EVERY, _SLOWEST_FETCH_S = 500, 50, 1.5


def healthy(stage: DrillHarness, row: DrillResult) -> None:
    """Text and a rate that the model learns from: at ten times the rate its gates do collapse."""
    corpus = stage.folder / "corpus.jsonl"
    write_jsonl(corpus, 4000)
    settings = [
        f"train.steps={_STEPS}",
        f"train.save_every={_SAVE_EVERY}",
        "train.eval_every=100",
        "train.eval_batches=8",
    ]
    settings += ["data.dataset=local", f"data.path={corpus}", "data.held_out=0.05", "train.lr=1e-3"]
    watchdog = stage.watch()
    noise = stage.fault(FaultKind.BENIGN_NOISE, seconds=_SLOWEST_FETCH_S)
    process = stage.train(*settings, "train.log_every=5", fault=noise)
    pid = stage.wait_for_step(50, process)
    process.send(signal.SIGUSR1)
    stage.wait_for_step(120, process)
    process.send(signal.SIGUSR2)
    row.demand_equal("exit code", process.end(), 0)
    row.demand_equal("last step", artifacts.last_step(stage.run), _STEPS)
    row.demand_equal("newest verified checkpoint", artifacts.newest_good_step(stage.run), _STEPS)
    row.demand(names.stackdump(0, pid) in artifacts.stack_dumps(stage.run), "USR1 left no stacks")
    saves = [event.step for event in artifacts.events(stage.run, EventKind.SAVE)]
    row.demand(any(step % _SAVE_EVERY for step in saves), "USR2 left no checkpoint")
    row.demand(watchdog.running or watchdog.end() == 0, "the watchdog itself ended badly")
    found = [str(event.details.get("condition")) for event in artifacts.findings(stage.run)]
    row.demand_equal("findings", found, [])
    row.demand_equal("the anomaly file", artifacts.anomaly(stage.run), "")
    row.demand(not (stage.run / names.HALT).exists(), "a halt file")
    slow = sum((beat.dt_fetch_s or 0) > 0.2 for beat in artifacts.beats(stage.run))
    row.demand(slow >= 5, f"only {slow} slow fetches: the noise was not there, so its silence proves nothing")
    row.detected_by = ", ".join(found) or "nothing, as demanded"
    row.left_behind = f"{len(artifacts.beats(stage.run))} records, {slow} with a slow fetch, stacks, checkpoints"
    row.resumed = "not needed"
