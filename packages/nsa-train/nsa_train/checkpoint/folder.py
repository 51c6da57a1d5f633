"""Atomic checkpoint writes: staging, commit by rename, the `latest` link, fallback, retention, cleanup after a kill.

The steps of a save. Rank 0 alone does everything after the first one, once all ranks have written.
1. Every rank writes into `staging(step)`, a hidden folder that nothing resumes from, and hashes what it writes.
2. fsync of every file, then hashing of those that no rank has hashed.
3. COMMIT.json is written last.
4. The folder is renamed to `step{N}`. Only now does the checkpoint exist.
5. `latest` is replaced. 6. Old checkpoints are deleted.
A kill before 4 leaves the previous checkpoint and a leftover folder; after 4 it leaves the new one. `clean_up` at the
next start corrects the link and removes leftovers. All of it requires the run's lock (`lock.RunLock`).
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from nsa.errors import CheckpointError
from nsa.files import fsync_path, fsync_tree, replace_file, write_atomic
from nsa_train import names
from nsa_train.checkpoint.manifest import (
    INTERVAL,
    REQUESTED,
    CheckpointManifest,
    CheckpointVerdict,
    LocalFiles,
    ManifestEntry,
    build_manifest,
    encode,
    examine,
)


@dataclass(frozen=True)
class CheckpointFinding:
    """A checkpoint that was rejected, and why; for the log and for events.jsonl."""

    name: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.problems)}"


@dataclass(frozen=True)
class ResumableCheckpoint:
    """The newest good checkpoint, and every newer one that was rejected."""

    step: int | None
    path: Path | None
    passed_over: tuple[CheckpointFinding, ...]


@dataclass(frozen=True)
class RetentionPolicy:
    keep_last: int = 3
    """How many of the newest checkpoints are kept; with one there is no fallback."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted; 0 for none."""

    @classmethod
    def from_settings(cls, config: Mapping[str, Any]) -> Self:
        """The policy of a run, from the settings that its checkpoints record."""
        train = config.get("train", {})
        return cls(int(train.get("keep_checkpoints", cls.keep_last)), int(train.get("keep_every", cls.keep_every)))

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise CheckpointError(
                f"checkpoints cannot be kept by keep_last={self.keep_last}, keep_every={self.keep_every}: the newest "
                f"one must stay. Set keep_last to 1 or more and keep_every to 0 or more."
            )

    def why_kept(self, saved: Mapping[int, str]) -> dict[int, tuple[str, ...]]:
        """Why each checkpoint is kept, from its step and the reason it was saved for; empty for those to delete."""
        newest = sorted(saved)[-self.keep_last :]
        return {
            step: tuple(
                why
                for why, holds in (
                    (REQUESTED, reason == REQUESTED),
                    (f"every {self.keep_every}", self.keep_every and step % self.keep_every == 0),
                    (f"newest {self.keep_last}", step in newest),
                )
                if holds
            )
            for step, reason in saved.items()
        }


