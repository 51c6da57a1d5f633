"""Copies a checkpoint to an object store while it is saved: each rank uploads the files that it wrote.

The copy is complete when rank 0 has put COMMIT.json, which it does last, after the local commit, and only if there is
none. A copy that fails is reported and given up: it never fails the save, whose checkpoint is in the run folder.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.manifest import CheckpointManifest, LocalFiles, examine
from nsa_train.checkpoint.transfer import S3Prefix

_log = logging.getLogger(__name__)

_MOST_REASONS = 3
"""Reasons shown of ranks that failed: each names files of its own, and there may be thousands."""


@dataclass(frozen=True)
class CopyResult:
    """How the copy of a checkpoint ended."""

    step: int
    path: Path
    """The local checkpoint."""
    address: str
    failure: str | None = None
    """Why the store does not have it; None if it does."""


class StoreCopy:
    """The copy of the checkpoint of one step. One object per save and rank."""

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
                more = [f"and {len(reasons) - _MOST_REASONS} more"] if len(reasons) > _MOST_REASONS else []
                raise CheckpointError("; ".join([*reasons[:_MOST_REASONS], *more]))
            manifest = examine(LocalFiles(checkpoint), step=self._step, deep=False).require_good()
            if failure := self.upload(checkpoint, sorted(manifest.files.keys() - set(uploaded))):
                raise CheckpointError(failure)
            self._commit(checkpoint, manifest)
        except (CheckpointError, OSError) as error:
            _log.warning(
                "%s was not copied to %s (%s). The checkpoint itself is good; copy it with: nsa checkpoint push %s %s",
                names.step_name(self._step), self._url, error, checkpoint, self._url,
            )  # fmt: skip
            return CopyResult(self._step, checkpoint, str(self), str(error))
        _log.info("copied %s to %s", names.step_name(self._step), self)
        return CopyResult(self._step, checkpoint, str(self))

    def _commit(self, checkpoint: Path, manifest: CheckpointManifest) -> None:
        there = self._there()
        present = there.files()
        there.delete(sorted(present.keys() - manifest.files.keys()))  # left by a save of another number of ranks
        if wrong := sorted(name for name, entry in manifest.files.items() if present.get(name) != entry.bytes):
            raise CheckpointError(f"{there}/{wrong[0]} did not arrive whole")
        if not there.put_if_absent(names.COMMIT, (checkpoint / names.COMMIT).read_bytes()):
            raise CheckpointError(f"{there} was committed by another writer meanwhile")

    def _there(self) -> S3Prefix:
        if self._opened is None:
            self._opened = S3Prefix(self._url, self._client).child(names.step_name(self._step))
        return self._opened
