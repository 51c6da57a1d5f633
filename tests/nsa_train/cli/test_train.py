"""The runbook's spellings reach the trainer as settings; the scripts are thin."""

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train.cli.main import app
from nsa_train.train.start_options import StartOptions

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

ROOT = Path(__file__).parents[3]
CONFIG = str(ROOT / "configs" / "train_showcase.yaml")


@pytest.fixture
def called(monkeypatch):
    """Arguments of the trainer and the launcher, which do not run."""
    seen = {}

    def fake_train(config, options, reporter, importer):
        seen.update(config=config, options=options)
        return 10

    def fake_launch(words, options, *, nproc):
        seen.update(words=words, options=options, nproc=nproc)
        return 0

    monkeypatch.setattr("nsa_train.train.run.train", fake_train)
    monkeypatch.setattr("nsa_train.cli.train.launch_ranks", fake_launch)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def invoke(*words, code=10):
    result = CliRunner().invoke(app, ["train", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output


def test_the_runbooks_options(called, monkeypatch):
    monkeypatch.setenv("CONFIG", CONFIG)
    invoke("--dataset", "fineweb_edu", "--ddp", "0", "--fwe-report-docs", "500", "--loader-timeout", "90",
           "--synthetic-on-fail", "--steps", "7", "--precision", "bf16")  # fmt: skip
    config = called["config"]
    assert (config.data.dataset, config.data.report_docs, config.data.loader_timeout_s) == ("fineweb_edu", 500, 90.0)
    assert (config.data.synthetic_on_fail, config.train.steps, config.runtime.precision) == (True, 7, "bf16")
    assert called["options"] == StartOptions()


def test_settings_and_options_mix(called):
    invoke(CONFIG, "train.lr=1e-4", "--steps", "9", "data.dataset=synthetic")
    assert (called["config"].train.lr, called["config"].train.steps) == (1e-4, 9)
    assert called["config"].origin("train.steps") == "command line"


def test_both_spellings_of_resume(called, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "latest"
    checkpoint.mkdir(parents=True)
    for words in (
        ["--resume", str(checkpoint)],
        ["--resume-from", str(checkpoint)],
        ["--resume-from", f"{checkpoint}.pt"],
    ):
        invoke(CONFIG, "data.dataset=synthetic", *words)
        assert called["options"].resume_from == checkpoint
    invoke(CONFIG, "data.dataset=synthetic", "--resume")
    assert called["options"] == StartOptions(resume=True)


def test_ddp_asks_for_ranks(called, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    invoke(CONFIG, "--ddp", "1", "--dataset", "synthetic", code=0)
    assert called["nproc"] == 2
    assert called["words"] == [CONFIG, "data.dataset=synthetic"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    invoke(CONFIG, "--ddp", "1", "--dataset", "synthetic")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--ddp 0"):
        invoke(CONFIG, "--ddp", "0", "--dataset", "synthetic")


@pytest.mark.parametrize(("mib", "config"), [("24576", "24g"), ("40960", "40g"), ("81559", "80g"), ("141000", "80g")])
def test_the_prime_script_picks_the_config_that_fits(tmp_path, mib, config):
    smi = f'case "$1" in -L) echo a; echo b;; *) echo {mib}; echo {mib};; esac'
    for name, body in (("nvidia-smi", smi), ("nsa", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environ.pop("CONFIG", None)
    script = ROOT / "scripts" / "train_m7c_prime.sh"
    done = subprocess.run([script, "--resume"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["launch", "--nproc", "2", f"configs/m7c_125m_{config}.yaml", "--resume"]


@pytest.mark.parametrize("script", ["train_showcase.py", "train_m7c_prime.sh"])
def test_scripts_are_thin(script):
    assert len((ROOT / "scripts" / script).read_text().splitlines()) <= 10


def test_a_skipped_step_is_reported_and_the_run_continues(capsys):
    from nsa_train import names
    from nsa_train.cli.train import _PlainProgress
    from nsa_train.record.heartbeat_record import HeartbeatRecord

    skipped = HeartbeatRecord.now(ts=0.0, rank=0, step=7, msg=names.SKIPPED, loss=float("nan"), detail="loss is nan")
    _PlainProgress().beat(skipped, 10)
    assert capsys.readouterr().out == "skipped_step at step 7: loss is nan\n"
