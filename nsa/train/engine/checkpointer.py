"""The engine's checkpointer, made to save through `CheckpointFolder` and to load verified bytes only.

A load does not use the engine's own reader, which unpickles: rank 0 checks COMMIT.json and hands it to all ranks, each
of which then reads the index, its trainer state and its pieces of the tensors through `VerifiedFiles`.

Order of an asynchronous save, on every rank in the main thread unless said otherwise:
1. rank 0 empties the staging folder; barrier;
2. each rank writes `train/rank{N}.pt`, rank 0 also `state.json`; barrier (the engine's);
3. each rank copies its tensors to host memory and hands them to DCP's thread; training goes on;
4. in that thread: all ranks write; rank 0 writes the index, hashes, commits, renames, moves `latest`, retires old ones.
The future that rank 0 gets is done after 4, so whoever waits for it waits for the commit. The other ranks' futures are
done when the tensors are written; `settle` makes all ranks wait for, and agree on, the outcome.
The engine's own retention must be off: `CheckpointerCallback(max_checkpoints=None, remove="never")`.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from olmo_core.aliases import PathOrStr
from olmo_core.distributed.utils import all_gather_object, barrier, broadcast_object, get_rank, get_world_size
from olmo_core.io import is_url
from olmo_core.train.checkpoint import Checkpointer, CheckpointerConfig
from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.api import CheckpointException

from nsa import names
from nsa.checkpoint.folder import CheckpointFolder, ResumableCheckpoint, RetentionPolicy
from nsa.checkpoint.load import VerifiedReader, open_checkpoint, read_record, require_trustworthy
from nsa.checkpoint.manifest import INTERVAL, CheckpointManifest, read_key, wrong_hashes
from nsa.checkpoint.pickle_scan import read_trainer_state, require_harmless
from nsa.checkpoint.run_state import RunRecord
from nsa.checkpoint.verified_files import VerifiedFiles
from nsa.errors import CheckpointError
from nsa.storage import LocalFiles

log = logging.getLogger(__name__)

_READING_THREADS = 4


@dataclass
class VerifiedCheckpointerConfig(CheckpointerConfig):
    key_file: str | None = None
    keep_last: int = 3
    keep_every: int = 0
    allow_foreign: bool = False

    def build(self, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> "VerifiedCheckpointer":
        values = {**self.as_dict(exclude_none=True, recurse=False), **kwargs}
        retention = RetentionPolicy(values.pop("keep_last"), values.pop("keep_every"))
        key_file = values.pop("key_file", None)
        key = read_key(Path(key_file)) if key_file else None
        values["work_dir"] = Path(values["work_dir"])
        return VerifiedCheckpointer(process_group=process_group, key=key, retention=retention, **values)


@dataclass
class VerifiedCheckpointer(Checkpointer):
    key: bytes | None = field(default=None, repr=False)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    allow_foreign: bool = False
    """Load folders that have no COMMIT.json, whose damage cannot be detected."""
    record: Callable[[], RunRecord] | None = None
    """Set by the trainer; asked on rank 0 at every save."""
    reason: str = INTERVAL
    """Why the next checkpoint is saved; for that one only."""
    _folders: dict[Path, CheckpointFolder] = field(default_factory=dict, repr=False)
    loaded_record: RunRecord | None = field(default=None, repr=False)
    """state.json of the checkpoint that was loaded last."""

    def folder(self, checkpoints: Path) -> CheckpointFolder:
        """The folder of all checkpoints, the same object each time, so that it remembers suspects."""
        if checkpoints not in self._folders:
            self._folders[checkpoints] = CheckpointFolder(checkpoints, key=self.key, retention=self.retention)
        return self._folders[checkpoints]

    def find_resumable(self, checkpoints: Path) -> ResumableCheckpoint:
        """The same answer on all ranks. Rank 0 looks for it; all ranks hash, each its share of the files."""

        def inspect(path: Path) -> None:
            require_trustworthy(path, key=self.key, deep=False)

        def hash_on_all_ranks(store: LocalFiles, manifest: CheckpointManifest) -> list[str]:
            broadcast_object((store.path, manifest))
            return self._hash_share(store.path, manifest)

        if get_rank() == 0:
            try:
                found = self.folder(checkpoints).find_resumable(inspect, hash_on_all_ranks)
            finally:
                broadcast_object(None)
        else:
            while (task := broadcast_object(None)) is not None:
                self._hash_share(*task)
            found = None
        found = broadcast_object(found)
        assert found is not None
        return found

    @staticmethod
    def _hash_share(path: Path, manifest: CheckpointManifest) -> list[str]:
        """What is wrong with any file, on every rank; the files are dealt out by size."""
        by_size = sorted(manifest.files, key=lambda name: manifest.files[name].bytes, reverse=True)
        try:
            problems = list(wrong_hashes(LocalFiles(path), manifest, by_size[get_rank() :: get_world_size()]))
        except OSError as error:
            problems = [f"it cannot be read: {error}"]
        return [problem for part in all_gather_object(problems) for problem in part]

    def save(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> None:
        folder, step, reason = self._begin(dir)
        super().save(folder.staging(step), train_module, train_state, ephemeral=ephemeral)
        barrier()
        self._agree(lambda: folder.commit(step, reason))

    def save_async(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> "Future[None]":
        folder, step, reason = self._begin(dir)
        written = super().save_async(folder.staging(step), train_module, train_state, ephemeral=ephemeral)
        if get_rank() == 0:
            # The engine's own callback, which writes .metadata.json, was added first and so runs first.
            return folder.commit_after(written, step, reason)  # type: ignore[return-value]
        return written

    def set_reason(self, dir: PathOrStr, reason: str) -> None:
        """Of a checkpoint that this run has committed. On all ranks."""
        path = self._local(dir)
        step = names.step_of(path.name)
        assert step is not None
        self._agree(lambda: self.folder(path.parent).set_reason(step, reason))

    def settle(self, saving: "Future[Any]") -> None:
        """Wait for an asynchronous save on all ranks, and raise on all of them if it came to nothing."""
        self._agree(saving.result, on_every_rank=True)

    def load(
        self,
        dir: PathOrStr,
        train_module: TrainModule,
        *,
        load_trainer_state: bool | None = None,
        load_optim_state: bool | None = None,
        reset_optimizer_states_on_load: bool | None = None,
    ) -> dict[str, Any] | None:
        path = self._local(dir).resolve()  # `latest` may move while we read
        if hasattr(train_module, "load_state_dict_direct"):
            raise CheckpointError(
                f"{type(train_module).__name__} reads checkpoints unverified: it cannot be used here."
            )
        opened: list[VerifiedFiles] = []
        self._agree(lambda: opened.append(open_checkpoint(path, key=self.key, allow_foreign=self.allow_foreign)))
        manifest = broadcast_object(opened[0].manifest if opened else None)
        files = opened[0] if opened else VerifiedFiles(path, manifest)
        read: dict[str, Any] = {}

        def read_small_files() -> None:
            read["index"] = require_harmless(files, pieces=False)
            read["record"] = read_record(files)
            read["state"] = read_trainer_state(files, get_rank()) if load_trainer_state is not False else None
            if load_trainer_state is True and not isinstance(read["state"], dict):
                raise CheckpointError(f"{path} holds no state of the trainer: a run cannot go on from it.")

        self._agree(read_small_files, on_every_rank=True)
        state = train_module.state_dict_to_load(read["index"], optim=load_optim_state)
        try:
            dist_cp.load(
                state,
                checkpoint_id=str(path),
                storage_reader=VerifiedReader(files, read["index"], self.load_thread_count or _READING_THREADS),
                process_group=self.process_group,
            )
        except CheckpointException as error:  # on all ranks, if on one
            failures = [failure for failure, _ in error.failures.values()]
            raise CheckpointError(f"{path} could not be loaded: {failures[0]}") from error
        train_module.load_state_dict(state)
        self.loaded_record = read["record"]
        return read["state"]

    def _save_train_state(self, dir: PathOrStr, wd: Path, train_state: dict[str, Any]) -> None:
        """Inside the engine's barriers, so that no rank's file can miss the commit."""
        super()._save_train_state(dir, wd, train_state)
        # What cannot be loaded again must not be found out by the run that needs it.
        read_trainer_state(VerifiedFiles(wd, None), get_rank())
        if get_rank() == 0 and self.record is not None:
            self.record().write(wd)

    def _begin(self, dir: PathOrStr) -> tuple[CheckpointFolder, int, str]:
        path = self._local(dir)
        step = names.step_of(path.name)
        if step is None:
            raise CheckpointError(
                f"{path} is no place for a checkpoint: the name must be {names.step_name(0)} or alike."
            )
        folder = self.folder(path.parent)
        self._agree(lambda: folder.begin(step))
        reason, self.reason = self.reason, INTERVAL
        return folder, step, reason

    @staticmethod
    def _local(dir: PathOrStr) -> Path:
        if is_url(dir):
            raise CheckpointError(
                f"{dir} is an object store: runs save to a folder, whose checkpoints are copied to a store and back "
                f"whole and verified. Set train.out_dir to a folder that all nodes share."
            )
        return Path(dir)

    @staticmethod
    def _agree(act: Callable[[], object], *, on_every_rank: bool = False) -> None:
        """Act on rank 0, or on all; then raise on every rank what went wrong on one that acted."""
        failure: BaseException | None = None
        if on_every_rank or get_rank() == 0:
            try:
                act()
            # DCP's own failure is no Exception. Whatever it is, it is raised below, when all ranks know.
            except (Exception, CheckpointException) as error:  # noqa: BLE001
                failure = error
        mine = str(failure) if failure is not None else None
        told = all_gather_object(mine) if on_every_rank else [broadcast_object(mine)]
        if isinstance(failure, Exception):
            raise failure
        if reasons := [reason for reason in told if reason is not None]:
            raise CheckpointError(reasons[0])
