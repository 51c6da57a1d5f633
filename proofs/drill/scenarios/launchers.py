"""Drill scenarios: the launcher or its agent is killed, a rank runs out of memory, a failure repeats at every start."""

import os
import signal
import socket
import time
from pathlib import Path

from nsa.errors import DataError, ExitCode
from nsa_train.record.events import EventKind, LauncherAction, RunEvent
from nsa_train.record.failure_codes import FailureCode
from proofs.drill import artifacts
from proofs.drill.data_server import DataServer
from proofs.drill.harness import SAVE_EVERY, DrillHarness, DrillProcess, NotObserved
from proofs.drill.result import DrillResult, finish

_MIDDLE = SAVE_EVERY + 2
_LOADER_TIMEOUT_S = 5.0


def killed_agent(harness: DrillHarness, result: DrillResult) -> None:
    """The process between launcher and ranks is killed: its ranks die with it, and the launcher starts again."""
    launched = harness.launch(nproc=2)
    pids = [harness.wait_for_step(_MIDDLE, launched, rank) for rank in (0, 1)]
    agent = _child_with(launched.pid)  # a launcher has no other
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
        "the watchdog's finding", lambda: artifacts.findings_of(harness.run_folder, "process_gone"), watchdog
    )[0]
    result.detected("watchdog: process_gone", event.ts - at, within_s=3.0 + harness.slack_s)
    watchdog.kill()
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"verified checkpoint {step}, no process"
    again = harness.launch("--resume", nproc=2)
    finish(harness, result, again, ranks=2, same_as_undisturbed=True, fault_at=at)


def out_of_memory(harness: DrillHarness, result: DrillResult) -> None:
    """The kernel's out-of-memory killer ends the prefetching process, the largest of a host: SIGKILL, no message."""
    words = ["data.prefetch=true", "data.queue_depth=1"]
    launched = harness.launch(*words, nproc=1)
    pid = harness.wait_for_step(_MIDDLE, launched)
    at = time.time()
    os.kill(_child_with(pid, b"multiprocessing.spawn"), signal.SIGKILL)
    event = _verdict(harness, launched)
    errors = [e for e in artifacts.events(harness.run_folder, EventKind.ERROR) if "launcher" not in e.details]
    result.require_equal(
        "failure codes", [e.details.get("failure_code") for e in errors], [FailureCode.DATA_PROCESS_KILLED]
    )
    if errors:
        result.detected(f"run: {FailureCode.DATA_PROCESS_KILLED}", errors[0].ts - at, within_s=60)
    result.require_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    result.left_behind = f"verified checkpoint {artifacts.newest_good_step(harness.run_folder)}, event"
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
    """Another program has the port of the rendezvous and never answers: the launcher says so."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = "{}:{}".format(*taken.getsockname())
        at = time.time()
        launched = harness.start(
            "nsa_train.cli",
            "launch",
            "--nproc",
            "1",
            "--nnodes",
            "1:2",
            "--rdzv-endpoint",
            endpoint,
            *harness.arguments(()),
        )
        taken_by_another = f"what listens at {endpoint} did not answer"
        harness.wait_for("the launcher's message", lambda: taken_by_another in launched.output(), launched)
        result.detected("launcher: another program seems to have the port", time.time() - at, within_s=120)
        launched.send(signal.SIGTERM)
        result.require_equal("exit code", launched.wait(), ExitCode.PREEMPTED)
    result.require_equal("steps", artifacts.last_step(harness.run_folder), 0)
    result.left_behind = "nothing but logs"
    finish(harness, result, harness.train(), same_as_undisturbed=True)


def _verdict(harness: DrillHarness, launched: DrillProcess) -> RunEvent:
    folder = harness.run_folder
    return harness.wait_for("the launcher's record", lambda: artifacts.launcher_verdicts(folder), launched)[0]


def _child_with(parent: int, text: bytes = b"") -> int:
    """The first child process whose command line contains the text, by whichever thread it was started."""
    for thread in Path(f"/proc/{parent}/task").iterdir():
        for word in (thread / "children").read_text().split():
            if text in Path(f"/proc/{word}/cmdline").read_bytes():
                return int(word)
    raise NotObserved(f"process {parent} has no child with {text.decode()} in its command line")


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]
