import csv
import json

import pytest

from nsa import names
from nsa.observe.heartbeat import HeartbeatRecord
from nsa.observe.metric_writers import MetricWriters

pytest.importorskip("tensorboard", reason="part of the train extra")


def take(folder, *steps: int) -> None:
    writers = MetricWriters(folder)
    for step in steps:
        writers.write(
            HeartbeatRecord.now(ts=float(step), rank=0, step=step, msg=names.PROGRESS, loss=10 / step, lr=0.1)
        )
        writers.write_evaluation(step=step, val_loss=1.0 / step, tokens=7, seconds=0.5, ts=1.0)
    writers.close()


def test_csv_has_step_and_loss_first_and_goes_on_after_a_restart(tmp_path):
    take(tmp_path, 1, 2)
    take(tmp_path, 3)
    with (tmp_path / names.TRAINING_CSV).open() as file:
        rows = list(csv.reader(file))
    assert rows[0][:2] == ["step", "loss"]
    assert [row[:2] for row in rows[1:]] == [["1", "10.0"], ["2", "5.0"], ["3", str(10 / 3)]]
    with (tmp_path / names.VAL_CSV).open() as file:
        assert [row["val_loss"] for row in csv.DictReader(file)] == ["1.0", "0.5", str(1 / 3)]


def test_metrics_are_the_last_record_and_the_best_loss(tmp_path):
    take(tmp_path, 5, 2)
    metrics = json.loads((tmp_path / names.METRICS).read_text())
    assert (metrics["step"], metrics["loss"], metrics["best_loss"], metrics["val_loss"]) == (2, 5.0, 2.0, 0.5)


def test_tensorboard_has_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    take(tmp_path, 1, 2)
    events = EventAccumulator(str(tmp_path / names.TENSORBOARD))
    events.Reload()
    assert {"train/loss", "train/lr", "val/loss"} <= set(events.Tags()["tensors"])
    assert "train/pid" not in events.Tags()["tensors"]
