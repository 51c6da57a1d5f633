"""`nsa eval` of a run on synthetic data: answers that are right, and whether selection found their facts."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from typer.testing import CliRunner

from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.record.evaluations import read_evaluations
from nsa_train.watch.view.formatting import share
from tests.nsa_train.train.runs import Job, run_all

ROWS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two ranks with sharded weights, trained until they know which tokens are answers."""
    folder = tmp_path_factory.mktemp("synthetic") / "run"
    changes = ["data.synthetic_task=recall", "model.vocab_size=320", "parallel.data=fsdp", "train.seq_len=128"]
    changes += ["train.steps=12", "train.save_every=12", "train.eval_every=12", "train.eval_batches=2", "train.lr=1e-2"]
    assert run_all(Job(str(folder), 2, changes)) == [[0, 0]]
    return folder


def test_accuracy_is_that_of_the_evaluation_during_training_and_facts_are_looked_for(run):
    words = ["--tasks", "held_out_loss,selection", "--rows", str(ROWS), "--device", "cpu"]
    done = CliRunner().invoke(app, ["eval", str(run), *words, "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    with (run / names.VAL_CSV).open() as file:
        (recorded,) = csv.DictReader(file)
    held_out, facts = printed["held_out_loss"], printed["selection"]["facts"]
    assert held_out["tokens"] == int(recorded["tokens"]) == ROWS * 16
    assert held_out["loss"] == pytest.approx(float(recorded["val_loss"]), rel=1e-5)
    assert held_out["accuracy"] == pytest.approx(float(recorded["val_accuracy"]), abs=1.01 / held_out["tokens"])
    assert 0 < held_out["accuracy"] < 0.5  # about 1 in 4
    assert [row["layer"] for row in facts["layers"]] == [0, 1]
    assert 0 < facts["layers"][0]["chance"] < facts["any_layer"]["chance"] < 1
    assert ROWS * 8 < facts["any_layer"]["questions"] <= ROWS * 16

    (evaluation,) = read_evaluations(run)
    written = (*facts["layers"], facts["any_layer"])
    assert evaluation.facts == [{name: value for name, value in row.items() if value is not None} for row in written]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    html = (run / "report.html").read_text()
    assert "accuracy if missed" in html
    assert f"accuracy {share(held_out['accuracy'])}" in html
