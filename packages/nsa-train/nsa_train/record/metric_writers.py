"""Metric writers: copy progress records to training.csv, val.csv, metrics.json and TensorBoard."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.files import write_atomic
from nsa_train import names
from nsa_train.record.heartbeat_record import METRIC_COLUMNS, HeartbeatRecord
from nsa_train.record.record_files import to_line

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
