"""Copies checkpoints to and from an object store, also while they are saved: `s3://bucket/path/step200/…`.

An object store has no rename, so COMMIT.json is written last, and only if there is none yet: a prefix without it is not
a checkpoint, however many objects it has, and of two writers the second gets an error. A killed upload may leave parts
that only a lifecycle rule of the bucket removes.

The store is not trusted: listings, names, sizes and received bytes are bounded, and nothing gets a name in the run
folder before it was read the way it would be loaded.
"""

import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nsa.errors import CheckpointError, StoreRefused
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFinding, CheckpointFolder, ResumableCheckpoint
from nsa_train.checkpoint.manifest import (
    CHUNK_BYTES,
    LARGEST_COMMIT_BYTES,
    CheckpointManifest,
    LocalFiles,
    decode,
    examine,
)
from nsa_train.storage import StorageAddress, boto3_client

_log = logging.getLogger(__name__)

_MAX_TRIED = 50
_MOST_SHOWN = 3
"""Reasons and files shown of a copy that failed: there may be thousands."""
_MAX_OBJECTS = 200_000  # of a checkpoint of ten thousand ranks
_MAX_PAGES = 1_000
_MAY_PASS = (408, 429)  # status codes of requests that may succeed later
_MAY_PASS_CODES = ("RequestTimeout",)  # which S3 sends with status 400
_HEADER_VALUE = re.compile(r"Invalid header value .*", re.DOTALL)
"""The HTTP client quotes the header: an access key or a session token with a line break in it."""
_NOT_SHOWN = "a credential holds a character that HTTP does not allow, such as a line break (it is not shown)"
GIB = 1 << 30


