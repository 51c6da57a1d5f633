"""Runs pytest by fork from a process that has imported torch and other large packages, but nothing of this repository.

Importing them takes most of the time of a short test. `python -m proofs.planting.warm_pytest PACKAGES` reads requests
from its standard input, one per line, and writes the exit code of each; `WarmPytest` starts it. It runs what pytest
would run in the folder, as nothing of the checkout is imported before.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "pytest", "hypothesis", "numpy", "pydantic", "typer", "torch", "torch._dynamo", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "torch.utils.tensorboard", "triton", "transformers", "olmo_core.train",
)  # fmt: skip

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of <sys/prctl.h>


class WarmPytest:
    """Pytest in a folder. It ends with `close`."""

    def __init__(self, folder: Path, environ: dict[str, str], preloaded: Collection[str] = PRELOADED) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "proofs.planting.warm_pytest", *preloaded],
            cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, words: list[str]) -> tuple[int, str]:
        """The exit code of pytest and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            print(json.dumps({"words": words, "output": output.name}), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            return (int(answer) if answer else -1), output.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve() -> None:
    # Ranks that a planted bug lets wait for each other for ever would use the processors of all later tests: when their
    # parent ends, they become children of this process. It ends them with itself when the drill is killed.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end_all)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while request := sys.stdin.readline():  # line by line: a forked process must not inherit lines read ahead
        pid = os.fork()
        if pid == 0:
            _run(**json.loads(request))
        ended, status = os.waitpid(-1, 0)
        while ended != pid:
            ended, status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        _end_children()
        print(code, file=answers, flush=True)


def _end_all(*_: object) -> NoReturn:
    _end_children()
    os._exit(1)


def _end_children() -> None:
    """Kill what a run has left; the children of a killed process are children of this one then."""
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _run(words: list[str], output: str) -> NoReturn:
    import pytest

    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_APPEND)):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    sys.argv = ["pytest", *words]
    code = pytest.main(words)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))  # objects are not deleted one by one: that takes a second


if __name__ == "__main__":
    _serve()
