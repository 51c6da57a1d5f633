"""Drill scenario: the disk is full while a run saves (ENOSPC)."""

import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

from nsa.drill import artifacts
from nsa.drill.harness import SAVE_EVERY, DrillHarness, DrillProcess
from nsa.drill.result import DrillResult, finish
from nsa.errors import CheckpointError

_DISK = "16m"


def full_disk(harness: DrillHarness, result: DrillResult) -> None:
    """A small tmpfs where mounting is allowed; elsewhere a limit on file size (RLIMIT_FSIZE)."""
    mounted = _mount(harness)
    process = harness.train()
    harness.wait_for("a checkpoint", lambda: artifacts.saved_steps(harness.run_folder), process)
    at = time.time()
    how = _fill(harness.run_folder.parent / "ballast") if mounted else _limit(process)
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
        (harness.run_folder.parent / "ballast").unlink()
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def _mount(harness: DrillHarness) -> bool:
    disk = harness.folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "nsa-drill", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    harness.run_folder = disk / "run"
    harness.at_end(lambda: _unmount(disk, harness.folder / "run"))
    return True


def _unmount(disk: Path, keep: Path) -> None:
    """Copy the run folder out and unmount, even if files are still open."""
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
    raise AssertionError("a full disk accepted another byte")


def _limit(process: DrillProcess) -> str:
    most = 2**14
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    return f"no file may grow beyond {most} bytes"
