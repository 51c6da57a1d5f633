"""A run goes on after what can get better, stops at what cannot, and leaves no rank behind: real processes, real kills.

For every change a launcher forks its agents; every night they are new interpreters, as those of users are.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from nsa.errors import ConfigError, ExitCode
from nsa_train.record import halt_file
from nsa_train.record.events import EventKind, LauncherAction, read_events
from nsa_train.record.failure_codes import code_of_exit_status
from nsa_train.train.launch import launcher as launching
from nsa_train.train.launch.agent import NO_RENDEZVOUS
from nsa_train.train.launch.launcher import LaunchSettings, _classify_exit, _RankOutcome, launch
from tests import fork_server
from tests.nsa_train.train.launch import stand_in
from tests.nsa_train.train.launch.stand_in import STEPS, WAIT_S, commit, newest, wait_for
from tests.nsa_train.train.runs import ROOT, environment


@pytest.mark.parametrize(
    ("codes", "agent", "code", "again"),
    [
        ({}, 0, 0, False),
        ({0: 20, 1: 1}, 1, 20, False),
        ({1: 1, 0: 20}, 1, 20, False),
        ({0: 11, 1: 11}, 1, 11, False),
        ({0: 10, 1: -15}, 1, 10, False),
        ({0: 23, 1: 1}, 1, 23, False),
        ({3: 16, 0: 1}, 1, 16, False),
        ({0: 2}, 1, 2, False),
        ({0: 21, 1: 1}, 1, 21, True),
        ({0: 22}, 1, 22, True),
        ({0: 24, 1: -9}, 1, 24, True),
        ({0: 1, 1: -9}, 1, -9, True),
        ({0: -15, 1: -9}, 1, -9, True),
        ({0: -15, 1: 7}, 1, 7, True),
        ({0: 1}, 1, 1, True),
        ({0: -11}, 1, -11, True),
        ({}, -9, -9, True),
        ({}, 1, 1, True),
        ({}, NO_RENDEZVOUS, NO_RENDEZVOUS, True),
        ({0: 12, 1: 12}, 1, 12, True),
        ({0: 12, 1: 10}, 1, 10, False),
    ],
)
def test_only_transient_failures_are_restarted(codes, agent, code, again):
    outcome = _classify_exit(codes, agent)
    assert (outcome.code, outcome.restartable) == (code, again)


def test_a_reason_names_the_rank_and_the_signal():
    assert _classify_exit({0: 1, 1: -9}, 1).why == "rank 1 was killed by SIGKILL"
    assert _classify_exit({}, -9).why == "the agent was killed by SIGKILL"
    assert _RankOutcome(-9, "").exit_code == 137
    assert _classify_exit({0: 20}, 1).why.startswith("rank 0 exited with 20: ")


class Lives:
    """Replaces real cycles: each ends as specified, after saving the specified step, if any."""

    def __init__(self, monkeypatch, run: Path, *told: tuple[int, int | None]) -> None:
        self.resumed: list[bool] = []
        self.pauses: list[float] = []
        left = list(told)

        class Cycle:
            def __init__(cycle, settings, logs, options, requests, log, show) -> None:
                self.resumed.append(options.resume)

            def run(cycle) -> _RankOutcome:
                code, step = left.pop(0)
                if step is not None:
                    commit(run, step)
                return _RankOutcome(code, "told so")

        monkeypatch.setattr(launching, "_RankCycle", Cycle)
        monkeypatch.setattr(launching._StopRequests, "pause", lambda requests, seconds: self.pauses.append(seconds))


def plan(run: Path, **settings) -> LaunchSettings:
    return LaunchSettings(command=["true"], run_folder=run, nproc=1, **settings)


def test_three_restarts_without_a_checkpoint_end_the_run(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, *[(1, None)] * 9)
    said = []
    assert launch(plan(tmp_path), said.append) == 1
    assert lives.resumed == [False] * 3
    assert lives.pauses == [2.0, 4.0]
    assert read_events(tmp_path)[-1].details["launcher"] == LauncherAction.GAVE_UP


def test_a_new_checkpoint_starts_the_count_and_the_waiting_again(monkeypatch, tmp_path):
    told = [(1, None), (1, None), (-9, 5), (1, None), (1, None), (1, None)]
    lives = Lives(monkeypatch, tmp_path, *told)
    assert launch(plan(tmp_path), lambda text: None) == 1
    assert lives.resumed == [False, False, False, True, True, True]
    assert lives.pauses == [2.0, 4.0, 2.0, 2.0, 4.0]


def test_a_checkpoint_saved_again_is_no_progress(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, (1, 5), (1, 5), (1, 4), (1, 5))
    assert launch(plan(tmp_path), lambda text: None) == 1
    assert len(lives.resumed) == 4


def test_a_node_without_other_nodes_waits_longer_than_three_restarts(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, *[(NO_RENDEZVOUS, None)] * 9, (0, 5))
    assert launch(plan(tmp_path), lambda text: None) == 0
    assert lives.pauses == [2.0] * 9


def test_a_node_without_other_nodes_gives_up_in_the_end(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, (1, 5), *[(NO_RENDEZVOUS, None)] * 9)
    ticks = iter(range(0, 10000, 500))
    monkeypatch.setattr(launching.time, "monotonic", lambda: next(ticks))
    assert launch(plan(tmp_path, meet_s=1800.0), lambda text: None) == 1
    assert 2 <= len(lives.resumed) <= 4
    assert read_events(tmp_path)[-1].details["launcher"] == LauncherAction.GAVE_UP


def test_ranks_that_saved_for_another_node_are_resumed(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, (12, 5), (0, 9))
    assert launch(plan(tmp_path), lambda text: None) == 0
    assert lives.resumed == [False, True]
    details = read_events(tmp_path)[-1].details
    assert (details["launcher"], details.get("failure_code")) == (LauncherAction.RESTARTED, None)


def test_a_halt_file_that_came_meanwhile_stops_the_run_before_the_ranks_start_again(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, (-9, 5), (0, 9))
    halt_file.request(tmp_path, "heartbeat_stall", "a test")
    said = []
    assert launch(plan(tmp_path), said.append) == ExitCode.HALTED
    assert len(lives.resumed) == 1
    restarted, stopped = (event.details for event in read_events(tmp_path))
    assert restarted["launcher"] == LauncherAction.RESTARTED
    assert (stopped["launcher"], stopped["code"]) == (LauncherAction.NOT_RESTARTED, ExitCode.HALTED)
    assert "heartbeat_stall" in said[-1]


def test_waiting_has_a_limit(monkeypatch, tmp_path):
    lives = Lives(monkeypatch, tmp_path, *[(1, None)] * 20)
    launch(plan(tmp_path, max_fruitless_cycles=20, backoff_max_s=10.0), lambda text: None)
    assert max(lives.pauses) == 10.0


@pytest.mark.parametrize("code", [2, 10, 11, 16, 20, 23])
def test_a_permanent_failure_is_not_restarted(monkeypatch, tmp_path, code):
    lives = Lives(monkeypatch, tmp_path, (code, 3))
    assert launch(plan(tmp_path), lambda text: None) == code
    assert len(lives.resumed) == 1
    details = read_events(tmp_path)[-1].details
    assert details["code"] == code
    assert details.get("failure_code") == (None if code in (10, 11) else code_of_exit_status(code))


def test_numbers_that_cannot_be_launched_are_refused(tmp_path):
    for settings, option in (({"nnodes": "x"}, "--nproc 1"), ({"nnodes": "2"}, "--rdzv-endpoint")):
        with pytest.raises(ConfigError, match=option):
            launch(plan(tmp_path, **settings), print)
    assert plan(tmp_path, nnodes="2:4", rdzv_endpoint="a:1").nodes() == (2, 4)


class Running:
    """A launcher of its own process, with two ranks of the stand-in below."""

    def __init__(self, run: Path, mode: str, agents: str = "forked", **settings) -> None:
        self.run = run
        self.said = run / "said"
        words = [stand_in.__file__, agents, str(run), mode, json.dumps(settings)]
        with self.said.open("ab") as out:
            self.process = fork_server.start(words, cwd=ROOT, env=environment(), stdout=out, stderr=out)

    def pids(self, life: int) -> dict[int, int]:
        """Rank → pid of one life of the ranks, once both are up."""
        wait_for(lambda: len(list(self.run.glob(f"life{life}-rank*"))) == 2, f"life {life}", self.said)
        return {int(file.name[-1]): int(file.read_text()) for file in self.run.glob(f"life{life}-rank*")}

    def agent(self, life: int) -> int:
        return int(Path(f"/proc/{self.pids(life)[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])

    def end(self) -> int:
        return self.process.wait(WAIT_S)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(params=["forked", pytest.param("new", marks=pytest.mark.nightly)])
def start(request, tmp_path):
    running = []

    def begin(mode: str, **settings) -> Running:
        running.append(Running(tmp_path, mode, request.param, backoff_s=0.1, shutdown_s=2, **settings))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.wait()
    for pid in (int(file.read_text()) for file in tmp_path.glob("life*-rank*")):  # none, unless a test has failed
        if alive(pid) and str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)


def test_a_run_finishes_after_a_killed_rank_and_a_killed_agent(start, tmp_path):
    running = start("train")
    first = running.pids(0)
    wait_for(lambda: newest(tmp_path) >= 2, "a checkpoint", running.said)
    os.kill(first[1], signal.SIGKILL)

    second = running.pids(1)
    assert not any(alive(pid) for pid in first.values())
    agent, before = running.agent(1), newest(tmp_path)
    wait_for(lambda: newest(tmp_path) > before, "the next checkpoint", running.said)
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in second.values()), "the end of the orphans", running.said)
    assert not list(tmp_path.glob("life2-*")), "two lives at once"

    assert running.end() == 0, running.said.read_text()
    assert newest(tmp_path) == STEPS
    said = running.said.read_text()
    assert "rank 1 was killed by SIGKILL" in said
    assert "the agent was killed by SIGKILL" in said
    assert f"step {STEPS}" in said, "what rank 0 writes is shown"
    assert [event.details["why"] for event in read_events(tmp_path)] == [
        "rank 1 was killed by SIGKILL",
        "the agent was killed by SIGKILL",
    ]
    # Every life went on from a checkpoint of the one before it.
    starts = [int(line.split()[1]) for line in (tmp_path / "starts").read_text().splitlines()]
    assert starts[0] == 0
    assert 2 <= starts[1] < starts[2] < STEPS
    assert "step" in (tmp_path / "logs/cycle0/rank0.log").read_text()
    assert "rank 1" in (tmp_path / "logs/cycle2/rank1.log").read_text()
    assert (tmp_path / "store-variable").read_text() == "1"


def test_ranks_do_not_outlive_the_launcher(start, tmp_path):
    running = start("forever")
    pids, agent = running.pids(0), running.agent(0)
    running.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in (*pids.values(), agent)), "the end of the orphans")


def test_a_crash_loop_is_stopped(start, tmp_path):
    """Stopped after two: each starts an agent, which imports torch. That it is three, if not set, is tested above."""
    running = start("crash", max_fruitless_cycles=2)
    assert running.end() == 7, running.said.read_text()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["cycle0", "cycle1"]
    assert read_events(tmp_path)[-1].details["launcher"] == LauncherAction.GAVE_UP
    assert "rank 1 is up told to" in (tmp_path / "logs/cycle1/rank1.log").read_text()


@pytest.mark.nightly  # for every change without processes, test_a_permanent_failure_is_not_restarted
def test_a_config_error_is_not_restarted(start, tmp_path):
    running = start("config")
    assert running.end() == 20, running.said.read_text()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["cycle0"]


def test_ranks_save_before_they_stop_on_request(start, tmp_path):
    running = start("polite")
    running.pids(0)
    running.process.send_signal(signal.SIGUSR2)
    wait_for(lambda: (tmp_path / "usr2").exists(), "the forwarded signal", running.said)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 10, running.said.read_text()
    assert newest(tmp_path) == 99
    assert read_events(tmp_path)[-1].details["launcher"] == LauncherAction.STOPPED
    assert not (tmp_path / "logs/cycle1").exists()


def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(start, tmp_path):
    running = start("stubborn", grace_s=0.5)
    pids = running.pids(0)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 10, running.said.read_text()
    assert not any(alive(pid) for pid in pids.values())


def test_a_launcher_that_waits_for_other_nodes_records_it_and_stops_at_once_when_asked(tmp_path):
    """A program that is no rendezvous has the port and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = dict(command=[sys.executable, "-c", "pass"], nproc=1, nnodes="2", rdzv_endpoint=endpoint)
        program = (
            "import pathlib, sys; from nsa_train.train.launch import launcher; launcher._REMIND_S = 0.5; "
            "from nsa_train.train.launch.launcher import LaunchSettings, launch; "
            "from tests.nsa_train.train.launch.stand_in import fork_agents; fork_agents(); "
            f"sys.exit(launch(LaunchSettings(run_folder=pathlib.Path({str(tmp_path)!r}), **{settings!r}), print))"
        )
        process = fork_server.start(["-c", program], cwd=ROOT, env=environment())
        try:
            taken.settimeout(WAIT_S)
            agent, _ = taken.accept()
            wait_for(lambda: read_events(tmp_path), "the event")
            time.sleep(1.0)  # further reminders add no event
            (waiting,) = read_events(tmp_path)
            assert (waiting.kind, waiting.details["launcher"]) == (EventKind.WAITING, LauncherAction.WAITING)
            assert endpoint in waiting.details["why"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=50) == 10  # the agent gives up the connection after 75 s
            agent.close()
        finally:
            process.kill()


