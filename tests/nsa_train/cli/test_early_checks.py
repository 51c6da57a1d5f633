"""What takes a millisecond to refuse is refused before torch and Transformers are imported."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.errors import CheckpointError, ConfigError
from nsa_train import names
from nsa_train.cli import early_checks
from nsa_train.cli.early_checks import find_model, find_run, how_to_install, require_device, require_packages
from nsa_train.cli.main import app

HEAVY = ("torch", "transformers", "olmo_core")
PROGRAM = f"""
import json, os, sys
from nsa_train.cli.main import main
sys.argv = ["nsa", *json.loads(sys.argv[1])]
try:
    main()
finally:
    print(json.dumps([name for name in {HEAVY} if name in sys.modules]), flush=True)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("text")
    (tmp_path / "run" / names.CHECKPOINTS).mkdir(parents=True)
    (tmp_path / "exported").mkdir()
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / "exported" / file).write_text("{}")
    (tmp_path / "trained" / names.CHECKPOINTS / "step7").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["generate", "nowhere", "-p", "x"], 22, "nowhere does not exist"),
        (["eval", "nowhere"], 22, "nowhere does not exist"),
        (["eval", "run", "--against", "nowhere"], 22, "nowhere does not exist"),
        (["chat", "nowhere"], 22, "nowhere does not exist"),
        (["serve", "nowhere"], 22, "nowhere does not exist"),
        (["serve", "run", "--port", "PORT"], 20, "--port"),
        (["generate", "run", "-p", "x", "--device", "gpu"], 20, "cuda:N"),
        (["generate", "run", "-p", "x", "--tokenizer", "gpt2"], 20, "hf download gpt2"),
        (["eval", "run", "--tasks", "needles"], 20, "needle_multikey"),
        (["eval", "run", "--tasks", "layers"], 20, "--against"),
        (["eval", "run", "--lm-eval", "hellaswag", "--against", "trained"], 20, "scores one model"),
        (["chat", "run"], 20, "nsa generate run"),
        (["chat", "exported"], 20, "no chat template"),
        (["export", "hf", "nowhere", "out"], 22, "nowhere does not exist"),
        (["export", "hf", "run", "full"], 22, "full is not empty"),
        (["convert", "nowhere", "out"], 22, "nowhere is not a folder"),
        (["convert", "run", "full"], 22, "full is not empty"),
        (["import", "hf", "nowhere", "out"], 22, "nowhere is not a folder"),
        (["import", "hf", "run", "full"], 22, "full is not empty"),
        (["train", "cpu_quickstart", "runtime.device=gpu"], 20, "cuda:N"),
        (["train", "cpu_quickstart", "train.lr=fast"], 20, "train.lr"),
        (["train", "cpu_quickstart"], 2, "artifacts/demo_set does not exist"),
        (["train", "cpu_quickstart", "data.dataset=local", "data.path=nowhere"], 2, "data.path is nowhere"),
        (["train", "cpu_quickstart", "data.dataset=local", "data.path=full", "data.tokenizer=b.json"], 2, "b.json"),
        (["train", "cpu_quickstart", "data.dataset=synthetic", "train.out_dir=full/mine.txt"], 2, "is not a folder"),
        (["train", "cpu_quickstart", "data.dataset=synthetic", "train.out_dir=trained"], 2, "add --resume"),
        (["train", "cpu_quickstart", "--resume-from", "nowhere"], 22, "nowhere"),
        (["train", "cpu_quickstart", "--init-from", "nowhere"], 22, "nowhere does not exist"),
        (["train", "cpu_quickstart", "--init-from", "full"], 22, "full holds no checkpoint"),
        (["train", "cpu_quickstart", "--init-from", "run/checkpoints/step5"], 22, "step5, which does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_answered_before_the_slow_imports(words, code, text, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "PORT" else word for word in words]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(words)], cwd=folder, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_missing_packages_are_named_together_with_one_command(monkeypatch):
    present = {"torch", "numpy"}
    monkeypatch.setattr(early_checks, "find_spec", lambda name: name if name in present else None)
    with pytest.raises(ConfigError) as refusal:
        require_packages(*early_checks.SERVER_PACKAGES)
    text = str(refusal.value)
    assert "transformers, safetensors, tokenizers, fastapi, openai, uvicorn, which are" in text
    assert "pip install 'nsa-train[serve]'" in text, "which has the others"
    present |= {*early_checks.SERVER_PACKAGES}
    require_packages(*early_checks.SERVER_PACKAGES)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["demo", "new"], "train"),
        (["data", "prepare", "full", "new"], "data"),
        (["data", "tokenizer", "train", "full", "new"], "data"),
        (["data", "inspect", "full"], "data"),
        (["data", "verify", "full"], "data"),
        (["data", "stats", "full"], "data"),
        (["plan", "cpu_quickstart", "--gpus", "h100-80gb:8"], "data"),
        (["estimate", "cpu_quickstart"], "data"),
        (["preflight", "cpu_quickstart"], "data"),
        (["generate", "--pretrained", "-p", "x"], "hf"),
        (["chat", "--pretrained"], "hf"),
        (["eval", "trained"], "hf"),
        (["eval", "trained", "--lm-eval", "hellaswag"], "eval"),
        (["export", "hf", "trained", "new"], "hf"),
        (["serve", "--pretrained", "--port", "0"], "serve"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_without_extras_a_command_names_one_that_is_enough_and_writes_nothing(words, extra, folder, monkeypatch):
    absent = early_checks._OPTIONAL
    monkeypatch.setattr(early_checks, "find_spec", lambda name: None if name in absent else name)
    monkeypatch.chdir(folder)
    before = {*folder.iterdir()}
    refusal = CliRunner().invoke(app, words).exception
    assert isinstance(refusal, ConfigError), refusal
    assert f"pip install 'nsa-train[{extra}]'" in str(refusal)
    assert {*folder.iterdir()} == before


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_training_names_the_packages_of_its_settings_too(command, monkeypatch):
    absent = {"olmo_core", "tensorboard", "wandb", "mlflow"}
    monkeypatch.setattr(early_checks, "find_spec", lambda name: None if name in absent else name)
    words = [command, "cpu_quickstart", "track.wandb_project=x"]
    refusal = CliRunner().invoke(app, words).exception
    assert isinstance(refusal, ConfigError)
    assert "packages olmo_core, tensorboard, wandb, which are" in str(refusal)
    assert "pip install 'nsa-train[track,train]'" in str(refusal)


def test_a_package_of_every_install_needs_no_extra():
    assert "pip install 'nsa-train' " in how_to_install(["torch"])


@pytest.mark.parametrize("part", [names.CHECKPOINTS, names.ENV, names.MODEL_SAFETENSORS])
def test_the_run_in_a_folder_of_init_is_its_model(part, tmp_path):
    inside = tmp_path / "my-run" / "run"
    inside.mkdir(parents=True)
    assert find_run(tmp_path / "my-run") == tmp_path / "my-run", "no run yet"
    (inside / part).write_text("")
    assert find_run(tmp_path / "my-run") == find_model(tmp_path / "my-run") == inside
    assert find_run(inside) == inside
    (tmp_path / "my-run" / part).write_text("")
    assert find_run(tmp_path / "my-run") == tmp_path / "my-run", "it is a run itself"


def test_a_link_to_nothing_is_left_to_the_reader_of_checkpoints(tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    assert find_model(tmp_path / "latest") == tmp_path / "latest"
    with pytest.raises(CheckpointError, match="does not exist"):
        find_model(tmp_path / "nothing")


@pytest.mark.parametrize(("version", "refused"), [("2.13.0+cpu", True), ("", False)])
def test_torch_for_the_cpu_alone_has_no_gpu(version, refused, monkeypatch):
    monkeypatch.setattr(early_checks, "_version", lambda package: version)
    monkeypatch.setattr("nsa.kernels.gpu_versions.device_named", lambda name: name)
    assert require_device("cpu") == "cpu"
    assert require_device(None) is None
    if refused:
        with pytest.raises(ConfigError, match=r"2\.13\.0\+cpu"):
            require_device("cuda:1")
    else:
        assert require_device("cuda:1") == "cuda:1"
