"""A file system without room is named: a full /dev/shm is not called a full disk."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.train.full_disk import SHARED_MEMORY, no_room_error
from tests.ops.needs import root

CHILD = """
import sys
from pathlib import Path
from nsa.data.prefetch.prefetcher import BatchPrefetcher
from nsa.data.rows.specs import SyntheticData
from nsa.train.full_disk import no_room_error

def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            return error

if __name__ == "__main__":
    fill("/dev/shm/ballast")
    try:
        BatchPrefetcher(SyntheticData("uniform", vocab_size=9, seq_len=8, seed=1), global_rows=1)
    except OSError as error:
        print("shm:", no_room_error(error, Path(sys.argv[1])))
    print("disk:", no_room_error(fill(sys.argv[1] + "/ballast"), Path(sys.argv[1])))
"""


def test_full_shared_memory_and_a_full_disk_are_told_apart(tmp_path):
    """Both really full, in a mount namespace of their own."""
    root()
    run, child = tmp_path / "run", tmp_path / "child.py"
    run.mkdir()
    child.write_text(CHILD)
    mounts = f"mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=64k none {run}"
    command = ["unshare", "--mount", "sh", "-c", f"{mounts} && {sys.executable} {child} {run}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "/dev/shm" in told["shm"], done.stderr
    assert "not at fault" in told["shm"]
    assert "/dev/shm" not in told["disk"]
    assert str(run) in told["disk"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_error_with_a_file_is_about_its_file_system(tmp_path, number):
    here = OSError(number, "no room", str(tmp_path / "checkpoints" / "x"))
    shared = OSError(number, "no room", str(SHARED_MEMORY / "x"))
    assert "/dev/shm" not in str(no_room_error(here, tmp_path))
    assert str(no_room_error(shared, tmp_path)).startswith("shared memory (/dev/shm)")
    assert no_room_error(shared, tmp_path).exit_code == 22


def test_a_quota_is_the_run_folders(tmp_path):
    assert str(no_room_error(OSError(errno.EDQUOT, "over quota"), tmp_path)).startswith(str(tmp_path))
