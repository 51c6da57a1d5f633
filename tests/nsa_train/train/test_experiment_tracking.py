"""Trackers of experiments get the heartbeat's figures; one that is down, slow or missing never stops a run."""

import json
import threading

import pytest

from nsa.errors import ConfigError
from nsa_train.config import load
from nsa_train.names import DONE, PROGRESS, TRACKERS, heartbeat
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.train.metric_writers import _BackgroundLogger, _TrackerIds, start_tracking
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment, free_port, write_config

SECRET = "hunter2-do-not-tell"


class Service:
    name = "a service"
    errors = (OSError,)

    def __init__(self, *, broken: bool = False, slow: threading.Event | None = None) -> None:
        self.broken, self.slow = broken, slow
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.opened = self.closed = 0

    def open(self) -> None:
        self.opened += 1
        if self.broken:
            raise ConnectionError(f"no answer from http://me:{SECRET}@there/")

    def send(self, step, numbers) -> None:
        if self.slow is not None:
            self.slow.wait()
        self.sent.append((step, numbers))

    def close(self) -> None:
        self.closed += 1


def test_everything_is_delivered_in_order_before_the_end():
    service, warnings = Service(), []
    logger = _BackgroundLogger(service, warnings.append)
    for step in range(50):
        logger.log(step, {"train/loss": 1.0})
    logger.close()
    assert [step for step, _ in service.sent] == list(range(50))
    assert (service.opened, service.closed, warnings) == (1, 1, [])


def test_an_unavailable_service_is_reported_once_and_without_its_password():
    service, warnings = Service(broken=True), []
    logger = _BackgroundLogger(service, warnings.append)
    for step in range(50):
        logger.log(step, {})
    logger.close()
    (warning,) = warnings
    assert warning.startswith("WARNING: a service ")
    assert "ConnectionError: no answer from http://there/" in warning
    assert SECRET not in warning
    assert service.opened == 1, "tried again a minute later, not with every record"


def test_a_hanging_service_delays_no_step_and_the_end_by_a_bounded_time(monkeypatch):
    monkeypatch.setattr("nsa_train.train.metric_writers._CLOSE_TIMEOUT_S", 0.2)
    hang, warnings = threading.Event(), []
    logger = _BackgroundLogger(Service(slow=hang), warnings.append)
    for step in range(3000):
        logger.log(step, {})
    logger.close()  # returns while the service hangs
    assert len(warnings) == 1
    assert "1024 records" in warnings[0]
    hang.set()


def test_a_silent_service_is_reported_at_the_end(monkeypatch):
    """Too few records to fill the queue, and no error yet: without a warning they would be missed by nobody."""
    monkeypatch.setattr("nsa_train.train.metric_writers._CLOSE_TIMEOUT_S", 0.2)
    hang, warnings = threading.Event(), []
    logger = _BackgroundLogger(Service(slow=hang), warnings.append)
    logger.log(1, {})
    logger.close()
    assert len(warnings) == 1
    hang.set()


@pytest.mark.parametrize(("key", "package"), [("wandb_project", "wandb"), ("mlflow_uri", "mlflow")])
def test_a_tracker_that_is_not_installed_is_refused_on_every_rank(tmp_path, monkeypatch, key, package):
    monkeypatch.setattr("nsa_train.train.metric_writers.find_spec", lambda name: None)
    config = load(write_config(tmp_path), overrides=[f"track.{key}=x"])
    for first in (True, False):
        with pytest.raises(ConfigError, match=rf"track\.{key} .*{package}"):
            start_tracking(config, tmp_path, first, print)


def test_nothing_is_tracked_by_default(tmp_path):
    assert start_tracking(load(write_config(tmp_path)), tmp_path, True, print) == []


