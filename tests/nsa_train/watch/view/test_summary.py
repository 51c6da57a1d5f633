"""The loss of a run is where it is now, smoothed over few records, and the same wherever it is summarised."""

import json
import math
import random
import re

import pytest
from typer.testing import CliRunner

from nsa_train.cli.main import app
from nsa_train.record.events import EventKind
from nsa_train.watch.run_reader import load
from nsa_train.watch.trends import smoothed_last
from nsa_train.watch.view.run_report import render
from nsa_train.watch.view.summary import summarize, take_snapshot
from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.written import write_run


def nsa(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def falling(steps: int):
    """Losses from 5 to 1.97, with noise."""
    rng = random.Random(steps)
    return lambda step: {"loss": 1.97 + 3.03 * (1 - step / steps) ** 2 + rng.gauss(0, 0.005)}


@pytest.mark.parametrize("steps", [5, 9, 17, 40, 400])
def test_the_loss_of_a_run_is_that_of_its_last_records_and_not_its_mean(tmp_path, steps):
    folder = write_run(tmp_path / "run", a_run(steps, falling(steps)))
    run_summary = summarize(load(folder))
    assert run_summary.loss == pytest.approx(1.97, abs=0.03)
    shown = f"{run_summary.loss:.3f}"
    assert re.search(rf"loss, nats per token</span><b>{shown}</b>", render(take_snapshot(folder)))
    compared = nsa("compare", folder, write_run(tmp_path / "b", a_run(3)))
    assert re.search(rf"loss, mean of the last records +{shown} \({run_summary.loss_records} up to {steps}\)", compared)
    assert f"loss {shown}" in nsa("monitor", folder, "--once")
    status = json.loads(nsa("status", folder, "--json"))
    assert status["loss"] == pytest.approx(run_summary.loss)
    assert status["loss_records"] == run_summary.loss_records


def test_accuracy_is_shown_wherever_the_held_out_loss_is_if_it_was_recorded(tmp_path):
    evaluated = [(10, 2.5, 1.0, 5.0), (20, 2.0, 1.0, 9.0)]
    event = (EventKind.EVALUATION, 9.0, 20, {"val_loss": 2.0, "val_accuracy": 0.375})
    new = write_run(tmp_path / "new", a_run(20), [event], val=evaluated, accuracy=0.375)
    old = write_run(tmp_path / "old", a_run(20), val=evaluated)
    assert summarize(load(new)).held_out_accuracy == 0.375
    assert math.isnan(summarize(load(old)).held_out_accuracy)
    shown, page = "accuracy 38 %", render(take_snapshot(new))
    assert page.count(shown) >= 4  # tile, two marks of the chart, event
    assert "<h3>held-out accuracy " in page
    assert "accuracy" not in render(take_snapshot(old)).partition('id="configuration"')[0]
    assert re.search(r"held-out accuracy, last +38 % +–", nsa("compare", new, old))
    nsa("compare", new, old, "--out", tmp_path / "both.html")
    assert (tmp_path / "both.html").read_text().count("<h3>held-out accuracy ") == 1
    assert shown in nsa("monitor", new, "--once")
    assert "accuracy" not in nsa("monitor", old, "--once")


def test_the_last_tenth_is_averaged_at_most_20_records():
    assert smoothed_last([]) == (pytest.approx(math.nan, nan_ok=True), 0)
    assert smoothed_last([9.0] * 8 + [2.0]) == (2.0, 1)
    assert smoothed_last([9.0] * 28 + [3.0, 1.0, 2.0]) == (2.0, 3)
    assert smoothed_last([9.0] * 980 + [1.0, 3.0] * 10) == (2.0, 20)


def test_a_record_that_is_not_finite_counts_only_while_it_is_the_last():
    assert smoothed_last([2.0] * 50 + [math.inf]) == (math.inf, 1)
    assert smoothed_last([9.0] * 45 + [2.0, 2.0, 2.0, math.inf, 2.0]) == (2.0, 4)
