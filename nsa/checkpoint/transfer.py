"""Copies checkpoints to and from an object store (`nsa checkpoint push` and `pull`): `s3://bucket/path/step200/…`.

An object store has no rename, so COMMIT.json is written last, and only if there is none yet: a prefix without it is not
a checkpoint, however many objects it has, and of two writers the second gets an error. A killed upload may leave parts
that only a lifecycle rule of the bucket removes.

The store is not trusted: listings, names, sizes and received bytes are bounded, and nothing gets a name in the run
folder before it was read the way it would be loaded.
"""

import shutil
from pathlib import Path
from typing import Any

from nsa import names
from nsa.checkpoint.folder import CheckpointFinding, CheckpointFolder, ResumableCheckpoint
from nsa.checkpoint.manifest import LARGEST_COMMIT_BYTES, CheckpointManifest, decode, examine
from nsa.errors import CheckpointError
from nsa.storage import LocalFiles, S3Prefix

_MAX_TRIED = 50
GIB = 1 << 30


def push(checkpoint: Path, checkpoints_url: str, *, key: bytes | None = None, client: Any = None) -> S3Prefix:
    """Copy a committed checkpoint into a store; complete when COMMIT.json is there. Idempotent."""
    step = names.step_of(checkpoint.resolve().name)
    manifest = examine(LocalFiles(checkpoint), key=key, step=step).require_good()
    commit = (checkpoint / names.COMMIT).read_bytes()
    there = S3Prefix(checkpoints_url, client, error=CheckpointError).child(names.step_name(manifest.step))
    present = there.files()
    if names.COMMIT in present:
        if there.read_bytes(names.COMMIT, limit=LARGEST_COMMIT_BYTES) != commit:
            raise CheckpointError(f"{there} already holds another checkpoint. Remove it, or use another place.")
        examine(there, key=key, step=step, deep=False).require_good()
        return there
    there.delete(sorted(present))  # left by a killed copy
    for name in manifest.files:
        there.upload(checkpoint / name, name)
    if wrong := {name for name, size in there.files().items() if manifest.files[name].bytes != size}:
        raise CheckpointError(f"{there}: {', '.join(sorted(wrong))} did not arrive whole; nothing was committed.")
    if not there.put_if_absent(names.COMMIT, commit):
        raise CheckpointError(f"{there} was committed by another writer meanwhile: theirs stays.")
    return there


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
    from nsa.checkpoint.load import require_trustworthy

    store = S3Prefix(checkpoints_url, client, error=CheckpointError)
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
                _copy(there, name, staging / name, entry.bytes)
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


def _copy(there: S3Prefix, name: str, file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for chunk in there.bounded_chunks(name, size):
            out.write(chunk)
