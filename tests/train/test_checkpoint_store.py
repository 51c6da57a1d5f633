"""A run of two ranks whose folder is lost continues elsewhere from its copies in an object store, bit for bit."""

from pathlib import Path

import pytest
import torch

from nsa.checkpoint.folder import CheckpointFolder
from nsa.checkpoint.transfer import S3Prefix, pull
from tests.checkpoint.conftest import client, server  # noqa: F401 - fixtures
from tests.train.runs import Job, run_all

URL = "s3://models/run"
CHANGES = ["train.steps=8", "train.save_every=4", "parallel.data=fsdp", f"train.checkpoint_store={URL}"]


@pytest.mark.slow  # two runs of two ranks; the copy itself is tests/checkpoint/test_store_copy.py
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
