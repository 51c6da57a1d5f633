"""A command whose stdout is closed by its reader ends quietly; what was passed over is reported on stderr."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_train.cli.outputs import PipedStdout, print_rejected

ROOT = Path(__file__).parents[3]
SHELL_CODE_OF_SIGPIPE = 141


@pytest.mark.parametrize("words", ["--version", "--help", "config show configs/cpu_quickstart.yaml"])
def test_a_closed_pipe_ends_a_command_without_a_traceback(words):
    """Output that waits in a buffer until the end (--version), and rich's tables."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "nsa_train.cli", *words.split()],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (SHELL_CODE_OF_SIGPIPE, "")


def test_a_reader_that_takes_everything_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "nsa_train.cli", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("nsa ")


def test_the_end_is_an_exception_so_that_blocks_that_end_processes_run():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        stdout = PipedStdout(stream)
        stdout.write("first")
        os.close(reader)
        with pytest.raises(SystemExit) as ended:
            print("second", file=stdout, flush=True)
        assert ended.value.code == SHELL_CODE_OF_SIGPIPE
        stdout.flush()  # as at the exit of Python: what is in the buffer has no reader and no trace


def test_a_checkpoint_that_was_passed_over_is_reported_on_stderr(capsys):
    print_rejected("step20: damaged")
    assert capsys.readouterr() == ("", "WARNING: passed over step20: damaged\n")
