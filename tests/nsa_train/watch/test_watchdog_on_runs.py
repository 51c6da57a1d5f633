"""Real runs that hang and die, real process groups that wait for each other."""

import os
import signal
import subprocess
import time

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import last_beat
from nsa_train.record.record_files import JsonLines
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.hang_diagnosis import diagnose_hang
from nsa_train.watch.history import RunHistory
from nsa_train.watch.smoke import smoke
from nsa_train.watch.status import RunPhase
from nsa_train.watch.watchdog import Watchdog
from tests import fork_server
from tests.nsa_train.record.beats import a_beat
from tests.nsa_train.train.runs import ROOT, environment, free_port

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from tests.nsa_train.train.test_signal_handlers import WAIT_S, start  # noqa: F401 - a fixture

LIMITS = HealthLimits(stall_s=4.0, stall_steps=20.0, startup_s=4.0, gone_s=1.0)


def watch_until(dog: Watchdog, lines: list[str], wanted: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(wanted in line for line in lines):
        assert time.monotonic() < deadline, f"{wanted!r} was not said, but {lines}"
        dog.check()
        time.sleep(0.3)


def test_a_stalled_rank_is_reported_with_its_stacks_and_the_run_halted(start):  # noqa: F811
    run = start(ranks=2)
    run.wait_for("both ranks", lambda: min(run.step(0), run.step(1)) >= 3)
    pids = [last_beat(run.folder / names.heartbeat(rank)).pid for rank in (0, 1)]
    lines: list[str] = []
    dog = Watchdog(run.folder, halt=True, limits=LIMITS, emit=lines.append)
    dog.begin()
    dog.check()
    os.kill(pids[1], signal.SIGSTOP)
    try:
        watch_until(dog, lines, ".HALT written")
    finally:
        os.kill(pids[1], signal.SIGCONT)
    text = "\n".join(lines)
    assert "CRITICAL heartbeat_stall (rank" in text
    assert f"rank 0: stack dump of process {pids[0]}: " in text
    assert f"rank 1: process {pids[1]} wrote no stack dump; its state: stopped by a signal" in text
    assert "_fit_epoch" in (run.folder / names.stackdump(0, pids[0])).read_text()
    assert "pg_status" in (run.folder / names.collectives(0, pids[0])).read_text()
    assert (run.folder / names.ANOMALY).read_text() == "heartbeat_stall\n"
    run.end()
    watch_until(dog, lines, "resolved: heartbeat_stall")
    assert dog.phase == RunPhase.HALTED
    kinds = [event.kind for event in read_events(run.folder)]
    assert [kind for kind in kinds if kind in (EventKind.STALL, EventKind.HALT_ASKED, EventKind.HALT)] == [
        EventKind.STALL, EventKind.HALT_ASKED, EventKind.HALT,
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_killed_run_is_reported_and_continues_after_a_stale_halt_is_cleared(start):  # noqa: F811
    run = start("train.save_every=5")
    run.wait_for("a checkpoint", lambda: run.step() >= 8)
    lines: list[str] = []
    dog = Watchdog(run.folder, halt=True, limits=LIMITS, emit=lines.append)
    dog.check()
    assert dog.phase == RunPhase.RUNNING
    run.process.kill()
    watch_until(dog, lines, "CRITICAL process_gone")
    dog.check()
    assert dog.phase == RunPhase.GONE
    assert (run.folder / names.ANOMALY).read_text() == "process_gone\n"
    assert not (run.folder / names.HALT).exists(), "there is nothing to halt"
    run.process.wait()

    (run.folder / names.HALT).write_text("halt: of before\n")
    steps = run.step() + 3
    again = start("--resume", "--clear-halt", f"train.steps={steps}")
    assert again.end() == 0
    assert not (run.folder / names.HALT).exists()
    (aside,) = run.folder.glob(f"{names.HALT}.cleared-*")
    assert aside.read_text() == "halt: of before\n"
    cleared = [event.details for event in read_events(run.folder) if event.kind == EventKind.HALT_CLEARED]
    assert [(details["reason"], details["aside"]) for details in cleared] == [("of before", aside.name)]
    dog.check()
    assert dog.phase == RunPhase.FINISHED
    checks = list(
        smoke(
            training_csv=run.folder / names.TRAINING_CSV,
            heartbeat=run.folder / names.heartbeat(0),
            min_steps=steps,
            folder=run.folder,
        )
    )
    # So few steps of a toy need not lower the loss; all else must hold.
    assert [check for check in checks if not check.passed and check.name != "loss_falling"] == []


RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from nsa_train import names
from nsa_train.train.signal_handlers import SignalHandlers
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
import os
here = rank, os.getpid()
signals = SignalHandlers(folder / names.stackdump(*here), folder / names.collectives(*here))
signals.install()
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{sys.argv[3]}")
x = torch.ones(3)
dist.all_reduce(x)
print("ready", flush=True)
if rank == 0:
    second = dist.all_reduce(x, async_op=True)
    print("second", flush=True)
    second.wait()
time.sleep(600)
"""


def test_a_missed_collective_names_the_rank_that_missed_it(tmp_path):
    port = str(free_port())
    ranks = [
        fork_server.start(
            ["-c", RANK, str(rank), str(tmp_path), port], cwd=ROOT, env=environment(), stdout=subprocess.PIPE
        )
        for rank in (0, 1)
    ]  # fmt: skip
    history = RunHistory()
    try:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            JsonLines(tmp_path / names.heartbeat(rank)).close()
            history.add(a_beat(names.ALIVE, 1, 0.0, rank=rank, pid=process.pid - rank), 0.0)
        assert ranks[0].stdout.readline() == "second\n"
        lines = list(diagnose_hang(tmp_path, history.ranks.values(), wait_s=20.0))
        assert all(process.poll() is None for process in ranks), "the question must not end a process"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert lines[-1] == "gloo group 0: ranks [0] are at collective 2, ranks [1] have not reached it", lines
    assert [line for line in lines if "stack dump of process" in line] == lines[:2]
