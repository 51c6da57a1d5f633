import re

from typer.testing import CliRunner

from nsa_train.cli.main import app
from nsa_train.watch.run_reader import load
from nsa_train.watch.view.summary import differing_settings, run_labels
from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.written import CONFIG, write_run
from tests.nsa_train.watch.view.test_monitor_frame import fresh, healthy
from tests.nsa_train.watch.view.test_run_report import Page

OTHER = {"train": {"steps": 1000, "lr": 1e-3, "out_dir": "elsewhere"}, "nsa": {"n_sel": 4, "l_sel": 64, "w": 512}}


def two(tmp_path):
    return healthy(tmp_path / "a"), write_run(tmp_path / "b", a_run(500, lambda step: {"loss": 9.0}), config=OTHER)


def test_only_settings_that_differ_are_listed(tmp_path):
    runs = [load(folder) for folder in two(tmp_path)]
    assert differing_settings(runs) == [("train.lr", [3e-4, 1e-3]), ("nsa.w", [None, 512])]
    assert differing_settings([runs[0], runs[0]]) == []
    assert CONFIG["train"]["out_dir"] != OTHER["train"]["out_dir"]


def test_runs_of_the_same_name_are_distinguished(tmp_path):
    runs = [load(healthy(tmp_path / parent / "run")) for parent in ("x", "y")]
    assert run_labels(runs) == ["A x/run", "B y/run"]


def test_a_run_in_a_folder_of_init_has_the_name_of_that_folder(tmp_path):
    runs = [load(healthy(tmp_path / parent / "run")) for parent in ("mine", "a/mine", "other")]
    assert [run.name for run in runs] == ["run"] * 3, "no config beside it: a person named the run"
    for run in runs:
        (run.folder.parent / "config.yaml").write_text("")
    assert [run.name for run in runs] == ["mine", "mine", "other"]
    assert run_labels(runs) == [f"A {tmp_path.name}/mine", "B a/mine", "C other"]


def test_the_command_prints_figures_settings_and_curves(tmp_path):
    a, b = two(tmp_path)
    result = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert result.exit_code == 0, result.output
    assert re.search(r"steps +600 +500", result.output)
    assert re.search(r"train.lr +0.0003 +0.001", result.output)
    assert re.search(r"loss, mean of the last records +3\.\d+ \(20 up to 600\) +9\.000 \(20 up to 500\)", result.output)
    plot = result.output[result.output.index("nats per token") :]
    assert plot.count("A") >= 3
    assert plot.count("B") >= 3


def test_the_page_overlays_the_runs(tmp_path):
    a, b = two(tmp_path)
    out = tmp_path / "c.html"
    result = CliRunner().invoke(app, ["compare", str(a), str(b), str(fresh(tmp_path / "c")), "--out", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    page = Page(text)
    assert {"figures", "settings", "curves"} <= page.ids
    assert not page.references
    assert 'class="line c1"' in text
    assert 'class="line c2"' in text
    assert not re.search(r"https?://", text)


def test_one_run_is_no_comparison(tmp_path):
    result = CliRunner().invoke(app, ["compare", str(healthy(tmp_path))])
    assert result.exit_code != 0
    assert "takes 2 to 6" in str(result.exception)
