"""Drill scenarios: services that fail: data server, object store of checkpoints, metric trackers."""

import time
from functools import partial
from http.server import BaseHTTPRequestHandler

from nsa.errors import PreflightError
from nsa_train import names
from nsa_train.record.events import EventKind
from proofs.drill import artifacts
from proofs.drill.data_server import DataServer, ServerFault
from proofs.drill.harness import SAVE_EVERY, STEPS, DrillHarness, NotObserved
from proofs.drill.object_store import BUCKET, ObjectStore, store_environment
from proofs.drill.result import DrillResult, finish

_FAULT_S = 2.0
_STORE = f"s3://{BUCKET}/run"
_SECRET, _OTHER_SECRET = "drill-secret-7f3a", "drill-secret-91c2"
_DEAD_END = "http://127.0.0.1:9"
"""The discard port, at which nothing listens."""


class CountingDataServer(DataServer):
    """Counts what it was asked, so that a fault that nobody met does not pass."""

    requests = 0

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        super()._answer(request)


def data_server_errors(harness: DrillHarness, result: DrillResult) -> None:
    """The data server answers 500, 429, resets connections and breaks off bodies: reads are repeated."""
    server = CountingDataServer(harness.folder)
    harness.at_end(server.close)
    words = ["data.dataset=local", f"data.path={server.url}", "data.prefetch=true", "data.queue_depth=1"]
    calm = harness.undisturbed(1, *words)
    process = harness.train(*words)
    for number, fault in enumerate(ServerFault):
        harness.wait_for_step(SAVE_EVERY + 6 * number, process)
        asked, server.fault = server.requests, fault
        harness.wait_for(f"a request while it fails ({fault})", partial(_asked_after, server, asked), process)
        harness.pause(_FAULT_S)
        server.fault = None
    finish(harness, result, process)
    same = artifacts.same_end(harness.run_folder, calm)
    result.require(same, "the weights or losses differ from those of an undisturbed run")
    result.detected_by = f"reader: retries ({', '.join(ServerFault)})"
    result.left_behind = "nothing"
    result.resumed = "never stopped, bitwise equal to an undisturbed run" if same else "never stopped"


def object_store_errors(harness: DrillHarness, result: DrillResult) -> None:
    """The object store answers 503 for a while: checkpoints of that time are not copied, those before and after are."""
    store = _object_store(harness)
    process = harness.train(f"train.checkpoint_store={_STORE}")
    harness.wait_for("the first copy", lambda: _copied(store), process)
    at, store.failing = time.time(), True
    harness.wait_for("a report of the failed copy", lambda: "was not copied" in process.output(), process)
    result.detected("run: copy not made, with the command to repeat it", time.time() - at, within_s=60)
    store.failing = False
    finish(harness, result, process, same_as_undisturbed=True)
    copied, reported = _copied(store), process.output().count("was not copied")
    result.require(STEPS in copied, f"the last checkpoint is not in the store, which has {copied}")
    result.require(reported, "no failed copy was reported")
    _require_events(harness, result, copied)
    _require_no_secret(harness, result)
    result.left_behind = f"copies of {len(copied)} checkpoints, {reported} reported as missing"
    result.resumed = result.resumed.replace("yes, from the beginning", "never stopped")


def wrong_store_secret(harness: DrillHarness, result: DrillResult) -> None:
    """A wrong secret of the object store refuses a new run. A secret that is revoked later stops nothing: the watchdog
    reports the copies that fail."""
    store = _object_store(harness)
    harness.environment["AWS_SECRET_ACCESS_KEY"] = _OTHER_SECRET
    refused = harness.train(f"train.checkpoint_store={_STORE}")
    result.require_equal("exit code with a wrong secret", refused.wait(), PreflightError.exit_code)
    for word in ("checkpoint_store", "SignatureDoesNotMatch", "--allow"):
        result.require(word in refused.output(), f"the refusal does not contain {word!r}")
    result.require_equal("steps of the refused run", artifacts.last_step(harness.run_folder), 0)
    harness.environment["AWS_SECRET_ACCESS_KEY"] = _SECRET
    watchdog = harness.watch()
    process = harness.train(f"train.checkpoint_store={_STORE}")
    harness.wait_for("the first copy", lambda: _copied(store), process)
    at, store.secret = time.time(), _OTHER_SECRET
    findings = harness.wait_for("a finding", lambda: artifacts.findings_of(harness.run_folder, "copy_failed"), watchdog)
    result.detected("preflight; if revoked later, watchdog: copy_failed", findings[0].ts - at, within_s=60)
    finish(harness, result, process, same_as_undisturbed=True)
    copied, reported = _copied(store), process.output().count("was not copied")
    result.require(not (harness.run_folder / names.HALT).exists(), "a warning must not halt")
    result.require(STEPS not in copied, "the last checkpoint was copied with a revoked secret")
    _require_events(harness, result, copied)
    _require_no_secret(harness, result)
    result.left_behind = f"copies of {len(copied)} checkpoints, {reported} reported as missing"
    result.resumed = result.resumed.replace("yes, from the beginning", "never stopped")


def metric_sink_down(harness: DrillHarness, result: DrillResult) -> None:
    """Nothing listens at the address of the MLflow server: the run trains on and its own records are complete."""
    process = harness.train(f"track.mlflow_uri={_DEAD_END}")
    finish(harness, result, process, same_as_undisturbed=True)
    if "mlflow" not in process.output().lower():
        raise NotObserved("the log says nothing of MLflow: is the package installed?")
    result.require_equal("progress records", len(artifacts.beats(harness.run_folder)), STEPS)
    result.detected_by = "run: a warning of the tracker's thread"
    result.left_behind = "all records of its own"
    result.resumed = result.resumed.replace("yes, from the beginning", "never stopped")


def _object_store(harness: DrillHarness) -> ObjectStore:
    """A store that knows one secret; the processes of the scenario get it."""
    store = ObjectStore(secret=_SECRET)
    harness.at_end(store.close)
    harness.environment |= store_environment(store.url, _SECRET)
    return store


def _require_events(harness: DrillHarness, result: DrillResult, copied: list[int]) -> None:
    """Every checkpoint has an event that says whether the store has it."""
    steps = {kind: [event.step for event in artifacts.events(harness.run_folder, kind)] for kind in EventKind}
    result.require_equal("steps of the events `copied`", steps[EventKind.COPIED], copied)
    missing = sorted(set(steps[EventKind.SAVE]) - set(copied))
    result.require(missing, "no copy failed")
    result.require_equal("steps of the events `copy_failed`", steps[EventKind.COPY_FAILED], missing)


def _require_no_secret(harness: DrillHarness, result: DrillResult) -> None:
    for path in sorted(harness.folder.rglob("*")):
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in (_SECRET, _OTHER_SECRET)):
            result.unmet.append(f"{path.relative_to(harness.folder)} contains the secret")


def _asked_after(server: CountingDataServer, asked: int) -> bool:
    return server.requests > asked


def _copied(store: ObjectStore) -> list[int]:
    """Steps of the complete copies."""
    folders = [key.split("/")[-2] for key in list(store.objects) if key.endswith(f"/{names.COMMIT}")]
    return sorted(step for step in map(names.step_of, folders) if step is not None)
