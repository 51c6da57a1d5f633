"""Checkpoints in an object store: whole copies of committed folders, `s3://bucket/path/step200/…`.

A store has no rename, so COMMIT.json is put last, and only if there is none yet: a prefix without it is no checkpoint,
however many objects lie there, and of two writers one is told. Credentials, region and endpoint are boto3's business
(AWS_ENDPOINT_URL and so on). A killed upload may leave parts that only a lifecycle rule of the bucket removes.

A store is not trusted: listings, names, sizes and what arrives are bounded, and nothing gets a name in the run folder
before it was read as it would be loaded.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from boto3.exceptions import Boto3Error  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from nsa.checkpoint import names
from nsa.checkpoint.folder import CheckpointFinding, CheckpointFolder, ResumableCheckpoint
from nsa.checkpoint.manifest import LARGEST_COMMIT_BYTES, CheckpointManifest, decode, examine
from nsa.checkpoint.store import CHUNK_BYTES, FolderStore
from nsa.errors import CheckpointError

_SCHEME = "s3://"
_MOST_OBJECTS = 200_000  # of a checkpoint of ten thousand ranks
_MOST_PAGES = 1_000
_MOST_TRIED = 50
GIB = 1 << 30


def connect() -> Any:
    """A client that gives up after a while, and that understands stores at a plain address."""
    patience = {"max_attempts": 5, "mode": "standard"}
    return boto3.client(
        "s3", config=Config(connect_timeout=5, read_timeout=60, retries=patience, s3={"addressing_style": "path"})
    )


class S3Checkpoint:
    """One checkpoint in a bucket."""

    def __init__(self, url: str, client: Any = None) -> None:
        bucket, _, path = url.removeprefix(_SCHEME).partition("/")
        if not url.startswith(_SCHEME) or not bucket or not path.strip("/"):
            raise CheckpointError(f"{url} is not a place in an object store. Write s3://BUCKET/PATH.")
        self._bucket, self._path = bucket, f"{path.strip('/')}/"
        self.client = client or connect()

    def __str__(self) -> str:
        return f"{_SCHEME}{self._bucket}/{self._path}".rstrip("/")

    def child(self, name: str) -> "S3Checkpoint":
        return S3Checkpoint(f"{self}/{name}", self.client)

    def files(self) -> dict[str, int]:
        found = self._list("Contents")
        return {item["Key"].removeprefix(self._path): item["Size"] for item in found}

    def folders(self) -> list[str]:
        found = self._list("CommonPrefixes", Delimiter="/")
        return [item["Prefix"].removeprefix(self._path).rstrip("/") for item in found]

    def _list(self, what: str, **how: str) -> list[dict[str, Any]]:
        """A store that lists without end is refused, not awaited."""
        found: list[dict[str, Any]] = []
        with _told(self):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._path, **how)
            for number, page in enumerate(pages, 1):
                found.extend(page.get(what, ()))
                if len(found) > _MOST_OBJECTS or number >= _MOST_PAGES:
                    raise CheckpointError(
                        f"{self} lists more than {_MOST_OBJECTS} objects, or in more than {_MOST_PAGES} pages: it is "
                        f"not the place of a checkpoint. Name the folder of a run's checkpoints."
                    )
        return found

    def chunks(self, name: str) -> Iterator[bytes]:
        with _told(self):
            body = self.client.get_object(Bucket=self._bucket, Key=self._path + name)["Body"]
            yield from body.iter_chunks(CHUNK_BYTES)

    def read(self, name: str, limit: int = LARGEST_COMMIT_BYTES) -> bytes:
        """A whole small object."""
        return b"".join(self.bounded(name, limit))

    def bounded(self, name: str, limit: int) -> Iterator[bytes]:
        """The content, refused as soon as there is more of it than `limit` bytes."""
        for chunk in self.chunks(name):
            limit -= len(chunk)
            if limit < 0:
                raise CheckpointError(f"{self}/{name} is longer than it was said to be")
            yield chunk

    def put_file(self, name: str, file: Path) -> None:
        with _told(self):
            self.client.upload_file(
                str(file), self._bucket, self._path + name, ExtraArgs={"ChecksumAlgorithm": "SHA256"}
            )

    def put_if_absent(self, name: str, content: bytes) -> None:
        try:
            self.client.put_object(Bucket=self._bucket, Key=self._path + name, Body=content, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise CheckpointError(f"{self} was committed by another writer meanwhile: theirs stays.") from error
            raise CheckpointError(f"{self} could not be committed: {error}.") from error
        except BotoCoreError as error:
            raise CheckpointError(f"{self} could not be committed: {error}.") from error

    def remove(self, names: list[str]) -> None:
        with _told(self):
            for name in names:
                self.client.delete_object(Bucket=self._bucket, Key=self._path + name)


def push(checkpoint: Path, checkpoints_url: str, *, key: bytes | None = None, client: Any = None) -> S3Checkpoint:
    """Copy a committed checkpoint into a store; done when COMMIT.json is there. Doing it twice does no harm."""
    step = names.step_of(checkpoint.resolve().name)
    manifest = examine(FolderStore(checkpoint), key=key, step=step).demand_good()
    commit = (checkpoint / names.COMMIT).read_bytes()
    there = S3Checkpoint(checkpoints_url, client).child(names.step_name(manifest.step))
    present = there.files()
    if names.COMMIT in present:
        if there.read(names.COMMIT) != commit:
            raise CheckpointError(f"{there} already holds another checkpoint. Remove it, or use another place.")
        examine(there, key=key, step=step, deep=False).demand_good()
        return there
    there.remove(sorted(present))  # what a killed copy left
    for name in manifest.files:
        there.put_file(name, checkpoint / name)
    if wrong := {name for name, size in there.files().items() if manifest.files[name].bytes != size}:
        raise CheckpointError(f"{there}: {', '.join(sorted(wrong))} did not arrive whole; nothing was committed.")
    there.put_if_absent(names.COMMIT, commit)
    return there


def pull(
    checkpoints_url: str,
    into: CheckpointFolder,
    *,
    key: bytes | None = None,
    client: Any = None,
    max_bytes: int | None = None,
) -> ResumableCheckpoint:
    """Copy the newest good checkpoint of a store into a run's folder, read there as it would be loaded.

    Bad ones are left where they are and reported. What the folder already has, good, is not copied again; another
    checkpoint of the same step, if good, is not replaced.
    """
    from nsa.checkpoint.load import demand_trustworthy

    store = S3Checkpoint(checkpoints_url, client)
    steps = sorted((step for name in store.folders() if (step := names.step_of(name)) is not None), reverse=True)
    passed_over: list[CheckpointFinding] = []
    for step in steps[:_MOST_TRIED]:
        there = store.child(names.step_name(step))
        try:
            manifest = examine(there, key=key, step=step, deep=False).demand_good()
            commit = there.read(names.COMMIT)
            if decode(commit, key) != manifest:
                raise CheckpointError(f"{names.COMMIT} changed while it was read")
            if _has(into, step, commit):
                return ResumableCheckpoint(step, into.step_path(step), tuple(passed_over))
            _require_room(manifest, into.path, max_bytes)
            staging = into.begin(step)
            for name, entry in manifest.files.items():
                _copy(there, name, staging / name, entry.bytes)
            (staging / names.COMMIT).write_bytes(commit)
            adopted = into.adopt(step, lambda path: demand_trustworthy(path, key=key))
            return ResumableCheckpoint(step, adopted, tuple(passed_over))
        except CheckpointError as error:
            into.abandon(step)
            passed_over.append(CheckpointFinding(str(there), (str(error),)))
        except OSError as error:  # this machine's fault: an older checkpoint would not fare better
            into.abandon(step)
            raise CheckpointError(f"{there} could not be copied to {into.path}: {error}.") from error
    return ResumableCheckpoint(None, None, tuple(passed_over))


def _has(into: CheckpointFolder, step: int, commit: bytes) -> bool:
    """Whether the folder has this very checkpoint; raises if it has another good one of the same step."""
    if not into.step_path(step).exists() or not into.examine(step).good:
        return False
    if (into.step_path(step) / names.COMMIT).read_bytes() != commit:
        raise CheckpointError(f"{into.step_path(step)} is another good checkpoint of step {step}: it is not replaced")
    return True


def _require_room(manifest: CheckpointManifest, folder: Path, max_bytes: int | None) -> None:
    """Only names that a checkpoint has, and no more bytes than there is room for."""
    for name in manifest.files:
        if not names.is_known_file(name):
            raise CheckpointError(f"{name!r} is no file that a checkpoint has")
    if max_bytes is not None and manifest.bytes > max_bytes:
        raise CheckpointError(f"it has {manifest.bytes / GIB:.1f} GiB, more than the {max_bytes / GIB:.1f} GiB allowed")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if manifest.bytes > free:
        raise CheckpointError(f"it has {manifest.bytes / GIB:.1f} GiB, but {folder} has {free / GIB:.1f} GiB free")


def _copy(there: S3Checkpoint, name: str, file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for chunk in there.bounded(name, size):
            out.write(chunk)


@contextmanager
def _told(where: S3Checkpoint) -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise CheckpointError(f"{where} cannot be used: {error}.") from error
