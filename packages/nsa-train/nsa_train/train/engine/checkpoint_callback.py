"""The engine's checkpoint callback: when a run saves, and saves that all ranks wait for.

The engine's own retention must be off (`max_checkpoints=None, remove="never"`): retention is the checkpointer's.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.callbacks.checkpointer import CheckpointRemovalStrategy

from nsa_train.checkpoint.manifest import LAST, REQUESTED
from nsa_train.config.schema import RunConfig


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
