import csv
import json
from dataclasses import fields

import pytest

from nsa_train import names
from nsa_train.record import value_checks
from nsa_train.record.heartbeat_record import CHECKS, HeartbeatRecord
from nsa_train.train.metric_writers import MetricWriters, tracked_numbers

pytest.importorskip("tensorboard", reason="part of the train extra")


def take(folder, *steps: int) -> None:
    writers = MetricWriters(folder)
    for step in steps:
        writers.write(
            HeartbeatRecord.now(ts=float(step), rank=0, step=step, msg=names.PROGRESS, loss=10 / step, lr=0.1)
        )
        writers.write_evaluation(step=step, val_loss=1.0 / step, val_accuracy=step / 8, tokens=7, seconds=0.5, ts=1.0)
    writers.close()


def test_csv_has_step_and_loss_first_and_goes_on_after_a_restart(tmp_path):
    take(tmp_path, 1, 2)
    take(tmp_path, 3)
    with (tmp_path / names.TRAINING_CSV).open() as file:
        rows = list(csv.reader(file))
    assert rows[0][:2] == ["step", "loss"]
    assert [row[:2] for row in rows[1:]] == [["1", "10.0"], ["2", "5.0"], ["3", str(10 / 3)]]
    with (tmp_path / names.VAL_CSV).open() as file:
        values = [(row["val_loss"], row["val_accuracy"]) for row in csv.DictReader(file)]
    assert values == [("1.0", "0.125"), ("0.5", "0.25"), (str(1 / 3), "0.375")]


def test_csv_has_every_number_of_a_record(tmp_path):
    """TensorBoard and the trackers have the same."""
    numbers = {field.name: float(n) for n, field in enumerate(fields(HeartbeatRecord)) if field.default is None}
    texts = {
        name
        for name, check in CHECKS.items()
        if check not in (value_checks.number, value_checks.whole, value_checks.amount)
    }
    numbers = {name: value for name, value in numbers.items() if name not in texts}
    beat = HeartbeatRecord.now(
        ts=1.0, rank=0, step=1, msg=names.PROGRESS, **numbers, gate_branch_shares=(0.1, 0.2, 0.7)
    )
    writers = MetricWriters(tmp_path)
    writers.write(beat)
    writers.close()
    with (tmp_path / names.TRAINING_CSV).open() as file:
        (row,) = csv.DictReader(file)
    numbers |= {"gate_share_0": 0.1, "gate_share_1": 0.2, "gate_share_2": 0.7}
    assert {name: float(row[name]) for name in numbers} == numbers
    assert tracked_numbers(beat) == {f"train/{name}": value for name, value in numbers.items()}


def test_a_file_of_an_older_version_keeps_its_columns(tmp_path):
    (tmp_path / names.TRAINING_CSV).write_text("step,loss,fallbacks\n1,10.0,0\n")
    (tmp_path / names.VAL_CSV).write_text("step,val_loss,tokens,seconds,ts\n1,1.0,7,0.5,1.0\n")
    take(tmp_path, 2)
    assert (tmp_path / names.VAL_CSV).read_text() == (
        "step,val_loss,tokens,seconds,ts\n1,1.0,7,0.5,1.0\n2,0.5,7,0.5,1.0\n"
    )
    assert (tmp_path / names.TRAINING_CSV).read_text() == "step,loss,fallbacks\n1,10.0,0\n2,5.0,\n"


def test_metrics_are_the_last_record_and_the_best_loss(tmp_path):
    take(tmp_path, 5, 2)
    metrics = json.loads((tmp_path / names.METRICS).read_text())
    assert (metrics["step"], metrics["loss"], metrics["best_loss"], metrics["val_loss"]) == (2, 5.0, 2.0, 0.5)
    assert metrics["val_accuracy"] == 0.25


def test_tensorboard_has_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    take(tmp_path, 1, 2)
    events = EventAccumulator(str(tmp_path / names.TENSORBOARD))
    events.Reload()
    assert {"train/loss", "train/lr", "val/loss", "val/accuracy"} <= set(events.Tags()["tensors"])
    assert "train/pid" not in events.Tags()["tensors"]
