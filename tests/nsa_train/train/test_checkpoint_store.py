"""Copies of checkpoints in an object store: a lost run continues from them, and a failed one reaches the operator."""

from pathlib import Path

import pytest
import torch

from nsa.errors import PreflightError
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.transfer import S3Prefix, pull
from nsa_train.cli import launch
from nsa_train.config import load
from nsa_train.planning.hardware import hardware_here, parse_target
from nsa_train.planning.preflight_rules import RuleStatus, check_rules
from nsa_train.record.events import EventKind, RunEvent, read_events
from nsa_train.train.distributed import RankInfo
from nsa_train.train.gather_preflight_facts import gather, require_preflight
from nsa_train.train.run import train
from nsa_train.train.start_options import StartOptions
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.run_reader import RunReader
from proofs.drill.object_store import BUCKET, ObjectStore
from tests.nsa_train.checkpoint.conftest import client, server  # noqa: F401 - fixtures
from tests.nsa_train.train.runs import Job, run_all, write_config

URL = "s3://models/run"
CHANGES = ["train.steps=8", "train.save_every=4", "parallel.data=fsdp", f"train.checkpoint_store={URL}"]


@pytest.mark.nightly  # two runs of two ranks; the copy itself is tests/nsa_train/checkpoint/test_store_copy.py
@pytest.mark.timeout(600)
def test_a_run_moves_to_another_folder_through_its_store(client, tmp_path: Path) -> None:  # noqa: F811
    assert run_all(Job(str(tmp_path / "run"), 2, CHANGES)) == [[0, 0]]
    store = S3Prefix(URL)
    assert sorted(store.folders()) == ["step4", "step8"]
    last = store.child("step8")
    last.delete(sorted(last.files()))
    moved = tmp_path / "moved"
    assert pull(URL, CheckpointFolder(moved / "checkpoints")).step == 4
    assert run_all(Job(str(moved), 2, CHANGES, resume=True)) == [[0, 0]]
    whole, again = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("run", "moved"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert sorted(store.folders()) == ["step4", "step8"]


@pytest.fixture
def store(monkeypatch):
    object_store = ObjectStore(secret="right")
    variables = {
        "ENDPOINT_URL": object_store.url,
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "right",
        "DEFAULT_REGION": "r",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it remembers credentials
    yield object_store
    object_store.close()


def config_of(folder: Path, steps: int):
    changes = [f"train.steps={steps}", "train.save_every=1", f"train.checkpoint_store=s3://{BUCKET}/run"]
    return load(write_config(folder), overrides=[f"train.out_dir={folder}/run", *changes])


def copies(folder: Path) -> list[RunEvent]:
    return [event for event in read_events(folder / "run") if event.kind in (EventKind.COPIED, EventKind.COPY_FAILED)]


def findings_in(folder: Path) -> list[str]:
    reader = RunReader(folder / "run")
    try:
        findings = examine(reader.update(), now=reader.now.steady, limits=HealthLimits())
    finally:
        reader.close()
    return [finding.name for finding in findings]


def test_copies_and_failed_copies_are_events_and_the_newest_failure_is_a_finding(store, tmp_path: Path) -> None:
    assert train(config_of(tmp_path, 1)) == 0
    (copied,) = copies(tmp_path)
    assert (copied.kind, copied.step, copied.details["address"]) == (EventKind.COPIED, 1, f"s3://{BUCKET}/run/step1")
    assert findings_in(tmp_path) == []
    store.secret = "revoked"  # a run that has checkpoints is not refused for it
    assert train(config_of(tmp_path, 2), StartOptions(resume=True)) == 0
    failed = copies(tmp_path)[-1]
    assert (failed.kind, failed.step) == (EventKind.COPY_FAILED, 2)
    assert failed.details["path"] == str(tmp_path / "run/checkpoints/step2")
    assert failed.details["address"] == f"s3://{BUCKET}/run/step2"
    assert "403" in failed.details["error"]
    assert findings_in(tmp_path) == ["copy_failed"]


def status(folder: Path, target=None, **more) -> RuleStatus:
    facts = gather(config_of(folder, 1), target or hardware_here("cpu"), try_it=False, **more)
    (verdict,) = [verdict for verdict in check_rules(facts) if verdict.rule == "checkpoint_store"]
    return verdict.status


def test_a_refusing_store_refuses_a_run_before_it_writes_anything(store, tmp_path: Path) -> None:
    store.secret = "another"
    with pytest.raises(PreflightError, match=r"checkpoint_store.*SignatureDoesNotMatch") as refused:
        train(config_of(tmp_path, 1))
    assert "right" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    assert status(tmp_path, look_for_store=True) == RuleStatus.FAIL
    assert status(tmp_path) == RuleStatus.NOT_CHECKED
    assert status(tmp_path, parse_target("h200"), look_for_store=True) == RuleStatus.NOT_CHECKED
    require_preflight(config_of(tmp_path, 1), RankInfo(), StartOptions(allow=("checkpoint_store",)))
    # Ranks of a launcher may have been started again: the launcher asks, before the first start.
    with pytest.raises(PreflightError, match="checkpoint_store"):
        launch._check(config_of(tmp_path, 1), 2, (1, 1), StartOptions())
    require_preflight(config_of(tmp_path, 1), RankInfo(distributed=True), StartOptions())


def test_a_store_that_is_overloaded_or_away_refuses_nothing(store, tmp_path: Path) -> None:
    assert status(tmp_path, look_for_store=True) == RuleStatus.PASS
    store.failing = True
    assert status(tmp_path, look_for_store=True) == RuleStatus.NOT_CHECKED
    store.close()
    assert status(tmp_path, look_for_store=True) == RuleStatus.NOT_CHECKED
