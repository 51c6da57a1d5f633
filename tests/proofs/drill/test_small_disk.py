"""The drill's small disk: it fills up, it is gone afterwards, also if the drill is killed."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from proofs.drill.harness import DrillHarness
from proofs.drill.small_disk import fill_disk, free_disk, mount_small_disk
from tests.ops.needs import root

ROOT = Path(__file__).parents[3]
MOUNTS = "import sys, threading; from pathlib import Path; from proofs.drill.harness import DrillHarness; " + (
    "from proofs.drill.small_disk import mount_small_disk; "
    "harness = DrillHarness(Path(sys.argv[1]), threading.Event()); "
    "print(mount_small_disk(harness, '1m'), flush=True); sys.stdin.read()"
)


def mounted(folder: Path) -> list[str]:
    """Mount points in a folder."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]


@pytest.fixture(autouse=True)
def may_mount(tmp_path):
    root()
    # Some containers' root may not mount.
    tried = subprocess.run(["mount", "-t", "tmpfs", "nsa-test", str(tmp_path)], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"mounting is not allowed: {tried.stderr.strip()}")
    subprocess.run(["umount", str(tmp_path)], check=True)
    yield
    for point in mounted(tmp_path):  # of a test that failed: pytest could not remove its folder
        subprocess.run(["umount", point], check=True)


def test_it_is_full_and_free_again_and_what_was_written_is_kept(tmp_path):
    with DrillHarness(tmp_path, threading.Event()) as harness:
        assert mount_small_disk(harness, "1m")
        assert mounted(tmp_path)
        harness.run_folder.mkdir()
        (harness.run_folder / "log").write_text("before")
        assert fill_disk(harness) == "No space left on device"
        with pytest.raises(OSError, match="No space left"):
            (harness.run_folder / "more").write_bytes(bytes(2**14))
        free_disk(harness)
        (harness.run_folder / "more").write_bytes(bytes(2**14))
    assert not mounted(tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"log", "more"}


def test_a_killed_drill_leaves_nothing_mounted(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", MOUNTS, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout.readline() == "True\n"
        assert mounted(tmp_path)
    finally:
        owner.kill()
        owner.communicate()
    deadline = time.monotonic() + 120
    while mounted(tmp_path):
        assert time.monotonic() < deadline, "still mounted"
        time.sleep(0.05)
