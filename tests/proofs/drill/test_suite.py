"""The drill itself: every kind of failure must end in a result that does not hold."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.config.env import without_settings
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.heartbeat_record import HeartbeatRecord
from proofs.drill import artifacts, suite
from proofs.drill.__main__ import app
from proofs.drill.data_server import DataServer
from proofs.drill.harness import PROGRESS_TIMEOUT_S, DrillHarness, DrillProcess, NotObserved
from proofs.drill.inject import FaultKind, PlantedFault
from proofs.drill.result import DrillResult, measure_interruption
from proofs.drill.suite import DrillScenario, DrillSuite, choose


def good(harness, result):
    result.detected("a test", 1.0, within_s=2.0)


def too_late(harness, result):
    result.detected("a test", 3.0, within_s=2.0)


def unmet(harness, result):
    result.require_equal("exit code", 1, 22)


def never(harness, result):
    harness.wait_for("the end of the world", lambda: False, harness.start("nsa_train.cli", "--version"))


def vanished(harness, result):
    raise ProcessLookupError("no such process")


@pytest.fixture
def scenarios(monkeypatch):
    known = {run.__name__: DrillScenario(run.__name__, run) for run in (good, too_late, unmet, never, vanished)}
    monkeypatch.setattr(suite, "SCENARIOS", known)


def test_every_kind_of_failure_is_a_row_that_does_not_hold(scenarios, tmp_path):
    with DrillSuite(tmp_path, jobs=2) as drill:
        rows = dict(drill.run(choose([])))
    assert {name for name, row in rows.items() if row.holds} == {"good"}
    assert rows["too_late"].unmet == ["found after 3.0 s, not within 2.0 s"]
    assert rows["unmet"].unmet == ["exit code is 1, not 22"]
    assert rows["never"].unmet[0].startswith("0---version exited with 0 before the end of the world: nsa ")


@pytest.mark.parametrize(("only", "code"), [("good", 0), ("unmet", 1)])
def test_the_exit_code_and_what_is_kept(scenarios, monkeypatch, tmp_path, only, code):
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path / "made") + prefix)
    result = CliRunner().invoke(app, ["--only", only])
    assert result.exit_code == code, result.output
    assert ("exit code is 1, not 22" in result.output) == bool(code)
    assert [path.name for path in tmp_path.iterdir()] == (["madensa-drill-"] if code else [])


def test_an_unknown_scenario_is_refused():
    with pytest.raises(ConfigError, match="--only earthquake"):
        choose(["sigterm", "earthquake"])


def test_scenarios_keep_the_order_of_the_suite():
    assert choose(["sigterm", "nan_gradient"]) == ["nan_gradient", "sigterm"]


def test_leaving_the_harness_ends_its_processes(tmp_path):
    with DrillHarness(tmp_path, threading.Event()) as harness:
        process = harness.start("http.server", "--bind", "127.0.0.1", "0")
        assert process.running
    assert not process.running


def test_a_stop_event_ends_every_wait(tmp_path):
    stop_event = threading.Event()
    threading.Timer(0.2, stop_event.set).start()
    process = DrillProcess(["http.server", "--bind", "127.0.0.1", "0"], tmp_path / "log", stop_event)
    began = time.monotonic()
    with pytest.raises(NotObserved):
        process.wait()
    assert time.monotonic() - began < PROGRESS_TIMEOUT_S / 2
    process.kill()


def test_a_term_ends_the_drill_and_its_runs(tmp_path):
    keep = tmp_path / "kept"
    command = [sys.executable, "-m", "proofs.drill", "--only", "sigterm", "--keep", str(keep)]
    drill = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(lambda: list(keep.glob("sigterm/0-train.log")), "no run was started")
    drill.send_signal(signal.SIGTERM)
    drill.communicate(timeout=120)
    assert drill.returncode not in (0, 1)
    assert not processes_with(str(keep))


def processes_with(text: str) -> list[bytes]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(path.read_bytes())
    return [command for command in commands if text.encode() in command]


def wait_until(holds, what: str, timeout_s: float = 240) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def test_killing_the_drill_ends_its_runs(tmp_path):
    keep = tmp_path / "kept"
    command = [sys.executable, "-m", "proofs.drill", "--only", "killed_rank", "--keep", str(keep)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    drill = subprocess.Popen(command, cwd=Path(__file__).parents[3], **quiet)
    try:
        wait_until(lambda: list(keep.glob("killed_rank/run/logs/*/rank1.log")), "no rank was started")
    finally:
        drill.kill()
        drill.wait()
    wait_until(lambda: not processes_with(str(keep)), f"still there: {processes_with(str(keep))}")


def test_leaving_the_harness_ends_what_a_killed_process_has_started(tmp_path):
    child = f"import subprocess, sys; subprocess.Popen(['sleep', '600.{os.getpid()}'])"
    with DrillHarness(tmp_path, threading.Event()) as harness:
        process = harness.start("timeit", "-n1", "-s", child, "import time; time.sleep(600)")
        wait_until(lambda: processes_with(f"sleep\x00600.{os.getpid()}"), "no child")
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not processes_with(f"sleep\x00600.{os.getpid()}"), "the child lives on")


def test_a_watchdog_watches_before_anything_is_broken(tmp_path):
    with DrillHarness(tmp_path, threading.Event()) as harness:
        harness.watch()
        assert "watching" in (harness.run_folder / names.HEALTH_LOG).read_text()


def test_a_run_that_makes_progress_is_waited_for(monkeypatch, tmp_path):
    """A slow machine is no fault: what is waited for is over when nothing has moved for a while."""
    monkeypatch.setattr("proofs.drill.harness.PROGRESS_TIMEOUT_S", 0.6)
    with DrillHarness(tmp_path, threading.Event()) as harness:
        harness.run_folder.mkdir()
        beats, looks = harness.run_folder / names.heartbeat(0), []

        def slow() -> bool:
            looks.append(1)
            time.sleep(0.2)
            with beats.open("a") as out:
                out.write("{}\n")
            return len(looks) > 8

        assert harness.wait_for("the ninth look", slow)
        with pytest.raises(NotObserved):
            harness.wait_for("anything", lambda: False)


def test_a_fault_survives_a_round_trip_through_json():
    fault = PlantedFault(kind=FaultKind.SLOW_RANK, marker="m", first_batch=3, also=(1,), rank=1, seconds=0.5)
    assert PlantedFault.from_json(fault.to_json()) == fault
    assert [fault.hits(batch) for batch in range(5)] == [False, True, False, True, True]


def test_a_child_gets_no_setting_from_the_environment(monkeypatch):
    for name in ("NSA_KERNEL", "CONFIG"):
        monkeypatch.setenv(name, "x")
    assert {"NSA_KERNEL", "CONFIG"}.isdisjoint(without_settings())
    assert "PATH" in without_settings()


def ended(folder: Path, weights: np.ndarray, loss: float) -> Path:
    folder.mkdir()
    save_file({"w": weights}, folder / names.MODEL_SAFETENSORS)
    beat = HeartbeatRecord.now(ts=0.0, rank=0, step=1, msg=names.PROGRESS, loss=loss, grad_norm=1.0)
    (folder / names.heartbeat(0)).write_text(beat.to_line() + "\n")
    return folder


def test_one_different_bit_of_a_weight_is_a_different_result(tmp_path):
    weights, flipped = np.ones(8, np.float32), np.ones(8, np.float32)
    flipped.view(np.int32)[3] ^= 1
    calm = ended(tmp_path / "calm", weights, 2.0)
    assert artifacts.same_end(ended(tmp_path / "same", weights, 2.0), calm)
    assert not artifacts.same_end(ended(tmp_path / "bit", flipped, 2.0), calm)
    assert not artifacts.same_end(ended(tmp_path / "loss", weights, 2.0000001), calm)
    assert not artifacts.same_end(ended(tmp_path / "shape", weights.reshape(2, 4), 2.0), calm)


def test_the_data_server_hangs_and_recovers(tmp_path):
    import urllib3

    server = DataServer(tmp_path)
    try:
        tail = urllib3.request("GET", server.url, headers={"Range": "bytes=-4"}, timeout=5)
        assert (tail.status, tail.data) == (206, b"PAR1")
        server.hang()
        with pytest.raises(urllib3.exceptions.MaxRetryError):
            urllib3.request("GET", server.url, timeout=0.3, retries=0)
        server.recover()
        assert urllib3.request("GET", server.url, headers={"Range": "bytes=0-3"}, timeout=5).data == b"PAR1"
    finally:
        server.close()


def test_a_row_holds_until_a_requirement_fails():
    row = DrillResult("x")
    row.require(True, "never recorded")
    assert row.holds
    row.require([], "nothing there")
    assert row.unmet == ["nothing there"]


@pytest.mark.parametrize("restarted", [True, False])
def test_the_time_to_recover_ends_with_the_first_step_after_the_restart(tmp_path, restarted):
    """A step that a dying process still records is none; without a restart the next step counts."""
    folder = tmp_path / "run"
    folder.mkdir()
    beats = [(1, 90.0), (2, 99.0), (3, 100.5), *([(2, 130.0), (3, 131.0)] if restarted else [])]
    lines = [HeartbeatRecord.now(ts=ts, rank=0, step=step, msg=names.PROGRESS).to_line() for step, ts in beats]
    (folder / names.heartbeat(0)).write_text("\n".join(lines) + "\n")
    add_event(folder, EventKind.START, ts=80.0, step=0)
    if restarted:
        add_event(folder, EventKind.RESTART, ts=120.0, step=1)
    result = DrillResult("x")
    with DrillHarness(tmp_path, threading.Event()) as harness:
        measure_interruption(harness, result, 100.0)
    assert (result.continued_s, result.repeated_steps) == ((30.0, 2) if restarted else (0.5, 0))


def test_a_run_without_a_step_after_the_fault_does_not_hold(tmp_path):
    result = DrillResult("x")
    with DrillHarness(tmp_path, threading.Event()) as harness:
        measure_interruption(harness, result, 100.0)
    assert not result.holds
