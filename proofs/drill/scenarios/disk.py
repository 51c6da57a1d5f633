"""Drill scenario: the disk is full while a run saves (ENOSPC)."""

import resource
import time

from nsa.errors import CheckpointError
from proofs.drill import artifacts
from proofs.drill.harness import SAVE_EVERY, DrillHarness, DrillProcess
from proofs.drill.result import DrillResult, finish
from proofs.drill.small_disk import fill_disk, free_disk, mount_small_disk

_DISK = "16m"


def full_disk(harness: DrillHarness, result: DrillResult) -> None:
    """A small tmpfs where mounting is allowed; elsewhere a limit on file size (RLIMIT_FSIZE)."""
    mounted = mount_small_disk(harness, _DISK)
    process = harness.train()
    harness.wait_for("a checkpoint", lambda: artifacts.saved_steps(harness.run_folder), process)
    at = time.time()
    how = f"{fill_disk(harness)} on a disk of {_DISK}" if mounted else _limit(process)
    code = process.wait()
    after = time.time() - at
    result.require_equal("exit code", code, CheckpointError.exit_code)
    reported = process.output()
    result.require(
        str(harness.run_folder) in reported and "--resume" in reported,
        "the error does not name the run folder and --resume",
    )
    result.detected(f"run: {how}", after, within_s=30)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step is not None and step >= SAVE_EVERY, f"the newest verified checkpoint is {step}")
    result.left_behind = f"exit {code}, verified checkpoint {step}"
    if mounted:
        free_disk(harness)
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def _limit(process: DrillProcess) -> str:
    most = 2**14
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    return f"no file may grow beyond {most} bytes"
