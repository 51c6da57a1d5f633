"""Processes of a chaos run are found in the process tree."""

import signal
import subprocess
import sys

from proofs.drill.chaos.cluster import descendants, send

CHILD = "import time; print(1, flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_children_of_children_are_found_and_can_be_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = descendants(parent.pid)
        send(child, signal.SIGKILL)
        assert parent.wait(timeout=120) == 0
    assert descendants(parent.pid) == []
    send(child, signal.SIGKILL)  # has ended: nothing happens


def test_a_process_without_children_has_none():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as alone:
        assert alone.stdout is not None
        alone.stdout.readline()
        assert descendants(alone.pid) == []
        alone.kill()
