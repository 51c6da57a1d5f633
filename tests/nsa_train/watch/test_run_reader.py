"""Incremental reading of a run folder, with clocks that jump and process ids that are used again."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.record_files import JsonLines
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.run_reader import ClockReading, RunReader
from tests.nsa_train.record.beats import BEGAN, a_beat, a_run, progress

HOUR = 3600.0


class Clock:
    """Wall and steady time; the wall clock may be set."""

    def __init__(self, wall: float) -> None:
        self.now = ClockReading(wall, 50.0)

    def __call__(self) -> ClockReading:
        return self.now

    def go(self, seconds: float) -> None:
        self.now = ClockReading(self.now.wall + seconds, self.now.steady + seconds)

    def jump(self, seconds: float) -> None:
        self.now = ClockReading(self.now.wall + seconds, self.now.steady)


class Folder:
    def __init__(self, path) -> None:
        self.path = path
        self.lines = JsonLines(path / names.heartbeat(0))
        self.clock = Clock(BEGAN)
        self.reader = RunReader(path, self.clock, host="another")
        self.step = 0

    def beat(self) -> None:
        self.step += 1
        self.lines.append(progress(self.step, self.clock.now.wall).to_line())

    def findings(self) -> list[str]:
        history = self.reader.update()
        return [finding.name for finding in examine(history, now=self.reader.now.steady, limits=HealthLimits())]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize("jump", [HOUR, -HOUR, 0.0])
def test_a_clock_that_jumps_neither_invents_a_stall_nor_hides_one(folder, jump):
    for i in range(60):
        folder.clock.go(10.0)
        folder.beat()
        if i == 30:
            folder.clock.jump(jump)
        assert folder.findings() == []
    for _ in range(17):
        folder.clock.go(10.0)
        assert folder.findings() == []
    folder.clock.jump(jump)
    assert folder.findings() == []
    folder.clock.go(20.0)
    assert folder.findings() == ["heartbeat_stall"]
    folder.clock.jump(-jump)
    assert folder.findings() == ["heartbeat_stall"]
    folder.beat()
    assert folder.findings() == []


def test_a_reader_that_comes_late_knows_how_old_the_last_beat_is(folder):
    for _ in range(5):
        folder.clock.go(10.0)
        folder.beat()
    folder.clock.go(200.0)
    assert folder.findings() == ["heartbeat_stall"]


def test_a_reader_that_looks_seldom_takes_records_for_as_old_as_they_are(folder):
    folder.beat()
    folder.findings()
    folder.clock.go(5.0)
    folder.beat()
    folder.clock.go(400.0)
    assert folder.findings() == ["heartbeat_stall"]


def test_facts_come_from_env_and_saves_from_events(folder):
    config = {"train": {"steps": 9, "save_every": 2}, "nsa": {"l_sel": 8}, "data": {"dataset": "local"}}
    folder.beat()
    assert folder.reader.update().facts.steps is None
    (folder.path / names.ENV).write_text('{"host": "h", "co')
    assert folder.reader.update().facts.host is None
    (folder.path / names.ENV).write_text(json.dumps({"host": "h", "world_size": 4, "config": config}))
    add_event(folder.path, EventKind.START, ts=BEGAN, step=0)
    add_event(folder.path, EventKind.SAVE, ts=BEGAN, step=4)
    history = folder.reader.update()
    assert (history.facts.world, history.facts.save_every, history.facts.dataset) == (4, 2, "local")
    assert history.saved_step == 4
    add_event(folder.path, EventKind.LOST_STEPS, ts=BEGAN, step=2)
    assert folder.reader.update().saved_step == 2


def test_lines_that_are_no_beats_are_skipped(folder):
    for text in ('{"step":1}', '{"ts":"x","pid":1,"rank":0,"step":1,"msg":"alive"}', "[]", '{"ts":1'):
        folder.lines.append(text)
    assert folder.reader.update().ranks == {}


def test_memory_stays_bounded(folder):
    history = folder.reader.update()
    for step in range(3000):
        history.add(progress(step, BEGAN + step), BEGAN + step)
        history.add(a_beat(names.SKIPPED, step, BEGAN + step), BEGAN + step)
    log = history.ranks[0]
    assert len(log.progress) <= 256
    assert len(log.skipped) <= 256
    assert len(log.spans) <= 240


def test_a_new_process_begins_anew(folder):
    history = folder.reader.update()
    for beat in [*a_run(50), *a_run(3, first=21, began=BEGAN + 900, pid=2000)]:
        history.add(beat, beat.ts)
    assert [beat.step for beat in history.ranks[0].progress] == [21, 22, 23]


PROCESS = "import sys, time\nopened = open(sys.argv[1], 'a')\nprint('ready', flush=True)\ntime.sleep(60)\n"


def test_a_process_counts_as_there_only_while_it_holds_the_runs_files(tmp_path):
    beats = tmp_path / names.heartbeat(0)
    (tmp_path / names.ENV).write_text(json.dumps({"host": socket.gethostname(), "world_size": 1}))
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(beats)], stdout=subprocess.PIPE)
    reader = RunReader(tmp_path)

    def tell(pid: int) -> frozenset[int]:
        lines = JsonLines(beats)
        lines.append(replace(a_beat(names.ALIVE, 3, time.time()), pid=pid).to_line())
        lines.close()
        return reader.update().gone

    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert tell(process.pid) == frozenset()
        assert tell(os.getpid()) == {0}, "a process that exists, and is another one by now"
        assert tell(process.pid) == frozenset()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert reader.update().gone == {0}, "not waited for, and dead all the same"
    finally:
        process.kill()
        process.wait()
    assert reader.update().gone == {0}
    assert RunReader(tmp_path, host="another").update().gone == frozenset()
