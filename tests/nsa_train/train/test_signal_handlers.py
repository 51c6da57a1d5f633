"""Real processes, real signals, a real halt file."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import last_beat, read_beats
from nsa_train.record.run_folder import RunFolder
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, Job, environment, free_port, write_config

WAIT_S = 300


class Process:
    """A run under one of the three launchers (`nsa train` alone, `nsa launch`, torchrun), or of forked ranks alone."""

    def __init__(self, tmp_path, *words, launcher: str | None = None, ranks: int = 1, no_hangup: bool = False) -> None:
        self.folder = tmp_path / "run"
        self.log = (tmp_path / "log").open("a")
        launcher = launcher or ("train" if ranks == 1 else "forked")
        files = dict(stdout=self.log, stderr=self.log)
        if launcher == "train":
            command = ["-m", "nsa_train.cli", "train", str(write_config(tmp_path))]
            command += ["train.steps=4900", f"train.out_dir={self.folder}", *words]
            ignored = (signal.SIGHUP,) if no_hangup else ()
            self.process = fork_server.start(command, cwd=ROOT, env=environment(), ignored_signals=ignored, **files)
            return
        if launcher == "forked":
            job = Job(str(self.folder), ranks, ["train.steps=4900", *words])
            self.process = fork_server.start(
                ["-m", "tests.nsa_train.train.runs"], cwd=ROOT, env=environment(), stdin=subprocess.PIPE, **files
            )
            with self.process.stdin as jobs:
                json.dump([asdict(job)], jobs)
            return
        start = {
            "launch": ["nsa_train.cli", "launch", "--nproc", str(ranks)],
            "torchrun": ["torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port()),
                         "-m", "nsa_train.cli", "train"],
        }  # fmt: skip
        # A run inside this test process leaves USR1 and USR2 ignored, which a child would inherit.
        prefix = ["env", "--default-signal=USR1,USR2,HUP"]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *start[launcher], str(write_config(tmp_path)),
             "train.steps=4900", f"train.out_dir={self.folder}", *words],
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """Process ids of the ranks, from their heartbeats."""
        beats = [last_beat(path) for path in self.folder.glob(names.HEARTBEATS)]
        return [beat.pid for beat in beats if beat]

    def shell(self, command: str) -> None:
        """Run a command as an operator types it; `nsa` is forked, so that the run trains fewer steps until it
        answers."""
        function = f'nsa() {{ {fork_server.command_for("-m", "nsa_train.cli")} "$@"; }}\n'
        words = ["bash", "-ec", function + command.replace("RUN", str(self.folder))]
        subprocess.run(words, cwd=ROOT, env=environment(), check=True, timeout=WAIT_S)

    def wait_for(self, what, happened) -> None:
        deadline = time.monotonic() + WAIT_S
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}"
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.05)

    def step(self, rank: int = 0) -> int:
        beat = last_beat(self.folder / names.heartbeat(rank), names.PROGRESS)
        return beat.step if beat else 0

    def wait_for_steps(self, more: int = 3) -> None:
        goal = self.step() + more
        self.wait_for(f"step {goal}", lambda: self.step() >= goal)

    def end(self) -> int:
        code = self.process.wait(WAIT_S)
        self.log.close()
        return code


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*words, **how) -> Process:
        started.append(Process(tmp_path, *words, **how))
        return started[-1]

    yield begin
    for run in started:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        for pid in filter(alive, run.pids()):  # torchrun's ranks have sessions of their own; none, unless a test failed
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_usr1_dumps_stacks_usr2_saves_and_term_leaves_with_a_checkpoint(start):
    run = start("train.keep_checkpoints=1", no_hangup=True)
    run.wait_for_steps()
    run.process.send_signal(signal.SIGHUP)  # nohup: it goes on
    run.process.send_signal(signal.SIGUSR1)
    dump = run.folder / names.stackdump(0, run.process.pid)
    run.wait_for("a stack dump", lambda: "most recent call first" in dump.read_text())
    run.wait_for_steps()

    checkpoints = CheckpointFolder(run.folder / names.CHECKPOINTS)
    assert checkpoints.steps() == []
    run.process.send_signal(signal.SIGUSR2)
    run.wait_for("a checkpoint", checkpoints.committed_steps)
    run.wait_for_steps()
    assert len(checkpoints.steps()) == 1

    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        run.process.send_signal(number)
    assert run.end() == 10
    resumable = checkpoints.find_resumable()
    assert resumable.step == run.step() == checkpoints.latest()
    assert [manifest.reason for manifest in checkpoints.committed().values()] == ["requested", "last"]
    last = last_beat(run.folder / names.heartbeat(0))
    assert last is not None
    assert (last.msg, last.step) == (names.STOPPED, resumable.step)
    kinds = [event.kind for event in read_events(run.folder)]
    assert kinds == [EventKind.START, EventKind.FIRST_STEP, EventKind.SAVE, EventKind.STOP, EventKind.SAVE]
    assert not (run.folder / names.MODEL).exists()


def test_a_checkpoint_that_was_just_saved_anyway_is_kept_when_it_is_asked_for(start):
    run = start("train.keep_checkpoints=1", "train.save_every=1")
    run.wait_for_steps()
    checkpoints = CheckpointFolder(run.folder / names.CHECKPOINTS)

    def requested() -> list[int]:
        return [step for step, commit in checkpoints.committed().items() if commit.reason == "requested"]

    run.process.send_signal(signal.SIGUSR2)
    run.wait_for("a checkpoint that was asked for", requested)
    asked_for = requested()
    run.wait_for_steps()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 10
    assert requested() == asked_for
    assert checkpoints.steps() == [*asked_for, run.step()]


def test_a_halt_file_stops_all_ranks_at_the_same_step(start):
    run = start(ranks=2)
    run.wait_for("both ranks", lambda: min(run.step(0), run.step(1)) >= 2)
    (run.folder / names.HALT).write_text("halt: manual_stop\n")
    run.end()
    beats = [last_beat(run.folder / names.heartbeat(rank)) for rank in (0, 1)]
    assert [beat.msg for beat in beats if beat] == [names.HALTED] * 2
    assert len({beat.step for beat in beats if beat}) == 1
    halts = [event for event in read_events(run.folder) if event.kind == EventKind.HALT]
    assert [event.details for event in halts] == [{"reason": ".HALT: manual_stop"}]
    assert CheckpointFolder(run.folder / names.CHECKPOINTS).find_resumable().step == RunFolder(run.folder).last_step()

    stale = start("--resume")
    assert stale.end() == 11
    assert "(manual_stop; written " in (log := (run.folder.parent / "log").read_text())
    assert "--clear-halt" in log
    assert len(list(read_beats(run.folder / names.heartbeat(0)))) == beats[0].step + 2  # start, steps, halt


def test_a_term_to_one_rank_stops_all_ranks(start):
    run = start(ranks=2)
    run.wait_for("both ranks", lambda: min(run.step(0), run.step(1)) >= 2)
    pids = [last_beat(run.folder / names.heartbeat(rank)).pid for rank in (0, 1)]
    os.kill(pids[1], signal.SIGTERM)
    run.end()
    beats = [last_beat(run.folder / names.heartbeat(rank)) for rank in (0, 1)]
    assert [beat.msg for beat in beats] == [names.STOPPED] * 2
    assert beats[0].step == beats[1].step == CheckpointFolder(run.folder / names.CHECKPOINTS).latest()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ranks_asked_to_regroup_save_together_and_are_resumed_by_the_launcher(start):
    run = start(launcher="launch", ranks=2)
    run.wait_for("both ranks", lambda: min(run.step(0), run.step(1)) >= 2)
    os.kill(last_beat(run.folder / names.heartbeat(1)).pid, signal.SIGURG)
    run.wait_for(
        "the resumed run", lambda: [event for event in read_events(run.folder) if event.kind == EventKind.RESTART]
    )
    events = read_events(run.folder)
    (stopped,) = [event for event in events if "launcher" in event.details]
    (resumed,) = [event for event in events if event.kind == EventKind.RESTART]
    assert (stopped.kind, stopped.details["code"]) == (EventKind.STOP, 12)
    assert resumed.step == stopped.step > 0
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 10


# Runs of their own for each. For every change test_usr1_dumps_stacks_… sends the signals to a run without a launcher,
# test_launcher to one of stand-ins, and test_rendezvous ends a real launcher.
@pytest.mark.nightly
@pytest.mark.parametrize(("launcher", "code"), [("train", 10), ("launch", 10), ("torchrun", 1)])
def test_the_runbooks_signals_work_under_every_launcher(start, launcher, code):
    ranks = 1 if launcher == "train" else 2
    run = start(launcher=launcher, ranks=ranks)
    run.wait_for("all ranks", lambda: min(run.step(rank) for rank in range(ranks)) >= 2)
    pids, checkpoints = run.pids(), CheckpointFolder(run.folder / names.CHECKPOINTS)
    run.shell("kill -USR1 $(nsa status RUN --pids)")
    dumps = [
        run.folder / names.stackdump(rank, last_beat(run.folder / names.heartbeat(rank)).pid) for rank in range(ranks)
    ]
    run.wait_for("stacks of all", lambda: all("most recent call first" in _text(dump) for dump in dumps))
    run.shell("kill -USR2 $(nsa status RUN --pids)")
    run.wait_for("a checkpoint", checkpoints.committed_steps)
    run.wait_for_steps()
    run.shell("kill -TERM $(nsa status RUN --pids)")
    assert run.end() == code, "torchrun has only 1 for ranks that end with 10"
    beats = [last_beat(run.folder / names.heartbeat(rank)) for rank in range(ranks)]
    assert [beat.msg for beat in beats] == [names.STOPPED] * ranks
    assert {beat.step for beat in beats} == {checkpoints.find_resumable().step}
    assert not [pid for pid in pids if alive(pid)]


_BUSY = """
import hashlib, sys, threading, time
from pathlib import Path
from nsa_train.train.signal_handlers import SignalHandlers

