"""Metrics served to Prometheus: every figure of a run, nothing that could be a secret, on loopback."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="pip install -e packages/nsa-attention -e 'packages/nsa-train[ops]'")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.heartbeat_record import RECORD_FIELDS, HeartbeatRecord
from nsa_train.record.record_files import JsonLines
from nsa_train.record.run_folder import RunFolder
from nsa_train.watch import exporter
from nsa_train.watch.exporter import SHARED_S, MetricsExporter, RunsCollector, _run_names, _SharedScrapes

SECRET = "hunter2-do-not-tell"


def beat(msg=names.PROGRESS, step=1, rank=0, **more) -> HeartbeatRecord:
    return HeartbeatRecord.now(ts=time.time(), rank=rank, step=step, msg=msg, **more)


def write(folder: Path, *beats: HeartbeatRecord) -> None:
    for each in beats:
        lines = JsonLines(folder / names.heartbeat(each.rank))
        lines.append(each.to_line())
        lines.close()


class Served:
    """A collector over folders, asked as Prometheus would."""

    def __init__(self, *folders: Path) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RunsCollector(folders))

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def __call__(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return None


def test_a_field_without_a_gauge_says_where_its_value_is_or_why_it_is_not_served():
    for field in RECORD_FIELDS.values():
        assert (field.gauge is not None) != bool(field.no_gauge), field.name
        named = set(re.findall(r"nsa_\w+", field.no_gauge))
        assert named <= exporter.HELP.keys(), field.name


def test_figures_have_the_values_of_the_last_record_in_base_units(tmp_path):
    served, began = Served(tmp_path / "alpha"), time.time()
    assert served.text() == ""
    usual = dict.fromkeys(exporter.GAUGES, 2)
    shares = ((0.1, 0.2, 0.7), (0.3, 0.3, 0.4))
    write(tmp_path / "alpha", beat(names.START, 0), beat(step=7, **usual, gate_branch_shares=(0.2, 0.25, 0.55),
          gate_shares_by_layer=shares, kernel_sliding="portable"))  # fmt: skip
    for gauge in exporter.GAUGES.values():
        assert served(gauge.name, run="alpha", rank="0", **gauge.labels) == 2 * gauge.scale, gauge
    assert served("nsa_memory_bytes", kind="host_rss") == 2 * 2**20
    assert served("nsa_step", run="alpha", rank="0") == 7
    assert served("nsa_gate_share_ratio", layer="1", branch="selected") == 0.3
    assert served("nsa_gate_share_mean_ratio", branch="sliding") == 0.55
    assert served("nsa_kernel_info", branch="sliding", backend="portable") == 1
    assert began - 1e-3 <= served("nsa_heartbeat_timestamp_seconds") <= time.time()  # in whole milliseconds
    write(tmp_path / "alpha", beat(step=8, loss=1.5))
    assert served("nsa_loss_nats") == 1.5


def test_a_loss_that_is_not_finite_is_served_and_remembered(tmp_path):
    served = Served(tmp_path)
    write(tmp_path, beat(step=1, loss=2.0, grad_norm=1.0), beat(step=2, loss=math.nan, grad_norm=math.inf))
    assert math.isnan(served("nsa_loss_nats"))
    assert served("nsa_grad_norm") == math.inf
    write(tmp_path, beat(step=3, loss=2.0, grad_norm=1.0))
    assert served("nsa_loss_nats") == 2.0
    assert (served("nsa_nonfinite_losses_total"), served("nsa_nonfinite_grad_norms_total")) == (1, 1)
    assert served("nsa_findings", condition="loss_nonfinite") == 1


def test_a_skipped_step_is_counted_and_its_loss_is_not_the_runs(tmp_path):
    served = Served(tmp_path)
    write(tmp_path, beat(step=1, loss=2.0, grad_norm=1.0), beat(names.SKIPPED, step=2, loss=math.nan, grad_norm=1.0),
          beat(step=2, loss=math.nan, grad_norm=1.0))  # fmt: skip
    assert served("nsa_loss_nats") == 2.0
    assert (served("nsa_skipped_steps_total"), served("nsa_nonfinite_steps_total")) == (1, 1)
    assert served("nsa_nonfinite_losses_total") == 0
    write(tmp_path, beat(names.START, step=0), beat(step=1, loss=2.0, skipped_steps=0))
    assert served("nsa_skipped_steps_total") == 1, "a counter does not go back when the run does"


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ([names.START], "starting"),
        ([names.START, names.ALIVE], "starting"),
        ([names.START, names.PROGRESS, names.ALIVE], "running"),
        ([names.PROGRESS, names.SKIPPED], "running"),
        ([names.PROGRESS, names.HALTED], "halted"),
        ([names.PROGRESS, names.STOPPED], "stopped"),
        ([names.PROGRESS, names.DONE], "done"),
        ([names.PROGRESS, names.FAILED], "failed"),
        ([names.PROGRESS, names.FAILED, names.START], "starting"),
    ],
)
def test_the_state_is_what_the_last_words_say(tmp_path, words, state):
    write(tmp_path, *(beat(word, step, loss=1.0) for step, word in enumerate(words)))
    served = Served(tmp_path)
    states = {name: served("nsa_run_state", state=name) for name in exporter._STATES}
    assert states == {name: float(name == state) for name in exporter._STATES}
    ended = state in ("halted", "stopped", "done", "failed")
    assert (served("nsa_heartbeat_limit_seconds") is None) == ended
    assert (served("nsa_loss_nats") is None) == (state in ("starting", "stopped", "done"))


def test_a_process_is_up_while_it_is(tmp_path):
    code = f"import sys; f = open({str(tmp_path / names.heartbeat(0))!r}, 'a'); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    (tmp_path / names.ENV).write_text(json.dumps({"host": socket.gethostname(), "world_size": 1}))
    write(tmp_path, replace(beat(), pid=process.pid))
    served = Served(tmp_path)
    assert served("nsa_process_up") == 1
    process.communicate()
    assert served("nsa_process_up") == 0
    (tmp_path / names.ENV).write_text(json.dumps({"host": "another", "world_size": 1}))
    assert served("nsa_process_up") is None


def test_events_are_counted_over_all_starts(tmp_path):
    add_event(tmp_path, EventKind.START, ts=1.0, step=0)
    add_event(tmp_path, EventKind.SAVE, ts=2.0, step=5)
    add_event(tmp_path, EventKind.RESTART, ts=3.0, step=5)
    add_event(tmp_path, EventKind.LOST_STEPS, ts=3.0, step=5, steps=4)
    add_event(tmp_path, EventKind.ROLLBACK, ts=4.0, step=9)
    add_event(tmp_path, EventKind.EVALUATION, ts=5.0, step=9, val_loss=2.5, val_accuracy=0.25)
    write(tmp_path, beat(step=10))
    served = Served(tmp_path)
    figures = ("nsa_restarts_total", "nsa_rollbacks_total", "nsa_lost_steps_total", "nsa_eval_loss_nats")
    assert [served(name) for name in figures] == [1, 1, 4, 2.5]
    assert served("nsa_eval_accuracy_ratio") == 0.25
    assert (served("nsa_last_checkpoint_step"), served("nsa_last_checkpoint_timestamp_seconds")) == (5, 2.0)


def test_synthetic_data_is_reported_where_other_data_was_configured(tmp_path):
    served = Served(tmp_path)
    write(tmp_path, beat(synthetic=True))
    for dataset, expected in (("synthetic", 0), ("fineweb_edu", 1)):
        (tmp_path / names.ENV).write_text(json.dumps({"config": {"data": {"dataset": dataset}}}))
        assert served("nsa_data_substituted") == expected


def test_runs_that_begin_later_are_found_in_a_folder_of_runs(tmp_path):
    served = Served(tmp_path)
    write(tmp_path / "one", beat(step=3))
    assert served("nsa_step", run="one") == 3
    write(tmp_path / "two", beat(step=4))
    assert (served("nsa_step", run="one"), served("nsa_step", run="two")) == (3, 4)


def test_runs_of_the_same_name_stay_apart(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert list(_run_names(paths).values()) == ["a/run", "b/run", "c"]


def test_a_folder_that_is_lost_keeps_its_last_figures(tmp_path):
    folder = tmp_path / "alpha"
    write(folder, beat(names.START, 0), beat(step=3, loss=1.0))
    served = Served(folder)
    before = served("nsa_heartbeat_timestamp_seconds")
    for path in list(folder.iterdir()):
        path.unlink()
    folder.rmdir()
    assert served("nsa_heartbeat_timestamp_seconds") == pytest.approx(before, abs=0.1)


def test_no_text_of_a_configuration_or_a_record_becomes_a_label(tmp_path):
    from nsa_train.config import load

    path = f"s3://key:{SECRET}@store/bucket?token={SECRET}"
    (tmp_path / "run.yaml").write_text(
        f"data: {{dataset: prepared, path: '{path}'}}\ntrain: {{checkpoint_key_file: /keys/{SECRET}}}\n"
    )
    config = load(tmp_path / "run.yaml", overrides=[f"train.out_dir={tmp_path / 'alpha'}"])
    RunFolder(tmp_path / "alpha").make()
    RunFolder(tmp_path / "alpha").write_env(config, device="cpu", world_size=1, data=path)
    add_event(tmp_path / "alpha", EventKind.START, ts=time.time(), step=0, origin=path, data=path)
    add_event(tmp_path / "alpha", EventKind.ERROR, ts=time.time(), step=3, error=f"DataError: {path}")
    write(tmp_path / "alpha", beat(names.START, 0, data=path), beat(step=3, loss=1.0, data=path),
          beat(names.FAILED, 3, data=path, detail=f"DataError: {path} did not come within 3 s"))  # fmt: skip
    served = Served(tmp_path / "alpha")
    assert served("nsa_findings", condition="loader_timeout") == 1
    assert served("nsa_run_info", dataset="prepared", device="cpu", world_size="1") == 1
    assert SECRET in (tmp_path / "alpha" / names.ENV).read_text()
    assert SECRET not in served.text()
    assert "bucket" not in served.text()


class CountingApp:
    """Answers with the number of the call, and the encoding asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, environ, start_response):
        self.calls += 1
        time.sleep(0.05)
        start_response("200 OK", [("X-Call", str(self.calls))])
        return [f"{self.calls} {environ.get('HTTP_ACCEPT_ENCODING', '')}".encode()]


