"""Output and actions of the watchdog on recorded heartbeats, with simulated clocks."""

import errno
import json
import os

import pytest

from nsa_train import names
from nsa_train.record import halt_file
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.record_files import JsonLines
from nsa_train.watch.conditions import CONDITIONS, HealthLimits
from nsa_train.watch.hang_diagnosis import _ranks_behind, diagnose_hang
from nsa_train.watch.run_reader import RunReader
from nsa_train.watch.status import RunPhase
from nsa_train.watch.watchdog import Watchdog
from tests.nsa_train.record.beats import BEGAN, a_beat, a_run, progress
from tests.nsa_train.watch.recorded import UNWELL
from tests.nsa_train.watch.test_run_reader import Clock


class Watched:
    """A run folder with rank 0's beats, and a watchdog with a clock of its own."""

    def __init__(self, path, *, halts: bool = True) -> None:
        self.path = path
        self.lines = JsonLines(path / names.heartbeat(0))
        self.clock = Clock(BEGAN)
        self.said: list[str] = []
        self.halts = halts
        self.dog = self.new_dog()
        self.step = 0

    def new_dog(self) -> Watchdog:
        reader = RunReader(self.path, self.clock, host="another")
        return Watchdog(self.path, halt=self.halts, limits=HealthLimits(), emit=self.said.append, reader=reader)

    def go_on(self, steps: int, **changed) -> None:
        for _ in range(steps):
            self.clock.go(2.0)
            self.step += 1
            self.lines.append(progress(self.step, self.clock.now.wall, **changed).to_line())

    def look(self, after_s: float = 0.0) -> list[str]:
        """The lines that were new."""
        self.clock.go(after_s)
        before = len(self.said)
        self.dog.check()
        return self.said[before:]

    def text(self, name: str) -> str:
        return (self.path / name).read_text()


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_a_stall_is_reported_once_and_halted_and_its_end_is_reported(watched):
    watched.go_on(5)
    assert watched.look() == ["running at step 5"]
    assert watched.look(170.0) == []
    messages = watched.look(30.0)
    assert messages[0] == "hung at step 5"
    assert messages[1].startswith("CRITICAL heartbeat_stall (rank 0, step 5): ")
    assert "200 s" in messages[1]
    assert messages[-1].startswith(".HALT written: heartbeat_stall: ")
    assert watched.text(names.ANOMALY) == "heartbeat_stall\n"
    reason, by = watched.text(names.HALT).splitlines()
    assert reason.startswith("halt: heartbeat_stall: ")
    assert all(value in reason for value in ("200 s", "step 5", "180 s"))
    assert by.startswith("by: nsa watch")
    assert watched.look(100.0) == []
    watched.go_on(1)
    assert watched.look() == ["running at step 6", "resolved: heartbeat_stall (rank 0, step 5)"]
    kinds = [event.kind for event in read_events(watched.path)]
    assert kinds == [EventKind.STALL, EventKind.HALT_ASKED, EventKind.FINDING]
    for line in watched.said:
        assert line in watched.text(names.HEALTH_LOG)


def test_a_second_stall_is_a_second_episode(watched):
    watched.go_on(5)
    for _ in range(2):
        watched.look()
        messages = watched.look(200.0)
        assert any("CRITICAL heartbeat_stall" in line for line in messages)
        assert any(".HALT written" in line for line in messages)
        (watched.path / names.HALT).unlink()
        watched.go_on(1)


def test_a_failure_after_a_stall_keeps_the_name_of_the_stall(watched):
    watched.go_on(5)
    watched.look()
    watched.look(200.0)
    watched.lines.append(a_beat(names.FAILED, 5, watched.clock.now.wall, detail="RuntimeError: timed out").to_line())
    assert any(line.startswith(f"{names.ANOMALY} stays heartbeat_stall: run_failed") for line in watched.look())
    assert watched.text(names.ANOMALY) == "heartbeat_stall\n"


def test_a_failure_after_the_run_has_continued_takes_its_own_name(watched):
    watched.go_on(5)
    watched.look()
    watched.look(200.0)
    watched.go_on(1)
    watched.look()
    watched.lines.append(a_beat(names.FAILED, 6, watched.clock.now.wall, detail="RuntimeError: other").to_line())
    watched.look()
    assert watched.text(names.ANOMALY) == "run_failed\n"