class CheckpointFolder:
    def __init__(self, path: Path, *, key: bytes | None = None, retention: RetentionPolicy | None = None) -> None:
        self.path = path
        self._key = key
        self._retention = retention or RetentionPolicy()
        self._suspect: set[int] = set()

    def step_path(self, step: int) -> Path:
        return self.path / names.step_name(step)

    def steps(self) -> list[int]:
        """Steps that have a folder, complete or not, ascending."""
        if not self.path.is_dir():
            return []
        numbers = (names.step_of(path.name) for path in self.path.iterdir() if path.is_dir() and not path.is_symlink())
        return sorted(step for step in numbers if step is not None)

    def require_steps(self) -> list[int]:
        """`steps`; raises if there is none."""
        if steps := self.steps():
            return steps
        raise CheckpointError(
            f"{self.path} holds no checkpoint. Name a run folder (train.out_dir) that has saved one, or its folder "
            f"{names.CHECKPOINTS}."
        )

    def committed_steps(self) -> list[int]:
        """Steps whose COMMIT.json is intact: quick, for counting progress. Tensors are not verified."""
        return list(self.committed())

    def committed(self) -> dict[int, CheckpointManifest]:
        """The manifest of every step whose COMMIT.json is intact."""
        verdicts = {step: self.examine(step, deep=False) for step in self.steps()}
        return {step: verdict.manifest for step, verdict in verdicts.items() if verdict.good and verdict.manifest}

    def latest(self) -> int | None:
        """The step `latest` points at."""
        link = self.path / names.LATEST
        return names.step_of(os.readlink(link)) if link.is_symlink() else None

    def examine(self, step: int, *, deep: bool = True) -> CheckpointVerdict:
        return examine(LocalFiles(self.step_path(step)), key=self._key, step=step, deep=deep)

    def find_resumable(
        self,
        inspect: Callable[[Path], object] | None = None,
        wrong_hashes: Callable[[LocalFiles, CheckpointManifest], Iterable[str]] | None = None,
    ) -> ResumableCheckpoint:
        """The newest good checkpoint. Bad ones are reported, left in place and not read further.

        `inspect` reads the contents of one whose names and sizes are right, and raises CheckpointError for what would
        not be loaded: otherwise it would be found again at every start. `wrong_hashes` compares the files with their
        hashes when all ranks share that work.
        """
        passed_over: list[CheckpointFinding] = []
        for step in reversed(self.steps()):
            path = self.step_path(step)
            problems = self.examine(step, deep=wrong_hashes is None).problems
            if not problems and inspect is not None:
                try:
                    inspect(path)
                except CheckpointError as error:
                    problems = (str(error),)
            if not problems and wrong_hashes is not None:
                problems = tuple(wrong_hashes(LocalFiles(path), self.examine(step, deep=False).require_good()))
            if not problems:
                return ResumableCheckpoint(step, path, tuple(passed_over))
            self._suspect.add(step)
            passed_over.append(CheckpointFinding(names.step_name(step), problems))
        return ResumableCheckpoint(None, None, tuple(passed_over))

    def staging(self, step: int) -> Path:
        """The folder into which the ranks write, with one path on every rank. Rank 0 calls `begin` first."""
        return self.path / f"{names.SAVING}{names.step_name(step)}"

    def begin(self, step: int) -> Path:
        """Empty the staging folder, on one rank; a barrier must follow before any rank writes."""
        staging = self.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        return staging

    def commit(self, step: int, reason: str = INTERVAL, hashed: Mapping[str, ManifestEntry] | None = None) -> Path:
        """Turn the staging folder into a checkpoint. Called on rank 0 when every rank has written.

        `hashed` are the files whose writers have hashed them, by name relative to the checkpoint.
        """
        staging, target = self.staging(step), self.step_path(step)
        if not staging.is_dir():
            raise CheckpointError(
                f"{staging} does not exist: step {step} was never written, so it cannot be committed."
            )
        try:
            store = LocalFiles(staging)
            fsync_tree(staging)
            manifest = build_manifest(store, step, datetime.now(UTC).isoformat(timespec="seconds"), reason, hashed)
            if not manifest.files:
                raise CheckpointError(f"{staging} is empty: there is nothing to commit for step {step}.")
            write_atomic(staging / names.COMMIT, encode(manifest, self._key), durable=True)
            self._rename(staging, target)
        except OSError as error:
            raise CheckpointError(
                f"step {step} could not be saved ({error}): the checkpoints before it are untouched. "
                f"Free disk space or set train.out_dir to another disk."
            ) from error
        self._suspect.discard(step)
        self._point_latest_at(step)
        self._delete_old()
        return target

    def adopt(self, step: int, inspect: Callable[[Path], object]) -> Path:
        """Add a checkpoint that was committed elsewhere and copied into staging, with its COMMIT.json.

        `inspect` raises CheckpointError for what would not be loaded. Nothing is deleted: a checkpoint from elsewhere
        must not displace those saved here.
        """
        staging, target = self.staging(step), self.step_path(step)
        examine(LocalFiles(staging), key=self._key, step=step, deep=False).require_good()
        inspect(staging)
        fsync_tree(staging)
        self._rename(staging, target)
        self._suspect.discard(step)
        self._point_latest_at(max(step, *self.committed_steps()))
        return target

    def commit_after(
        self,
        written: "Future[Any]",
        step: int,
        reason: str = INTERVAL,
        hashed: Callable[[], Mapping[str, ManifestEntry]] = dict,
        then: Callable[[Path], object] | None = None,
    ) -> "Future[Path]":
        """Commit as soon as an asynchronous write has succeeded, in the thread that finished it; then call `then`.

        The returned future is done when the checkpoint exists, or carries why it does not. DCP's future is done on
        rank 0 only after every rank has written and rank 0 has written the index, so no further barrier is needed.
        """
        committed: Future[Path] = Future()

        def finish(future: "Future[Any]") -> None:
            try:
                # DCP reports a failure on any rank by an exception that is no Exception.
                if (failure := future.exception()) is not None:
                    raise CheckpointError(f"step {step} was not written ({failure}): nothing was committed.")
                path = self.commit(step, reason, hashed())
                if then is not None:
                    then(path)
                committed.set_result(path)
            except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                committed.set_exception(error)

        written.add_done_callback(finish)
        return committed

    def set_reason(self, step: int, reason: str) -> None:
        """Record another reason for a checkpoint; its content does not change."""
        manifest = self.examine(step, deep=False).require_good()
        content = encode(replace(manifest, reason=reason), self._key)
        write_atomic(self.step_path(step) / names.COMMIT, content, durable=True)

    def abandon(self, step: int) -> None:
        """Delete the files of a save that failed."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def clean_up(self) -> list[str]:
        """Repair what a kill left behind and return what was done. Requires the run's lock; call it before saving."""
        if not self.path.is_dir():
            return []
        repairs = []
        for path in sorted(self.path.iterdir()):
            if path.is_symlink() or not names.is_leftover(path.name):
                continue
            original = self.path / path.name.removeprefix(names.REPLACED)
            if path.name.startswith(names.REPLACED) and not original.exists():
                os.rename(path, original)
                fsync_path(self.path)
                repairs.append(f"restored {original.name}: a kill interrupted its replacement")
            else:
                shutil.rmtree(path)
                repairs.append(f"removed {path.name}: left by a killed process")
        (self.path / names.NEW_LINK).unlink(missing_ok=True)
        committed = self.committed_steps()
        if committed and self.latest() != committed[-1]:
            self._point_latest_at(committed[-1])
            repairs.append(f"pointed {names.LATEST} at {names.step_name(committed[-1])}")
        return repairs

    def _rename(self, staging: Path, target: Path) -> None:
        replaced = self.path / f"{names.REPLACED}{target.name}"
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(staging, target)
        fsync_path(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _point_latest_at(self, step: int) -> None:
        link = self.path / names.NEW_LINK
        link.unlink(missing_ok=True)
        link.symlink_to(names.step_name(step))
        replace_file(link, self.path / names.LATEST)
        fsync_path(self.path)

    def _delete_old(self) -> None:
        """Apply retention. Rejected checkpoints are neither counted nor deleted: they are evidence, not a fallback."""
        saved = {step: manifest.reason for step, manifest in self.committed().items() if step not in self._suspect}
        for step, why in self._retention.why_kept(saved).items():
            if why or step == self.latest():
                continue
            doomed = self.path / f"{names.DELETING}{names.step_name(step)}"
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(self.step_path(step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def resolve_links(path: Path) -> Path:
    try:
        return path.resolve()
    except (RuntimeError, OSError) as error:  # a loop of links is a RuntimeError in Python 3.11
        raise CheckpointError(f"{path} does not lead to a checkpoint ({error}). Check the path.") from None


def open_folder(run: Path, *, key: bytes | None = None) -> CheckpointFolder:
    """The checkpoints of a run folder, or a folder of checkpoints."""
    inside = run / names.CHECKPOINTS
    folder = inside if inside.is_dir() else run
    if not folder.is_dir():
        raise CheckpointError(f"{run} does not exist. Name a run folder (train.out_dir).")
    return CheckpointFolder(folder, key=key)
