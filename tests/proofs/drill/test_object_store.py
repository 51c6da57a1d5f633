"""The drill's object store, through the client that copies checkpoints."""

import gc
from pathlib import Path

import pytest

from nsa.errors import CheckpointError, StoreRefused
from nsa_train.checkpoint.transfer import S3Prefix
from proofs.drill.object_store import BUCKET, ObjectStore
from proofs.drill.request_signature import is_signed_with

pytest.importorskip("boto3")


@pytest.fixture
def store(monkeypatch):
    object_store = ObjectStore()
    variables = {
        "ENDPOINT_URL": object_store.url,
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    yield object_store
    object_store.close()


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


def test_a_request_that_was_signed_with_another_secret_is_refused_and_changes_nothing(store, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    there = S3Prefix(f"s3://{BUCKET}/run").child("step10")
    store.secret = "b"
    there.upload(tmp_path / "file", "model/a b+c.distcp")
    assert there.put_if_absent("COMMIT.json", b"{}")
    before = there.files()
    assert before == {"COMMIT.json": 2, "model/a b+c.distcp": 5000}
    store.secret = "another"
    with pytest.raises(StoreRefused, match="SignatureDoesNotMatch"):
        there.check_access()
    for act in (
        lambda: there.upload(tmp_path / "file", "more"),
        lambda: there.put_if_absent("other", b"{}"),
        lambda: there.has("COMMIT.json"),
        lambda: there.delete(["COMMIT.json"]),
    ):
        with pytest.raises(CheckpointError):
            act()
    store.secret = "b"
    assert there.files() == before


def test_credentials_are_read_again_for_every_client(store, monkeypatch):
    store.secret = "b"
    S3Prefix(f"s3://{BUCKET}/run").check_access()
    store.secret = "renewed"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "renewed")
    S3Prefix(f"s3://{BUCKET}/run").check_access()


def test_a_credentials_file_that_was_written_again_is_read_again(store, monkeypatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for store.secret in ("b", "renewed"):
        file.write_text(f"[default]\naws_access_key_id = a\naws_secret_access_key = {store.secret}\n")
        S3Prefix(f"s3://{BUCKET}/run").check_access()


def test_a_client_per_checkpoint_takes_little_memory(store):
    """Training collects garbage every 1,000 steps; a session per client is 10,000 objects of 12 MB."""
    S3Prefix(f"s3://{BUCKET}/run")
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(10):
            S3Prefix(f"s3://{BUCKET}/run")
        assert len(gc.get_objects()) - before < 10 * 3000
    finally:
        gc.enable()


def test_the_signature_of_amazons_documentation_is_accepted():
    """The example GET of an object's first bytes in "Authenticating Requests: Using the Authorization Header"."""
    headers = {
        "Host": "examplebucket.s3.amazonaws.com",
        "Range": "bytes=0-9",
        "x-amz-date": "20130524T000000Z",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "Authorization": "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    }
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # Amazon's own example, no secret of anybody
    assert is_signed_with(secret, "GET", "/test.txt", headers)
    assert not is_signed_with(secret[:-1], "GET", "/test.txt", headers)
    assert not is_signed_with(secret, "GET", "/other.txt", headers)
    assert not is_signed_with(secret, "GET", "/test.txt", headers | {"Range": "bytes=0-8"})
