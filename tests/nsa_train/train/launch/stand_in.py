"""Programs of the tests of the launcher: `AGENTS RUN MODE SETTINGS` is a launcher of two ranks, `rank RUN MODE` a rank.

A rank stands in for the trainer: no torch, a checkpoint every few hundredths of a second. AGENTS is `new` for agents in
new interpreters, or `forked` for those forked from the launcher, which saves the import of torch in a program of
tests/fork_server.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy

STEPS = 12
WAIT_S = 300
"""Deadline of every wait: twenty times what an idle machine takes."""


def commit(run: Path, step: int) -> None:
    folder = CheckpointFolder(run / "checkpoints", retention=RetentionPolicy(keep_last=3))
    staging = folder.begin(step)
    staging.mkdir(parents=True)
    (staging / "state.json").write_text(json.dumps({"step": step}))
    folder.commit(step)


def newest(run: Path) -> int:
    return max(CheckpointFolder(run / "checkpoints").committed_steps(), default=0)


def wait_for(what, name: str, said: Path | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, f"{name} never came: {said.read_text() if said else ''}"
        time.sleep(0.02)


class ForkedAgent:
    """The part of `subprocess.Popen` that a launcher uses, for an agent forked from it."""

    def __init__(self, words: list[str], *, stdin: int, stdout: IO, stderr: IO, start_new_session: bool) -> None:
        from tests.fork_server import ForkRequest, become

        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, stdout, True)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                if callable(signal.getsignal(number)):  # as exec does
                    signal.signal(number, signal.SIG_DFL)
            with open(os.devnull, "rb") as nothing:
                files = [os.dup(file.fileno()) for file in (nothing, stdout, stderr)]
            become(ForkRequest(words[1:], os.getcwd(), dict(os.environ)), files)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_agents() -> None:
    """Have the launcher of this process fork its agents."""
    from nsa_train.train.launch import launcher

    launcher.subprocess = SimpleNamespace(Popen=ForkedAgent, DEVNULL=subprocess.DEVNULL)


def run_rank(run: Path, mode: str, again: bool) -> None:
    rank = int(os.environ["RANK"])
    if mode == "meet":
        (run / f"met-{rank}-of-{os.environ['WORLD_SIZE']}").touch()
        sys.exit(0)
    stubborn = {"stubborn": signal.SIG_IGN, "polite": lambda *_: _leave(run, rank)}
    signal.signal(signal.SIGTERM, stubborn.get(mode, signal.SIG_DFL))
    signal.signal(signal.SIGUSR2, lambda *_: (run / "usr2").touch())
    life = len(list(run.glob(f"life*-rank{rank}")))
    print(f"rank {rank} is up", "told to" if mode in ("crash", "config") else "", flush=True)
    (run / f"rank{rank}.new").write_text(str(os.getpid()))
    os.rename(run / f"rank{rank}.new", run / f"life{life}-rank{rank}")
    (run / "store-variable").write_text(os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"])
    if mode in ("crash", "config"):
        # The agent ends the other rank as soon as it sees one fail: not before both have got this far.
        wait_for(lambda: len(list(run.glob(f"life{life}-rank*"))) == 2, "the other rank")
        sys.exit({"crash": 7, "config": 20}[mode])
    step = (CheckpointFolder(run / "checkpoints").find_resumable().step or 0) if again else 0
    if rank == 0:
        with (run / "starts").open("a") as starts:
            starts.write(f"from {step}\n")
    while mode != "train" or newest(run) < STEPS:
        time.sleep(0.05)
        if rank == 0 and mode == "train" and (life == 2 or step < 3 * (life + 1)):  # leaves the test time to kill
            step += 1
            commit(run, step)
            print(f"step {step}", flush=True)


def _leave(run: Path, rank: int) -> None:
    if rank == 0:
        commit(run, 99)
    time.sleep(0.3)
    sys.exit(10)


if __name__ == "__main__":
    program, folder, mode, *rest = sys.argv[1:]
    if program == "rank":
        run_rank(Path(folder), mode, "--resume" in rest)
    else:
        from nsa_train.train.launch.launcher import LaunchSettings, launch

        if program == "forked":
            fork_agents()
        command = [sys.executable, __file__, "rank", folder, mode]
        settings = LaunchSettings(command=command, run_folder=Path(folder), nproc=2, **json.loads(rest[0]))
        sys.exit(launch(settings, lambda text: print(f"launch: {text}", flush=True), lambda text: print(text, end="")))
