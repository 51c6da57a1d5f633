"""A disk that fills up while a run saves."""

import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

from nsa.drill import artifacts
from nsa.drill.harness import SAVE_EVERY, DrillHarness, DrillProcess
from nsa.drill.result import DrillResult
from nsa.drill.scenarios.resume import finish
from nsa.errors import CheckpointError

_DISK = "16m"


def full_disk(stage: DrillHarness, row: DrillResult) -> None:
    """A small file system of its own where that may be mounted; elsewhere files that may not grow (RLIMIT_FSIZE)."""
    mounted = _mount(stage)
    process = stage.train()
    stage.wait_for("a checkpoint", lambda: artifacts.saved_steps(stage.run), process)
    at = time.time()
    how = _fill(stage.run.parent / "ballast") if mounted else _limit(process)
    code = process.end()
    after = time.time() - at
    row.demand_equal("exit code", code, CheckpointError.exit_code)
    row.detected(f"run: {how}", after, within_s=30)
    step = artifacts.newest_good_step(stage.run)
    row.demand(step is not None and step >= SAVE_EVERY, f"the newest verified checkpoint is {step}")
    row.left_behind = f"exit {code}, verified checkpoint {step}"
    if mounted:
        (stage.run.parent / "ballast").unlink()
    finish(stage, row, stage.train("--resume"), like_calm=True)


def _mount(stage: DrillHarness) -> bool:
    disk = stage.folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "nsa-drill", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    stage.run = disk / "run"
    stage.at_end(lambda: _unmount(disk, stage.folder / "run"))
    return True


def _unmount(disk: Path, keep: Path) -> None:
    """What the run left is worth keeping; the mount must not stay, whatever is still open on it."""
    try:
        if (disk / "run").is_dir():
            shutil.copytree(disk / "run", keep, symlinks=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(ballast: Path) -> str:
    piece = bytes(2**12)
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(piece):
                pass
        except OSError as error:
            return f"{error.strerror} on a disk of {_DISK}"
    raise AssertionError("a full disk took another byte")


def _limit(process: DrillProcess) -> str:
    most = 2**14
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    return f"no file may grow beyond {most} bytes"