NOBODY = f"http://127.0.0.1:{free_port()}"
KEY = {"WANDB_API_KEY": "x" * 40}
# By run: what it is told to track, and what the clients of the trackers are told.
RUNS = {
    "reached": (
        [
            "track.wandb_project=p",
            "track.mlflow_uri=file:{folder}/mlflow",
            f"train.checkpoint_key_file={{folder}}/{SECRET}",
        ],
        KEY | {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"},
    ),
    "unreachable": (
        ["track.wandb_project=p", f"track.mlflow_uri={NOBODY}"],
        KEY | {"WANDB_BASE_URL": NOBODY, "WANDB_INIT_TIMEOUT": "3", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"},
    ),
}

# Forks a run for each [output, processes, environment] that stdin names; its processes
# (their words) run one after another, as those of a run that was stopped and resumed.
PROGRAM = """
import json, os, sys
import nsa_train.train.run
from nsa_train.cli.main import main
children = []
for output, processes, environment in json.load(sys.stdin):
    child = os.fork()
    if not child:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1); os.dup2(file, 2)
        os.environ.update(environment)
        for words in processes:
            process = os.fork()
            if not process:
                sys.argv = words
                main()
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os._exit(code)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real runs, each telling both trackers; their folder."""
    for package in ("wandb", "mlflow"):
        pytest.importorskip(package, reason="pip install -e packages/nsa-attention -e 'packages/nsa-train[track]'")
    folder = tmp_path_factory.mktemp("tracked")
    (folder / SECRET).write_bytes(b"k" * 32)
    config = str(write_config(folder))
    jobs = []
    for name, (changes, env) in RUNS.items():
        words = [
            "nsa",
            "train",
            config,
            f"train.out_dir={folder / name}",
            *(word.format(folder=folder) for word in changes),
        ]
        words += ["train.eval_every=3", "train.eval_batches=1"]
        processes = [[*words, "train.steps=6"]]
        if name == "reached":
            processes = [[*words, "train.steps=3"], [*words, "train.steps=6", "--resume"]]
        jobs.append((str(folder / f"{name}.txt"), processes, env))
    done = fork_server.run(["-c", PROGRAM], cwd=ROOT, env=environment(), input=json.dumps(jobs), timeout=240)
    outputs = [(folder / f"{name}.txt").read_text() for name in RUNS]
    assert done.stdout == "[0, 0]\n", "\n".join([done.stderr, *outputs])
    return folder


def test_mlflow_has_the_curves_of_both_processes_in_one_run(runs, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((runs / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("nsa").experiment_id])
    assert (run.info.run_name, run.info.status) == ("reached", "FINISHED")
    told = [beat for beat in read_beats(runs / "reached" / heartbeat(0)) if beat.msg == PROGRESS]
    curve = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in curve] == [(beat.step, beat.loss) for beat in told]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "val/loss")] == [3, 6]
    assert "does not take records" not in (runs / "reached.txt").read_text()


def test_wandb_has_the_curves_and_no_secret(runs):
    first, second = sorted((runs / "reached" / "wandb").glob("**/offline-run-*/run-*.wandb"))
    for file in (first, second):
        content = file.read_bytes()
        for word in (b"train/loss", b"val/loss", b"val/accuracy", b"gate_entropy_mean", b"n_kv_groups"):
            assert word in content
        assert SECRET.encode() not in content, "neither from the configuration nor from the command line"
    assert first.name == second.name, "named after the id of the tracker's run, which both processes continue"


def test_a_run_that_starts_anew_is_a_new_run_of_the_tracker(tmp_path):
    ids = _TrackerIds(tmp_path, resuming=False)
    ids.put("wandb", "a1")
    ids.put("mlflow", "b2")
    again = _TrackerIds(tmp_path, resuming=True)
    assert (again.get("wandb"), again.get("mlflow"), again.get("other")) == ("a1", "b2", None)
    assert _TrackerIds(tmp_path, resuming=False).get("wandb") is None
    assert _TrackerIds(tmp_path, resuming=True).get("wandb") is None


def test_a_file_of_ids_that_cannot_be_read_costs_no_run(tmp_path):
    (tmp_path / TRACKERS).write_text("[1, 2")
    ids = _TrackerIds(tmp_path, resuming=True)
    assert ids.get("wandb") is None
    ids.put("wandb", "a1")
    assert _TrackerIds(tmp_path, resuming=True).get("wandb") == "a1"


def test_a_run_goes_on_when_both_trackers_are_unreachable(runs):
    lines = (runs / "unreachable.txt").read_text().splitlines()
    warned = [line.split()[1] for line in lines if line.startswith(("WARNING: MLflow", "WARNING: Weights"))]
    assert sorted(warned) == ["MLflow", "Weights"]
    beats = list(read_beats(runs / "unreachable" / heartbeat(0)))
    assert (beats[-1].msg, beats[-1].step) == (DONE, 6)
