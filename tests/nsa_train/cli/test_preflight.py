"""The commands print tables that fit a terminal, JSON that parses, and end with the right code."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train.cli.main import app

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

ROOT = Path(__file__).parents[3]
TOY = str(ROOT / "configs" / "train_showcase.yaml")
LONG = str(ROOT / "configs" / "train_50k.yaml")


def invoke(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), env={"CONFIG": "", "COLUMNS": "80"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_toy_is_refused_for_a_long_run_in_one_table():
    text = invoke("preflight", TOY, "train.steps=50000", "--target", "a100-80gb", "--no-dry-run", code=2)
    for rule in ("precision", "flash", "toy_profile", "toy_model", "toy_sequence"):
        assert f"fail         {rule} " in text
        assert f"--allow={rule}" in text
    assert "Set runtime.precision=bf16." in text
    assert "Refused: 5 rules" in text
    assert "assumed" in text


def test_the_canonical_long_run_passes_with_a_step_of_fake_tensors():
    report = json.loads(invoke("preflight", LONG, "--target", "a100-80gb", "--json"))
    assert (report["refused"], report["long_run"]) == (False, True)
    status = {verdict["rule"]: verdict["status"] for verdict in report["verdicts"]}
    assert status["step"] == status["memory"] == status["model"] == "pass"
    assert status["data"] == status["disk"] == "not checked"
    assert report["estimate"]["parameters"]["total"] == 123_827_376


def test_allowed_rules_are_shown_as_allowed():
    words = ["preflight", LONG, "--target", "a100-80gb", "--no-dry-run", "runtime.use_flash=false"]
    assert "fail         flash" in invoke(*words, code=2)
    assert "allowed      flash" in invoke(*words, "--allow", "flash")
    with pytest.raises(ConfigError, match=r"flash\?"):
        invoke(*words, "--allow", "flsh")


def test_train_and_launch_take_overrides(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "nsa_train.train.run.train", lambda config, options, reporter, importer: seen.update(options=options) or 0
    )
    invoke("train", TOY, "data.dataset=synthetic", "--allow", "precision", "--allow", "flash")
    assert seen["options"].allow == ("precision", "flash")

    def launch(settings, *_):
        seen["program"] = settings.start.for_restart().to_args()
        return 0

    monkeypatch.setattr("nsa_train.train.launch.launcher.launch", launch)
    invoke("launch", TOY, "--allow", "precision")
    assert seen["program"] == ["--resume", "--allow=precision"]
    with pytest.raises(ConfigError, match="nothing_like_it"):
        invoke("launch", TOY, "--allow", "nothing_like_it")


def test_the_estimate_fits_a_terminal_and_names_its_assumptions():
    text = invoke("estimate", LONG, "--target", "a100-80gb:2")
    for part in ("parameters", "selected", "gradients", "optimizer", "activations", "checkpoint", "cache", "price"):
        assert part in text
    assert "123,827,376" in text
    assert "gradient checkpointing full" in text
    assert "modelled: attention at" in " ".join(text.split())
    assert "with portable" in text
    assert "calculated: attention moves" in " ".join(text.split())


def test_the_estimates_json_is_in_bytes_and_adds_up():
    printed = json.loads(
        invoke("estimate", LONG, "--target", "a100-80gb", "--efficiency", "0.4", "--price", "2", "--json")
    )
    memory = printed["memory_bytes"]
    parts = ("weights", "gradients", "optimizer", "activations", "communication", "reserve")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert memory["activations"] == memory["activations_recomputed"] < memory["activations_kept"]
    assert memory["weights"] == 4 * printed["parameters"]["total"]
    assert printed["usd"] == pytest.approx(printed["wall_s"] / 3600 * 2)
    assert [one["backend"] for one in printed["backends"]] == ["triton", "portable"]
    for one in printed["backends"]:
        assert one["usd"] == pytest.approx(printed["steps"] * one["step_s"] / 3600 * 2)
        assert one["memory_bytes"] > memory["weights"]


def test_the_script_is_thin_and_takes_the_config_that_CONFIG_names(tmp_path):
    script = ROOT / "scripts" / "preflight_train.sh"
    assert len(script.read_text().splitlines()) <= 10
    (tmp_path / "nsa").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "nsa").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "mine.yaml"}
    done = subprocess.run([script, "--target", "h200"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["preflight", "mine.yaml", "--target", "h200"]
