"""A child that dies, hangs or prints garbage is a reason for its parent, and leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.child_process import ChildFailed, ChildProcess

ECHO = """
from nsa.child_process import answer_parent

def act(send, numbers, then=""):
    for number in numbers:
        print("a library prints this")
        send(twice=2 * number)
    exec(then)

answer_parent(act)
"""


def twice(numbers: list[int], then: str = "", **limits) -> list[int]:
    with ChildProcess("the child", ("-c", ECHO)) as child:
        child.send(numbers=numbers, then=then)
        return [message["twice"] for message in child.messages(**limits)]


def test_messages_arrive_whole_and_in_order_beside_what_libraries_print():
    assert twice(list(range(1000))) == [2 * number for number in range(1000)]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the child was killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL.* memory"),
        ("raise ValueError('two\\nlines')", "exit code 1: ValueError: two"),
        ("import sys; sys.exit('refused')", "exit code 1: refused"),
    ],
)
def test_a_dead_child_is_reported_with_its_cause(then, why):
    with pytest.raises(ChildFailed, match=why):
        twice([1], then)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (dict(silence_s=3.0), "no message for 3 s"),
        (dict(limit_s=3.0), "after 3 s"),
        (dict(watch=lambda: "because it is watched"), "the child was ended because it is watched"),
    ],
)
def test_a_child_that_hangs_is_ended(limits, why):
    with pytest.raises(ChildFailed, match=why):
        twice([1], "import time; time.sleep(600)", **limits)


def test_messages_before_the_end_are_not_lost():
    with ChildProcess("the child", ("-c", ECHO)) as child:
        child.send(numbers=[1, 2], then="raise ValueError")
        assert [child.receive(60.0)["twice"] for _ in range(2)] == [2, 4]
        assert child.receive(60.0) is None
        assert "ValueError" in child.failure()


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.01)
    return False


GRANDCHILD = "import subprocess; send(twice=subprocess.Popen(['sleep', '600']).pid); import time; time.sleep(600)"


def test_its_descendants_end_with_it():
    with ChildProcess("the child", ("-c", ECHO)) as child:
        child.send(numbers=[], then=GRANDCHILD)
        pid = child.receive(60.0)["twice"]
    assert ended(pid)


def test_it_ends_with_its_parent():
    program = (
        "from nsa.child_process import ChildProcess; from tests.nsa.test_child_process import ECHO, GRANDCHILD\n"
        "child = ChildProcess('the child', ('-c', ECHO)); child.send(numbers=[], then=GRANDCHILD)\n"
        "print(child.pid, child.receive(60.0)['twice'], flush=True); import os; os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert all(ended(int(pid)) for pid in done.stdout.split())
