"""Trainer hook that skips steps with NaN gradients or loss spikes on all ranks, and rolls back to a checkpoint.

Between the backward pass and the optimizer every rank reads its loss and the gradient norm and all ranks take the mean
(one all-reduce of two numbers on the host), so that all of them decide on the same numbers.

On a GPU reading them would make the host wait for the backward pass at every step. There the same decision is made on
the device, by the limits that the host knows, and the fused optimizer leaves weights and moments as they are.
The host reads the numbers one step later, when they have long arrived, or at once before it logs, saves or stops: a
skipped step is logged then, and a rollback leaves out one batch more.

A skipped step counts as a step: it used up its batch, and the learning rate, a function of the step, advances as if the
step had been made. Its gradients are dropped; weights, moments and the optimizer's own step count stay unchanged, bit
for bit.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from olmo_core.train import Trainer
from olmo_core.train.train_module import TransformerTrainModule
from torch import Tensor

from nsa.core.selector_loss import selector_layers, set_sampling_step
from nsa.errors import NonFiniteError
from nsa.model.loss import ScoreSums
from nsa_train import names
from nsa_train.config.schema import RunConfig
from nsa_train.record.events import EventKind
from nsa_train.train.bad_step_policy import BadStepLimits, BadStepPolicy, BadStepState, StepAction, StepVerdict
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.distributed import HostCollectives
from nsa_train.train.engine import GRAD_NORM_METRIC, TRAIN_CE_LOSS_METRIC, Callback, PathOrStr
from nsa_train.train.engine.checkpoint_callback import CheckpointCallback
from nsa_train.train.engine.lm_head import SCORE_SUMS
from nsa_train.train.run_outputs import EventLogCallback


def make_bad_step_policy(config: RunConfig) -> BadStepPolicy:
    train = config.train
    return BadStepPolicy(BadStepLimits(train.max_skipped, train.max_rollbacks, train.skip_window, train.spike_sigma))


class _SkipStep(Exception):
    """Leaves the engine's optimizer step after clipping and before anything is changed."""


class _RollBack(Exception):
    """Leaves the engine's loop in the middle of a step: nothing of it may be saved, evaluated or logged as progress."""