def test_two_nodes_start_one_run(tmp_path):
    """Two launchers on one machine stand for two nodes that share the run folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [Running(tmp_path, "meet", nnodes="2", rdzv_endpoint=endpoint) for _ in range(2)]
    try:
        assert [node.end() for node in nodes] == [0, 0], nodes[0].said.read_text()
    finally:
        for node in nodes:
            node.process.kill()
            node.process.wait()
    assert sorted(path.name for path in tmp_path.glob("met-*")) == [f"met-{rank}-of-4" for rank in range(4)]
    assert len(list((tmp_path / "logs").glob(f"cycle*-{socket.gethostname()}/rank*.log"))) == 4


def test_a_wrong_config_is_reported_before_any_rank_starts(tmp_path):
    (tmp_path / "run.yaml").write_text(f"train: {{stepz: 3, out_dir: {tmp_path}/run}}\n")
    command = ["-m", "nsa_train.cli", "launch", "--nproc", "2", str(tmp_path / "run.yaml")]
    result = fork_server.run(command, cwd=ROOT, env=os.environ, timeout=WAIT_S)
    assert result.returncode == 20
    assert "Did you mean train.steps?" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dataset", ["prepared", pytest.param("local", marks=pytest.mark.nightly)])  # the same rule
def test_a_data_folder_that_does_not_exist_ends_at_once(dataset, tmp_path):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    words = [f"data.dataset={dataset}", f"data.path={tmp_path}/nowhere", f"train.out_dir={tmp_path}/run"]
    command = ["-m", "nsa_train.cli", "launch", "--nproc", "2", "configs/cpu_quickstart.yaml", *words]
    result = fork_server.run(command, cwd=ROOT, env=os.environ, timeout=WAIT_S)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"{tmp_path}/nowhere" in result.stderr
    assert not (tmp_path / "run" / "logs").exists()
