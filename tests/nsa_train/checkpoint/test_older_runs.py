"""A run folder written by an older version of this package still resumes, and gives the losses it gave then.

tests/nsa_train/checkpoint/fixtures/run_e78e5fe.tar.xz was written at commit e78e5fe, before files and classes were
renamed: eight
steps of run.yaml with a checkpoint at step 4, as a crash before the save at step 8 leaves it. It was made with

    nsa train run.yaml train.out_dir=run
    cd run && rm -r checkpoints/step8 model.* tb && ln -sfn step4 checkpoints/latest
"""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from proofs import import_path
from tests import fork_server

ARCHIVE = Path(__file__).parent / "fixtures" / "run_e78e5fe.tar.xz"
ROOT = Path(__file__).parents[3]
DEFAULTS_THEN = ("nsa.kv=per_branch", "data.mask_document_ends=false")


@pytest.fixture(scope="module")
def older_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def nsa(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("NSA_")}
    variables = {**environment, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
    return fork_server.run(["-m", "nsa_train.cli", *words], cwd=folder, env=variables)


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "run" / "heartbeat_rank0.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines) if record["msg"] == "progress"]


def test_its_checkpoint_is_verified_and_its_records_are_read(older_run):
    verified = nsa(older_run, "checkpoint", "verify", "run")
    assert verified.returncode == 0, verified.stderr
    assert "step4" in verified.stdout
    status = nsa(older_run, "status", "run", "--json")
    assert json.loads(status.stdout)["step"] == 8, status.stderr


def test_a_setting_it_does_not_know_counts_as_its_default(older_run):
    from nsa_train.checkpoint.run_state import RunRecord
    from nsa_train.config import load
    from nsa_train.train.resume import changed_settings

    record = RunRecord.read(older_run / "run" / "checkpoints" / "step4")
    assert "init_std" not in record.config["model"]
    same, raised = (
        load(older_run / "run.yaml", overrides=[*DEFAULTS_THEN, *changes]) for changes in ([], ["model.init_std=0.08"])
    )
    known = {change.key for change in changed_settings(record, same, 257)}
    assert {change.key for change in changed_settings(record, raised, 257)} - known == {"model.init_std"}
    assert not any(key.startswith(("model.", "nsa.")) for key in known)


def test_other_defaults_are_refused_by_name_and_a_missing_setting_counts_as_what_was_done_then(older_run):
    from nsa_train.checkpoint.run_state import RunRecord
    from nsa_train.checkpoint.trained_model import open_trained_model

    assert "kv" not in RunRecord.read(older_run / "run" / "checkpoints" / "step4").config["nsa"]
    assert open_trained_model(older_run / "run").config.nsa.kv == "per_branch"
    refused = nsa(older_run, "train", "run.yaml", "train.out_dir=run", "--resume")
    assert refused.returncode != 0
    text = " ".join(refused.stderr.split())
    assert "nsa.kv: saved per_branch, now shared" in text
    assert all(setting in text.partition("Set them back")[2] for setting in DEFAULTS_THEN)


def test_it_resumes_and_repeats_the_losses_of_its_first_life(older_run):
    before = dict(losses(older_run))
    resumed = nsa(older_run, "train", "run.yaml", "train.out_dir=run", *DEFAULTS_THEN, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    again = dict(losses(older_run)[len(before) :])
    assert list(again) == [5, 6, 7, 8]
    assert again == pytest.approx({step: before[step] for step in again}, rel=1e-5)