def ask(app, **environ) -> tuple[str, bytes]:
    heads = []
    body = app({"PATH_INFO": "/metrics", **environ}, lambda status, headers: heads.append(dict(headers)["X-Call"]))
    return heads[0], b"".join(body)


def test_scrapes_at_once_and_soon_after_share_one_reading():
    app, now = CountingApp(), [100.0]
    shared, answers = _SharedScrapes(app, clock=lambda: now[0]), []
    threads = [threading.Thread(target=lambda: answers.append(ask(shared))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [("1", b"1 ")] * 20
    now[0] += 0.99 * SHARED_S
    assert ask(shared) == ("1", b"1 ")
    now[0] += 0.02 * SHARED_S
    assert ask(shared) == ("2", b"2 ")
    assert app.calls == 2


def test_another_encoding_or_path_is_another_answer():
    shared = _SharedScrapes(CountingApp(), clock=lambda: 0.0)
    assert ask(shared)[1] == b"1 "
    assert ask(shared, HTTP_ACCEPT_ENCODING="gzip")[1] == b"2 gzip"
    assert ask(shared, PATH_INFO="/favicon.ico")[1] == b"3 "
    assert ask(shared)[1] == b"1 "


def test_a_port_in_use_is_an_error_with_the_way_out(tmp_path):
    first = MetricsExporter([tmp_path], host="127.0.0.1", port=0)
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"{port} .*--port"):
        MetricsExporter([tmp_path], host="127.0.0.1", port=port)
    first.close()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "nsa_train.cli", "exporter", *words]


