"""`nsa plan`: its tables, its JSON, the settings it prints, and the refusal where nothing fits."""

import json

import pytest
from typer.testing import CliRunner

from nsa_train.cli.main import app
from nsa_train.config.load import load
from nsa_train.config.rules import broken_parallel_rules

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

CONFIG = "configs/base_1b_32k.yaml"
SMALL = [
    "configs/train_showcase.yaml",
    "model.vocab_size=512",
    "train.seq_len=1024",
    "train.batch_size=8",
    "parallel.data=fsdp",
]


def call(*words: str):
    return CliRunner().invoke(app, ["plan", *words])


def test_the_first_layout_can_be_given_to_the_config():
    result = call(CONFIG, "--gpus", "h100-80gb:8", "--top", "3", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    speeds = [each["tokens_per_s"] for each in plan["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 3
    first = plan["layouts"][0]
    planned = load(CONFIG, overrides=first["overrides"])
    assert not list(broken_parallel_rules(planned, 8, 8))
    before = load(CONFIG).train
    rows = before.batch_size * before.accumulate_grad_batches
    assert planned.train.batch_size * planned.train.accumulate_grad_batches == rows
    text = call(CONFIG, "--gpus", "h100-80gb:8", "--top", "1").output
    assert " ".join(first["overrides"]) in text
    assert {"Memory of a GPU", "Collectives of a rank in a step"} <= set(text.splitlines())


def test_a_step_of_the_best_layout_is_executed_and_compared():
    result = call(*SMALL, "--gpus", "h100-80gb:16", "--execute", "--json")
    assert result.exit_code == 0, result.output
    executed = json.loads(result.stdout)["executed"]
    differences = {each["name"]: each["difference"] for each in executed["compared"]}
    assert differences["held memory"] == pytest.approx(0, abs=0.02)
    assert differences["FLOPs"] == pytest.approx(0, abs=0.01)
    gathers = [value for name, value in differences.items() if name.startswith("all_gather")]
    assert gathers == [0] * len(gathers)
    assert gathers


def test_it_is_refused_where_nothing_fits():
    result = call("configs/base_7b_128k.yaml", "--gpus", "rtx3090:4", "train.batch_size=4")
    assert result.exit_code != 0
    assert "no layout of this run fits" in str(result.exception or result.output)
