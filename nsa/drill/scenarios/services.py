"""Drill scenarios: services that fail: data server, object store of checkpoints, metric trackers."""

import time
from functools import partial
from http.server import BaseHTTPRequestHandler

from nsa import names
from nsa.drill import artifacts
from nsa.drill.data_server import DataServer, ServerFault
from nsa.drill.harness import SAVE_EVERY, STEPS, DrillHarness, NotObserved
from nsa.drill.object_store import BUCKET, ObjectStore
from nsa.drill.result import DrillResult, finish

_FAULT_S = 2.0
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
    store = ObjectStore()
    harness.at_end(store.close)
    harness.environment |= {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "drill",
        "AWS_SECRET_ACCESS_KEY": "drill",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }
    process = harness.train(f"train.checkpoint_store=s3://{BUCKET}/run")
    harness.wait_for("the first copy", lambda: _copied(store), process)
    at, store.failing = time.time(), True
    harness.wait_for("a report of the failed copy", lambda: "was not copied" in process.output(), process)
    result.detected("run: copy not made, with the command to repeat it", time.time() - at, within_s=60)
    store.failing = False
    finish(harness, result, process, same_as_undisturbed=True)
    copied, reported = _copied(store), process.output().count("was not copied")
    result.require(STEPS in copied, f"the last checkpoint is not in the store, which has {copied}")
    result.require(reported, "no failed copy was reported")
    result.require("drill" not in process.output().replace(str(harness.folder), ""), "the secret is in the log")
    result.left_behind = f"{len(copied)} copies, {reported} reported as missing"
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


def _asked_after(server: CountingDataServer, asked: int) -> bool:
    return server.requests > asked


def _copied(store: ObjectStore) -> list[int]:
    """Steps of the complete copies."""
    folders = [key.split("/")[-2] for key in list(store.objects) if key.endswith(f"/{names.COMMIT}")]
    return sorted(step for step in map(names.step_of, folders) if step is not None)
