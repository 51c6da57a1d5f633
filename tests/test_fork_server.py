"""Forked programs are processes of their own: arguments, folder, variables, files, signals and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from tests import fork_server
from tests.nsa_train.train.runs import environment

TELL = """
import json, os, sys, threading
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get("TOLD"), sys.stdin.read(), threading.active_count()]))
print("said", file=sys.stderr)
sys.exit(7)
"""


def test_a_program_has_its_own_arguments_folder_variables_and_files(tmp_path):
    done = fork_server.run(["-c", TELL, "a", "b"], cwd=tmp_path, env=environment(TOLD="yes"), input="given")
    assert (done.returncode, done.stderr) == (7, "said\n")
    assert json.loads(done.stdout) == [["a", "b"], str(tmp_path), "yes", "given", 1]
    assert "TOLD" not in os.environ
    again = fork_server.run(["-c", TELL], cwd=tmp_path, env=environment())
    assert json.loads(again.stdout) == [[], str(tmp_path), None, "", 1]


def test_modules_and_files_run_as_main(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "script.py").write_text("import sys, beside; print(__name__, beside.NAME, sys.argv)\n")
    for words in (["script.py", "x"], ["-m", "script", "x"]):
        done = fork_server.run(words, cwd=tmp_path, env=environment())
        assert done.stdout.startswith("__main__ beside ["), done.stderr
        assert done.stdout.endswith("script.py', 'x']\n")


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise ValueError('told')", 1),
        ("import sys; sys.exit('told')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("print('told', file=__import__('sys').stderr); raise KeyboardInterrupt", -2),
        ("import atexit, sys; atexit.register(print, 'told', file=sys.stderr); sys.exit(3)", 3),
    ],
)
def test_exit_codes_are_those_of_a_new_interpreter(tmp_path, program, code):
    done = fork_server.run(["-c", program], cwd=tmp_path, env=environment())
    real = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, real.stdout) == (real.returncode, "")
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_signals_reach_it_and_are_not_inherited(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        program = "import time; print('up', flush=True); time.sleep(60)"
        for ignored, number, code in (((), signal.SIGUSR1, -10), ((1,), signal.SIGTERM, -15)):
            with (tmp_path / "out").open("w") as out:
                words = ["-c", program]
                process = fork_server.start(words, cwd=tmp_path, env=environment(), stdout=out, ignored_signals=ignored)
            while "up" not in (tmp_path / "out").read_text():
                time.sleep(0.01)
            assert process.poll() is None
            if ignored:
                process.send_signal(signal.SIGHUP)
            process.send_signal(number)
            assert process.wait(timeout=120) == code
            assert process.poll() == code
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_timeout_ends_the_whole_session(tmp_path):
    program = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server.run(["-c", f"open('pid', 'w').write(str(__import__('os').getpid())); {program}"], cwd=tmp_path,
                        env=environment(), timeout=1)  # fmt: skip
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 120
    while subprocess.run(["pgrep", "-s", str(pid), "-r", "R,S,D"], capture_output=True).returncode == 0:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_program_ends_with_its_shell_command(tmp_path):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen(
        ["sh", "-c", f"exec {fork_server.command_for('-c', program)}"], stdout=subprocess.PIPE
    ) as one:
        pid = int(one.stdout.readline())
        one.kill()
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_shell_command_passes_on_files_signals_and_the_exit_code(tmp_path):
    command = fork_server.command_for("-c", "import sys; print(sys.stdin.read() + sys.argv[1]); sys.exit(9)")
    done = subprocess.run(["sh", "-c", f"echo in | {command} word"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (9, "in\nword\n")
    sleeping = fork_server.command_for("-c", "import time; print('up', flush=True); time.sleep(60)")
    with subprocess.Popen(["sh", "-c", f"exec {sleeping}"], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