@dataclass(frozen=True)
class UnreadStep:
    """Loss and gradient norm of a step, on their way from the device."""

    step: int
    numbers: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def copied(cls, step: int, numbers: Tensor) -> Self:
        on_host = numbers.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
        if not numbers.is_cuda:
            return cls(step, on_host, None)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, on_host, arrived)

    def read(self) -> tuple[float, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, grad_norm = self.numbers.tolist()
        return loss, grad_norm


@dataclass
class BadStepCallback(Callback):
    priority: ClassVar[int] = 20  # before the heartbeat, which logs what was skipped

    policy: BadStepPolicy
    collectives: HostCollectives
    checkpoints: CheckpointCallback
    heartbeat: HeartbeatCallback
    event_log: EventLogCallback | None
    deferred: bool = False
    """Decide on the device, and read the numbers later."""
    _unread: UnreadStep | None = None

    def settle(self) -> None:
        """Read the numbers of the last step, if they are unread, and act on them; raises `_RollBack`."""
        if (unread := self._unread) is None:
            return
        self._unread = None
        mean_loss, norm = unread.read()
        verdict = self.policy.decide(unread.step, mean_loss, norm)
        if verdict.action == StepAction.STEP:
            return
        self._log_skip(verdict, mean_loss, norm, unread.step)
        if verdict.action == StepAction.ROLL_BACK:
            raise _RollBack(verdict.reason)

    def post_train_batch(self) -> None:
        """Before the heartbeat of a log step, and before the last save, which comes after the training loop."""
        if self.heartbeat.due() or self.trainer.training_complete:
            self.settle()

    def require_good_step(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Return if the step may be made; otherwise raise `_SkipStep` or `_RollBack`, on all ranks alike.

        Deferred, return for the fused optimizer whether it must skip the step.
        """
        if self.deferred:
            return self._decide_on_device(loss, grad_norm)
        numbers = torch.stack([loss.detach().double(), grad_norm.detach().double()]).tolist()
        mean_loss, norm = self.collectives.means(numbers)
        verdict = self.policy.decide(self.step, mean_loss, norm)
        if verdict.action == StepAction.STEP:
            return None
        self._log_skip(verdict, mean_loss, norm, self.step)
        raise _SkipStep if verdict.action == StepAction.SKIP else _RollBack(verdict.reason)

    def _decide_on_device(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 if this step must not be made, as the fused optimizer takes it, without waiting for the device."""
        self.settle()
        top_loss, top_norm = self.policy.tops()
        mean_loss, norm = loss.detach().double(), grad_norm.detach().double()
        if dist.is_initialized():
            mean_loss = mean_loss.clone()
            dist.all_reduce(mean_loss)  # all ranks: those that share a row have different tokens of it
            mean_loss /= dist.get_world_size()
        good = mean_loss.isfinite() & (mean_loss <= top_loss) & norm.isfinite() & (norm <= top_norm)
        self._unread = UnreadStep.copied(self.step, torch.stack([mean_loss, norm]))
        return (~good).float()

    def roll_back(self, reason: str) -> None:
        """Load the last verified checkpoint in this process; the data continues after the batch that failed."""
        trainer, failed_at = self.trainer, self.step
        self.checkpoints.wait_for_save()
        checkpoint = trainer.checkpointer.find_resumable(Path(trainer.save_folder))
        if why_not := self.policy.why_not_back_to(checkpoint.step):
            raise NonFiniteError(
                f"step {failed_at}: {reason}, and {why_not}. Look at the data of these steps and at {names.EVENTS}; a "
                f"lower train.lr, a longer train.warmup_steps or a smaller train.grad_clip may help."
            )
        assert checkpoint.path is not None
        cursor, state = trainer.data_loader.state_dict(), self.policy.state
        self._unread = None
        trainer.train_module.zero_grads()
        trainer.load_checkpoint(checkpoint.path, load_trainer_state=True, load_optim_state=True)
        saved, self.policy.state = self.policy.state, state
        first, end = self.policy.roll_back(failed_at, self.step, saved)
        trainer.data_loader.load_state_dict(cursor)
        self._log_rollback(failed_at, reason, checkpoint.path, [first, end])

    def post_checkpoint_loaded(self, path: PathOrStr) -> None:
        record = self.trainer.checkpointer.loaded_record  # from the bytes that were verified
        if record is None:
            return
        self.policy.state = BadStepState.restored(record.spike_window, record.skipped_batches)

    def _log_skip(self, verdict: StepVerdict, loss: float, grad_norm: float, step: int) -> None:
        numbers = dict(loss=loss, grad_norm=grad_norm)
        self.heartbeat.beat_at(step, names.SKIPPED, detail=verdict.reason, **numbers, **counts(self.policy.state))
        if self.event_log is not None:
            self.event_log.add_at(step, EventKind.SKIPPED_STEP, reason=verdict.reason, **numbers)

    def _log_rollback(self, failed_at: int, reason: str, path: Path, batches: list[int]) -> None:
        first, last = batches[0], batches[1] - 1
        detail = f"step {failed_at}: {reason}; rolled back to step {self.step}, leaving out batches {first} to {last}"
        self.heartbeat.beat(names.ROLLED_BACK, detail=detail, **counts(self.policy.state))
        if self.event_log is None:
            return
        self.event_log.add_at(failed_at, EventKind.ROLLBACK, reason=reason, origin=str(path), left_out_batches=batches)
        self.event_log.add(EventKind.LOST_STEPS, steps=failed_at - self.step, reason=reason)


class StepSkippingTrainModule(TransformerTrainModule):
    """The engine's train module, with a check between the gradients and the optimizer if `bad_steps` is set."""

    bad_steps: BadStepCallback | None = None
    _labels_per_rank: Tensor | None = None
    """During `train_batch`: what the sum over a rank's labels is divided by."""

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """The selector loss samples its queries by the step, so that a resumed run samples the same ones."""
        set_sampling_step(selector_layers(self.model), self.trainer.global_step)
        self._labels_per_rank = self._count_labels(batch["labels"])
        super().train_batch(batch, dry_run)
        self._labels_per_rank = None

    def model_forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        """The engine divides a rank's loss by the rank's own labels; here every label of the global batch weighs as
        much, however labels are divided among ranks."""
        if self._labels_per_rank is not None:
            options["loss_div_factor"] = self._labels_per_rank
        return super().model_forward(input_ids, labels=labels, **options)

    def _count_labels(self, labels_BS: Tensor) -> Tensor:
        """Labels of the global batch, divided by the number of ranks whose gradients are averaged."""
        count = (labels_BS != self.label_ignore_index).sum().double().to(self.device, non_blocking=True)
        if (group := self.dp_process_group) is not None:
            dist.all_reduce(count, group=group)
            count /= dist.get_world_size(group)
        return count.clamp(min=1).float()

    def optim_step(self) -> None:
        with suppress(_SkipStep):
            super().optim_step()
        self.optim.found_inf = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The fused optimizer counts steps on the device; a checkpoint of another one has them on the host."""
        super().load_state_dict(state_dict)
        if self.optim.defaults["fused"]:
            for state in self.optim.state.values():
                state["step"] = state["step"].to(self.device)

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        grad_norm: Tensor = super()._clip_grad_norm(*args, **kwargs)
        if self.bad_steps is not None:
            loss = self.trainer.get_metric(TRAIN_CE_LOSS_METRIC)
            try:
                self.optim.found_inf = self.bad_steps.require_good_step(loss, grad_norm)
            except _SkipStep:
                self.trainer.record_metric(GRAD_NORM_METRIC, grad_norm)
                raise
        return grad_norm

    def forward_backward(self, batch: dict[str, Any]) -> float:
        """Loss of one forward and backward pass as the engine makes them, without a trainer (for the dry run)."""
        return float(self._pass_loss(batch, 0, 1))

    def step_without_trainer(self, batches: Sequence[dict[str, Any]], max_norm: float) -> None:
        """A step of these micro-batches that reads no value, so that it also runs on fake tensors."""
        for index, batch in enumerate(batches):
            self._pass_loss(batch, index, len(batches))
        super()._clip_grad_norm(max_norm)
        self.optim.step()
        self.zero_grads()

    def _pass_loss(self, batch: dict[str, Any], index: int, count: int) -> Tensor:
        on_device = {
            name: value.to(self.device) if name in ("input_ids", "labels") else value for name, value in batch.items()
        }
        input_ids, labels, more = self._prepare_batch(on_device)
        with self._train_microbatch_context(index, count):
            output = self.model_forward(
                input_ids,
                labels=labels,
                ignore_index=self.label_ignore_index,
                loss_reduction="mean",
                return_logits=False,
                **more,
            )
            output.loss.backward()
        loss: Tensor = output.loss.detach()
        return loss

    def score_batch(self, batch: dict[str, Any]) -> ScoreSums:
        """Evaluate on one batch: sums over the tokens that this rank computes, as the engine's `eval_batch` runs it."""
        input_ids, labels, more = self._prepare_batch(batch)
        self._set_model_mode("eval")
        with self._eval_batch_context():
            sums = self.model_forward(
                input_ids,
                labels=labels,
                ignore_index=self.label_ignore_index,
                loss_reduction=SCORE_SUMS,
                return_logits=False,
                **more,
            )
        assert isinstance(sums, ScoreSums)
        return sums

    def clip_gradients(self, limit: float) -> float:
        """Clip the gradients as the engine does and return their norm before that, without a trainer."""
        return float(super()._clip_grad_norm(limit))


@dataclass
class RollbackTrainer(Trainer):
    """The engine's trainer, with rollback to a checkpoint, errors of the last save reported, and no metrics pipeline.

    The engine reduces metrics over ranks in a thread, and records how long a background save took at whatever step
    each rank has reached. Ranks then reduce different sets of metrics and wait for each other forever. Nothing here
    reads those metrics (the heartbeat is the record of a run), so they are dropped; callbacks still see them until
    the step ends.
    """

    def fit(self) -> None:
        try:
            super().fit()
        except BaseException as error:
            if self._error is not error:  # after the last step the engine does not report errors to its callbacks
                for callback in self._iter_callbacks():
                    callback.on_error(error)
            raise

    def _fit_epoch(self) -> None:
        try:
            super()._fit_epoch()
        except _RollBack as request:
            reason = str(request)
        else:
            return
        # Outside the handler, so that nothing holds the frames of the failed step, and with them its memory.
        self._metrics.clear()
        self.train_module.bad_steps.roll_back(reason)

    def _log_metrics(self) -> None:
        self._metrics.clear()


def counts(state: BadStepState) -> dict[str, int]:
    return {"skipped_steps": state.skipped_steps, "nonfinite_steps": state.nonfinite_steps}
