"""Checkpoint callback: when a run saves, and saves that all ranks wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from olmo_core.train.callbacks import CheckpointerCallback

from nsa_train.checkpoint.manifest import LAST, REQUESTED
from nsa_train.config.schema import RunConfig


@dataclass
class CheckpointCallback(CheckpointerCallback):
    """Saves whose errors all ranks raise. The engine requires a subclass of its own callback; of that only the fields
    `save_interval` and `save_async` are used: retention is the checkpointer's.
    """

    check_unread_step: Callable[[], None] | None = None
    """Called before every save: what must be known of the last step."""
    saving: "Future[Any] | None" = None
    """A save in the background that has not been waited for."""
    newest: tuple[int, Path] = (-1, Path())
    """Step and path of the newest checkpoint of this process."""

    def pre_train(self) -> None:
        if dist.is_initialized() and self.save_async and self.checkpointer.process_group is None:
            self.checkpointer.process_group = dist.new_group(timeout=timedelta(minutes=30))

    def post_train_batch(self) -> None:
        if self.save_interval is not None and self.step % self.save_interval == 0:
            self._save(in_background=bool(self.save_async))

    def post_train(self) -> None:
        self.checkpointer.reason = LAST
        if self.step > self.newest[0]:
            self._save(in_background=False)
        self.wait_for_save()

    def save_now(self) -> None:
        """Save a requested checkpoint, which retention keeps. Collective, between steps."""
        step, path = self.newest
        if self.step > step:
            self.checkpointer.reason = REQUESTED
            self._save(in_background=False)
        else:
            self.wait_for_save()
            self.checkpointer.set_reason(path, REQUESTED)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank."""
        return self.saving is not None and self.saving.done() and self.saving.exception() is not None

    def wait_for_save(self) -> None:
        """Wait for a save in the background; raises on all ranks if it failed on one."""
        if (saving := self.saving) is not None:
            self.saving = None
            self.checkpointer.wait_for_save(saving)

    def _save(self, *, in_background: bool) -> None:
        if self.check_unread_step is not None:
            self.check_unread_step()
        self.wait_for_save()
        if in_background:
            path, self.saving = self.trainer.save_checkpoint_async()
        else:
            path = self.trainer.save_checkpoint()
        self.newest = self.step, Path(path)


def make_checkpoint_callback(config: RunConfig) -> CheckpointCallback:
    return CheckpointCallback(save_interval=config.train.save_every or None, save_async=config.train.save_async)
