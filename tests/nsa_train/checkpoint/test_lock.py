"""Single-writer lock of a run folder; it does not outlive its process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.errors import CheckpointError
from nsa_train.checkpoint.lock import RunLock, holder

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from nsa_train.checkpoint.lock import RunLock
lock = RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the run folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_two_writers_are_refused_and_the_first_is_named(tmp_path, other):
    with pytest.raises(CheckpointError, match=str(other.pid)):
        RunLock(tmp_path).acquire()
    lock_holder = holder(tmp_path)
    assert lock_holder is not None
    assert lock_holder.pid == other.pid


def test_two_locks_in_one_process_are_refused_too(tmp_path):
    with RunLock(tmp_path), pytest.raises(CheckpointError, match=str(os.getpid())):
        RunLock(tmp_path).acquire()
    assert RunLock(tmp_path).acquire().died is None


def test_the_lock_of_a_dead_process_is_taken_over_and_its_death_reported(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert holder(tmp_path) is None
    lock = RunLock(tmp_path).acquire()
    assert lock.died is not None
    assert lock.died.pid == other.pid
    lock.release()


def test_waiting_for_the_lock_ends_when_its_holder_dies(tmp_path, other, monkeypatch):
    """The holder dies when the lock was tried three times."""
    sleep, pauses = time.sleep, []

    def kill_at_the_third(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.kill()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", kill_at_the_third)
    RunLock(tmp_path).acquire(wait_s=300).release()
    assert len(pauses) >= 3


def test_a_clean_end_leaves_no_name(tmp_path):
    RunLock(tmp_path).acquire().release()
    assert RunLock(tmp_path).acquire().died is None


def test_an_orphan_of_a_killed_run_does_not_keep_the_lock(tmp_path):
    """A data worker may outlive its trainer by a while."""
    forks = HOLDER.replace('print("held"', "import os; child = os.fork(); print(child or time.sleep(100)")
    process = subprocess.Popen([sys.executable, "-c", forks, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        lock = RunLock(tmp_path).acquire(wait_s=60)  # the child may not have run yet
        assert lock.died is not None
        os.kill(child, 0)
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_free_the_lock(tmp_path):
    with RunLock(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        assert holder(tmp_path) is not None


def test_an_unreadable_lock_file_names_no_holder(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xff{")
    assert RunLock(tmp_path).acquire().died is None
