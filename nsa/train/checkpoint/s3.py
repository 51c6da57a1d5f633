"""Checkpoints in an object store: whole copies of committed folders, `s3://bucket/path/step200/…`.

A store has no rename, so COMMIT.json is put last, and only if there is none yet: a prefix without it is no checkpoint,
however many objects lie there, and of two writers one is told. Credentials, region and endpoint are boto3's business
(AWS_ENDPOINT_URL and so on). A killed upload may leave parts that only a lifecycle rule of the bucket removes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from boto3.exceptions import Boto3Error  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

from nsa.errors import CheckpointError
from nsa.train.checkpoint import layout
from nsa.train.checkpoint.folder import CheckpointFolder, Finding, Resumable
from nsa.train.checkpoint.manifest import decode, examine
from nsa.train.checkpoint.store import CHUNK_BYTES, Folder

_SCHEME = "s3://"


def connect() -> Any:
    """A client that gives up after a while, and that understands stores at a plain address."""
    patience = {"max_attempts": 5, "mode": "standard"}
    return boto3.client(
        "s3", config=Config(connect_timeout=5, read_timeout=60, retries=patience, s3={"addressing_style": "path"})
    )


class Prefix:
    """One checkpoint in a bucket."""

    def __init__(self, url: str, client: Any = None) -> None:
        bucket, _, path = url.removeprefix(_SCHEME).partition("/")
        if not url.startswith(_SCHEME) or not bucket or not path.strip("/"):
            raise CheckpointError(f"{url} is not a place in an object store. Write s3://BUCKET/PATH.")
        self._bucket, self._path = bucket, f"{path.strip('/')}/"
        self.client = client or connect()

    def __str__(self) -> str:
        return f"{_SCHEME}{self._bucket}/{self._path}".rstrip("/")

    def child(self, name: str) -> "Prefix":
        return Prefix(f"{self}/{name}", self.client)

    def files(self) -> dict[str, int]:
        with _told(self):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._path)
            found = [item for page in pages for item in page.get("Contents", ())]
        return {item["Key"].removeprefix(self._path): item["Size"] for item in found}

    def folders(self) -> list[str]:
        with _told(self):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._path, Delimiter="/"
            )
            found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [prefix.removeprefix(self._path).rstrip("/") for prefix in found]

    def chunks(self, name: str) -> Iterator[bytes]:
        with _told(self):
            body = self.client.get_object(Bucket=self._bucket, Key=self._path + name)["Body"]
            yield from body.iter_chunks(CHUNK_BYTES)

    def read(self, name: str) -> bytes:
        return b"".join(self.chunks(name))

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


def push(checkpoint: Path, checkpoints_url: str, *, key: bytes | None = None, client: Any = None) -> Prefix:
    """Copy a committed checkpoint into a store; done when COMMIT.json is there. Doing it twice does no harm."""
    step = layout.step_of(checkpoint.resolve().name)
    manifest = examine(Folder(checkpoint), key=key, step=step).demand_good()
    commit = (checkpoint / layout.COMMIT).read_bytes()
    there = Prefix(checkpoints_url, client).child(layout.step_name(manifest.step))
    present = there.files()
    if layout.COMMIT in present:
        if there.read(layout.COMMIT) != commit:
            raise CheckpointError(f"{there} already holds another checkpoint. Remove it, or use another place.")
        examine(there, key=key, step=step, deep=False).demand_good()
        return there
    there.remove(sorted(present))  # what a killed copy left
    for name in manifest.files:
        there.put_file(name, checkpoint / name)
    if wrong := {name for name, size in there.files().items() if manifest.files[name].bytes != size}:
        raise CheckpointError(f"{there}: {', '.join(sorted(wrong))} did not arrive whole; nothing was committed.")
    there.put_if_absent(layout.COMMIT, commit)
    return there


def pull(checkpoints_url: str, into: CheckpointFolder, *, key: bytes | None = None, client: Any = None) -> Resumable:
    """Copy the newest good checkpoint of a store into a run's folder, verified after it has arrived.

    Bad ones are left where they are and reported. What the folder already has, good, is not copied again.
    """
    store = Prefix(checkpoints_url, client)
    steps = sorted((step for name in store.folders() if (step := layout.step_of(name)) is not None), reverse=True)
    passed_over: list[Finding] = []
    for step in steps:
        there = store.child(layout.step_name(step))
        quick = examine(there, key=key, step=step, deep=False)
        problems = quick.problems
        if not problems and quick.manifest is not None:
            try:
                commit = there.read(layout.COMMIT)
                decode(commit, key)
                if _has(into, step, commit):
                    return Resumable(step, into.step_path(step), tuple(passed_over))
                staging = into.begin(step)
                for name in (*quick.manifest.files, layout.COMMIT):
                    _copy(there, name, staging / name)
                return Resumable(step, into.adopt(step), tuple(passed_over))
            except CheckpointError as error:
                into.abandon(step)
                problems = (str(error),)
            except OSError as error:  # this machine's fault: an older checkpoint would not fare better
                into.abandon(step)
                raise CheckpointError(f"{there} could not be copied to {into.path}: {error}.") from error
        passed_over.append(Finding(str(there), problems))
    return Resumable(None, None, tuple(passed_over))


def _has(into: CheckpointFolder, step: int, commit: bytes) -> bool:
    here = into.step_path(step) / layout.COMMIT
    return here.is_file() and here.read_bytes() == commit and into.examine(step).good


def _copy(there: Prefix, name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for chunk in there.chunks(name):
            out.write(chunk)


@contextmanager
def _told(where: Prefix) -> Iterator[None]:
    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error) as error:
        raise CheckpointError(f"{where} cannot be used: {error}.") from error
