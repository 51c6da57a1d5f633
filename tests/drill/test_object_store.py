"""The drill's object store, through the client that copies checkpoints."""

from pathlib import Path

import pytest

from nsa.checkpoint.transfer import S3Prefix
from nsa.drill.object_store import BUCKET, ObjectStore
from nsa.errors import CheckpointError

pytest.importorskip("boto3")


@pytest.fixture
def store(monkeypatch):
    made = ObjectStore()
    variables = {
        "ENDPOINT_URL": made.url,
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield made
    made.close()


def test_objects_are_listed_with_their_sizes_and_deleted(store, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    there = S3Prefix(f"s3://{BUCKET}/run").child("step10")
    there.upload(tmp_path / "file", "model/a b.distcp")
    assert there.put_if_absent("COMMIT.json", b"{}")
    assert not there.put_if_absent("COMMIT.json", b"[]"), "the first one stays"
    assert there.files() == {"COMMIT.json": 2, "model/a b.distcp": 5000}
    assert there.has("COMMIT.json")
    there.delete(["COMMIT.json"])
    assert not there.has("COMMIT.json")


def test_a_failing_store_changes_nothing_and_is_reported(store):
    there = S3Prefix(f"s3://{BUCKET}/run")
    store.failing = True
    with pytest.raises(CheckpointError, match="cannot be used"):
        there.put_if_absent("COMMIT.json", b"{}")
    store.failing = False
    assert there.files() == {}
