"""The engine's checkpointer: saves through `CheckpointFolder`, loads verified bytes only.

A load does not use the engine's own reader, which unpickles: rank 0 checks COMMIT.json and broadcasts it, and each rank
then reads the index, its trainer state and its pieces of the tensors through `VerifiedFiles`.

Order of an asynchronous save, on every rank, in the main thread unless stated otherwise:
1. rank 0 empties the staging folder, and all ranks wait for it;
2. each rank writes and hashes `train/rank{N}.pt`, rank 0 also `state.json`; an error on one is raised on all;
3. each rank copies its tensors to host memory and hands them to DCP's thread; training continues;
4. in that thread: all ranks write and hash (`HashingWriter`); rank 0 gets their hashes, writes the index, commits,
   renames, moves `latest`, deletes old ones.
The future that rank 0 gets is done after 4, so waiting for it waits for the commit. The other ranks' futures are done
when the tensors are written; `wait_for_save` makes all ranks wait for the outcome and raise alike.
"""

import io
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_cp
from olmo_core.distributed.utils import all_gather_object, broadcast_object, get_rank, get_world_size
from olmo_core.io import is_url
from olmo_core.train.checkpoint import Checkpointer, CheckpointMetadata
from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.api import CheckpointException

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder, ResumableCheckpoint, RetentionPolicy
from nsa_train.checkpoint.load import (
    LARGEST_RANK_FILE_BYTES,
    VerifiedFiles,
    VerifiedReader,
    describe_as_rows,
    open_checkpoint,
    parse_plain,
    read_record,
    read_trainer_state,
    require_harmless,
    require_trustworthy,
)
from nsa_train.checkpoint.manifest import (
    INTERVAL,
    CheckpointManifest,
    HashedFile,
    LocalFiles,
    ManifestEntry,
    read_key,
    wrong_hashes,
)
from nsa_train.checkpoint.run_state import RunRecord
from nsa_train.checkpoint.save import HashingWriter
from nsa_train.checkpoint.save_plan import SavePlanCache, SharedSavePlanner
from nsa_train.checkpoint.transfer import CopyResult, StoreCopy
from nsa_train.config.schema import RunConfig
from nsa_train.data.tokenizer import Tokenizer
from nsa_train.train.engine import PathOrStr

_log = logging.getLogger(__name__)

