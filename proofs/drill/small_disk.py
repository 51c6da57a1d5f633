"""A small tmpfs for the run folder of a drill, which can be filled up (ENOSPC) and freed."""

import os
import shutil
import subprocess
from pathlib import Path

from proofs.drill.harness import DrillHarness

_PIECE_BYTES, _LAST_BYTES = 2**20, 2**12
_UNMOUNT_AT_END_OF_INPUT = 'cat; umount --lazy "$0"'


def mount_small_disk(harness: DrillHarness, size: str) -> bool:
    """Move the run folder to a tmpfs of this size; False where mounting is not allowed."""
    disk = harness.folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "nsa-drill", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return False
    # In a process of its own, which reads the end of its input even if this process is killed.
    unmounter = subprocess.Popen(
        ["sh", "-c", _UNMOUNT_AT_END_OF_INPUT, str(disk)], stdin=subprocess.PIPE, start_new_session=True
    )
    harness.run_folder = disk / "run"
    harness.at_end(lambda: _unmount(disk, harness.folder / "run", unmounter))
    return True


def fill_disk(harness: DrillHarness) -> str:
    """Write until nothing more fits; returns the error."""
    problem = ""
    with _ballast(harness).open("wb", buffering=0) as file:
        for piece in (bytes(_PIECE_BYTES), bytes(_LAST_BYTES)):
            try:
                while file.write(piece):
                    pass
            except OSError as error:
                problem = str(error.strerror)
    assert problem, "a full disk accepted another byte"
    return problem


def free_disk(harness: DrillHarness) -> None:
    _ballast(harness).unlink(missing_ok=True)


def _ballast(harness: DrillHarness) -> Path:
    return harness.run_folder.parent / "ballast"


def _unmount(disk: Path, keep: Path, unmounter: "subprocess.Popen[bytes]") -> None:
    """Copy the run folder out and unmount, even if files are still open."""
    try:
        if (disk / "run").is_dir():
            shutil.copytree(disk / "run", keep, symlinks=True)
    finally:
        unmounter.communicate()
    assert unmounter.returncode == 0, f"{disk} could not be unmounted"
