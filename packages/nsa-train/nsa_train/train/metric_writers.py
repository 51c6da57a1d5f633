"""Metric writers: copy progress records to training.csv, val.csv, metrics.json, TensorBoard, W&B and MLflow.

Each tracking service has a queue and a thread: its client may block for minutes, which must never block training.
Records that a slow or unavailable service misses are dropped; the run folder has all of them. The engine's W&B callback
is called in the training loop, with metrics of a pipeline that is off (see `nan_guard`).
"""

import csv
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from nsa.errors import ConfigError
from nsa.files import write_atomic
from nsa_train import names
from nsa_train.config.schema import RunConfig
from nsa_train.record.heartbeat_record import METRIC_COLUMNS, HeartbeatRecord
from nsa_train.record.record_files import to_line
from nsa_train.train.engine.deferred_imports import deferred_imports

# Scripts read columns by position: these keep their places, the other numbers of a record follow.
_FIRST_COLUMNS = (
    "step", "loss", "lr", "toks_per_s", "grad_norm", "dt_fetch_s", "gpu_mem_alloc", "gpu_mem_reserved",
    "gate_entropy_mean", "gate_max_mean", "gate_collapse_frac", "sel_k_mean", "sel_k_max", "sel_pct_at_max",
    "reads_pred", "reads_act_total", "tokens_seen", "ts",
)  # fmt: skip
TRAINING_COLUMNS = tuple(dict.fromkeys((*_FIRST_COLUMNS, *METRIC_COLUMNS)))
VAL_LOSS, VAL_ACCURACY = "val/loss", "val/accuracy"
_VAL_COLUMNS = ("step", "val_loss", "tokens", "seconds", "ts", "val_accuracy")


def tracked_numbers(beat: HeartbeatRecord) -> dict[str, float]:
    """Return the numbers of a record by the names that every tracker uses (`train/loss`)."""
    return {f"train/{name}": value for name, value in beat.metrics().items()}


class CsvFile:
    """Appends rows to a CSV file; the header is written once, a resumed run appends to its earlier rows.

    A file that another version began keeps its own columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        new = not path.exists() or path.stat().st_size == 0
        self._columns = columns if new else _header(path)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if new:
            self.add(dict(zip(columns, columns, strict=True)))

    def add(self, row: dict[str, Any]) -> None:
        self._writer.writerow(["" if row.get(name) is None else row[name] for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


class MetricWriters:
    """Writes progress records and evaluations of rank 0."""

    def __init__(self, run_folder: Path) -> None:
        with deferred_imports():  # of clients of remote storage
            from tensorboard.summary import Writer

        self._folder = run_folder
        self._training = CsvFile(run_folder / names.TRAINING_CSV, TRAINING_COLUMNS)
        self._val: CsvFile | None = None
        self._tensorboard = Writer(str(run_folder / names.TENSORBOARD))
        self._metrics: dict[str, Any] = {}

    def write(self, beat: HeartbeatRecord) -> None:
        record = beat.as_dict()
        self._training.add(record | beat.metrics())
        for name, value in tracked_numbers(beat).items():
            self._tensorboard.add_scalar(name, value, beat.step)
        self._tensorboard.flush()
        losses = (self._metrics.get("best_loss"), beat.loss)
        best = min((loss for loss in losses if loss is not None and math.isfinite(loss)), default=None)
        self._write_metrics({**record, "best_loss": best})

    def write_evaluation(
        self, *, step: int, val_loss: float, val_accuracy: float, tokens: int, seconds: float, ts: float
    ) -> None:
        self._val = self._val or CsvFile(self._folder / names.VAL_CSV, _VAL_COLUMNS)
        scores = {"val_loss": val_loss, "val_accuracy": val_accuracy}
        self._val.add({"step": step, **scores, "tokens": tokens, "seconds": round(seconds, 3), "ts": ts})
        for name, value in ((VAL_LOSS, val_loss), (VAL_ACCURACY, val_accuracy)):
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()
        self._write_metrics({**scores, "val_step": step})

    def close(self) -> None:
        self._training.close()
        if self._val is not None:
            self._val.close()
        self._tensorboard.close()

    def _write_metrics(self, news: dict[str, Any]) -> None:
        self._metrics |= news
        text = json.dumps(json.loads(to_line(self._metrics)), indent=2) + "\n"
        write_atomic(self._folder / names.METRICS, text)


_QUEUE_SIZE = 1024
"""Records that may be queued; further ones are dropped."""
_RETRY_S = 60.0
"""Pause between attempts to connect to an unavailable service."""
_CLOSE_TIMEOUT_S = 30.0
"""How long the end of a run waits for queued records to be sent."""
_SENT_SECTIONS = {"model", "nsa", "runtime", "kernels", "parallel"}
"""Not data and train: addresses in them may hold passwords."""
_PASSWORD = re.compile(r"//[^/@\s]*@")

_Record = tuple[int, dict[str, float]]


class _TrackingService(Protocol):
    name: str
    errors: tuple[type[Exception], ...]
    """Exceptions of its client for a failing service; complete after `open` has imported the client."""

    def open(self) -> None: ...
    def send(self, step: int, numbers: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class _BackgroundLogger:
    def __init__(self, service: _TrackingService, warn: Callable[[str], None]) -> None:
        self._service, self._warn = service, warn
        self._records: queue.Queue[_Record | None] = queue.Queue(_QUEUE_SIZE)
        self._open = self._warned = False
        self._not_before = 0.0
        self._thread = threading.Thread(target=self._run, name=f"background logger {service.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Queue a record; never blocks."""
        try:
            self._records.put_nowait((step, numbers))
        except queue.Full:
            self._warn_once(f"{_QUEUE_SIZE} records are queued")

    def close(self) -> None:
        """Send queued records within the timeout; the rest is dropped, with a warning."""
        try:
            self._records.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn_once(f"the end of the run waited {_CLOSE_TIMEOUT_S:g} s for it")

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._send(*record)
            except self._service.errors as error:
                self._warn_once(f"{type(error).__name__}: {_PASSWORD.sub('//', str(error))[:300]}")
        if self._open:
            try:
                self._service.close()
            except self._service.errors as error:
                self._warn_once(type(error).__name__)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        if not self._open:
            if time.monotonic() < self._not_before:
                return
            self._not_before = time.monotonic() + _RETRY_S
            self._service.open()
            self._open = True
        self._service.send(step, numbers)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"WARNING: {self._service.name} does not accept records ({why}). Training continues; the run "
                f"folder has all records."
            )


