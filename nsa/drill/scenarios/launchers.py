"""Drill scenarios: the launcher or its agent is killed, a rank runs out of memory, a failure repeats at every start."""

import os
import resource
import signal
import socket
import time
from pathlib import Path

from nsa.drill import artifacts
from nsa.drill.data_server import DataServer
from nsa.drill.harness import SAVE_EVERY, DrillHarness, DrillProcess, NotObserved
from nsa.drill.result import DrillResult, finish
from nsa.errors import ConfigError, DataError, ExitCode
from nsa.observe.events import EventKind, LauncherAction, RunEvent
from nsa.observe.failure_codes import FailureCode

_MIDDLE = SAVE_EVERY + 2
_LOADER_TIMEOUT_S = 5.0


def killed_agent(harness: DrillHarness, result: DrillResult) -> None:
    """The process between launcher and ranks is killed: its ranks die with it, and the launcher starts again."""
    launched = harness.launch(nproc=2)
    pids = [harness.wait_for_step(_MIDDLE, launched, rank) for rank in (0, 1)]
    agent = _agent(launched.pid)
    at = time.time()
    os.kill(agent, signal.SIGKILL)
    event = _verdict(harness, launched)
    result.detected(f"launcher: {event.details.get('why')}", event.ts - at, within_s=30)
    result.require_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    result.require_equal("ranks of the killed agent that still run", _alive(pids), [])
    result.left_behind = f"verified checkpoint {artifacts.newest_good_step(harness.run_folder)}, event, logs"
    finish(harness, result, launched, ranks=2, same_as_undisturbed=True, fault_at=at)
    result.resumed = f"by the launcher: {result.resumed}"


def killed_launcher(harness: DrillHarness, result: DrillResult) -> None:
    """The launcher itself is killed: no process of it lives on, and the folder can be used again at once."""
    watchdog = harness.watch(gone_s=3.0)
    launched = harness.launch(nproc=2)
    pids = [harness.wait_for_step(_MIDDLE, launched, rank) for rank in (0, 1)]
    at = time.time()
    launched.send(signal.SIGKILL)
    launched.wait()
    harness.wait_for("the end of both ranks", lambda: not _alive(pids))
    event = harness.wait_for(
        "the watchdog's finding", lambda: artifacts.found(harness.run_folder, "process_gone"), watchdog
    )[0]
    result.detected("watchdog: process_gone", event.ts - at, within_s=3.0 + harness.slack_s)
    watchdog.kill()
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"verified checkpoint {step}, no process"
    again = harness.launch("--resume", nproc=2)
    finish(harness, result, again, ranks=2, same_as_undisturbed=True, fault_at=at)


def out_of_memory(harness: DrillHarness, result: DrillResult) -> None:
    """A rank may have no more memory from one step to the next (RLIMIT_AS): the launcher starts it again."""
    launched = harness.launch(nproc=1)
    pid = harness.wait_for_step(_MIDDLE, launched)
    at = time.time()
    resource.prlimit(pid, resource.RLIMIT_AS, (_address_space(pid), resource.RLIM_INFINITY))
    event = _verdict(harness, launched)
    errors = [e for e in artifacts.events(harness.run_folder, EventKind.ERROR) if "launcher" not in e.details]
    codes = {str(e.details.get("failure_code")) for e in errors}
    result.detected(f"launcher: {event.details.get('why')}", event.ts - at, within_s=60)
    result.require_equal("failure codes of the run", codes, {FailureCode.OUT_OF_MEMORY})
    result.require_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    result.left_behind = f"verified checkpoint {artifacts.newest_good_step(harness.run_folder)}, event {codes}"
    finish(harness, result, launched, same_as_undisturbed=True, fault_at=at)
    result.resumed = f"by the launcher: {result.resumed}"


def crash_loop(harness: DrillHarness, result: DrillResult) -> None:
    """The data server is gone for good: three starts without progress, then the launcher gives up."""
    server = DataServer(harness.folder)
    words = ["data.dataset=local", f"data.path={server.url}", f"data.loader_timeout_s={_LOADER_TIMEOUT_S:g}"]
    launched = harness.launch(*words, nproc=1)
    harness.wait_for_step(_MIDDLE, launched)
    at = time.time()
    server.close()
    result.require_equal("exit code of the launcher", launched.wait(), DataError.exit_code)
    verdicts = artifacts.launcher_verdicts(harness.run_folder)
    actions = [event.details.get("launcher") for event in verdicts]
    result.require_equal("last verdict", actions[-1:], [LauncherAction.GAVE_UP])
    result.require(3 <= len(actions) <= 4, f"the launcher started the run {len(actions)} times")
    result.detected(f"launcher: {verdicts[0].details.get('why')}", verdicts[0].ts - at, within_s=60)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"exit {DataError.exit_code} after {len(actions)} starts, verified checkpoint {step}"
    result.resumed = "no: gave up, as it must"


def busy_port(harness: DrillHarness, result: DrillResult) -> None:
    """Another program has the port of the rendezvous: the launcher says so and does not wait for other nodes."""
    with socket.create_server((_own_address(), 0)) as taken:
        endpoint = "{}:{}".format(*taken.getsockname())
        at = time.time()
        launched = harness.start(
            "nsa.cli", "launch", "--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", endpoint, *harness.arguments(())
        )
        output = harness.wait_for("the launcher's message", lambda: _line_with(launched, endpoint), launched)
        result.detected(f"launcher: {output[:60]}", time.time() - at, within_s=120)
        launched.send(signal.SIGTERM)
        result.require_equal("exit code", launched.wait(), ExitCode.PREEMPTED)
    result.left_behind = "nothing but logs"
    finish(harness, result, harness.train(), same_as_undisturbed=True)
    result.resumed = f"without the port: {result.resumed}"


def _line_with(process: DrillProcess, text: str) -> str:
    return next((line for line in process.output().splitlines() if text in line and "restarting" in line), "")


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: the route decides the address
        except OSError as error:
            raise ConfigError("this machine has no address but loopback") from error
        return str(probe.getsockname()[0])


def _verdict(harness: DrillHarness, launched: DrillProcess) -> RunEvent:
    folder = harness.run_folder
    return harness.wait_for("the launcher's record", lambda: artifacts.launcher_verdicts(folder), launched)[0]


def _agent(launcher: int) -> int:
    for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"nsa.train.launch.agent" in Path(f"/proc/{word}/cmdline").read_bytes():
            return int(word)
    raise NotObserved("the launcher has no agent")


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def _address_space(pid: int) -> int:
    """Bytes that the process has mapped now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
