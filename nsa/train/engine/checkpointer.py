"""The engine's checkpointer and its callback: saves through `CheckpointFolder`, loads verified bytes only.

A load does not use the engine's own reader, which unpickles: rank 0 checks COMMIT.json and broadcasts it, and each rank
then reads the index, its trainer state and its pieces of the tensors through `VerifiedFiles`.

Order of an asynchronous save, on every rank, in the main thread unless stated otherwise:
1. rank 0 empties the staging folder; barrier;
2. each rank writes `train/rank{N}.pt`, rank 0 also `state.json`; barrier (the engine's);
3. each rank copies its tensors to host memory and hands them to DCP's thread; training continues;
4. in that thread: all ranks write; rank 0 writes the index, hashes, commits, renames, moves `latest`, deletes old ones.
The future that rank 0 gets is done after 4, so waiting for it waits for the commit. The other ranks' futures are done
when the tensors are written; `wait_for_save` makes all ranks wait for the outcome and raise alike.
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
from olmo_core.distributed.utils import all_gather_object, barrier, broadcast_object, get_rank, get_world_size
from olmo_core.io import is_url
from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.callbacks.checkpointer import CheckpointRemovalStrategy
from olmo_core.train.checkpoint import Checkpointer, CheckpointerConfig
from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.api import CheckpointException

from nsa import names
from nsa.checkpoint.folder import CheckpointFolder, ResumableCheckpoint, RetentionPolicy
from nsa.checkpoint.load import VerifiedReader, open_checkpoint, read_record, require_trustworthy
from nsa.checkpoint.manifest import INTERVAL, LAST, REQUESTED, CheckpointManifest, LocalFiles, read_key, wrong_hashes
from nsa.checkpoint.pickle_scan import read_trainer_state, require_harmless
from nsa.checkpoint.run_state import RunRecord
from nsa.checkpoint.verified_files import VerifiedFiles
from nsa.config.schema import RunConfig
from nsa.data.tokenizer import Tokenizer
from nsa.errors import CheckpointError
from nsa.train.engine import PathOrStr

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
    """Builds state.json; called on rank 0 at every save."""
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    """Saved as tokenizer.json with every checkpoint."""
    reason: str = INTERVAL
    """Why the next checkpoint is saved; for that one only."""
    _folders: dict[Path, CheckpointFolder] = field(default_factory=dict, repr=False)
    loaded_record: RunRecord | None = field(default=None, repr=False)
    """state.json of the checkpoint that was loaded last."""

    def folder(self, checkpoints: Path) -> CheckpointFolder:
        """The folder of all checkpoints; one object per path, because it remembers rejected checkpoints."""
        if checkpoints not in self._folders:
            self._folders[checkpoints] = CheckpointFolder(checkpoints, key=self.key, retention=self.retention)
        return self._folders[checkpoints]

    def find_resumable(self, checkpoints: Path) -> ResumableCheckpoint:
        """The newest good checkpoint, the same on all ranks. Rank 0 searches; each rank hashes a share of the files."""

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
        """Problems of all files, on every rank; files are distributed over the ranks by size."""
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
        self._raise_on_all_ranks(lambda: folder.commit(step, reason))

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
        """Change the reason of a checkpoint that this run has committed. Collective."""
        path = self._local(dir)
        step = names.step_of(path.name)
        assert step is not None
        self._raise_on_all_ranks(lambda: self.folder(path.parent).set_reason(step, reason))

    def wait_for_save(self, saving: "Future[Any]") -> None:
        """Wait for an asynchronous save on all ranks, and raise on all of them if it failed on one."""
        self._raise_on_all_ranks(saving.result, on_every_rank=True)

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
        self._raise_on_all_ranks(
            lambda: opened.append(open_checkpoint(path, key=self.key, allow_foreign=self.allow_foreign))
        )
        manifest = broadcast_object(opened[0].manifest if opened else None)
        files = opened[0] if opened else VerifiedFiles(path, manifest)
        read: dict[str, Any] = {}

        def read_small_files() -> None:
            read["index"] = require_harmless(files, pieces=False)
            read["record"] = read_record(files)
            read["state"] = read_trainer_state(files, get_rank()) if load_trainer_state is not False else None
            if load_trainer_state is True and not isinstance(read["state"], dict):
                raise CheckpointError(f"{path} holds no trainer state: a run cannot be resumed from it.")

        self._raise_on_all_ranks(read_small_files, on_every_rank=True)
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

    def load_weights(self, path: Path, train_module: TrainModule) -> None:
        """Load the model of a checkpoint and nothing else: no optimizer state, no step. Collective."""
        self.load(path, train_module, load_trainer_state=False, load_optim_state=False)
        self.loaded_record = None

    def _save_train_state(self, dir: PathOrStr, wd: Path, train_state: dict[str, Any]) -> None:
        """Inside the engine's barriers, so that no rank's file can miss the commit."""
        super()._save_train_state(dir, wd, train_state)
        # State that cannot be loaded again must fail here, not in the run that needs it.
        read_trainer_state(VerifiedFiles(wd, None), get_rank())
        if get_rank() == 0 and self.record is not None:
            self.record().write(wd)
            if self.tokenizer is not None:
                (wd / names.TOKENIZER).write_text(self.tokenizer.to_json(), encoding="utf-8")

    def _begin(self, dir: PathOrStr) -> tuple[CheckpointFolder, int, str]:
        path = self._local(dir)
        step = names.step_of(path.name)
        if step is None:
            raise CheckpointError(
                f"{path} cannot hold a checkpoint: the folder name must be like {names.step_name(0)}."
            )
        folder = self.folder(path.parent)
        self._raise_on_all_ranks(lambda: folder.begin(step))
        reason, self.reason = self.reason, INTERVAL
        return folder, step, reason

    @staticmethod
    def _local(dir: PathOrStr) -> Path:
        if is_url(dir):
            raise CheckpointError(
                f"{dir} is an object store, and runs save to a folder: whole, verified checkpoints are copied to an "
                f"object store and back. Set train.out_dir to a folder that all nodes share."
            )
        return Path(dir)

    @staticmethod
    def _raise_on_all_ranks(act: Callable[[], object], *, on_every_rank: bool = False) -> None:
        """Call `act` on rank 0, or on all ranks; then raise its error, if any, on every rank."""
        failure: BaseException | None = None
        if on_every_rank or get_rank() == 0:
            try:
                act()
            # DCP's own failure is no Exception. Whatever it is, it is raised below, when all ranks know.
            except (Exception, CheckpointException) as error:  # noqa: BLE001
                failure = error
        mine = str(failure) if failure is not None else None
        reported = all_gather_object(mine) if on_every_rank else [broadcast_object(mine)]
        if isinstance(failure, Exception):
            raise failure
        if reasons := [reason for reason in reported if reason is not None]:
            raise CheckpointError(reasons[0])


@dataclass
class CheckpointCallback(CheckpointerCallback):
    """The engine's checkpoint schedule, with saves that all ranks wait for and whose errors all ranks raise."""

    _future = None
    settle: Callable[[], None] | None = None
    """Called before every save: what must be known of the last step."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self.settle is not None:
            self.settle()
        return super()._save_checkpoint(*args, **kwargs)

    def save_now(self) -> None:
        """Save a requested checkpoint, which retention keeps. Collective, between steps."""
        if self.step > self._latest_checkpoint_step:
            self.checkpointer.reason = REQUESTED
            self._save_checkpoint(save_async=False)
        else:
            self.wait_for_save()
            self.checkpointer.set_reason(self._latest_checkpoint_path, REQUESTED)

    def post_train(self) -> None:
        self.checkpointer.reason = LAST
        super().post_train()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank."""
        saving: Future[Any] | None = self._future
        return saving is not None and saving.done() and saving.exception() is not None

    def wait_for_save(self) -> None:
        """Wait for a save in the background; raises on all ranks if it failed on one."""
        self._await_last_checkpoint()

    def _await_last_checkpoint(self, blocking: bool = True) -> "Future[Any] | None":
        # Whether the future is done differs between ranks, so only a wait of all ranks may act on it.
        saving: Future[Any] | None = self._future
        if not blocking or saving is None:
            return None
        self._future = None
        self.checkpointer.wait_for_save(saving)
        return saving


def make_checkpoint_callback(config: RunConfig) -> CheckpointCallback:
    return CheckpointCallback(
        save_interval=config.train.save_every or None,
        save_async=config.train.save_async,
        pre_train_checkpoint=False,
        remove=CheckpointRemovalStrategy.never,
        max_checkpoints=None,  # retention is the checkpointer's
    )


def make_checkpointer(
    config: RunConfig, work_dir: Path, record: Callable[[], RunRecord] | None = None
) -> VerifiedCheckpointer:
    return VerifiedCheckpointer(
        work_dir=work_dir,
        retention=RetentionPolicy(config.train.keep_checkpoints, config.train.keep_every),
        record=record,
        key=signing_key(config),
    )


def signing_key(config: RunConfig) -> bytes | None:
    """The key that checkpoints are signed with, if one is configured."""
    return read_key(Path(config.train.checkpoint_key_file)) if config.train.checkpoint_key_file else None