class S3Prefix:
    """The objects below a prefix of a bucket, through boto3. What the store refuses is raised as CheckpointError."""

    def __init__(self, url: str, client: Any = None, *, patient: bool = True) -> None:
        """patient: whether a new client repeats failed requests."""
        address = StorageAddress.parse(url)
        path = address.path.strip("/")
        if address.scheme != "s3" or not address.bucket or not path:
            raise CheckpointError(f"{url} is not a place in an object store. Write s3://BUCKET/PATH.")
        self._address = replace(address, path=path)
        self._bucket, self._root = address.bucket, f"{path}/"
        with _explained(self):
            try:
                self.client = client or boto3_client(self._address, patient=patient)
            except ValueError as error:  # of an address that is no address
                raise StoreRefused(f"{self} cannot be used: {error}. Correct AWS_ENDPOINT_URL.") from error

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._address.path}"

    def child(self, name: str) -> "S3Prefix":
        return S3Prefix(f"{self}/{name}", self.client)

    def check_access(self) -> None:
        """List one object at most. Raises StoreRefused if the store refuses, CheckpointError if it did not answer."""
        with _explained(self):
            self.client.list_objects_v2(Bucket=self._bucket, Prefix=self._root, MaxKeys=1)

    def files(self) -> dict[str, int]:
        objects = self._list("Contents")
        return {item["Key"].removeprefix(self._root): item["Size"] for item in objects}

    def folders(self) -> list[str]:
        prefixes = self._list("CommonPrefixes", Delimiter="/")
        return [item["Prefix"].removeprefix(self._root).rstrip("/") for item in prefixes]

    def _list(self, what: str, **how: str) -> list[dict[str, Any]]:
        """A store that lists without end is refused."""
        entries: list[dict[str, Any]] = []
        with _explained(self):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._root, **how)
            for number, page in enumerate(pages, 1):
                entries.extend(page.get(what, ()))
                if len(entries) > _MAX_OBJECTS or number >= _MAX_PAGES:
                    raise CheckpointError(
                        f"{self} lists more than {_MAX_OBJECTS} objects, or in more than {_MAX_PAGES} pages: it is "
                        f"not the place of a checkpoint. Name the folder of a run's checkpoints."
                    )
        return entries

    def chunks(self, name: str) -> Iterator[bytes]:
        with _explained(self):
            body = self.client.get_object(Bucket=self._bucket, Key=self._root + name)["Body"]
            yield from body.iter_chunks(CHUNK_BYTES)

    def bounded_chunks(self, name: str, limit: int) -> Iterator[bytes]:
        """The content; raises as soon as there is more of it than `limit` bytes."""
        for chunk in self.chunks(name):
            limit -= len(chunk)
            if limit < 0:
                raise CheckpointError(f"{self}/{name} is longer than its listed size")
            yield chunk

    def read_bytes(self, name: str, *, limit: int) -> bytes:
        return b"".join(self.bounded_chunks(name, limit))

    def upload(self, source: Path, name: str) -> None:
        """Copy a local file here; the store verifies its SHA-256."""
        with _explained(self):
            self.client.upload_file(
                str(source), self._bucket, self._root + name, ExtraArgs={"ChecksumAlgorithm": "SHA256"}
            )

    def has(self, name: str) -> bool:
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]

        with _explained(self):
            try:
                self.client.head_object(Bucket=self._bucket, Key=self._root + name)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    return False
                raise
        return True

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write a small object; False, and nothing changed, if another writer was first."""
        from botocore.exceptions import ClientError

        with _explained(self):
            try:
                self.client.put_object(Bucket=self._bucket, Key=self._root + name, Body=content, IfNoneMatch="*")
            except ClientError as error:
                if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                    return False
                raise
        return True

    def delete(self, names: Iterable[str]) -> None:
        with _explained(self):
            for name in names:
                self.client.delete_object(Bucket=self._bucket, Key=self._root + name)


def push(checkpoint: Path, checkpoints_url: str, *, key: bytes | None = None, client: Any = None) -> S3Prefix:
    """Copy a committed checkpoint into a store; complete when COMMIT.json is there. Idempotent."""
    step = names.step_of(checkpoint.resolve().name)
    manifest = examine(LocalFiles(checkpoint), key=key, step=step).require_good()
    there = S3Prefix(checkpoints_url, client).child(names.step_name(manifest.step))
    if there.has(names.COMMIT):
        if there.read_bytes(names.COMMIT, limit=LARGEST_COMMIT_BYTES) != (checkpoint / names.COMMIT).read_bytes():
            raise CheckpointError(f"{there} already holds another checkpoint. Remove it, or use another place.")
        examine(there, key=key, step=step, deep=False).require_good()
        return there
    for name in manifest.files:
        there.upload(checkpoint / name, name)
    _commit(checkpoint, manifest, there)
    return there


def _commit(checkpoint: Path, manifest: CheckpointManifest, there: S3Prefix) -> None:
    """Write COMMIT.json into a store that has all other files."""
    present = there.files()
    there.delete(sorted(present.keys() - manifest.files.keys()))  # left by a killed copy, or by another number of ranks
    if wrong := sorted(name for name, entry in manifest.files.items() if present.get(name) != entry.bytes):
        raise CheckpointError(f"{there}: {', '.join(wrong[:_MOST_SHOWN])} did not arrive whole; nothing was committed.")
    if not there.put_if_absent(names.COMMIT, (checkpoint / names.COMMIT).read_bytes()):
        raise CheckpointError(f"{there} was committed by another writer meanwhile: theirs stays.")


@dataclass(frozen=True)
class CopyResult:
    """Result of copying a checkpoint."""

    step: int
    path: Path
    """The local checkpoint."""
    address: str
    failure: str | None = None
    """Why the store does not have it; None if it does."""


class StoreCopy:
    """Copies a checkpoint to an object store while it is saved. One object per save and rank.

    Each rank uploads the files that it wrote, and rank 0 commits the copy after the local commit. A copy that fails is
    reported and given up: it never fails the save, whose checkpoint is in the run folder.
    """

    def __init__(self, checkpoints_url: str, step: int, client: Any = None) -> None:
        self._url, self._step, self._client = checkpoints_url, step, client
        self._opened: S3Prefix | None = None

    def __str__(self) -> str:
        folder = self._url.partition("?")[0].rstrip("/")  # without the options of the address
        return f"{folder}/{names.step_name(self._step)}"

    def upload(self, checkpoint: Path, files: Iterable[str]) -> str | None:
        """Upload files of this rank; why it failed, or None. On every rank, in the thread that writes."""
        try:
            there = self._there()
            if there.has(names.COMMIT):
                return f"{there} already holds a checkpoint, which is not replaced"
            for name in files:
                there.upload(checkpoint / name, name)
        except CheckpointError as error:
            return str(error)
        return None

    def finish(self, checkpoint: Path, uploaded: Iterable[str], failures: Iterable[str]) -> CopyResult:
        """Upload what no rank has uploaded, and commit the copy. On rank 0."""
        try:
            if reasons := sorted(set(failures)):
                more = [f"and {len(reasons) - _MOST_SHOWN} more"] if len(reasons) > _MOST_SHOWN else []
                raise CheckpointError("; ".join([*reasons[:_MOST_SHOWN], *more]))
            manifest = examine(LocalFiles(checkpoint), step=self._step, deep=False).require_good()
            if failure := self.upload(checkpoint, sorted(manifest.files.keys() - set(uploaded))):
                raise CheckpointError(failure)
            _commit(checkpoint, manifest, self._there())
        except (CheckpointError, OSError) as error:
            _log.warning(
                "%s was not copied to %s (%s). The checkpoint itself is good; copy it with: nsa checkpoint push %s %s",
                names.step_name(self._step), self._url, error, checkpoint, self._url,
            )  # fmt: skip
            return CopyResult(self._step, checkpoint, str(self), str(error))
        _log.info("copied %s to %s", names.step_name(self._step), self)
        return CopyResult(self._step, checkpoint, str(self))

    def _there(self) -> S3Prefix:
        if self._opened is None:
            self._opened = S3Prefix(self._url, self._client).child(names.step_name(self._step))
        return self._opened


def pull(
    checkpoints_url: str,
    into: CheckpointFolder,
    *,
    key: bytes | None = None,
    client: Any = None,
    max_bytes: int | None = None,
) -> ResumableCheckpoint:
    """Copy the newest good checkpoint of a store into a run's folder, and verify it there as loading would.

    Bad ones are reported and left in the store. A good copy that the folder already has is not copied again; another
    good checkpoint of the same step is not replaced.
    """
    from nsa_train.checkpoint.load import require_trustworthy

    store = S3Prefix(checkpoints_url, client)
    steps = sorted((step for name in store.folders() if (step := names.step_of(name)) is not None), reverse=True)
    passed_over: list[CheckpointFinding] = []
    for step in steps[:_MAX_TRIED]:
        there = store.child(names.step_name(step))
        try:
            manifest = examine(there, key=key, step=step, deep=False).require_good()
            commit = there.read_bytes(names.COMMIT, limit=LARGEST_COMMIT_BYTES)
            if decode(commit, key) != manifest:
                raise CheckpointError(f"{names.COMMIT} changed while it was read")
            if _has(into, step, commit):
                return ResumableCheckpoint(step, into.step_path(step), tuple(passed_over))
            _require_room(manifest, into.path, max_bytes)
            staging = into.begin(step)
            for name, entry in manifest.files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                with (staging / name).open("wb") as out:
                    out.writelines(there.bounded_chunks(name, entry.bytes))
            (staging / names.COMMIT).write_bytes(commit)
            adopted = into.adopt(step, lambda path: require_trustworthy(path, key=key))
            return ResumableCheckpoint(step, adopted, tuple(passed_over))
        except CheckpointError as error:
            into.abandon(step)
            passed_over.append(CheckpointFinding(str(there), (str(error),)))
        except OSError as error:  # a fault of this machine: an older checkpoint would fail too
            into.abandon(step)
            raise CheckpointError(f"{there} could not be copied to {into.path}: {error}.") from error
    return ResumableCheckpoint(None, None, tuple(passed_over))


def _has(into: CheckpointFolder, step: int, commit: bytes) -> bool:
    """Whether the folder has this checkpoint; raises if it has another good one of the same step."""
    if not into.step_path(step).exists() or not into.examine(step).good:
        return False
    if (into.step_path(step) / names.COMMIT).read_bytes() != commit:
        raise CheckpointError(f"{into.step_path(step)} is another good checkpoint of step {step}: it is not replaced")
    return True


def _require_room(manifest: CheckpointManifest, folder: Path, max_bytes: int | None) -> None:
    """Allow only file names of a checkpoint, and no more bytes than the limit and the free disk space."""
    for name in manifest.files:
        if not names.is_known_file(name):
            raise CheckpointError(f"{name!r} does not belong in a checkpoint")
    if max_bytes is not None and manifest.bytes > max_bytes:
        raise CheckpointError(f"it has {manifest.bytes / GIB:.1f} GiB, more than the {max_bytes / GIB:.1f} GiB allowed")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if manifest.bytes > free:
        raise CheckpointError(f"it has {manifest.bytes / GIB:.1f} GiB, but {folder} has {free / GIB:.1f} GiB free")


@contextmanager
def _explained(place: object) -> Iterator[None]:
    """Raise what boto3 raises as `StoreRefused`, or as `CheckpointError` if it may pass: `place` and the reason."""
    from boto3.exceptions import Boto3Error  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (ClientError, BotoCoreError, Boto3Error) as error:
        reason = _HEADER_VALUE.sub(_NOT_SHOWN, str(error)).rstrip(".")
        kind = StoreRefused if _is_final(error) else CheckpointError
        # The original may quote a credential: it must not be printed with a traceback either.
        raise kind(f"{place} cannot be used: {reason}.") from (None if _HEADER_VALUE.search(str(error)) else error)


def _is_final(error: Exception) -> bool:
    """Whether the next attempt would fail in the same way."""
    from botocore import exceptions as botocore  # type: ignore[import-untyped]

    if isinstance(error, botocore.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code")
        return 300 <= status < 500 and status not in _MAY_PASS and code not in _MAY_PASS_CODES
    names_of_final = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
    final = tuple(getattr(botocore, name) for name in names_of_final)
    return bool(_HEADER_VALUE.search(str(error))) or isinstance(error, final)