_READING_THREADS = 4


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
    store: str | None = None
    """s3://… to which every checkpoint is copied while it is saved."""
    report_copy: Callable[[CopyResult], None] | None = None
    """Called on rank 0, in the thread that finished the save, when a copy was made or given up."""
    reason: str = INTERVAL
    """Why the next checkpoint is saved; for that one only."""
    _folders: dict[Path, CheckpointFolder] = field(default_factory=dict, repr=False)
    _plans: SavePlanCache = field(default_factory=SavePlanCache, repr=False)
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
                newest = self.folder(checkpoints).find_resumable(inspect, hash_on_all_ranks)
            finally:
                broadcast_object(None)
        else:
            while (task := broadcast_object(None)) is not None:
                self._hash_share(*task)
            newest = None
        newest = broadcast_object(newest)
        assert newest is not None
        return newest

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
        folder, step, reason = self._begin(dir, train_module)
        writer = self._write_small_files(folder.staging(step), step, train_state, ephemeral)
        with torch.no_grad():
            try:
                dist_cp.save(
                    train_module.state_dict_to_save(),
                    storage_writer=writer,
                    planner=SharedSavePlanner(self._plans),
                    process_group=self.process_group,
                )
            except CheckpointException as error:  # on all ranks, if on one
                raise CheckpointError(
                    f"step {step} was not written ({_first_failure(error)}): nothing was committed."
                ) from error
        self._raise_on_all_ranks(lambda: self._finish_copy(writer, folder.commit(step, reason, writer.hashes)))

    def save_async(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> "Future[None]":
        assert self.process_group is not None or get_world_size() == 1, "a background save needs a group of its own"
        folder, step, reason = self._begin(dir, train_module)
        writer = self._write_small_files(folder.staging(step), step, train_state, ephemeral)
        with torch.no_grad():
            written = dist_cp.async_save(
                train_module.state_dict_to_save(),
                storage_writer=writer,
                planner=SharedSavePlanner(self._plans),
                process_group=self.process_group,
            )
        assert isinstance(written, Future)
        if get_rank() == 0:
            committed = folder.commit_after(
                written, step, reason, lambda: writer.hashes, partial(self._finish_copy, writer)
            )
            return committed  # type: ignore[return-value]
        return written

    def _finish_copy(self, writer: HashingWriter, checkpoint: Path) -> None:
        result = writer.finish_copy(checkpoint)
        if result is not None and self.report_copy is not None:
            self.report_copy(result)

    def _write_small_files(
        self, staging: Path, step: int, train_state: dict[str, Any], ephemeral: bool
    ) -> HashingWriter:
        """Write everything but the tensors; the writer for those, which knows the hash of this rank's file."""
        name = names.trainer_state(get_rank())
        path = staging / name
        hashed: dict[str, ManifestEntry] = {}

        def write() -> None:
            content = io.BytesIO()
            torch.save(train_state, content)
            # State that cannot be loaded again must fail here, not in the run that needs it.
            if content.tell() > LARGEST_RANK_FILE_BYTES:
                raise CheckpointError(
                    f"{path} would have {content.tell()} bytes, more than the {LARGEST_RANK_FILE_BYTES} that such a "
                    f"file may have."
                )
            parse_plain(bytearray(content.getbuffer()), path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with HashedFile(path) as file:
                file.write(content.getbuffer())
            hashed[name] = file.entry()
            if get_rank() != 0:
                return
            metadata = CheckpointMetadata(ephemeral=ephemeral).as_dict(json_safe=True)
            (staging / self.METADATA_FNAME).write_text(json.dumps(metadata), encoding="utf-8")
            if self.record is not None:
                self.record().write(staging)
                if self.tokenizer is not None:
                    (staging / names.TOKENIZER).write_text(self.tokenizer.to_json(), encoding="utf-8")

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._raise_on_all_ranks(write, on_every_rank=True)
        copy = StoreCopy(self.store, step) if self.store is not None else None
        return HashingWriter(staging, thread_count=self.save_thread_count, hashed=hashed, copy=copy)

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
            read["index"] = require_harmless(files, pieces=False, rank=get_rank(), world=get_world_size())
            read["record"] = read_record(files)
            read["state"] = read_trainer_state(files, get_rank()) if load_trainer_state is not False else None
            if load_trainer_state is True and not isinstance(read["state"], dict):
                raise CheckpointError(f"{path} holds no trainer state: a run cannot be resumed from it.")

        self._raise_on_all_ranks(read_small_files, on_every_rank=True)
        state = train_module.state_dict_to_load(read["index"], optim=load_optim_state)
        describe_as_rows(read["index"], state)
        try:
            dist_cp.load(
                state,
                checkpoint_id=str(path),
                storage_reader=VerifiedReader(files, read["index"], self.load_thread_count or _READING_THREADS),
                process_group=self.process_group,
            )
        except CheckpointException as error:  # on all ranks, if on one
            raise CheckpointError(f"{path} could not be loaded: {_first_failure(error)}") from error
        train_module.load_state_dict(state)
        self.loaded_record = read["record"]
        return read["state"]

    def load_weights(self, path: Path, train_module: TrainModule) -> None:
        """Load the model of a checkpoint and nothing else: no optimizer state, no step. Collective."""
        self.load(path, train_module, load_trainer_state=False, load_optim_state=False)
        self.loaded_record = None

    def _begin(self, dir: PathOrStr, train_module: TrainModule) -> tuple[CheckpointFolder, int, str]:
        if hasattr(train_module, "save_state_dict_direct"):
            raise CheckpointError(f"{type(train_module).__name__} writes checkpoints itself: it cannot be used here.")
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
                f"{dir} is an object store, and runs save to a folder. Set train.out_dir to a folder that all nodes "
                f"share, and train.checkpoint_store to the object store: each checkpoint is copied there."
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


def _first_failure(error: CheckpointException) -> BaseException:
    return next(failure for failure, _ in error.failures.values())


def make_checkpointer(
    config: RunConfig, work_dir: Path, record: Callable[[], RunRecord] | None = None, *, store: str | None = None
) -> VerifiedCheckpointer:
    return VerifiedCheckpointer(
        work_dir=work_dir,
        retention=RetentionPolicy(config.train.keep_checkpoints, config.train.keep_every),
        record=record,
        key=signing_key(config),
        store=store,
    )


def signing_key(config: RunConfig) -> bytes | None:
    """The key that checkpoints are signed with, if one is configured."""
    file = config.train.checkpoint_key_file
    return read_key(Path(file) if file else None)