def test_without_halt_findings_are_reported_and_nothing_is_stopped(tmp_path):
    watched = Watched(tmp_path, halts=False)
    watched.go_on(5)
    watched.look()
    watched.look(200.0)
    assert watched.text(names.ANOMALY) == "heartbeat_stall\n"
    assert not (tmp_path / names.HALT).exists()


def test_an_age_known_from_time_stamps_alone_is_reported_and_not_acted_on_until_observed(watched):
    """The clock may have been set by hours just before the watchdog came."""
    watched.go_on(5)
    watched.clock.jump(3600.0)
    watched.dog = watched.new_dog()
    assert any("CRITICAL heartbeat_stall" in line for line in watched.look())
    assert not (watched.path / names.HALT).exists()
    assert watched.look(170.0) == []
    assert not (watched.path / names.HALT).exists()
    watched.look(20.0)
    assert (watched.path / names.HALT).exists()


def test_an_earlier_halt_is_reported_and_neither_obeyed_nor_overwritten(watched):
    halt_file.request(watched.path, "manual stop", "somebody")
    (watched.path / names.ANOMALY).write_text("loss_nonfinite\n")
    os.utime(watched.path / names.HALT, (1, 1))
    watched.dog.begin()
    assert any(line.startswith(".HALT") and "manual stop" in line and "by somebody" in line for line in watched.said)
    assert any(line.startswith(".anomaly_type") and "loss_nonfinite" in line for line in watched.said)
    watched.go_on(5)
    watched.look()
    messages = watched.look(200.0)
    assert ".anomaly_type changed from loss_nonfinite to heartbeat_stall" in messages
    assert not any(".HALT written" in line for line in messages)
    assert watched.text(names.HALT).startswith("halt: manual stop\n")


def test_collapsing_gates_leave_their_details(watched):
    layers = ((0.3, 0.3, 0.4), (0.01, 0.01, 0.98))
    watched.go_on(10)
    watched.go_on(3, gate_entropy_mean=0.25, gate_shares_by_layer=layers)
    watched.look()
    details = json.loads(watched.text(names.GATE_COLLAPSE))
    assert details["findings"][0]["condition"] == "gate_entropy_low"
    assert not (watched.path / names.HALT).exists()
    watched.go_on(3, gate_entropy_mean=0.1, gate_collapse_frac=0.5, gate_shares_by_layer=layers)
    watched.look()
    details = json.loads(watched.text(names.GATE_COLLAPSE))
    assert [finding["condition"] for finding in details["findings"]] == [
        "gate_entropy_critical",
        "gate_collapse_critical",
    ]
    assert [layer["layer"] for layer in details["layers"]] == [1, 0]
    assert (details["step"], details["recent"][-1]["gate_entropy_mean"]) == (16, 0.1)
    assert details["limits"]["entropy_critical"] == 0.2
    assert watched.text(names.ANOMALY) == "gate_entropy_critical\n"
    assert (watched.path / names.HALT).exists()


@pytest.mark.parametrize("name", [name for name, condition in CONDITIONS.items() if condition.process_ended])
def test_a_run_that_ended_by_itself_is_not_halted(tmp_path, name):
    """A launcher may be starting it again, and would find the halt."""
    watched, recording = Watched(tmp_path), UNWELL[name][0]()
    watched.dog.check()
    for beat in recording.beats[0]:
        watched.lines.append(beat.to_line())
    watched.clock.go(recording.end - BEGAN)
    if name == "process_gone":
        host = {"host": "another", "world_size": 1}
        (tmp_path / names.ENV).write_text(json.dumps(host))
    messages = watched.look(400.0)
    assert any(f"CRITICAL {name}" in line for line in messages)
    assert watched.text(names.ANOMALY) == f"{name}\n"
    assert not (tmp_path / names.HALT).exists()


def test_a_folder_that_cannot_be_written_is_reported_and_still_watched(watched):
    for name in (names.HEALTH_LOG, f"{names.ANOMALY}.new"):
        (watched.path / name).mkdir()  # a full disk refuses as well, but for some other reason
    watched.dog.begin()
    watched.go_on(5)
    watched.look()
    messages = watched.look(200.0)
    assert any("cannot write" in line and names.ANOMALY in line for line in messages)
    assert any("CRITICAL heartbeat_stall" in line for line in messages)
    assert (watched.path / names.HALT).exists()


