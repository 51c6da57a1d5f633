"""A checkpoint is copied to an object store while it is saved: whole or not at all, never at the cost of the save."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_cp

from nsa.errors import CheckpointError, StoreRefused
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.run_state import RunRecord
from nsa_train.checkpoint.save import HashingWriter
from nsa_train.checkpoint.save_plan import SharedSavePlanner
from nsa_train.checkpoint.transfer import CopyResult, S3Prefix, StoreCopy, pull

URL = "s3://models/team/run"


def save(folder: CheckpointFolder, step: int, copy: StoreCopy) -> Path:
    staging = folder.begin(step)
    staging.mkdir(parents=True)
    RunRecord(step, 1, {}, {}).write(staging)
    writer = HashingWriter(staging, copy=copy)
    dist_cp.save(
        {"model": {"w": torch.arange(9.0) + step}}, storage_writer=writer, planner=SharedSavePlanner(), no_dist=True
    )
    path = folder.commit(step, hashed=writer.hashes)
    writer.finish_copy(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "run/checkpoints")


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_the_copy_is_the_checkpoint(client, folder, tmp_path):
    saved = save(folder, 3, StoreCopy(URL, 3))
    before = content(saved)
    shutil.rmtree(folder.path)
    resumable = pull(URL, CheckpointFolder(tmp_path / "other/checkpoints"))
    assert (resumable.step, resumable.passed_over) == (3, ())
    assert content(resumable.path) == before


def test_leftovers_of_a_killed_copy_are_removed(client, folder, tmp_path):
    left = S3Prefix(f"{URL}/step3")
    (tmp_path / "x").write_text("x")
    left.upload(tmp_path / "x", "model_and_optim/__7_0.distcp")
    save(folder, 3, StoreCopy(URL, 3))
    assert "model_and_optim/__7_0.distcp" not in left.files()
    assert pull(URL, CheckpointFolder(tmp_path / "other")).step == 3


def test_a_committed_copy_is_not_touched(client, folder, caplog):
    first = content(save(folder, 3, StoreCopy(URL, 3)))
    shutil.rmtree(folder.path)
    (folder.path.parent / "x").mkdir()
    again = CheckpointFolder(folder.path)
    with caplog.at_level(logging.WARNING):
        staging = again.begin(3)
        staging.mkdir(parents=True)
        writer = HashingWriter(staging, copy=StoreCopy(URL, 3))
        dist_cp.save({"model": {"w": torch.zeros(5)}}, storage_writer=writer, planner=SharedSavePlanner(), no_dist=True)
        writer.finish_copy(again.commit(3, hashed=writer.hashes))
    assert "already holds a checkpoint" in caplog.text
    there = S3Prefix(f"{URL}/step3")
    assert {name: there.read_bytes(name, limit=1 << 20) for name in there.files()} == first
    assert again.find_resumable().step == 3


def test_a_failing_store_fails_the_copy_and_not_the_save(client, folder, caplog):
    with caplog.at_level(logging.WARNING):
        path = save(folder, 3, StoreCopy("s3://no-such-bucket/run", 3))
    assert folder.find_resumable().path == path
    assert "nsa checkpoint push" in caplog.text


class Flaky:
    """A client whose uploads stop after a number of files."""

    def __init__(self, client, uploads: int) -> None:
        self._client, self.left = client, uploads

    def __getattr__(self, name):
        return getattr(self._client, name)

    def upload_file(self, *arguments, **settings):
        from botocore.exceptions import EndpointConnectionError

        if self.left == 0:
            raise EndpointConnectionError(endpoint_url="it")
        self.left -= 1
        return self._client.upload_file(*arguments, **settings)


@pytest.mark.parametrize("uploads", [0, 1, 2])
def test_a_copy_cut_off_at_any_file_is_no_checkpoint(client, folder, tmp_path, uploads):
    save(folder, 2, StoreCopy(URL, 2))
    save(folder, 3, StoreCopy(URL, 3, Flaky(client, uploads)))
    assert "COMMIT.json" not in S3Prefix(f"{URL}/step3").files()
    assert pull(URL, CheckpointFolder(tmp_path / "other")).step == 2
    assert folder.find_resumable().step == 3


def test_a_file_of_another_rank_that_did_not_arrive_is_seen(client, folder):
    saved = save(folder, 3, StoreCopy("s3://models/elsewhere", 3))
    names = sorted(name for name in content(saved) if name != "COMMIT.json")
    copy = StoreCopy(URL, 3)
    assert copy.upload(saved, names[1:]) is None
    assert "did not arrive" in copy.finish(saved, names, []).failure
    assert not S3Prefix(f"{URL}/step3").has("COMMIT.json")
    assert copy.finish(saved, names[1:], []) == CopyResult(3, saved, f"{URL}/step3", None)
    assert S3Prefix(f"{URL}/step3").has("COMMIT.json")


def test_a_thousand_ranks_that_failed_are_one_short_reason(folder, tmp_path):
    result = StoreCopy(f"{URL}?endpoint=http://127.0.0.1:9", 3).finish(tmp_path, [], [f"file {i}" for i in range(1000)])
    assert result.address == f"{URL}/step3"
    assert result.failure == "file 0; file 1; file 10; and 997 more"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_PROFILE", "no-such-profile"),
        ("AWS_ENDPOINT_URL", "not an address"),
        ("AWS_SECRET_ACCESS_KEY", None),
        ("AWS_SESSION_TOKEN", "QWERTY\n"),
    ],
)
def test_a_client_that_cannot_be_created_fails_the_copy_and_is_refused(client, folder, monkeypatch, name, value):
    """boto3 finds some mistakes before the first request; nothing shows a credential."""
    with monkeypatch.context() as changed:
        changed.setattr("boto3.DEFAULT_SESSION", None)  # it remembers credentials
        changed.delenv(name, raising=False)
        if value is not None:
            changed.setenv(name, value)
        result = StoreCopy(URL, 3).finish(folder.path, [], [StoreCopy(URL, 3).upload(folder.path, [])])
        with pytest.raises(StoreRefused) as refused:
            S3Prefix(URL, patient=False).check_access()
    assert "cannot be used" in result.failure
    assert "QWERTY" not in result.failure
    assert "QWERTY" not in f"{refused.value} {refused.value.__cause__}"


def test_access_is_checked_with_one_request(client):
    S3Prefix(URL, patient=False).check_access()
    with pytest.raises(StoreRefused, match="NoSuchBucket"):
        S3Prefix("s3://no-such-bucket/run", patient=False).check_access()


def test_a_store_that_does_not_answer_has_not_refused(client):
    with pytest.raises(CheckpointError) as failure:
        S3Prefix(f"{URL}?endpoint=http://127.0.0.1:9", patient=False).check_access()
    assert not isinstance(failure.value, StoreRefused)
