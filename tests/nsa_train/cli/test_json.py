"""`--json` of the commands that scripts call: one document on stdout, and the exit code that their help promises."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from nsa.errors import CheckpointError
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.cli.main import app
from nsa_train.cli.outputs import print_json
from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.written import write_run


def call(*words: object) -> tuple[int, object]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, json.loads(result.stdout)


def test_non_finite_numbers_are_null_in_json(capsys):
    print_json({"a": [float("nan"), float("inf"), 1.5], 2: ("x",)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "2": ["x"]}


def test_doctor():
    code, report = call("doctor", "--dtype", "fp32", "--device", "cpu")
    assert code == 0
    assert report["checks"] is None
    chosen = [row["branch"] for row in report["backends"] if row["here"] == "chosen"]
    assert chosen == ["compressed", "select", "selected", "sliding"]


def test_doctor_ends_with_1_if_a_check_fails(monkeypatch):
    from nsa.check import prove
    from nsa.check.comparison import bounded

    results = [bounded("right", 0.0, 1.0), bounded("wrong", 2.0, 1.0)]
    monkeypatch.setattr(prove, "prove", lambda *_: iter(results))
    code, report = call("doctor", "--prove", "--dtype", "fp32", "--device", "cpu")
    assert code == 1
    assert [check["holds"] for check in report["checks"]] == [True, False]


def test_config_check(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("runtime: {fa2_enabled: false}\n")
    bad.write_text("train: {lr: abc}\n")
    code, verdicts = call("config", "check", good)
    assert (code, verdicts[0]["valid"], len(verdicts[0]["notices"])) == (0, True, 1)
    code, verdicts = call("config", "check", bad, good)
    assert code == 20
    assert [verdict["valid"] for verdict in verdicts] == [False, True]
    assert "train.lr" in verdicts[0]["problem"]


def test_compare(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, a_run(30))
    code, comparison = call("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    assert code == 0
    assert [run["step"] for run in comparison["runs"]] == [comparison["runs"][0]["step"]] * 2
    assert comparison["runs"][0]["loss"] > 0
    assert comparison["differing_settings"] == {}
    assert (tmp_path / "page.html").stat().st_size


@pytest.fixture
def run(tmp_path):
    folder = CheckpointFolder(tmp_path / "run/checkpoints")
    for step in (10, 20):
        dcp.save({"model": {"w": torch.ones(50)}}, checkpoint_id=folder.begin(step))
        folder.commit(step)
    return tmp_path / "run"


def test_checkpoint_ls(run):
    code, listing = call("checkpoint", "ls", run)
    assert (code, listing["in_use_by"]) == (0, None)
    assert [(row["step"], row["good"], row["latest"]) for row in listing["checkpoints"]] == [
        (10, True, False),
        (20, True, True),
    ]
    assert listing["checkpoints"][0]["bytes"] >= 100
    os.truncate(run / "checkpoints/step20/__0_0.distcp", 10)
    code, listing = call("checkpoint", "ls", run)
    assert (code, listing["checkpoints"][1]["good"]) == (0, False)
    assert listing["checkpoints"][1]["problems"]


def test_checkpoint_verify(run):
    assert call("checkpoint", "verify", run)[0] == 0
    data = run / "checkpoints/step20/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"y")  # the same size: only the hash tells
    code, verdicts = call("checkpoint", "verify", run)
    assert code == CheckpointError.exit_code
    assert [verdict["good"] for verdict in verdicts] == [True, False]
    assert "step20" in verdicts[1]["problem"]
