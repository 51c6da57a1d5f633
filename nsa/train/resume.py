"""The seam between the trainer and its checkpoints: when to save, what to start from."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.callbacks.checkpointer import CheckpointRemovalStrategy

from nsa import names
from nsa.checkpoint.folder import CheckpointFinding, RetentionPolicy
from nsa.checkpoint.manifest import LAST, REQUESTED, read_key
from nsa.config.schema import RunConfig
from nsa.errors import CheckpointError
from nsa.train.engine.checkpointer import VerifiedCheckpointer


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from; newer checkpoints that could not be trusted are named."""

    path: Path | None
    step: int
    passed_over: tuple[CheckpointFinding, ...] = ()


@dataclass
class CheckpointCallback(CheckpointerCallback):
    """The engine's rhythm of saving, with saves that all ranks wait for and agree on."""

    _future = None

    def save_now(self) -> None:
        """Somebody asks for a checkpoint, which is then kept. On all ranks, between steps."""
        if self.step > self._latest_checkpoint_step:
            self.checkpointer.reason = REQUESTED
            self._save_checkpoint(save_async=False)
        else:
            self.settle()
            self.checkpointer.set_reason(self._latest_checkpoint_path, REQUESTED)

    def post_train(self) -> None:
        self.checkpointer.reason = LAST
        super().post_train()

    @property
    def failed(self) -> bool:
        """Whether a save in the background came to nothing."""
        saving: Future[Any] | None = self._future
        return saving is not None and saving.done() and saving.exception() is not None

    def settle(self) -> None:
        """Wait for a save in the background; raises on all ranks if it failed on one."""
        self._await_last_checkpoint()

    def _await_last_checkpoint(self, blocking: bool = True) -> "Future[Any] | None":
        # Whether the future is done differs between ranks, so only a wait of all ranks may act on it.
        saving: Future[Any] | None = self._future
        if not blocking or saving is None:
            return None
        self._future = None
        self.checkpointer.settle(saving)
        return saving


def make_saver(config: RunConfig) -> CheckpointCallback:
    return CheckpointCallback(
        save_interval=config.train.save_every or None,
        save_async=config.train.save_async,
        pre_train_checkpoint=False,
        remove=CheckpointRemovalStrategy.never,
        max_checkpoints=None,  # retention is the checkpointer's
    )


def make_checkpointer(config: RunConfig, work_dir: Path, record: Callable[[], Any]) -> VerifiedCheckpointer:
    return VerifiedCheckpointer(
        work_dir=work_dir,
        retention=RetentionPolicy(config.train.keep_checkpoints, config.train.keep_every),
        record=record,
        key=signing_key(config),
    )


def signing_key(config: RunConfig) -> bytes | None:
    """What checkpoints are signed with, if anything."""
    return read_key(Path(config.train.checkpoint_key_file)) if config.train.checkpoint_key_file else None


def find_origin(
    checkpointer: VerifiedCheckpointer, checkpoints: Path, resume: bool, resume_from: Path | None
) -> ResumePoint:
    """The checkpoint to start from. All ranks must ask; the answer is the same for all."""
    if resume_from is not None and names.step_of(resume_from.resolve().name) is not None:
        path = resume_from.resolve()
        return ResumePoint(path, names.step_of(path.name) or 0)
    if resume_from is not None:
        inside = resume_from / names.CHECKPOINTS
        checkpoints = inside if inside.is_dir() else resume_from
    elif not resume:
        return ResumePoint(None, 0)
    found = checkpointer.find_resumable(checkpoints)
    if found.path is None and (resume_from is not None or found.passed_over):
        why = "; ".join(str(finding) for finding in found.passed_over) or "there is none"
        raise CheckpointError(
            f"{checkpoints} holds no checkpoint to resume from ({why}). Start anew in another train.out_dir, or give "
            f"--resume-from a good one."
        )
    return ResumePoint(found.path, found.step or 0, found.passed_over)