def test_the_command_listens_on_loopback_registers_itself_and_leaves_cleanly(tmp_path):
    target = tmp_path / "targets" / "here.json"
    write(tmp_path / "runs" / "alpha", beat(step=3))
    words = command(str(tmp_path / "runs"), "--port", "0", "--file-sd", str(target))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[-1]
        assert json.loads(target.read_text()) == [{"targets": [address.split("/")[2]]}]
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert 'nsa_step{rank="0",run="alpha"} 3.0' in answer.read().decode()
        listening = {line.split()[1] for line in _listening(process.pid)}
        assert {hexed.partition(":")[0] for hexed in listening} == {"0100007F"}, "127.0.0.1 and nothing else"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err, target.exists()) == (0, "", False)


def _listening(pid: int) -> list[str]:
    """Lines of /proc/net/tcp* of sockets of this process that listen."""
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [line for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return [line for line in lines if line.split()[3] == "0A" and line.split()[9] in inodes]


def test_an_address_beyond_loopback_gives_a_warning(tmp_path):
    # An address of nobody, reserved for documentation: the warning comes before the attempt to listen.
    done = subprocess.run(command(str(tmp_path), "--host", "192.0.2.1"), capture_output=True, text=True, timeout=60)
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.startswith("WARNING: listening on 192.0.2.1, not on loopback: whoever reaches this machine")
    assert "without a password" in done.stderr
    assert "Choose another --host" in done.stderr
