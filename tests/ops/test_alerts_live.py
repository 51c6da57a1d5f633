"""Runs with faults, Debian's Prometheus and Alertmanager on loopback, the shipped rules and routes: who is notified.

Limits are a twentieth of those in production. All runs go at once, and are real.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from nsa_train.watch.conditions import HealthLimits
from tests.nsa_train.train.runs import ROOT, environment, free_port
from tests.ops.alert_drill_runs import RUNS
from tests.ops.needs import programs

pytestmark = pytest.mark.nightly  # daemons and real runs against the clock: DEADLINE_S of waiting
SPEED = 20
DEADLINE_S = 150

# By run: alert → receiver. Of a collapsed run the two warnings of the same signals are silenced.
EXPECTED = {
    "healthy": {},
    "nan": {
        "NSAStepsSkipped": "ticket", "NSALossNonfinite": "page", "NSAGradNonfinite": "page", "NSARunFailed": "page",
    },
    "stopped": {"NSAHeartbeatStall": "page"},
    "killed": {"NSAProcessGone": "page"},
    "collapsed": {"NSAGateEntropyCritical": "page", "NSAGateCollapseCritical": "page", "NSAGateMaxHigh": "ticket"},
}  # fmt: skip
assert EXPECTED.keys() == set(RUNS)


class Receiver:
    """Takes Alertmanager's webhooks; stores receivers and resolved alerts."""

    def __init__(self) -> None:
        self.told: dict[str, dict[str, str]] = defaultdict(dict)
        self.over: set[tuple[str, str]] = set()
        self.texts: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                receiver.take(self.path.strip("/"), text)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, who: str, text: str) -> None:
        self.texts.append(text)
        for alert in json.loads(text)["alerts"]:
            run, name = alert["labels"].get("run", "-"), alert["labels"]["alertname"]
            if alert["status"] == "firing":
                self.told[run][name] = who
            else:
                self.over.add((run, name))

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def running(*words: str, log: Path, **more):
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **more)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


def wait_for(holds, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def write_prometheus(folder: Path, alertmanager: int) -> Path:
    """The shipped file, with short intervals and other ports."""
    config = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    config["scrape_configs"][0]["file_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "nsa_train.cli", "alert-rules", "--speed", str(SPEED)]
    rules = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    (folder / "rules.yml").write_text(rules.stdout)
    return folder / "prometheus.yml"


def write_alertmanager(folder: Path, webhook: int) -> Path:
    config = yaml.safe_load((ROOT / "ops/alertmanager/alertmanager.yml").read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route |= {"group_wait": "2s", "group_interval": "2s"}
    for receiver in config["receivers"]:
        hook = receiver["webhook_configs"][0]
        hook["url"] = hook["url"].replace(":9095/", f":{webhook}/")
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    return folder / "alertmanager.yml"


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    """Everything started; yields the receiver of alerts, and the processes of the runs."""
    for package in ("prometheus_client", "olmo_core"):
        pytest.importorskip(package, reason="pip install -e packages/nsa-attention -e 'packages/nsa-train[train,ops]'")
    prometheus, alertmanager = programs("prometheus", "prometheus-alertmanager").values()
    folder = tmp_path_factory.mktemp("alerts")
    (folder / "runs").mkdir()
    ports = free_port(), free_port()
    here = [f"--web.listen-address=127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as started:
        receiver = Receiver()
        started.callback(receiver.close)
        config = write_alertmanager(folder, receiver.server.server_port)
        started.enter_context(
            running(alertmanager, f"--config.file={config}", f"--storage.path={folder / 'am'}", here[0],
                    "--cluster.listen-address=", log=folder / "alertmanager.log")
        )  # fmt: skip
        config = write_prometheus(folder, ports[0])
        started.enter_context(
            running(prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", here[1],
                    log=folder / "prometheus.log")
        )  # fmt: skip
        words = [sys.executable, "-m", "nsa_train.cli", "exporter", str(folder / "runs"), "--port", "0"]
        words += ["--file-sd", str(folder / "targets" / "here.json")]
        for name in ("stall_s", "startup_s", "gone_s"):
            words += ["--limit", f"{name}={getattr(HealthLimits, name) / SPEED}"]
        started.enter_context(running(*words, log=folder / "exporter.log", cwd=ROOT, env=environment()))
        for port in ports:
            wait_for(lambda port=port: answers(f"http://127.0.0.1:{port}/-/ready"), "Prometheus and Alertmanager")
        words = [sys.executable, "-m", "tests.ops.alert_drill_runs", str(folder / "runs")]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with (folder / "runs.log").open("w") as log:
            runs = subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=log, **pipes)
        started.callback(runs.communicate, timeout=30)  # closes its stdin, which ends it
        yield receiver, json.loads(runs.stdout.readline()), folder


def test_every_alert_reaches_its_receiver_and_no_other(drill):
    receiver, processes, folder = drill
    beats = {name: folder / "runs" / name / "heartbeat_rank0.jsonl" for name in RUNS}
    wait_for(
        lambda: all(path.exists() and path.read_text().count('"progress"') > 4 for path in beats.values()), "progress"
    )
    os.kill(processes["stopped"], signal.SIGSTOP)
    os.kill(processes["killed"], signal.SIGKILL)
    wanted = {(run, alert) for run, alerts in EXPECTED.items() for alert in alerts}
    received = lambda: {(run, alert) for run, alerts in receiver.told.items() for alert in alerts}  # noqa: E731
    with contextlib.suppress(AssertionError):  # the comparison below says more
        wait_for(lambda: received() >= wanted, "alerts", DEADLINE_S)
    time.sleep(6)  # whatever else there is to tell
    assert {run: receiver.told.get(run, {}) for run in {*EXPECTED, *receiver.told}} == EXPECTED
    assert str(folder) not in "".join(receiver.texts), "alerts carry no paths"


def test_an_alert_is_resolved_when_its_cause_is(drill):
    receiver, processes, _ = drill
    assert "stopped" in receiver.told, "the test before this one has stopped it"
    os.kill(processes["stopped"], signal.SIGCONT)
    wait_for(lambda: ("stopped", "NSAHeartbeatStall") in receiver.over, "the stall to be over")
