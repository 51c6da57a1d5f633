"""Prepare from and to S3, and train from it, over real HTTP on the loopback interface.

The quick tests use moto's server, which accepts any secret; a nightly one runs Ceph's own gateway.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.errors import DataError
from nsa_train.data.prefetcher import BatchPrefetcher
from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare
from nsa_train.data.rows.specs import PreparedData
from nsa_train.data.shards.manifest import read_manifest, verify_set
from nsa_train.storage import StorageFolder

BUCKET = "corpus"
SETTINGS = {"held_out_fraction": 0.1, "units_per_task": 2, "shard_tokens": 20_000}


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    _login(patch, "key", "secret")
    yield f"http://{host}:{port}"
    patch.undo()
    server.stop()


def _login(patch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", key)
    patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def _url(endpoint: str, prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1"


def _client(endpoint: str):
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")


def _upload_corpus(endpoint: str, folder: Path) -> None:
    """Upload the documents as parquet under src/ and as JSON lines under lines/."""
    client = _client(endpoint)
    client.create_bucket(Bucket=BUCKET)
    for f in range(2):
        texts = [f"document {f}-{i} " * (1 + i % 40) for i in range(160)]
        ids = [f"{f}-{i}" for i in range(160)]
        path = folder / f"{f}.parquet"
        pq.write_table(pa.table({"text": texts, "id": ids}), path, row_group_size=40, write_page_checksum=True)
        client.upload_file(str(path), BUCKET, f"src/{f}.parquet")
        lines = "\n".join(json.dumps({"id": i, "text": t}) for i, t in zip(ids, texts, strict=True))
        client.put_object(Bucket=BUCKET, Key=f"lines/{f}.jsonl", Body=lines.encode())


def _fill(endpoint: str, folder: Path) -> None:
    """Upload a corpus and prepare it, from the store to the store."""
    (folder / "src").mkdir()
    _upload_corpus(endpoint, folder / "src")
    scratch = folder / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr(tempfile, "tempdir", None)
        prepare(make_plan(_url(endpoint, "src"), "byte", **SETTINGS), _url(endpoint, "out"), workers=2)
    assert not list(scratch.glob("nsa-*"))  # nothing is left behind


def _check(endpoint: str, folder: Path, tmp_path: Path) -> None:
    local = prepare(make_plan(str(folder / "src"), "byte", **SETTINGS), str(tmp_path / "local"), workers=1)
    out = _url(endpoint, "out")
    remote = read_manifest(StorageFolder(out))
    assert remote.splits == local.splits  # the same shards, hash by hash
    assert remote.totals("train")["documents"] > 250
    listed = _client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix="out/")["Contents"]
    assert not [entry["Key"] for entry in listed if "_work/" in entry["Key"]]

    again = prepare(make_plan(_url(endpoint, "src"), "byte", **SETTINGS), out, workers=1)
    assert again.fingerprint == remote.fingerprint
    assert list(verify_set(StorageFolder(out), remote)) == []

    here = PreparedData(str(tmp_path / "local"), seq_len=128, seed=1).open()
    there = PreparedData(out, seq_len=128, seed=1, cache_path=str(tmp_path / "cache"))
    with BatchPrefetcher(there, global_rows=4) as prefetcher:
        for _ in range(60):
            assert np.array_equal(next(prefetcher).tokens, here.next_batch(4).tokens)
    assert list((tmp_path / "cache").glob("*.tok"))


@pytest.fixture(scope="module")
def filled(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    _fill(store, folder)
    return folder


def test_prepare_and_read_through_s3(store: str, filled: Path, tmp_path: Path) -> None:
    _check(store, filled, tmp_path)


def test_json_lines_in_a_store_give_the_same_documents(store: str, filled: Path, tmp_path: Path) -> None:
    plan = make_plan(_url(store, "lines"), "byte", **SETTINGS)
    manifest = prepare(plan, str(tmp_path / "lines"), workers=1)
    of_parquet = read_manifest(StorageFolder(_url(store, "out")))
    assert manifest.totals("train")["tokens"] == of_parquet.totals("train")["tokens"]


def test_starting_from_a_set_in_a_store_lists_nothing(
    store: str, filled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A listing of a set of 15 trillion tokens would be dozens of pages, for each of a thousand ranks."""
    data = PreparedData(_url(store, "out"), seq_len=64, cache_path=str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO, logger="werkzeug"):
        rows = data.open()
        requests = [record.getMessage() for record in caplog.records if "/corpus" in record.getMessage()]
        assert any("manifest.json" in request for request in requests)
        rows.next_batch(2)
    requests = [record.getMessage() for record in caplog.records if "/corpus" in record.getMessage()]
    assert any(".tok" in request for request in requests)
    assert not [request for request in requests if "list-type" in request or "prefix=" in request]


def test_a_damaged_object_is_refused(store: str, filled: Path, tmp_path: Path) -> None:
    client = _client(store)
    manifest = read_manifest(StorageFolder(_url(store, "out")))
    name = manifest.splits["train"][0].files()[0][0]
    raw = client.get_object(Bucket=BUCKET, Key=f"out/{name}")["Body"].read()
    client.put_object(Bucket=BUCKET, Key=f"out/{name}", Body=raw[:-1] + bytes([raw[-1] ^ 1]))
    try:
        data = PreparedData(_url(store, "out"), seq_len=64, shuffle=False, cache_path=str(tmp_path / "cache"))
        with pytest.raises(DataError):
            data.open().next_batch(1)
    finally:
        client.put_object(Bucket=BUCKET, Key=f"out/{name}", Body=raw)


def test_a_missing_bucket_or_server_is_named(store: str) -> None:
    with pytest.raises(DataError, match="no-such-bucket"):
        read_manifest(StorageFolder(f"s3://no-such-bucket/x?endpoint={store}&region=us-east-1"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_prepare_and_read_through_ceph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs root and Debian's archive: the helper installs Ceph with apt and runs it on the loopback interface."""
    helper = Path(__file__).with_name("ceph_store.sh")
    if os.geteuid() != 0 or not Path("/usr/bin/apt-get").exists():
        pytest.skip("installing Ceph needs root and apt")
    work = tmp_path / "ceph"
    try:
        done = subprocess.run(["bash", str(helper), "start", str(work)], stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        _login(monkeypatch, answer["access_key"], answer["secret_key"])
        _fill(answer["endpoint"], tmp_path)
        _check(answer["endpoint"], tmp_path, tmp_path)
        # A real store checks signatures, which moto does not. The S3 client reads the secret once per process.
        wrong = os.environ | {"AWS_SECRET_ACCESS_KEY": "wrong"}
        command = [sys.executable, "-m", "nsa_train.cli", "data", "verify", _url(answer["endpoint"], "out")]
        refused = subprocess.run(command, env=wrong, capture_output=True, text=True)
        assert refused.returncode == 21, refused.stderr
        assert "Traceback" not in refused.stderr
    finally:
        subprocess.run(["bash", str(helper), "stop", str(work)], check=False)