class _TrackerIds:
    """trackers.json: which W&B and MLflow run belongs to a run folder, so that a restart continues it.

    Shared by the threads of all trackers. A run that does not resume begins without ids.
    """

    def __init__(self, run_folder: Path, *, resuming: bool) -> None:
        self._path = run_folder / names.TRACKERS
        self._lock = threading.Lock()
        if not resuming:
            self._path.unlink(missing_ok=True)
        self._ids = self._read()

    def get(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def put(self, tracker: str, run_id: str) -> None:
        with self._lock:
            self._ids[tracker] = run_id
            write_atomic(self._path, json.dumps(self._ids, indent=2) + "\n")

    def _read(self) -> dict[str, str]:
        """Read the ids; without them (file missing or damaged) the tracker gets a second run."""
        try:
            ids = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): v for k, v in ids.items() if isinstance(v, str)} if isinstance(ids, dict) else {}


class _MLflow:
    """Logs metrics to MLflow through its client: OLMo-core has no MLflow callback."""

    name = "MLflow (track.mlflow_uri)"

    def __init__(self, uri: str, experiment: str, run_name: str, ids: _TrackerIds) -> None:
        self.errors: tuple[type[Exception], ...] = (OSError,)
        self._ids = ids
        self._uri, self._experiment, self._run_name = uri, experiment, run_name

    def open(self) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.errors = (MlflowException, OSError)
        self._client = MlflowClient(self._uri)
        if (known := self._ids.get("mlflow")) is not None and self._continue(known):
            self._run_id = known
            return
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment_id = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=self._run_name).info.run_id
        self._ids.put("mlflow", self._run_id)

    def _continue(self, run_id: str) -> bool:
        """Reopen this run; False if the server does not have it."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return False
        return True

    def send(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class _WandbRun:
    name = "Weights & Biases (track.wandb_project)"

    def __init__(self, config: RunConfig, run_name: str, run_folder: Path, ids: _TrackerIds) -> None:
        self.errors: tuple[type[Exception], ...] = (OSError,)
        self._config, self._run_name, self._folder, self._ids = config, run_name, run_folder / "wandb", ids

    def open(self) -> None:
        import wandb
        from wandb.errors import Error, UsageError

        self.errors = (Error, OSError)
        if "WANDB_API_KEY" not in os.environ:  # the client would ask for it on a terminal
            raise UsageError("WANDB_API_KEY is not set")
        if (run_id := self._ids.get("wandb")) is None:
            run_id = token_hex(8)
            self._ids.put("wandb", run_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            dir=self._folder,
            project=self._config.track.wandb_project,
            entity=self._config.track.wandb_entity,
            group=self._run_name,
            name=self._run_name,
            config=self._config.model_dump(mode="json", include=_SENT_SECTIONS),
            id=run_id,
            resume="allow",
            # By default the client also sends the command line and the console output, which may contain passwords.
            settings=wandb.Settings(console="off", x_disable_meta=True),
        )

    def send(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


def start_tracking(
    config: RunConfig, run_folder: Path, first: bool, warn: Callable[[str], None], *, resuming: bool = False
) -> list[_BackgroundLogger]:
    """Only the first rank logs; all ranks raise for a tracker that is not installed.

    `resuming` continues the tracker runs recorded in this folder.
    """
    track, name = config.track, config.track.name or run_folder.resolve().name
    ids = _TrackerIds(run_folder, resuming=resuming or not first)
    services: list[_TrackingService] = []
    if track.wandb_project is not None:
        _require("wandb", "track.wandb_project")
        services.append(_WandbRun(config, name, run_folder, ids))
    if track.mlflow_uri is not None:
        _require("mlflow", "track.mlflow_uri")
        services.append(_MLflow(track.mlflow_uri, track.mlflow_experiment, name, ids))
    return [_BackgroundLogger(service, warn) for service in services] if first else []


def _require(package: str, key: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{key} is set and the package {package} is not installed: nothing would be logged. Run: pip install "
            f"'nsa-train[track]', or leave {key} out."
        )