def count(depth):
    return depth and 1 + count(depth - 1)

def work():
    while True:
        exec("def fresh(n):\\n    return n and fresh(n - 1)\\nfresh(50)", {})
        count(50)

signals = SignalHandlers(Path(sys.argv[1]))
signals.install()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
until, data = Path(sys.argv[2]), bytes(1 << 22)
while not until.exists():
    hashlib.sha256(data)  # gives the interpreter lock to the other threads, as a collective does
signals.close()
"""


def test_stacks_can_be_asked_for_while_threads_run(tmp_path):
    dump, enough = tmp_path / "stackdump.txt", tmp_path / "enough"
    words = ["env", "--default-signal=USR1", sys.executable, "-c", _BUSY, str(dump), str(enough)]
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + WAIT_S
        for number in itertools.count():
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
            assert process.poll() is None, process.returncode
            if number >= 1000 and number % 100 == 0 and _text(dump).count("most recent call first") > 10:
                break
            assert time.monotonic() < deadline, "no stacks"
        enough.touch()
        assert process.wait(WAIT_S) == 0


_FULL_DISK = """
import os, signal, sys, time
from pathlib import Path
from nsa_train.train import signal_handlers

attempts = []

def no_space(path):
    attempts.append(path)
    raise OSError(28, "No space left on device")

