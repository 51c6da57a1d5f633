"""The study of NSA beside dense attention: its runs are accepted, train, resume and give tables."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from experiments.nsa_vs_dense import depth_map, results, run, tables, time_to_loss
from nsa_train import names
from nsa_train.config.load import load
from tests import fork_server

TABLES = tables.read_tables()
TINY = (
    *("train.steps=4", "train.seq_len=128", "train.batch_size=2"),
    *("train.log_every=2", "train.eval_every=2", "train.save_every=2"),
)


@pytest.mark.parametrize(
    "study_run", [r for t in TABLES.values() for r in t.runs], ids=lambda r: f"{r.table}-{r.variant}-{r.seed}"
)
def test_every_run_is_a_valid_config(study_run):
    config = load(study_run.config, overrides=[word for word in study_run.command[2:] if "=" in word])
    assert config.train.seed == study_run.seed
    assert config.train.out_dir == str(study_run.folder)


def test_no_two_variants_have_the_same_settings():
    for table in TABLES.values():
        settings = {run.variant: run.settings for run in table.runs}
        assert len(set(settings.values())) == len(settings)


def forked(command, *, check, stdout, env=os.environ, stderr=None):
    """Replace subprocess.run: run the same command without a new import of torch."""
    assert (command[0], stderr) in ((sys.executable, None), (sys.executable, subprocess.STDOUT))
    out = None if stdout == subprocess.DEVNULL else stdout
    done = fork_server.start(command[1:], cwd=Path.cwd(), env=env, stdout=out, stderr=out).wait(timeout=300)
    assert not (check and done)
    return subprocess.CompletedProcess(command, done)


def test_runs_train_and_give_a_table(tmp_path, monkeypatch):
    """A run without results is left out."""
    monkeypatch.chdir(tmp_path)
    section = yaml.safe_load((tables.HERE / "tables.yaml").read_text())["far_recall"]
    section |= dict(config=str(tables.HERE / section["config"]), settings=list(TINY), seeds=[0])
    section["variants"] = {"dense": ["model.attention=dense"], "nsa": ["nsa.kv=shared", "nsa.n_sel=4"]}
    (tmp_path / "tables.yaml").write_text(yaml.safe_dump({"tiny": section}))
    table = tables.read_tables(tmp_path / "tables.yaml")["tiny"]
    dense, nsa = table.chosen(None, None)
    assert "--resume" not in dense.command
    assert not nsa.finished
    processes = SimpleNamespace(run=forked, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)
    for module in (run, results):
        monkeypatch.setattr(module, "subprocess", processes)
    _, code, _ = run.train(nsa, threads=1)
    assert code == 0, (nsa.folder / "log.txt").read_text()
    assert nsa.finished
    assert "--resume" in nsa.command
    assert nsa.selects
    assert not dense.selects
    results.evaluate_selection(nsa)
    text = results.write(table, tmp_path / "results")
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["nsa"]
    with open(tmp_path / "results" / "tiny.csv", encoding="utf-8") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert rows["nsa"]["step"] == "4"
    assert 0 <= float(rows["nsa"]["fact_hit"]) <= 1
    with open(tmp_path / "results" / "tiny_curves.csv", encoding="utf-8") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["variant"] == "nsa"] == ["2", "4"]
    assert (tmp_path / "results" / "tiny.svg").read_text().startswith("<svg xmlns=")
    points = time_to_loss.loss_points(nsa)
    assert [point.step for point in points] == [2, 4]
    assert 0 < points[0].seconds < points[1].seconds
    cells = depth_map.accuracy_by_depth(nsa, length=256, rows=3)
    assert sum(cell.questions for cell in cells) == 3 * 16
    assert {cell.depth for cell in cells} <= set(range(depth_map.DEPTHS))
    depth_map.write_cells(tmp_path / "depths.csv", cells)
    read_back = depth_map.read_cells(tmp_path / "depths.csv")
    assert [cell._replace(accuracy=pytest.approx(cell.accuracy, abs=1e-5)) for cell in cells] == read_back
    assert depth_map.draw_map("title", read_back).count("<rect ") == 1 + len(read_back)


def test_a_table_may_start_from_the_runs_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short, long = TABLES["far_recall_512"], TABLES["extended_2k"]
    run = long.chosen(["default_loss"], [1])[0]
    before = short.chosen(["default_loss"], [1])[0]
    assert run.command[-2:] == ["--init-from", str(before.folder)]
    settings = [word for word in run.command if "=" in word]
    assert "train.seq_len=2048" in settings
    assert "train.seq_len=512" not in settings
    assert "nsa.phi=softmax" in settings
    (run.folder / names.CHECKPOINTS).mkdir(parents=True)
    assert run.command[-1] == "--resume"
    assert "--init-from" not in run.command


def test_the_time_to_a_loss_lies_between_two_evaluations():
    points = [time_to_loss.LossPoint(*values) for values in ((10, 6.0, 100.0), (20, 5.0, 200.0), (30, 4.0, 300.0))]
    assert time_to_loss.seconds_to(points, 4.5) == 250
    assert time_to_loss.seconds_to(points, 4.0) == 300
    with pytest.raises(ValueError, match="no evaluation"):
        time_to_loss.seconds_to(points, 3.9)
