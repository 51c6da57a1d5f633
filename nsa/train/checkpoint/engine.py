"""The engine's checkpointer, made to save through `CheckpointFolder` and to verify before it loads.

Order of an asynchronous save, on every rank in the main thread unless said otherwise:
1. rank 0 empties the staging folder; barrier;
2. each rank writes `train/rank{N}.pt` and `state/rank{N}.json`, rank 0 also `state.json`; barrier (the engine's);
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
from olmo_core.aliases import PathOrStr
from olmo_core.distributed.utils import barrier, broadcast_object, get_rank
from olmo_core.io import is_url
from olmo_core.train.checkpoint import Checkpointer, CheckpointerConfig
from olmo_core.train.train_module import TrainModule
from torch.distributed.checkpoint.api import CheckpointException

from nsa.errors import CheckpointError
from nsa.train.checkpoint import layout
from nsa.train.checkpoint.folder import CheckpointFolder, Resumable, Retention
from nsa.train.checkpoint.load import demand_trustworthy
from nsa.train.checkpoint.manifest import read_key
from nsa.train.checkpoint.record import RunRecord, write_rng

log = logging.getLogger(__name__)


@dataclass
class VerifiedCheckpointerConfig(CheckpointerConfig):
    key_file: str | None = None
    keep_last: int = 3
    keep_every: int = 0
    allow_foreign: bool = False

    def build(self, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> "VerifiedCheckpointer":
        values = {**self.as_dict(exclude_none=True, recurse=False), **kwargs}
        retention = Retention(values.pop("keep_last"), values.pop("keep_every"))
        key_file = values.pop("key_file", None)
        key = read_key(Path(key_file)) if key_file else None
        values["work_dir"] = Path(values["work_dir"])
        return VerifiedCheckpointer(process_group=process_group, key=key, retention=retention, **values)


@dataclass
class VerifiedCheckpointer(Checkpointer):
    key: bytes | None = field(default=None, repr=False)
    retention: Retention = field(default_factory=Retention)
    allow_foreign: bool = False
    """Load folders that have no COMMIT.json, after a look at their pickles only."""
    record: Callable[[], RunRecord] | None = None
    """Set by the trainer; asked on rank 0 at every save."""
    _folders: dict[Path, CheckpointFolder] = field(default_factory=dict, repr=False)
    _just_verified: Path | None = field(default=None, repr=False)

    def folder(self, checkpoints: Path) -> CheckpointFolder:
        """The folder of all checkpoints, the same object each time, so that it remembers suspects."""
        if checkpoints not in self._folders:
            self._folders[checkpoints] = CheckpointFolder(checkpoints, key=self.key, retention=self.retention)
        return self._folders[checkpoints]

    def find_resumable(self, checkpoints: Path) -> Resumable:
        """The same answer on all ranks; rank 0 reads and hashes."""
        found = self.folder(checkpoints).find_resumable() if get_rank() == 0 else None
        found = broadcast_object(found)
        assert found is not None
        self._just_verified = found.path.resolve() if found.path is not None else None
        return found

    def save(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> None:
        folder, step = self._begin(dir)
        super().save(folder.staging(step), train_module, train_state, ephemeral=ephemeral)
        barrier()
        self._agree(lambda: folder.commit(step))

    def save_async(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> "Future[None]":
        folder, step = self._begin(dir)
        written = super().save_async(folder.staging(step), train_module, train_state, ephemeral=ephemeral)
        if get_rank() == 0:
            # The engine's own callback, which writes .metadata.json, was added first and so runs first.
            return folder.commit_after(written, step)  # type: ignore[return-value]
        return written

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
        hashed, self._just_verified = path == self._just_verified, None  # good for one load: hashing terabytes is slow
        self._agree(lambda: demand_trustworthy(path, key=self.key, allow_foreign=self.allow_foreign, hashed=hashed))
        return super().load(
            path,
            train_module,
            load_trainer_state=load_trainer_state,
            load_optim_state=load_optim_state,
            reset_optimizer_states_on_load=reset_optimizer_states_on_load,
        )

    def _save_train_state(self, dir: PathOrStr, wd: Path, train_state: dict[str, Any]) -> None:
        """Inside the engine's barriers, so that no rank's file can miss the commit."""
        super()._save_train_state(dir, wd, train_state)
        write_rng(wd, get_rank())
        if get_rank() == 0 and self.record is not None:
            self.record().write(wd)

    def _begin(self, dir: PathOrStr) -> tuple[CheckpointFolder, int]:
        path = self._local(dir)
        step = layout.step_of(path.name)
        if step is None:
            raise CheckpointError(
                f"{path} is no place for a checkpoint: the name must be {layout.step_name(0)} or alike."
            )
        folder = self.folder(path.parent)
        self._agree(lambda: folder.begin(step))
        return folder, step

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
        """Act on rank 0, or on all; then raise on every rank what went wrong on rank 0, or on this one."""
        failure: BaseException | None = None
        if on_every_rank or get_rank() == 0:
            try:
                act()
            # DCP's own failure is no Exception. Whatever it is, it is raised below, when all ranks know.
            except (Exception, CheckpointException) as error:  # noqa: BLE001
                failure = error
        told = broadcast_object(str(failure) if failure is not None else None)
        if isinstance(failure, Exception):
            raise failure
        if failure is not None or told is not None:
            raise CheckpointError(str(failure or told))