signal_handlers._write_flight_record = no_space
signals = signal_handlers.SignalHandlers(Path(sys.argv[1]), Path(sys.argv[1]))
signals.install()
for expected in (1, 2):
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 60.0
    while len(attempts) < expected and time.monotonic() < until:
        time.sleep(0.01)
signals.close()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
print(len(attempts))
"""


def test_a_full_disk_ends_neither_later_dumps_nor_the_process_after_the_run(tmp_path):
    words = [sys.executable, "-c", _FULL_DISK, str(tmp_path / "stackdump.txt")]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_hangup_saves_and_exits(start):
    run = start()
    run.wait_for_steps(2)
    run.process.send_signal(signal.SIGHUP)
    assert run.end() == 10
    assert last_beat(run.folder / names.heartbeat(0)).msg == names.STOPPED
    assert CheckpointFolder(run.folder / names.CHECKPOINTS).find_resumable().step == run.step()


@pytest.mark.nightly
def test_ranks_without_their_torchrun_save_and_exit(start):
    """USR2 ends torchrun, which has no handler for it, and it ends no rank."""
    run = start(launcher="torchrun", ranks=2)
    run.wait_for("both ranks", lambda: min(run.step(0), run.step(1)) >= 2)
    pids = run.pids()
    run.process.send_signal(signal.SIGUSR2)
    assert run.end() == -signal.SIGUSR2
    deadline = time.monotonic() + WAIT_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"orphans train on: step {run.step()}"
        time.sleep(0.05)
    beats = [last_beat(run.folder / names.heartbeat(rank)) for rank in (0, 1)]
    assert [beat.msg for beat in beats] == [names.STOPPED] * 2
    assert {beat.step for beat in beats} == {CheckpointFolder(run.folder / names.CHECKPOINTS).find_resumable().step}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
