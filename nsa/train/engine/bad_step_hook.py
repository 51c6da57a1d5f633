"""The judge's arm: bad steps never reach the optimizer, on any rank, and the run can go back to a checkpoint.

Between the backward pass and the optimizer every rank reads its loss and the gradient norm (one transfer; on a GPU the
host waits here for the backward pass) and all take the mean (one all-reduce of two numbers on the host), so that all
judge the same numbers.

A skipped step counts as a step: it used up its batch, and the learning rate, a function of the step, goes on as if it
had been made. Its gradients are dropped; weights, moments and the optimizer's own count stay as they were, bit for bit.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from olmo_core.aliases import PathOrStr
from olmo_core.train.callbacks import Callback
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC
from olmo_core.train.train_module import TransformerTrainModule
from torch import Tensor

from nsa import names
from nsa.config.schema import RunConfig
from nsa.errors import NonFiniteError
from nsa.observe.events import EventKind
from nsa.train.bad_step_policy import BadStepLimits, BadStepPolicy, BadStepState, StepAction, StepVerdict
from nsa.train.callbacks.event_log import EventLogCallback
from nsa.train.callbacks.heartbeat import GRAD_NORM_METRIC, HeartbeatCallback
from nsa.train.distributed import HostCollectives
from nsa.train.engine.trainer import QuietTrainer
from nsa.train.resume import CheckpointCallback


def make_judge(config: RunConfig) -> BadStepPolicy:
    train = config.train
    return BadStepPolicy(BadStepLimits(train.max_skipped, train.max_rollbacks, train.skip_window, train.spike_sigma))


class _SkipStep(Exception):
    """Leaves the engine's optimizer step between clipping and everything that changes something."""


class _RollBack(Exception):
    """Leaves the engine's loop in the middle of a step: nothing of it may be saved, evaluated or told as progress."""


@dataclass
class BadStepCallback(Callback):
    judge: BadStepPolicy
    agreement: HostCollectives
    saver: CheckpointCallback
    heartbeat: HeartbeatCallback
    story: EventLogCallback | None

    def demand_good_step(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Return, or leave the step, on all ranks alike."""
        numbers = torch.stack([loss.detach().double(), grad_norm.detach().double()]).tolist()
        mean_loss, norm = self.agreement.means(numbers)
        verdict = self.judge.judge(self.step, mean_loss, norm)
        if verdict.act == StepAction.STEP:
            return
        self._tell_skip(verdict, mean_loss, norm)
        raise _SkipStep if verdict.act == StepAction.SKIP else _RollBack(verdict.reason)

    def go_back(self, reason: str) -> None:
        """To the last verified checkpoint, in this process; the data goes on after the batch that failed."""
        trainer, failed_at = self.trainer, self.step
        self.saver.settle()
        found = trainer.checkpointer.find_resumable(Path(trainer.save_folder))
        if why_not := self.judge.why_not_back_to(found.step):
            raise NonFiniteError(
                f"step {failed_at}: {reason}, and {why_not}. Look at the data of these steps and at {names.EVENTS}; a "
                f"lower train.lr, a longer train.warmup_steps or a smaller train.grad_clip may help."
            )
        assert found.path is not None
        cursor, known = trainer.data_loader.state_dict(), self.judge.memory
        trainer.train_module.zero_grads()
        trainer.load_checkpoint(found.path, load_trainer_state=True, load_optim_state=True)
        then, self.judge.memory = self.judge.memory, known
        first, end = self.judge.go_back(failed_at, self.step, then)
        trainer.data_loader.load_state_dict(cursor)
        self._tell_way_back(failed_at, reason, found.path, [first, end])

    def post_checkpoint_loaded(self, path: PathOrStr) -> None:
        record = self.trainer.checkpointer.loaded_record  # from the bytes that were verified
        if record is None:
            return
        self.judge.memory = BadStepState.restored(record.spike_window, record.skipped_batches)

    def _tell_skip(self, verdict: StepVerdict, loss: float, grad_norm: float) -> None:
        self.heartbeat.beat(
            names.SKIPPED, loss=loss, grad_norm=grad_norm, detail=verdict.reason, **counts(self.judge.memory)
        )
        if self.story is not None:
            self.story.add(EventKind.SKIPPED_STEP, reason=verdict.reason, loss=loss, grad_norm=grad_norm)

    def _tell_way_back(self, failed_at: int, reason: str, path: Path, batches: list[int]) -> None:
        first, last = batches[0], batches[1] - 1
        detail = f"step {failed_at}: {reason}; back to step {self.step} without batches {first} to {last}"
        self.heartbeat.beat(names.ROLLED_BACK, detail=detail, **counts(self.judge.memory))
        if self.story is None:
            return
        self.story.add_at(failed_at, EventKind.ROLLBACK, reason=reason, origin=str(path), left_out_batches=batches)
        self.story.add(EventKind.LOST_STEPS, steps=failed_at - self.step, reason=reason)


class StepSkippingTrainModule(TransformerTrainModule):
    """The engine's, with a guard between the gradients and the optimizer; without one it is the engine's."""

    guard: BadStepCallback | None = None

    def optim_step(self) -> None:
        with suppress(_SkipStep):
            super().optim_step()

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        grad_norm: Tensor = super()._clip_grad_norm(*args, **kwargs)
        if self.guard is not None:
            try:
                self.guard.demand_good_step(self.trainer.get_metric(TRAIN_CE_LOSS_METRIC), grad_norm)
            except _SkipStep:
                self.trainer.record_metric(GRAD_NORM_METRIC, grad_norm)
                raise
        return grad_norm


@dataclass
class RollbackTrainer(QuietTrainer):
    """The engine's loop, begun anew from a checkpoint where the guard wants that."""

    def _fit_epoch(self) -> None:
        try:
            super()._fit_epoch()
        except _RollBack as wish:
            reason = str(wish)
        else:
            return
        # Outside the handler, so that nothing holds the frames of the failed step, and with them its memory.
        self._metrics.clear()
        self.train_module.guard.go_back(reason)


def counts(memory: BadStepState) -> dict[str, int]:
    return {"skipped_steps": memory.skipped_steps, "nonfinite_steps": memory.nonfinite_steps}
