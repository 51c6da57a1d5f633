"""`nsa config`, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import import_path

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nsa(tmp_path):
    """Run the command in an empty folder, with none of the tester's own variables."""

    def run(*words: str, cwd: Path = tmp_path, **environ: str) -> subprocess.CompletedProcess[str]:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
        return subprocess.run(
            [sys.executable, "-m", "nsa_train.cli", *words],
            cwd=cwd,
            env=clean | {"PYTHONPATH": import_path()} | environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_show_prints_every_value_with_its_origin(nsa):
    result = nsa("config", "show", "configs/train_50k.yaml", "train.lr=1e-4", cwd=ROOT, NSA_FWE_Q="9")
    assert result.returncode == 0, result.stderr
    rows = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert ["train.lr", "0.0001", "command line"] in [[cell.strip() for cell in row] for row in rows]
    assert ["data.queue_depth", "9", "environment NSA_FWE_Q"] in [[cell.strip() for cell in row] for row in rows]
    assert any(row[:2] == ["train.steps", "50000"] and row[2].startswith("configs/train_50k.yaml:") for row in rows)
    assert any(row[:2] == ["runtime.prefill_chunk", "8192"] and row[2].strip() == "profile a100" for row in rows)
    assert any(row[:2] == ["nsa.gate", "softmax"] and row[2].strip() == "default" for row in rows)


def test_show_puts_notices_first(nsa):
    result = nsa("config", "show", "configs/train_50k.yaml", cwd=ROOT, NSA_USE_FA2="1")
    assert result.stdout.startswith("notice: environment NSA_USE_FA2 is retired")


def test_show_changed_leaves_defaults_out(nsa, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  steps: 1000\n  lr: 2e-4\n")
    result = nsa("config", "show", "run.yaml", "--changed")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["setting", "train.lr"]


def test_show_prints_values_as_they_are(nsa, tmp_path):
    (tmp_path / "run.yaml").write_text("data: {tokenizer: '[bold]x[/bold]'}\n")
    assert " [bold]x[/bold] " in nsa("config", "show", "run.yaml").stdout


def test_show_json_is_json(nsa, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  lr: 2e-4\nruntime: {use_triton_sel: 1}\n")
    whole = json.loads(nsa("config", "show", "run.yaml", "--json").stdout)
    assert whole["config"]["train"]["lr"] == 2e-4
    assert whole["origins"]["train.lr"] == "run.yaml:2"
    assert whole["origins"]["model.dim"] == "default"
    assert len(whole["notices"]) == 1
    changed = json.loads(nsa("config", "show", "run.yaml", "--json", "--changed").stdout)
    assert changed["config"] == {"train": {"lr": 2e-4}}
    assert changed["origins"] == {"train.lr": "run.yaml:2"}


def test_show_takes_the_file_from_config(nsa, tmp_path):
    (tmp_path / "run.yaml").write_text("train: {lr: 2e-4}\n")
    result = nsa("config", "show", "train.seed=5", CONFIG="run.yaml")
    assert result.returncode == 0
    assert "run.yaml:1" in result.stdout


def test_show_without_a_file_says_how_to_name_one(nsa):
    result = nsa("config", "show")
    assert (result.returncode, result.stdout) == (20, "")
    assert result.stderr.startswith("ConfigError: no config file")


def test_show_refuses_two_files(nsa):
    result = nsa("config", "show", "a.yaml", "b.yaml")
    assert result.returncode == 20
    assert "got 2 (a.yaml, b.yaml)" in result.stderr


def test_show_of_a_broken_file_lists_the_problems_without_a_traceback(nsa, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  lr: abc\n  stepz: 1\n")
    result = nsa("config", "show", "run.yaml")
    assert (result.returncode, result.stdout) == (20, "")
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("ConfigError: run.yaml cannot be used, 2 problems:\n")
    assert "  - run.yaml:3: unknown key train.stepz. Did you mean train.steps?\n" in result.stderr


def test_check_passes_good_files(nsa):
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "configs").glob("*.yaml"))
    result = nsa("config", "check", *files, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines() == [f"{file} is valid" for file in files]


def test_check_goes_on_after_a_bad_file_and_ends_with_20(nsa, tmp_path):
    (tmp_path / "bad.yaml").write_text("train:\n  lr: abc\n  stepz: 1\n")
    (tmp_path / "good.yaml").write_text("runtime: {fa2_enabled: false}\n")
    result = nsa("config", "check", "bad.yaml", "good.yaml")
    assert result.returncode == 20
    assert "bad.yaml cannot be used, 2 problems:" in result.stdout
    assert "good.yaml is valid\n  - notice: good.yaml:1: runtime.fa2_enabled is retired" in result.stdout


@pytest.mark.parametrize("command", ["show", "check"])
def test_help_has_an_example(nsa, command):
    result = nsa("config", command, "--help", COLUMNS="200")
    assert f"Example: nsa config {command}" in result.stdout