def test_a_folder_that_cannot_be_read_for_a_while_is_reported_and_still_watched(watched):
    (watched.path / names.EVENTS).mkdir()
    watched.go_on(3)

    def pause(seconds: float) -> None:
        (watched.path / names.EVENTS).rmdir()
        watched.lines.append(a_beat(names.DONE, 3, watched.clock.now.wall).to_line())

    assert watched.dog.run(interval_s=1.0, pause=pause) == RunPhase.FINISHED
    assert any("could not be read (events.jsonl 1)" in line for line in watched.said)
    assert any("readable again" in line for line in watched.said)


def test_a_failing_check_is_reported_and_watching_continues(watched, monkeypatch):
    """A file server that is away for a moment."""
    watched.go_on(3)
    looks = iter([OSError(errno.ESTALE, "Stale file handle"), None])
    update = watched.dog._reader.update

    def once(*_):
        if problem := next(looks):
            raise problem
        return update()

    def pause(seconds: float) -> None:
        watched.lines.append(a_beat(names.DONE, 3, watched.clock.now.wall).to_line())

    monkeypatch.setattr(watched.dog._reader, "update", once)
    assert watched.dog.run(interval_s=1.0, pause=pause) == RunPhase.FINISHED
    assert any("Stale file handle" in line for line in watched.said)


def test_many_ranks_are_one_line(tmp_path):
    watched = Watched(tmp_path)
    for rank in range(1, 12):
        lines = JsonLines(tmp_path / names.heartbeat(rank))
        for beat in a_run(5, rank=rank, began=BEGAN - 30):
            lines.append(beat.to_line())
    watched.go_on(5)
    watched.look()
    (line,) = (line for line in watched.look(200.0) if "CRITICAL" in line)
    assert "(ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more, step" in line
    events = [event for event in read_events(tmp_path) if event.kind == EventKind.STALL]
    assert [event.details["ranks"] for event in events] == [list(range(12))]


@pytest.mark.parametrize(("word", "ended"), [(names.DONE, RunPhase.FINISHED), (names.HALTED, RunPhase.HALTED)])
def test_it_watches_until_the_run_is_finished_or_halted(watched, word, ended):
    watched.go_on(3)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        watched.clock.go(seconds)
        if len(pauses) == 3:
            watched.lines.append(a_beat(word, 3, watched.clock.now.wall).to_line())

    assert watched.dog.run(interval_s=7.0, pause=pause) == ended
    assert pauses == [7.0] * 3


def test_a_signal_goes_only_to_a_process_that_writes_the_runs_files(tmp_path):
    watched = Watched(tmp_path)
    watched.lines.append(a_beat(names.ALIVE, 1, BEGAN, pid=os.getpid()).to_line())
    watched.lines.close()
    (tmp_path / names.stackdump(0, os.getpid())).touch()
    watched.dog.check()
    (line,) = diagnose_hang(tmp_path, list(watched.dog._reader.history.ranks.values()))  # USR1 would end this process
    assert line.startswith(f"rank 0: process {os.getpid()} is not running")


def test_the_rank_that_did_not_come_to_a_collective_is_named():
    def status(first: int, second: int) -> dict:
        return {
            "gloo": {"pg_status": {str(i): {"last_enqueued_collective": str(n)} for i, n in enumerate((first, second))}}
        }

    assert list(_ranks_behind({0: status(4, 7), 1: status(4, 7)})) == []
    assert list(_ranks_behind({0: status(4, 7), 1: status(4, 6), 2: status(4, 7)})) == [
        "gloo group 1: ranks [0, 2] are at collective 7, ranks [1] have not reached it"
    ]
    assert list(_ranks_behind({})) == []


def test_a_halt_is_requested_once_and_moved_aside_with_a_note(tmp_path):
    assert halt_file.request(tmp_path, "one", "me")
    assert not halt_file.request(tmp_path, "two", "you")
    asked = halt_file.read(tmp_path)
    assert asked is not None
    assert (asked.reason, asked.by) == ("one", "me")
    assert asked.describe(asked.since + 7300) == "one; written 2 h 01 m ago by me"
    aside = halt_file.clear(tmp_path, now=0.0, step=3)
    assert aside is not None
    assert aside.name == ".HALT.cleared-19700101T000000Z"
    assert halt_file.read(tmp_path) is None
    assert halt_file.clear(tmp_path, now=1.0, step=3) is None
    (event,) = read_events(tmp_path)
    assert (event.kind, event.details["reason"]) == (EventKind.HALT_CLEARED, "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == [aside.name, names.EVENTS]
