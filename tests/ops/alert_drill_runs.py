"""Real tiny runs, side by side, with a fault planted in some: one process imports the trainer and forks them all.

As a program: `python -m tests.ops.alert_drill_runs FOLDER` prints the process of each run as JSON, keeps them going
until its stdin is closed, and buries whoever dies.
"""

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from tests.nsa_train.train.faulty_runs import Fault, _plant
from tests.nsa_train.train.runs import Job, _rank, write_config

FAULT_AT = 12
"""The batch at which a run goes wrong: watchers have seen it well before."""
STEP_S = 0.5
RUNS = ("healthy", "nan", "stopped", "killed", "collapsed")
"""`stopped` and `killed` are well until somebody sends them a signal."""
CHANGES = ["train.steps=4900", "train.lr=1e-4", "train.lr_schedule=constant"]


def _plant_here(name: str, planted: ExitStack) -> None:
    import torch

    from nsa.core.branches import BranchGates
    from nsa_train.train.engine.train_module import StepSkippingTrainModule as Module

    if name == "nan":
        _plant(Fault("forward", list(range(FAULT_AT, FAULT_AT + 9))), planted)
    train_batch = Module.train_batch

    def slow_batch(module, batch, dry_run=False):
        if not dry_run:
            time.sleep(STEP_S)
            if name == "collapsed" and module.trainer.global_step == FAULT_AT:
                with torch.no_grad():
                    for gates in (part for part in module.model.modules() if isinstance(part, BranchGates)):
                        gates.proj.bias[2::3] = 30.0
        return train_batch(module, batch, dry_run)

    planted.enter_context(mock.patch.object(Module, "train_batch", slow_batch))


def _run(name: str, folder: Path, config_path: Path) -> None:
    code = 1
    try:
        with ExitStack() as planted, contextlib.redirect_stdout(io.StringIO()):
            _plant_here(name, planted)
            code = _rank(Job(str(folder / name), changes=CHANGES), config_path)
    except BaseException:  # noqa: BLE001 - a forked run must not run the code of its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _main(folder: Path) -> None:
    import nsa_train.train.run  # noqa: F401 - once, for all

    config_path, children = write_config(folder.parent), {}
    for name in RUNS:
        children[name] = os.fork()
        if not children[name]:
            _run(name, folder, config_path)
    print(json.dumps(children), flush=True)
    alive = set(children.values())
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        while alive and (gone := os.waitpid(-1, os.WNOHANG)[0]):
            alive.discard(gone)
    for child in alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
