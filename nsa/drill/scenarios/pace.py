"""Ranks that stop or lag while their process is alive."""

import os
import signal
import time
from contextlib import suppress

from nsa.drill import artifacts
from nsa.drill.fault import FaultKind as FaultKind
from nsa.drill.harness import DrillHarness
from nsa.drill.result import DrillResult
from nsa.drill.scenarios.resume import finish
from nsa.errors import ExitCode
from nsa.observe import names

_STALL_S, _SAVE_EVERY = 4.0, 16
_COLLECTIVE_S = 15.0


def hung_rank(stage: DrillHarness, row: DrillResult) -> None:
    """Rank 1 is stopped in the middle of its work: rank 0 waits for it, and nothing in either process can tell."""
    settings = [f"train.save_every={_SAVE_EVERY}", f"parallel.timeout_s={_COLLECTIVE_S:g}"]
    stage.watch(stall_s=_STALL_S)
    launched = stage.launch(*settings, nproc=2)
    # Right after a save: where one is due the watchdog is patient.
    pid = stage.wait_for_step(_SAVE_EVERY + 2, launched, rank=1)
    os.kill(pid, signal.SIGSTOP)
    stage.at_end(lambda: _let_go(pid))
    silent_since = time.time()
    event = stage.wait_for("the watchdog's finding", lambda: artifacts.found(stage.run, "heartbeat_stall"), launched)[0]
    row.detected("watchdog: heartbeat_stall", event.ts - silent_since, within_s=_STALL_S + stage.slack_s)
    stage.wait_for("the anomaly file", lambda: "heartbeat_stall" in artifacts.anomaly(stage.run), launched)
    row.demand_equal("exit code of the launcher", launched.end(), ExitCode.HALTED)
    waiting = [
        name for name, text in artifacts.stack_dumps(stage.run).items() if "rank0" in name and "_fit_epoch" in text
    ]
    row.demand(waiting, "no stack dump that shows where in its step rank 0 waits")
    row.demand(list(stage.run.glob(names.COLLECTIVES)), "no record of the last collectives")
    said = (stage.run / names.HEALTH_LOG).read_text(encoding="utf-8")
    row.demand("rank 1" in said and "stopped by a signal" in said, "the watchdog does not tell that rank 1 is stopped")
    row.demand((stage.run / names.HALT).exists(), "no halt file")
    step = artifacts.newest_good_step(stage.run)
    row.demand(step, "no verified checkpoint")
    row.left_behind = f"stacks and collectives of rank 0, {names.ANOMALY}, {names.HALT}, verified checkpoint {step}"
    finish(stage, row, stage.launch(*settings, "--resume", "--clear-halt", nproc=2), ranks=2, like_calm=True)


def slow_rank(stage: DrillHarness, row: DrillResult) -> None:
    """Rank 1 takes a fifth of a second longer to compute: a warning that names it; nothing is stopped."""
    stage.watch()
    launched = stage.launch(nproc=2, fault=stage.fault(FaultKind.SLOW_RANK, rank=1, seconds=0.1))
    row.demand_equal("exit code", launched.end(), 0)
    told = artifacts.found(stage.run, "straggler")
    row.demand(told, "the watchdog found no straggler")
    if told:
        row.detected("watchdog: straggler", told[0].ts - stage.injected_at(), within_s=stage.slack_s)
        row.demand_equal("the ranks it names", told[0].details.get("ranks"), [1])
    row.demand(not (stage.run / names.HALT).exists(), "a warning must not halt")
    row.demand_equal("last step", artifacts.last_step(stage.run), artifacts.newest_good_step(stage.run))
    row.left_behind = "a warning that names rank 1"
    same = artifacts.same_end(stage.run, stage.calm(2))
    row.demand(same, "the weights or losses differ from those of a calm run")
    row.resumed = "never stopped, bits of the calm run" if same else "never stopped"


def _let_go(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
