"""push and pull: a checkpoint in an object store exists only once its COMMIT.json does; hostile stores are bounded."""

import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

boto3 = pytest.importorskip("boto3")
server_module = pytest.importorskip("moto.server")

from botocore.config import Config  # noqa: E402

from nsa.errors import CheckpointError, ConfigError  # noqa: E402
from nsa_train.checkpoint import transfer  # noqa: E402
from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy  # noqa: E402
from nsa_train.checkpoint.manifest import (  # noqa: E402
    CHUNK_BYTES,
    CheckpointManifest,
    LocalFiles,
    ManifestEntry,
    build_manifest,
    encode,
)
from nsa_train.checkpoint.run_state import RunRecord  # noqa: E402
from nsa_train.checkpoint.transfer import S3Prefix, pull, push  # noqa: E402

KEY = b"k" * 32
NAMES = ["model_and_optim/.metadata", "model_and_optim/__0_0.distcp", "state.json"]


URL = "s3://models/team/run"


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "run/checkpoints")
    for step in (1, 2):
        save(checkpoints, step)
    return checkpoints


def save(folder: CheckpointFolder, step: int, value: float = 0.0) -> None:
    staging = folder.begin(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({"model": {"w": torch.full((9,), step + value)}}, checkpoint_id=staging / "model_and_optim")
    RunRecord(step, 1, {}, {}).write(staging)
    folder.commit(step)


@pytest.fixture
def other(tmp_path):
    """A run folder on another machine."""
    return CheckpointFolder(tmp_path / "other/checkpoints")


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_pushed_checkpoint_is_pulled_unchanged(client, folder, other):
    for step in (1, 2):
        assert str(push(folder.step_path(step), URL)) == f"{URL}/step{step}"
    pulled = pull(URL, other)
    assert (pulled.step, pulled.passed_over) == (2, ())
    assert content(pulled.path) == content(folder.step_path(2))
    assert (other.latest(), other.find_resumable().step) == (2, 2)


def test_a_second_push_or_pull_changes_nothing(client, folder, other):
    push(folder.step_path(1), URL)
    push(folder.step_path(1), URL)
    pull(URL, other)
    before = (other.step_path(1) / "COMMIT.json").stat().st_ino
    pull(URL, other)
    assert (other.step_path(1) / "COMMIT.json").stat().st_ino == before


class Dying:
    """A client whose process dies after so many writes."""

    def __init__(self, client, writes: int) -> None:
        self._client, self._left = client, writes

    def __getattr__(self, name):
        attribute = getattr(self._client, name)
        return self._counted(attribute) if name in ("upload_file", "put_object") else attribute

    def _counted(self, call):
        def write(*args, **kwargs):
            if not self._left:
                raise KeyboardInterrupt
            self._left -= 1
            return call(*args, **kwargs)

        return write


@pytest.mark.parametrize("writes", range(len(NAMES) + 1))
def test_a_push_killed_at_any_write_leaves_no_checkpoint(client, folder, other, writes):
    push(folder.step_path(1), URL)
    with pytest.raises(KeyboardInterrupt):
        push(folder.step_path(2), URL, client=Dying(client, writes))
    pulled = pull(URL, other)
    assert pulled.step == 1
    if writes:
        assert "COMMIT.json is missing" in str(pulled.passed_over[0])
    client.put_object(Bucket="models", Key="team/run/step2/stray", Body=b"left by a killed copy")
    push(folder.step_path(2), URL)
    assert pull(URL, other).step == 2


def damage(client, name: str, body: bytes | None) -> None:
    key = f"team/run/step2/{name}"
    if body is None:
        client.delete_object(Bucket="models", Key=key)
    else:
        client.put_object(Bucket="models", Key=key, Body=body)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (NAMES[1], lambda old: old[:-1], " bytes, not "),
        (NAMES[1], lambda old: b"X" + old[1:], "does not match its SHA-256"),
        (NAMES[2], lambda old: None, "state.json is missing"),
        ("stray.pt", lambda old: b"x", "stray.pt is not listed"),
        ("COMMIT.json", lambda old: old[:50], "COMMIT.json is damaged"),
        ("COMMIT.json", lambda old: None, "COMMIT.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_pulled(client, folder, other, name, change, said):
    for step in (1, 2):
        push(folder.step_path(step), URL)
    file = folder.step_path(2) / name
    damage(client, name, change(file.read_bytes() if file.exists() else b""))
    pulled = pull(URL, other)
    assert pulled.step == 1
    assert f"{URL}/step2" in str(pulled.passed_over[0])
    assert said in str(pulled.passed_over[0])
    assert other.steps() == [1]
    assert [path.name for path in other.path.iterdir() if path.name.startswith(".")] == []


def test_a_committed_checkpoint_is_never_overwritten(client, folder):
    push(folder.step_path(2), URL)
    save(folder, 2, 0.5)
    with pytest.raises(CheckpointError):
        push(folder.step_path(2), URL)


def test_the_second_of_two_writers_is_refused(client):
    place = S3Prefix(f"{URL}/step9", client)
    assert place.put_if_absent("COMMIT.json", b"first")
    assert not place.put_if_absent("COMMIT.json", b"second")
    assert place.read_bytes("COMMIT.json", limit=5) == b"first"


def test_a_checkpoint_that_another_writer_committed_meanwhile_stays(client, folder):
    class Late(Dying):
        """Another writer commits between our last look and our own commit."""

        def put_object(self, **put):
            client.put_object(Bucket=put["Bucket"], Key=put["Key"], Body=b"theirs")
            return client.put_object(**put)

    with pytest.raises(CheckpointError, match="another writer"):
        push(folder.step_path(1), URL, client=Late(client, 99))
    assert S3Prefix(f"{URL}/step1", client).read_bytes("COMMIT.json", limit=9) == b"theirs"


def test_a_key_refuses_what_it_did_not_sign(client, tmp_path, other):
    signed = CheckpointFolder(tmp_path / "signed", key=KEY)
    save(signed, 1)
    save(CheckpointFolder(tmp_path / "plain"), 2)
    push(tmp_path / "signed/step1", URL, key=KEY)
    push(tmp_path / "plain/step2", URL)
    pulled = pull(URL, other, key=KEY)
    assert pulled.step == 1
    assert "not signed" in str(pulled.passed_over[0])


def test_a_damaged_local_checkpoint_is_not_pushed(client, folder):
    (folder.step_path(2) / NAMES[1]).write_bytes(b"x")
    with pytest.raises(CheckpointError):
        push(folder.step_path(2), URL)
    assert S3Prefix(URL, client).folders() == []


def test_names_that_leave_the_folder_are_refused(client, folder, other):
    from nsa_train.checkpoint.manifest import decode

    for name in ("../x", "/etc/x", "a/../../x", "a//b", "./a", "a/", ""):
        with pytest.raises(CheckpointError):
            decode(encode(CheckpointManifest(1, "now", {name: ManifestEntry(0, ())})))
    for names in (("a", "a/b"), ("COMMIT.json",)):
        with pytest.raises(CheckpointError):
            decode(encode(CheckpointManifest(1, "now", {name: ManifestEntry(0, ()) for name in names})))


def test_invalid_addresses_and_missing_buckets_are_refused(client, folder, other):
    for url in ("models/run", "s3://", "s3://models"):
        with pytest.raises(CheckpointError):
            S3Prefix(url)
    with pytest.raises(CheckpointError):
        push(folder.step_path(1), "s3://nobody/run")
    assert pull(URL, other).step is None


def test_an_address_names_its_endpoint_and_region(client, server, folder, other):
    url = f"{URL}?endpoint={server}&region=us-east-1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert str(push(folder.step_path(1), url)) == f"{URL}/step1"
        assert pull(url, other).step == 1


@pytest.mark.parametrize("url", ["s3://me:secret@models/run", f"{URL}?endpoint=host:9", f"{URL}?secret=x"])
def test_credentials_and_unknown_options_in_an_address_are_refused(url, folder):
    with pytest.raises(ConfigError) as refused:
        push(folder.step_path(1), url)
    assert "me:secret" not in str(refused.value)


def test_a_store_that_does_not_answer_is_reported(client, folder):
    impatient = Config(retries={"max_attempts": 0}, connect_timeout=1)
    gone = boto3.client("s3", endpoint_url="http://127.0.0.1:9", config=impatient)
    with pytest.raises(CheckpointError):
        push(folder.step_path(1), URL, client=gone)


def test_the_commands(client, folder, tmp_path):
    from typer.testing import CliRunner

    from nsa_train.cli.checkpoint import app

    run = CliRunner()
    assert run.invoke(app, ["push", str(folder.path / "latest"), URL]).stdout == f"wrote {URL}/step2\n"
    there = tmp_path / "there"
    assert run.invoke(app, ["pull", URL, str(there)]).stdout == f"wrote {there}/checkpoints/step2\n"
    assert isinstance(run.invoke(app, ["pull", "s3://models/nothing", str(there)]).exception, CheckpointError)
    assert run.invoke(app, ["pull", "--allow-empty", "s3://models/nothing", str(there)]).exit_code == 0
    client.put_object(Bucket="models", Key="team/run/step2/COMMIT.json", Body=b"{}")
    damaged = run.invoke(app, ["pull", "--allow-empty", URL, str(tmp_path / "other")])
    assert isinstance(damaged.exception, CheckpointError)


def hostile(folder: CheckpointFolder, step: int, change) -> None:
    """A checkpoint whose manifest fits, changed by whoever can write it."""
    path = folder.step_path(step)
    change(path)
    (path / "COMMIT.json").unlink()
    (path / "COMMIT.json").write_bytes(encode(build_manifest(LocalFiles(path), step, "now")))


def plant_code(path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {path.parent}/canary",)

    (path / NAMES[0]).write_bytes(pickle.dumps(Bomb()))


def plant_a_file(path: Path) -> None:
    (path / "sitecustomize.py").write_text("")


def plant_in_a_rank_file(path: Path) -> None:
    (path / "train").mkdir()
    (path / "train/rank0.pt").write_bytes(b"no archive")


@pytest.mark.parametrize("change", [plant_code, plant_a_file, plant_in_a_rank_file])
def test_what_would_not_load_never_reaches_the_run_folder(client, folder, other, change):
    """A checkpoint with a fitting manifest was accepted as the newest, and every later resume found it and failed."""
    push(folder.step_path(1), URL)
    hostile(folder, 2, change)
    push(folder.step_path(2), URL)
    pulled = pull(URL, other)
    assert (pulled.step, other.steps(), len(pulled.passed_over)) == (1, [1], 1)
    assert not (folder.path / "canary").exists()
    assert [path.name for path in other.path.iterdir() if path.name.startswith(".")] == []


def test_a_pull_removes_and_replaces_nothing(client, folder, tmp_path):
    """Checkpoints saved here stay, whatever a store offers."""
    here = CheckpointFolder(tmp_path / "here", retention=RetentionPolicy(keep_last=1))
    save(here, 2, 0.5)
    before = content(here.step_path(2))
    push(folder.step_path(2), URL)
    pulled = pull(URL, here)
    assert pulled.step is None
    assert "is not replaced" in str(pulled.passed_over[0])
    save(folder, 9)
    push(folder.step_path(9), URL)
    assert pull(URL, here).step == 9
    assert here.steps() == [2, 9]
    assert content(here.step_path(2)) == before


class Stretching:
    """A store that sends more than it listed, or lists without end."""

    def __init__(self, client, *, more: int = 0, pages: bool = False) -> None:
        self._client, self._more, self._pages = client, more, pages
        self.sent = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def get_object(self, Bucket, Key):
        answer = self._client.get_object(Bucket=Bucket, Key=Key)
        if self._more and Key.endswith(".distcp"):
            answer["Body"] = self
        return answer

    def iter_chunks(self, size):
        for _ in range(self._more):
            self.sent += size
            yield bytes(size)

    def get_paginator(self, name):
        return self if self._pages else self._client.get_paginator(name)

    def paginate(self, **_):
        while True:
            self.sent += 1
            yield {"Contents": [], "CommonPrefixes": []}


def test_more_than_was_listed_is_not_downloaded(client, folder, other):
    push(folder.step_path(2), URL)
    store = Stretching(client, more=100)
    pulled = pull(URL, other, client=store)
    assert pulled.step is None
    assert "longer than its listed size" in str(pulled.passed_over[0])
    assert store.sent <= 2 * CHUNK_BYTES
    assert other.steps() == []


def test_an_endless_listing_ends(client, other):
    with pytest.raises(CheckpointError, match=str(transfer._MAX_PAGES)):
        pull(URL, other, client=Stretching(client, pages=True))


def test_what_is_too_large_is_refused_before_it_is_downloaded(client, folder, other):
    push(folder.step_path(2), URL)
    pulled = pull(URL, other, max_bytes=100)
    assert pulled.step is None
    assert "more than the" in str(pulled.passed_over[0])
    huge = {NAMES[1]: ManifestEntry(1 << 60, ("0" * 64,) * 3)}
    with pytest.raises(CheckpointError):  # a size that does not go with its hashes
        encode_and_decode(CheckpointManifest(2, "now", huge))
    with pytest.raises(CheckpointError, match="free"):
        transfer._require_room(CheckpointManifest(2, "now", huge), other.path, None)


def encode_and_decode(manifest: CheckpointManifest) -> CheckpointManifest:
    from nsa_train.checkpoint.manifest import decode

    return decode(encode(manifest))


def test_a_manifest_that_is_too_large_is_not_read(client, folder, other, monkeypatch):
    from nsa_train.checkpoint import manifest

    push(folder.step_path(2), URL)
    monkeypatch.setattr(manifest, "LARGEST_COMMIT_BYTES", 100)
    pulled = pull(URL, other)
    assert pulled.step is None
    assert "more than the 100 allowed" in str(pulled.passed_over[0])
